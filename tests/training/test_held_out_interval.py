"""``[train] heldout_interval``: the loss on held-out rows during a training, and resume is exact all the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kiln_stages import admit, resume, train, verify_receipt
from kiln_stages.training import loop
from tiny_model import write_tiny_model
from training.admitted_run import admitted_run

from kiln_cli import KilnError
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins

Made = tuple[LoadedConfig, Path]
LAST = 12  # steps of the run: 4 rows, 3 epochs


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return admitted_run(tmp_path)


def held_out_losses(out: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    return {line["step"]: line["held_out"] for line in lines if "held_out" in line}


def test_no_step_has_a_held_out_loss_unless_it_is_asked_for(made: Made, plugins: Plugins) -> None:
    train.run(*made, plugins)
    assert held_out_losses(made[1]) == {}


def test_every_third_step_but_the_last_has_the_loss_on_the_held_out_rows(made: Made, plugins: Plugins) -> None:
    config, out = made
    train.run(config.replace("train", heldout_interval=3), out, plugins)
    losses = held_out_losses(out)
    assert list(losses) == [3, 6, 9]
    receipt = read_receipt(out / "train_receipt.json")
    assert receipt.held_out is not None
    sizes = {(value["rows"], value["supervised_tokens"]) for value in losses.values()}
    assert sizes == {(receipt.held_out.rows, receipt.held_out.supervised_tokens)}
    means = [value["mean_per_token"] for value in losses.values()]
    assert receipt.held_out.loss_before > means[0] > means[1] > means[2] > receipt.held_out.loss_after
    assert [line for line in verify_receipt.run(out).claims if line.status == "fails"] == []


def test_it_is_the_loss_of_the_model_as_it_stood_then(made: Made, plugins: Plugins, tmp_path: Path) -> None:
    """A training that ends at step 4 gives, at its end, what a longer one logged there."""
    config, out = made
    train.run(config.replace("train", heldout_interval=4), out, plugins)
    short_config, short = admitted_run(tmp_path / "short")
    train.run(short_config.replace("train", epochs=1), short, plugins)
    held_out = read_receipt(short / "train_receipt.json").held_out
    assert held_out is not None
    assert held_out.loss_after == held_out_losses(out)[4]["mean_per_token"]


def test_it_changes_nothing_of_what_is_trained(made: Made, plugins: Plugins, tmp_path: Path) -> None:
    config, out = made
    train.run(config.replace("train", heldout_interval=1), out, plugins)
    plain_config, plain = admitted_run(tmp_path / "plain")
    train.run(plain_config, plain, plugins)
    ours, theirs = (read_receipt(run / "train_receipt.json") for run in (out, plain))
    assert ours.adapters == theirs.adapters
    assert ours.loss_log_sha256 == theirs.loss_log_sha256


@pytest.mark.parametrize("stop_after", [2, 3, 5])
def test_a_cut_and_resumed_run_has_the_same_bytes(
    stop_after: int, made: Made, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_config, whole = admitted_run(tmp_path / "whole")
    train.run(whole_config.replace("train", heldout_interval=3), whole, plugins)
    config, out = made
    with _stopping_after(stop_after, monkeypatch):
        assert train.run(config.replace("train", heldout_interval=3), out, plugins).signal == signal.SIGTERM
    resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors", "training.json"):
        assert (out / "train" / name).read_bytes() == (whole / "train" / name).read_bytes(), name


def test_a_checkpoint_is_bound_to_the_interval(made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = made
    with _stopping_after(5, monkeypatch):
        train.run(config.replace("train", heldout_interval=3), out, plugins)
    changed = load_config(out / "config.resolved.toml").replace("train", heldout_interval=4)
    with pytest.raises(KilnError, match=r"heldout_interval +3 +4") as caught:
        resume.run(changed, out, plugins)
    assert caught.value.code == "KLN209"


def test_without_held_out_rows_it_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    config = load_config(None, options={"model": {"path": str(write_tiny_model(tmp_path / "model"))}})
    out = tmp_path / "run"
    turns = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    admit.run(config, out, plugins, rows=[{"messages": turns}])
    with pytest.raises(KilnError, match=r"heldout_interval = 3, and .* has no held-out rows") as caught:
        train.run(config.replace("train", heldout_interval=3), out, plugins)
    assert caught.value.code == "KLN203"
    assert not (out / "train").exists()


@contextmanager
def _stopping_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM reaches the process within that step, as from another terminal."""
    commit = loop.LoopState.commit

    def commit_and_signal(state: loop.LoopState, *arguments: object) -> None:
        commit(state, *arguments)  # type: ignore[arg-type]
        if state.global_step == step:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.LoopState, "commit", commit_and_signal)
        yield
