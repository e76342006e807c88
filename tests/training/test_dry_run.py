"""``kiln train --dry-run``: numbers that a real training bears out, and nothing of the run touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kiln_stages import train
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.dry_run import DryRun, held_out_losses
from training.admitted_run import admitted_run

from kiln_cli import KilnError, app
from kiln_cli.config import LoadedConfig
from kiln_cli.files import run_lock
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins

Made = tuple[LoadedConfig, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    config, out = admitted_run(tmp_path_factory.mktemp("dry"), rows=7)
    return config.replace("train", heldout_interval=5), out


@pytest.fixture(scope="module")
def estimate(made: Made, plugins: Plugins) -> DryRun:
    return train.preview(*made, plugins)


def snapshot(out: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_training_bears_its_numbers_out(made: Made, estimate: DryRun, plugins: Plugins, tmp_path: Path) -> None:
    config, out = admitted_run(tmp_path, rows=7)
    train.run(config.replace("train", heldout_interval=5), out, plugins)
    receipt = read_receipt(out / "train_receipt.json")
    lines = [json.loads(line) for line in (out / "train" / "metrics.jsonl").read_bytes().splitlines()]
    assert (estimate.rows, estimate.held_out_rows, estimate.epochs, estimate.steps) == (7, 2, 3, receipt.steps)
    assert estimate.tokens == sum(receipt.token_counts.values())
    assert estimate.supervised_tokens == receipt.token_counts["action_tokens"]
    assert estimate.longest_row == max(line["tokens"] for line in lines)
    assert estimate.held_out_losses == sum("held_out" in line for line in lines) + 2
    assert estimate.adapter_bytes == receipt.adapters["output"]["adapter_model_bytes"]
    checkpoints = [path for _, path in list_checkpoints(out / "train")]
    assert estimate.checkpoints == len(checkpoints) == 5
    files = [path for path in checkpoints[-1].iterdir() if path.suffix == ".safetensors"]
    tensors = sum(path.stat().st_size for path in files)
    assert tensors < estimate.checkpoint_bytes < tensors + 2000


def test_the_probe_takes_the_longest_row_first(estimate: DryRun) -> None:
    assert len(estimate.probe) == 3
    assert estimate.probe[0].tokens == estimate.longest_row >= estimate.probe[2].tokens >= estimate.probe[1].tokens
    usual = estimate.probe[1:]
    speed = sum(step.tokens for step in usual) / sum(step.seconds for step in usual)
    assert estimate.tokens_a_second == pytest.approx(speed)
    assert estimate.training_seconds == pytest.approx(estimate.tokens / speed)


def test_memory_adds_up(estimate: DryRun) -> None:
    memory = estimate.memory
    assert memory.adapter == memory.gradients == 4 * _leaves()
    assert memory.optimizer_state == 4 * _leaves(), "momentum of Muon"
    assert memory.base_weights == 4 * (384 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32)
    assert memory.activations is not None
    assert memory.peak > memory.base_weights + 2 * memory.adapter + memory.optimizer_state


def _leaves() -> int:
    """Elements of the rank-2 adapter of the tiny Llama: two layers of seven targets."""
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    return 2 * sum(2 * (rows + columns) for rows, columns in shapes)


def test_nothing_is_written_and_no_lock_is_taken(made: Made, plugins: Plugins) -> None:
    config, out = made
    with run_lock(out, "kiln admit"):
        before = snapshot(out.parent)
        train.preview(config, out, plugins)
        assert snapshot(out.parent) == before
    assert not (out / "train").exists()


def test_it_leaves_a_training_that_follows_as_it_is(
    made: Made, estimate: DryRun, plugins: Plugins, tmp_path: Path
) -> None:
    """The same process trains after the probe: the adapter is that of a training without one."""
    adapters = []
    for name, dry in (("with", True), ("without", False)):
        config, out = admitted_run(tmp_path / name)
        if dry:
            train.preview(config, out, plugins)
        train.run(config, out, plugins)
        adapters.append(read_receipt(out / "train_receipt.json").adapters["output"]["content_sha256"])
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize("steps, interval, times", [(12, None, 2), (12, 5, 4), (12, 6, 3), (12, 12, 2), (1, 1, 2)])
def test_held_out_losses_are_counted(steps: int, interval: int | None, times: int) -> None:
    assert held_out_losses(steps, interval) == times


def test_a_run_that_was_not_admitted_is_refused(made: Made, plugins: Plugins, tmp_path: Path) -> None:
    with pytest.raises(KilnError) as caught:
        train.preview(made[0], tmp_path, plugins)
    assert caught.value.code == "KLN206"


def test_the_command_prints_it(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = made
    arguments = ["train", str(config.path), "--out", str(out), "--dry-run", "--set", "train.optimizer=sgd"]
    assert app.run(arguments) == 0
    shown = capsys.readouterr()
    assert (
        "nothing was written" in shown.out
        and f"next: kiln train {config.path} --out {out} --set train.optimizer=sgd" in shown.err
    )
    assert app.run([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "kiln.dry-run.v1" and value["memory"]["optimizer_state"] == 0
