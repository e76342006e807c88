"""``kiln train`` and ``kiln resume`` on a run directory: what they write, what they refuse, and exact resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kiln_stages import resume, status, train, verify_receipt
from kiln_stages.training import loop
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.loop import StepRecord
from training.admitted_run import admitted_run, write_admitted

from kiln_cli import KilnError
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins, load_plugins

Made = tuple[LoadedConfig, Path]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Made:
    config, out = admitted_run(tmp_path_factory.mktemp("finished"))
    train.run(config, out, plugins)
    return config, out


@pytest.fixture
def run_copy(finished: Made, tmp_path: Path) -> Made:
    """A finished run that a test may change, with the config that lies beside it."""
    target = tmp_path / "copy"
    shutil.copytree(finished[1].parent, target)
    return load_config(target / "kiln.toml"), target / "run"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return admitted_run(tmp_path / "made")


def test_a_training_leaves_adapter_log_checkpoints_and_receipt(finished: Made) -> None:
    _, out = finished
    names = {path.name for path in (out / "train").iterdir()}
    assert names == {"training.json", "metrics.jsonl", "loss.svg", "adapter"} | {
        f"adapter-checkpoint-step-{step:08}.kiln-checkpoint" for step in (4, 8)
    }
    receipt = read_receipt(out / "train_receipt.json")
    assert (receipt.status, receipt.steps, receipt.data.examples_trained) == ("success", 12, 12)
    assert receipt.receipt_sha256 == receipt.whole_digest()
    assert receipt.content_sha256 == receipt.content_digest()
    assert receipt.held_out is not None and receipt.held_out.loss_after != receipt.held_out.loss_before
    assert [ref.path for ref in receipt.outputs] == [
        "train/adapter/adapter_config.json",
        "train/adapter/adapter_model.safetensors",
        "train/metrics.jsonl",
        "train/adapter/README.md",
        "train/loss.svg",
        "train/adapter/chat_template.jinja",
        "train/adapter/tokenizer.json",
        "train/adapter/tokenizer_config.json",
    ]
    lines = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert set(lines[0]) == set(StepRecord._fields)


def test_the_receipt_verifies(finished: Made) -> None:
    verdict = verify_receipt.run(finished[1])
    assert [line for line in verdict.claims if line.status == "fails"] == []


def test_no_path_of_the_machine_is_in_the_adapter(finished: Made) -> None:
    config = json.loads((finished[1] / "train" / "adapter" / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == "tiny"


def test_the_same_training_again_is_left_alone(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    before = _snapshot(out)
    for result in (
        train.run(config, out, plugins),
        train.run(config, out, plugins, fresh=True),
        resume.run(config, out, plugins),
    ):
        assert result.unchanged
    assert _snapshot(out) == before


def test_two_trainings_of_the_same_inputs_are_equal(finished: Made, made: Made, plugins: Plugins) -> None:
    train.run(*made, plugins)
    for name in ("train/metrics.jsonl", "train/adapter/adapter_model.safetensors", "train/adapter/adapter_config.json"):
        assert (made[1] / name).read_bytes() == (finished[1] / name).read_bytes(), name


@pytest.mark.parametrize("stop_after", [1, 4, 6, 11])
def test_a_stopped_and_resumed_training_equals_the_uncut_one(
    stop_after: int, finished: Made, made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    with _stopping_after(stop_after, monkeypatch):
        stopped = train.run(config, out, plugins)
    assert stopped.signal == signal.SIGINT and stopped.receipt is None
    assert read_receipt(out / "train_receipt.json").failure_reason == "cancelled"
    assert list_checkpoints(out / "train")[-1][0] == stop_after
    resumed = resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    assert resumed.resumed_from == stop_after
    for name in ("train/metrics.jsonl", "train/adapter/adapter_model.safetensors", "train/training.json"):
        assert (out / name).read_bytes() == (finished[1] / name).read_bytes(), name
    whole, again = read_receipt(finished[1] / "train_receipt.json"), read_receipt(out / "train_receipt.json")
    assert whole.adapters == again.adapters
    assert whole.loss_log_sha256 == again.loss_log_sha256
    assert whole.held_out == again.held_out
    assert [line for line in verify_receipt.run(out).claims if line.status == "fails"] == []


def test_a_killed_training_is_cut_back_to_its_checkpoint(run_copy: Made, finished: Made, plugins: Plugins) -> None:
    """What SIGKILL behind step 10 leaves: checkpoints 4 and 8, ten lines and half of another, no receipt."""
    _, out = run_copy
    _forget_the_end(out)
    log = out / "train" / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:10]) + b'{"counts":{},"curs')
    result = resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    assert result.resumed_from == 8
    assert log.read_bytes() == (finished[1] / "train" / "metrics.jsonl").read_bytes()


DAMAGE = {
    "changed": lambda data: data.replace(b'"steps": 12', b'"steps": 13'),
    "cut short": lambda data: data[:-100],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_receipt_is_told_and_written_anew(
    damage: Callable[[bytes], bytes],
    run_copy: Made,
    finished: Made,
    plugins: Plugins,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, out = run_copy
    path = out / "train_receipt.json"
    whole, broken = path.read_bytes(), damage(path.read_bytes())
    assert whole != broken
    path.write_bytes(broken)
    with pytest.raises(KilnError, match=r"train_receipt.json: ") as caught:
        status.run(out)
    assert caught.value.code == "KLN206" and f"`kiln resume {out}`" in str(caught.value.hint)
    with pytest.raises(KilnError, match="holds this training, unfinished"):
        train.run(config, out, plugins)
    assert path.read_bytes() == broken
    resume.run(config, out, plugins)
    assert "train_receipt.json: " in (told := capsys.readouterr().err) and "it is taken for none" in told
    assert read_receipt(path).content_sha256 == read_receipt(finished[1] / "train_receipt.json").content_sha256
    path.write_bytes(broken)
    train.run(config, out, plugins, fresh=True)
    assert read_receipt(path).content_sha256 == read_receipt(finished[1] / "train_receipt.json").content_sha256
    (aside,) = out.glob("train.*/train_receipt.json")
    assert aside.read_bytes() == broken


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_receipt_does_not_keep_status_from_a_training_that_goes_on(
    damage: Callable[[bytes], bytes],
    run_copy: Made,
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, out = run_copy
    path = out / "train_receipt.json"
    broken = damage(path.read_bytes())
    path.write_bytes(broken)
    states = []

    def watched(*args: object, **kwargs: object) -> Iterator[StepRecord]:
        for record in loop.train(*args, **kwargs):  # type: ignore[arg-type]
            states.append(status.run(out).state)
            yield record

    monkeypatch.setattr("kiln_stages.training.trainer.train", watched)
    resume.run(config, out, plugins, checkpoint=list_checkpoints(out / "train")[-1][1].name)
    assert states == ["running"] * 4
    assert f"{path} is damaged and kept as train_receipt.damaged.json" in capsys.readouterr().err
    assert (out / "train_receipt.damaged.json").read_bytes() == broken
    assert read_receipt(path).status == "success"


def test_a_log_that_is_not_the_checkpoints_is_refused(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    _forget_the_end(out)
    log = out / "train" / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1].replace(b'"loss":', b'"loss":1') + b"".join(lines[2:]))
    with pytest.raises(KilnError, match="they agree for 1 of 8 steps") as caught:
        resume.run(config, out, plugins)
    assert caught.value.code == "KLN207"


def test_another_corpus_is_refused_and_fresh_moves_the_old_one_aside(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    write_admitted(config, out, 5, 2)
    with pytest.raises(
        KilnError, match=r"holds a training of another corpus: sha256:\w{64}, now sha256:\w{64}"
    ) as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN208" and "--fresh" in caught.value.hint
    (out / "train_receipt.json.sig").write_bytes(b"of the old one")
    result = train.run(config, out, plugins, fresh=True)
    assert result.receipt is not None and result.receipt.steps == 15
    (aside,) = [path for path in out.iterdir() if path.name.startswith("train.")]
    assert len(aside.name) == len("train.") + 8
    assert (aside / "train_receipt.json").exists() and (aside / "adapter").is_dir()
    assert (aside / "train_receipt.json.sig").exists() and not (out / "train_receipt.json.sig").exists()


def test_another_config_is_refused_with_both_digests(run_copy: Made, plugins: Plugins) -> None:
    _, out = run_copy
    config = load_config(out.parent / "kiln.toml", ["train.epochs=2"])
    with pytest.raises(KilnError, match="another config: sha256:") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN208"


@pytest.mark.parametrize(("name", "what"), [("model.safetensors", "base model"), ("config.json", "model config.json")])
def test_a_finished_training_of_another_model_is_not_this_one(
    run_copy: Made, plugins: Plugins, name: str, what: str
) -> None:
    """Only a byte that changes nothing else: of a weight, or white space."""
    config, out = run_copy
    file = config.model_dir() / name
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("safetensors") else data + b"\n")
    with pytest.raises(KilnError, match=rf"another {re.escape(what)}: sha256:\w{{64}}, now sha256:\w{{64}}") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN208"
    with pytest.raises(KilnError) as caught:
        resume.run(config, out, plugins)
    assert caught.value.code == "KLN209"
    result = train.run(config, out, plugins, fresh=True)
    assert result.receipt is not None and not result.unchanged


def test_an_unfinished_training_is_resumed_not_begun_again(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    _forget_the_end(out)
    with pytest.raises(KilnError, match="unfinished, with checkpoints up to step 8") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN208" and "kiln resume" in caught.value.hint


def test_a_training_cut_before_its_first_checkpoint_begins_again(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    _forget_the_end(out)
    for _, path in list_checkpoints(out / "train"):
        shutil.rmtree(path)
    with pytest.raises(KilnError, match="before its first checkpoint"):
        resume.run(config, out, plugins)
    assert train.run(config, out, plugins).receipt is not None


def test_files_of_others_are_not_overwritten(made: Made, plugins: Plugins) -> None:
    config, out = made
    (out / "train").mkdir()
    (out / "train" / "notes.txt").write_text("mine")
    with pytest.raises(KilnError, match=r"no training\.json") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN208"


@pytest.mark.parametrize("name", ["admit/corpus.parquet", "admit/heldout.parquet", "admit/sft_ingestion.json"])
def test_files_changed_after_admit_are_refused(name: str, made: Made, plugins: Plugins) -> None:
    config, out = made
    (out / name).write_bytes((out / name).read_bytes()[:-1])
    with pytest.raises(KilnError, match="changed after admit_manifest") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN207"


def test_settings_changed_after_admit_are_refused(made: Made, plugins: Plugins) -> None:
    _, out = made
    config = load_config(out.parent / "kiln.toml", ["admit.max_tokens=7"])
    with pytest.raises(KilnError, match=r"\[model\] and \[admit\] of the config changed") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN207"


def test_resume_under_another_config_lists_every_difference(run_copy: Made, plugins: Plugins) -> None:
    _, out = run_copy
    _forget_the_end(out)
    config = load_config(
        out / "config.resolved.toml", ["train.learning_rate=0.02", "train.epochs=4", "project.seed=43"]
    )
    with pytest.raises(KilnError) as caught:
        resume.run(config, out, plugins)
    assert caught.value.code == "KLN209"
    named = {line.split()[0] for line in caught.value.message.splitlines()[2:]}
    assert {"config.learning_rate", "config.epochs", "config.seed", "total_steps", "optimizer.lr"} <= named


def test_an_older_checkpoint_is_resumed_only_where_no_later_one_is(run_copy: Made, plugins: Plugins) -> None:
    config, out = run_copy
    _forget_the_end(out)
    (_, older), (_, newer) = list_checkpoints(out / "train")
    with pytest.raises(KilnError, match="is not the newest checkpoint") as caught:
        resume.run(config, out, plugins, checkpoint=older.name)
    assert caught.value.code == "KLN215"
    shutil.move(newer, out / "elsewhere")
    assert resume.run(config, out, plugins, checkpoint=older.name).resumed_from == 4


@pytest.mark.parametrize("name", ["../run/train/x", "step-4", ""])
def test_checkpoints_are_named_not_located(name: str, run_copy: Made, plugins: Plugins) -> None:
    with pytest.raises(KilnError, match="no name of a checkpoint"):
        resume.run(*run_copy, plugins, checkpoint=name)


def test_a_signal_settles_the_step_and_leaves_a_checkpoint(made: Made) -> None:
    """As a process, with SIGTERM; SIGINT within this process is sent above."""
    _, out = made
    config = out.parent / "kiln.toml"
    config.write_text(config.read_text().replace("epochs = 3", "epochs = 2000"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "kiln_cli.app", "train", str(config), "--out", str(out)],
        env=env,
        stderr=subprocess.PIPE,
    )
    log = out / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") > 5) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    step = list_checkpoints(out / "train")[-1][0]
    assert log.read_bytes().count(b"\n") == step
    assert f"stopped after step {step}".encode() in errors and b"next: kiln resume" in errors


def _forget_the_end(out: Path) -> None:
    (out / "train_receipt.json").unlink()
    shutil.rmtree(out / "train" / "adapter")


def _snapshot(out: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".kiln.lock")
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@contextmanager
def _stopping_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends this process SIGINT while the step is trained, as a user would."""

    def interrupted(*args: object, **kwargs: object) -> Iterator[StepRecord]:
        for record in loop.train(*args, **kwargs):  # type: ignore[arg-type]
            if record.step == step:
                os.kill(os.getpid(), signal.SIGINT)
            yield record

    with monkeypatch.context() as patch:
        patch.setattr("kiln_stages.training.trainer.train", interrupted)
        yield
