"""``kiln status``: beside a running training, after a kill, and on runs that ended or have not begun. It only reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kiln_stages import resume, status, train
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.metrics import read_steps, steps_from_end
from training.admitted_run import admitted_run

from kiln_cli import KilnError
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.files import lock_holder, run_lock
from kiln_cli.manifests import document, read_receipt
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import TrainReceipt

Made = tuple[LoadedConfig, Path]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Made:
    config, out = admitted_run(tmp_path_factory.mktemp("finished"))
    train.run(config.replace("train", heldout_interval=5), out, plugins)
    return config, out


@pytest.fixture
def run(finished: Made, tmp_path: Path) -> Path:
    shutil.copytree(finished[1].parent, tmp_path / "copy")
    return tmp_path / "copy" / "run"


def cut_behind(run: Path, steps: int) -> None:
    """What a kill leaves: so many whole lines and half of another, the checkpoints up to there, and no receipt."""
    (run / "train_receipt.json").unlink()
    log = run / "train" / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:steps]) + b'{"counts":{},"cur')
    for step, path in list_checkpoints(run / "train"):
        if step > steps:
            shutil.rmtree(path)


def test_a_finished_run(run: Path) -> None:
    found, receipt = status.run(run), read_receipt(run / "train_receipt.json")
    assert (found.state, found.step, found.steps, found.epoch, found.epochs) == ("finished", 12, 12, 3, 3)
    losses = [step.loss for step in read_steps(run / "train" / "metrics.jsonl")]
    assert found.last_loss == losses[-1] and found.recent_loss == pytest.approx(sum(losses) / 12)
    assert receipt.held_out is not None
    assert [(point.step, point.loss) for point in found.held_out] == [
        (0, receipt.held_out.loss_before),
        (12, receipt.held_out.loss_after),
    ]
    assert found.next == f"kiln verify-receipt {run}" and found.in_use_by is None and found.notes == []


def test_a_killed_run_is_resumed_from_its_latest_checkpoint(run: Path, plugins: Plugins) -> None:
    cut_behind(run, 10)
    found = status.run(run)
    assert (found.state, found.step, found.steps) == ("unfinished", 10, 12)
    assert found.checkpoint is not None
    assert found.checkpoint.name == "adapter-checkpoint-step-00000008.kiln-checkpoint"
    assert found.notes == ["the checkpoint is 2 steps behind the log: resuming goes on from there"]
    assert [point.step for point in found.held_out] == [0, 10]
    assert found.next == f"kiln resume {run}"
    assert resume.run(load_config(run / "config.resolved.toml"), run, plugins).resumed_from == 8
    assert status.run(run).state == "finished"


def test_a_run_killed_before_its_first_checkpoint_is_trained_again(run: Path, plugins: Plugins) -> None:
    cut_behind(run, 3)
    found = status.run(run)
    assert (found.state, found.step, found.checkpoint) == ("unfinished", 3, None)
    assert found.next == f"kiln train {run}/config.resolved.toml --out {run}"
    assert train.run(load_config(run / "config.resolved.toml"), run, plugins).receipt is not None


def test_an_admitted_run_is_trained_next(tmp_path: Path) -> None:
    _, out = admitted_run(tmp_path / "two words")
    found = status.run(out)
    assert (found.state, found.step, found.steps, found.last_loss) == ("admitted", 0, 12, None)
    assert found.next == f"kiln train '{out}/config.resolved.toml' --out '{out}'"
    (out / "admit_manifest.json").unlink()
    found = status.run(out)
    assert (found.state, found.next) == ("prepared", f"kiln admit '{out}/config.resolved.toml' --out '{out}'")


@pytest.mark.parametrize(
    "reason, step", [("nan_loss", "kiln train CONFIG --out {run} --fresh"), ("cancelled", "kiln resume {run}")]
)
def test_a_failed_run_tells_why(run: Path, reason: str, step: str) -> None:
    receipt: TrainReceipt = read_receipt(run / "train_receipt.json")
    cut_behind(run, 10)
    receipt.status, receipt.failure_reason, receipt.failure_message = "failed", reason, "the loss of row 3 is nan"
    receipt.seal()
    (run / "train_receipt.json").write_bytes(document(receipt))
    found = status.run(run)
    assert (found.state, found.failure_reason, found.failure_message) == ("failed", reason, "the loss of row 3 is nan")
    assert found.next == step.format(run=run)
    assert f"stopped: the loss of row 3 is nan ({reason})" in status.page(found)


def test_a_damaged_checkpoint_is_told(run: Path) -> None:
    cut_behind(run, 8)
    manifest = list_checkpoints(run / "train")[-1][1] / "checkpoint_manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes().replace(b'"item_count": 4', b'"item_count": 5'))
    found = status.run(run)
    assert found.checkpoint is not None and found.checkpoint.fault is not None
    assert any("the checkpoint cannot be loaded" in note for note in found.notes)


def test_another_admission_since_then_is_told(run: Path) -> None:
    cut_behind(run, 8)
    from training.admitted_run import write_admitted

    write_admitted(load_config(run.parent / "kiln.toml"), run, 5, 2)
    found = status.run(run)
    assert found.steps is None
    assert found.notes[0].startswith("the admitted rows and the settings in config.resolved.toml changed")
    assert found.next == f"kiln train CONFIG --out {run} --fresh"


def test_no_run_is_refused(tmp_path: Path) -> None:
    for path, code in ((tmp_path / "none", "KLN204"), (tmp_path, "KLN206")):
        with pytest.raises(KilnError) as caught:
            status.run(path)
        assert caught.value.code == code


def test_it_works_beside_a_running_training_and_after_its_kill(tmp_path: Path, plugins: Plugins) -> None:
    config, out = admitted_run(tmp_path)
    with _training(config, out) as process:
        seen = _wait_for(out, lambda found: found.step >= 6 and found.checkpoint is not None)
        assert seen.state == "running" and seen.next is None
        assert seen.in_use_by is not None
        assert (seen.in_use_by.command, seen.in_use_by.pid) == ("kiln train", process.pid)
        assert seen.steps == 8000 and seen.last_loss is not None and seen.held_out[0].step == 0
        assert process.poll() is None, "the look did not disturb it"
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = status.run(out)
    assert found.state == "unfinished" and found.in_use_by is None and found.step >= seen.step
    assert found.next == f"kiln resume {out}"


def test_the_lock_is_looked_at_without_being_taken(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None and not (tmp_path / ".kiln.lock").exists()
    with run_lock(tmp_path, "kiln admit"):
        before = (tmp_path / ".kiln.lock").read_bytes()
        holder = lock_holder(tmp_path)
        assert holder is not None and (holder.command, holder.pid) == ("kiln admit", os.getpid())
        assert (tmp_path / ".kiln.lock").read_bytes() == before
    assert lock_holder(tmp_path) is None, "the file's text outlives the lock and counts for nothing"
    with run_lock(tmp_path, "kiln train"):
        pass


def test_nothing_is_written_and_torch_stays_out(run: Path) -> None:
    def snapshot() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(run.rglob("*"))}

    before = snapshot()
    script = (
        "import sys\nfrom kiln_cli.app import run\ncode = run(['status', sys.argv[1], '--json'])\n"
        "assert not {'torch', 'transformers', 'peft', 'polars'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "finished"
    assert snapshot() == before


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_a_growing_log_is_read_from_its_end(tmp_path: Path, block: int) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(steps_from_end(path, block)) == []
    for whole in (0, 1, 9):
        lines = [json.dumps({"step": step, "epoch": 0, "loss": step / 2}) + "\n" for step in range(1, whole + 1)]
        for torn in ("", '{"step": 99, "ep'):
            path.write_text("".join(lines) + torn)
            assert [step.step for step in steps_from_end(path, block)] == list(range(whole, 0, -1))


@contextlib.contextmanager
def _training(config: LoadedConfig, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    assert config.path is not None
    command = [sys.executable, "-m", "kiln_cli.app", "train", str(config.path), "--out", str(out)]
    options = ["--set", "train.epochs=2000"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(out: Path, enough: object) -> status.Status:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = status.run(out)
        if enough(found):  # type: ignore[operator]
            return found
        time.sleep(0.02)
    raise AssertionError(f"still {found}")
