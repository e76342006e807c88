"""``--keep-last N``: older checkpoints go once a newer one is there and loads; without it none ever goes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from kiln_stages import resume, train, verify_receipt
from kiln_stages.training import trainer as trainer_module
from kiln_stages.training.checkpoint import ADAPTER, list_checkpoints, load_checkpoint, retire_checkpoints
from kiln_stages.training.trainer import Trainer, train_adapter
from training.admitted_run import admitted_run
from training.tiny_models import make_plan

from kiln_cli import KilnError, files
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins

ALL = [2, 4, 6, 8, 10]


def steps_in(directory: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(directory)]


@pytest.fixture
def made(tmp_path: Path) -> tuple[LoadedConfig, Path]:
    """Twelve steps, a checkpoint every two."""
    config, out = admitted_run(tmp_path / "made")
    return config.replace("train", checkpoint_interval=2), out


@pytest.mark.parametrize(("keep", "left"), [(None, ALL), (1, [10]), (3, [6, 8, 10]), (9, ALL)])
def test_the_newest_n_are_kept_and_the_receipt_names_those(
    keep: int | None, left: list[int], made: tuple[LoadedConfig, Path], plugins: Plugins
) -> None:
    config, out = made
    result = train.run(config, out, plugins, keep_last=keep)
    assert steps_in(out / "train") == left
    assert result.outcome is not None
    assert result.outcome.removed == [step for step in ALL if step not in left]
    assert [each.step for each in read_receipt(out / "train_receipt.json").checkpoints] == left
    assert [claim for claim in verify_receipt.run(out).claims if claim.status == "fails"] == []
    assert not [path for path in (out / "train").iterdir() if path.name.startswith(".")]


def test_what_was_removed_is_said(made: tuple[LoadedConfig, Path], plugins: Plugins) -> None:
    config, out = made
    text = train.run(config, out, plugins, keep_last=2).account(out)
    assert "removed by --keep-last: 3 older checkpoints, of steps 2, 4, 6" in text


def test_resume_keeps_as_many_as_it_is_told_whatever_train_was_told(
    made: tuple[LoadedConfig, Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    real = trainer_module.train

    def interrupted(*args: object, **kwargs: object) -> object:
        for record in real(*args, **kwargs):  # type: ignore[arg-type]
            if record.step == 7:
                os.kill(os.getpid(), signal.SIGINT)
            yield record

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "train", interrupted)
        stopped = train.run(config, out, plugins, keep_last=3)
    assert steps_in(out / "train") == [4, 6, 7]
    assert "older checkpoint, of steps 2" in stopped.account(out)
    resumed = resume.run(load_config(out / "config.resolved.toml"), out, plugins, keep_last=1)
    assert resumed.outcome is not None and resumed.outcome.removed == [4, 6, 7, 8]
    assert steps_in(out / "train") == [10]


@pytest.fixture
def directory(model_dir: Path, tmp_path: Path) -> Path:
    train_adapter(Trainer(make_plan(model_dir, checkpoint_interval=3)), tmp_path)
    assert steps_in(tmp_path) == [3, 6, 9]
    return tmp_path


def test_nothing_goes_where_the_newest_does_not_load(directory: Path) -> None:
    path = list_checkpoints(directory)[-1][1] / ADAPTER
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(KilnError, match=r"adapter\.safetensors has") as caught:
        retire_checkpoints(directory, "adapter", 1)
    assert caught.value.code == "KLN215"
    assert steps_in(directory) == [3, 6, 9]


def test_checkpoints_of_another_adapter_and_links_are_left_alone(directory: Path, tmp_path: Path) -> None:
    other = directory / "other-checkpoint-step-00000001.kiln-checkpoint"
    link = directory / "adapter-checkpoint-step-00000001.kiln-checkpoint"
    shutil.copytree(list_checkpoints(directory)[0][1], other)
    link.symlink_to(other)
    assert retire_checkpoints(directory, "adapter", 1) == [3, 6]
    assert other.is_dir() and link.is_symlink()
    load_checkpoint(list_checkpoints(directory)[-1][1])


def test_a_kill_while_one_is_removed_leaves_it_whole_or_swept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name goes first: what a kill leaves of the files is hidden, and the next command sweeps it."""

    class Killed(BaseException):
        pass

    def killed(self: files.Filesystem, path: Path) -> None:
        next(path.iterdir()).unlink()
        raise Killed

    monkeypatch.setattr(files.Filesystem, "remove_tree", killed)
    with pytest.raises(Killed):
        retire_checkpoints(directory, "adapter", 2)
    monkeypatch.undo()
    assert steps_in(directory) == [6, 9]
    assert files.sweep(directory) == 1
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
