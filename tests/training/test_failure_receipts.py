"""A training that fails leaves a receipt that says so: verifiable, never over a successful one, replaced by success."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kiln_stages import resume, train, verify_receipt
from kiln_stages.training import failures, loop, run_training
from kiln_stages.training.checkpoint import list_checkpoints
from training.admitted_run import admitted_run

from kiln_cli import KilnError, app
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.files import FS
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.receipts import FAILURE_REASONS, TrainReceipt

Made = tuple[LoadedConfig, Path]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return admitted_run(tmp_path / "made")


def sound(out: Path) -> TrainReceipt:
    """The receipt of the run, after every claim about it was checked and none fails or could not be checked."""
    verdict = verify_receipt.run(out)
    assert [line for line in verdict.claims if line.status not in ("holds", "not checked")] == []
    receipt = read_receipt(out / "train_receipt.json")
    assert verdict.failed_training == f"{receipt.failure_reason}: {receipt.failure_message}"
    return receipt


def _failing_at(step: int, monkeypatch: pytest.MonkeyPatch, failure: Callable[[Any], Any]) -> None:
    """Row losses pass through ``failure`` from the given step on (from 1)."""
    seen, real = [0], loop.row_loss

    def row_loss(*arguments: Any, **more: Any) -> Any:
        out, batch = real(*arguments, **more)
        seen[0] += 1
        return (failure(out) if seen[0] >= step else out), batch

    monkeypatch.setattr(loop, "row_loss", row_loss)


def _nan(out: Any) -> Any:
    return msgspec.structs.replace(out, loss=out.loss * float("nan"))


def _no_memory(out: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _defect(out: Any) -> Any:
    raise RuntimeError("the loss function broke")


HELD_OUT = 2  # rows of the run that are evaluated before the first step


@pytest.mark.parametrize(
    ("failure", "error", "reason", "words"),
    [
        (_nan, KilnError, "nan_loss", "is nan"),
        (_no_memory, KilnError, "oom", "out of memory"),
        (_defect, RuntimeError, "training_error", "RuntimeError: the loss function broke"),
    ],
    ids=["nan", "memory", "defect"],
)
def test_a_failure_in_a_step_leaves_its_reason_and_the_admission(
    made: Made,
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[Any], Any],
    error: type[Exception],
    reason: str,
    words: str,
) -> None:
    config, out = made
    with monkeypatch.context() as patch:
        _failing_at(6 + HELD_OUT, patch, failure)
        with pytest.raises(error):
            train.run(config, out, plugins)
    receipt = sound(out)
    assert (receipt.status, receipt.failure_reason) == ("failed", reason)
    assert receipt.failure_message is not None and words in receipt.failure_message
    assert receipt.failure_reason in FAILURE_REASONS
    assert receipt.data.sft_ingestion.rows_kept == 4
    assert (receipt.steps, receipt.data.examples_trained) == (5, 5)
    assert (receipt.adapters["output"], receipt.held_out, receipt.lora_delta_norms) == (None, None, [])
    assert [each.step for each in receipt.checkpoints] == [4]
    # It is no success: neither command takes it for one, and going on makes one of it.
    with pytest.raises(KilnError, match="up to step 4"):
        train.run(config, out, plugins)
    assert resume.run(load_config(out / "config.resolved.toml"), out, plugins).resumed_from == 4
    assert read_receipt(out / "train_receipt.json").status == "success"
    assert verify_receipt.run(out).failed_training is None


def test_tokens_of_a_failed_training_are_those_of_its_steps(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    _failing_at(7 + HELD_OUT, monkeypatch, _nan)
    with pytest.raises(KilnError):
        train.run(config, out, plugins)
    lines = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_bytes().splitlines()]
    supervised = sum(line["supervised_tokens"] for line in lines)
    assert read_receipt(out / "train_receipt.json").token_counts == {
        "action_tokens": supervised,
        "context_tokens": sum(line["tokens"] for line in lines) - supervised,
    }


def test_divergence_is_a_training_error(made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = made
    monkeypatch.setattr(loop, "DIVERGED_RATIO", -1.0)
    monkeypatch.setattr(loop, "DIVERGED_GAP", -1e9)
    with pytest.raises(KilnError, match="diverged"):
        train.run(config, out, plugins)
    receipt = sound(out)
    assert receipt.failure_reason == "training_error"
    assert receipt.failure_message is not None and "the loss diverged" in receipt.failure_message


def test_a_model_that_cannot_be_loaded_leaves_a_receipt_without_machine(made: Made, plugins: Plugins) -> None:
    config, out = made
    path = config.base_dir / "model" / "config.json"
    value = json.loads(path.read_bytes())
    path.write_text(json.dumps(value | {"intermediate_size": 7}))
    with pytest.raises(KilnError) as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN302"
    assert not (out / "train").exists()
    receipt = sound(out)
    assert (receipt.steps, receipt.execution, receipt.execution_provenance) == (0, None, None)
    assert receipt.hyperparameters["target_modules"] is None and receipt.outputs == []
    assert receipt.token_counts == {"action_tokens": 0, "context_tokens": 0}
    path.write_text(json.dumps(value))
    train.run(config, out, plugins, fresh=True)
    assert read_receipt(out / "train_receipt.json").status == "success"
    assert [entry.name for entry in out.iterdir() if entry.name.startswith("train.")] == []


def test_a_full_disk_leaves_a_receipt_if_there_is_room_for_one(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FS, "rename_directory", full)
        with pytest.raises(KilnError, match="No space left"):
            train.run(config, out, plugins)
    receipt = sound(out)
    assert receipt.failure_reason == "training_error"
    assert receipt.failure_message is not None and "No space left on device" in receipt.failure_message
    assert receipt.steps == 4 and receipt.checkpoints == []
    train.run(config, out, plugins)  # it has no checkpoint: it begins again
    assert read_receipt(out / "train_receipt.json").status == "success"


def test_where_no_receipt_can_be_written_the_first_error_is_the_one_that_is_told(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    _failing_at(3 + HELD_OUT, monkeypatch, _nan)

    def refuse(*_: object) -> None:
        raise KilnError("KLN402", "no space")

    monkeypatch.setattr(run_training, "write_receipt", refuse)
    with pytest.raises(KilnError, match="is nan") as caught:
        train.run(config, out, plugins)
    assert caught.value.code == "KLN104"
    assert "no failure receipt was written: no space" in caught.value.message
    assert not (out / "train_receipt.json").exists()


@contextmanager
def _stopping_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = loop.LoopState.commit

    def commit(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        if self.global_step == step:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.LoopState, "commit", commit)
        yield


def test_a_stopped_training_is_a_failed_one_until_it_is_resumed(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    with _stopping_after(6, monkeypatch):
        assert train.run(config, out, plugins).signal == signal.SIGTERM
    receipt = sound(out)
    assert (receipt.failure_reason, receipt.failure_message) == ("cancelled", "cancelled by user: SIGTERM after step 6")
    assert [each.step for each in receipt.checkpoints] == [4, 6]
    with _stopping_after(9, monkeypatch):
        resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    assert sound(out).steps == 9
    resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    assert read_receipt(out / "train_receipt.json").status == "success"


def test_a_successful_receipt_is_never_written_over(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = made
    train.run(config, out, plugins)
    before = (out / "train_receipt.json").read_bytes()
    adapter = out / "train" / "adapter" / "adapter_model.safetensors"
    adapter.write_bytes(b"damaged")  # so that the training is not taken for finished
    for _, path in list_checkpoints(out / "train"):
        path.rename(out / path.name)
    _failing_at(2 + HELD_OUT, monkeypatch, _nan)
    with pytest.raises(KilnError):
        train.run(config, out, plugins)
    assert (out / "train_receipt.json").read_bytes() == before


def test_what_refuses_to_begin_leaves_no_receipt(made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = made
    with _stopping_after(6, monkeypatch):
        train.run(config, out, plugins)
    before = (out / "train_receipt.json").read_bytes()
    other = config.replace("train", learning_rate=0.5)
    with pytest.raises(KilnError) as caught:
        train.run(other, out, plugins)
    assert caught.value.code == "KLN208"
    with pytest.raises(KilnError) as caught:
        resume.run(other, out, plugins)
    assert caught.value.code == "KLN209"
    log = out / "train" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"loss":', b'"loss":1', 1))
    with pytest.raises(KilnError) as caught:
        resume.run(config, out, plugins)
    assert caught.value.code == "KLN207"
    assert (out / "train_receipt.json").read_bytes() == before


def test_a_failed_receipt_is_no_page_of_a_finished_run(
    made: Made, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = made
    _failing_at(5 + HELD_OUT, monkeypatch, _nan)
    with pytest.raises(KilnError):
        train.run(config, out, plugins)
    for command in (["report", str(out)], ["generate", str(out), "--row", "1"]):
        assert app.run(command) == 2
        told = capsys.readouterr().err
        assert "KLN206" in told and "nan_loss" in told and "kiln resume" in told
    assert app.run(["verify-receipt", str(out)]) == 0
    assert "the training FAILED: nan_loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("cancelled by user: out of memory", "cancelled"),
        ("CUDA out of memory", "oom"),
        ("the loss of row 3 is nan", "nan_loss"),
        ("the gradient of x is not finite", "nan_loss"),
        ("the base adapter is missing: x", "base_adapter_missing"),
        ("tensor x has shape [1], expected [2]", "shape_mismatch"),
        ("the base adapter cannot be read", "adapter_load_failed"),
        ("anything", "training_error"),
    ],
)
def test_reasons_by_words(message: str, reason: str) -> None:
    assert failures.reason_of(message) == reason


def test_the_home_directory_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    failure = failures.failure_of(KilnError("KLN302", "/home/somebody/model/config.json is missing"))
    assert failure is not None and failure.message == "~/model/config.json is missing"
