"""Trainings of forty steps on the tiny model: uncut, cut behind any step, gone on with, and compared bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from kiln_stages import train
from kiln_stages.training import loop
from kiln_stages.training.checkpoint import MANIFEST, latest_checkpoint, load_checkpoint
from kiln_stages.training.inputs import read_inputs
from kiln_stages.training.loop import StepRecord
from kiln_stages.training.lora import store
from kiln_stages.training.optimizers import export_state
from kiln_stages.training.tensors import StoredTensor
from kiln_stages.training.trainer import Plan, Trainer, train_adapter
from training.admitted_run import admitted_run

from kiln_cli.config import load_config
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import document
from kiln_cli.plugins import load_plugins
from kiln_cli.terminal import SILENT

ROWS, EPOCHS = 10, 4
STEPS = ROWS * EPOCHS
KINDS = ("muon", "adam_w")
FRESH = {"muon": (1, 10, 24, 39), "adam_w": (7, 20, 33, 40)}  # cuts of `make test`; `make test-faults` has all
RUN = "run"
RESULTS = (
    "train/metrics.jsonl",
    "train/training.json",
    "train/adapter/adapter_model.safetensors",
    "train/adapter/adapter_config.json",
)


class Killed(BaseException):
    """What ends a training in its own process as SIGKILL would: nothing catches it."""


def admitted_project(directory: Path, kind: str, *, epochs: int = EPOCHS, interval: int = 15) -> Path:
    """A project whose run is admitted: ten rows, an optimizer, a checkpoint every ``interval`` steps."""
    admitted_run(directory, ROWS, 2)
    path = directory / "kiln.toml"
    text = path.read_text()
    for old, new in (
        ("epochs = 3", f'epochs = {epochs}\noptimizer = "{kind}"'),
        ("checkpoint_interval = 4", f"checkpoint_interval = {interval}"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return directory


def plan_of(project: Path) -> Plan:
    return read_inputs(load_config(project / "kiln.toml"), project / RUN, load_plugins(), SILENT).plan()


def train_in_process(project: Path) -> None:
    train.run(load_config(project / "kiln.toml"), project / RUN, load_plugins())


def cut_in_process(admitted: Path, target: Path, step: int) -> Path:
    """A copy of the project whose training gets SIGTERM while it takes ``step``. Behind the last step nothing is left
    to settle: there the training dies before it writes anything more."""
    shutil.copytree(admitted, target)

    def cut(*args: object, **kwargs: object) -> Iterator[StepRecord]:
        for record in loop.train(*args, **kwargs):  # type: ignore[arg-type]
            if record.step == step < STEPS:
                os.kill(os.getpid(), signal.SIGTERM)
            yield record
        raise Killed

    with patch("kiln_stages.training.trainer.train", cut):
        try:
            train_in_process(target)
        except Killed:
            assert step == STEPS
    receipt = target / RUN / "train_receipt.json"
    assert not receipt.exists() or json.loads(receipt.read_bytes())["status"] == "failed"
    assert (target / RUN / RESULTS[0]).read_bytes().count(b"\n") == step
    return target


def kiln_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own."""
    command = [sys.executable, "-m", "kiln_cli.app", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def require_cuts_end_equal(admitted: Path, folder: Path, steps: Iterable[int]) -> None:
    """Trainings cut at each of ``steps`` and resumed by a process of its own end as the uncut one does."""
    whole = Path(shutil.copytree(admitted, folder / "whole"))
    train_in_process(whole)
    cut = [cut_in_process(admitted, folder / f"cut-{step:02}", step) for step in steps]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda project: kiln_process("resume", project / RUN), cut))
    for project, process in zip(cut, done, strict=True):
        assert process.returncode == 0, f"{project.name}: {process.stderr}"
        require_equal_runs(project, whole)


def require_equal_runs(project: Path, uncut: Path) -> None:
    """Log, adapter and receipt, but for times, are those of the uncut training."""
    for name in RESULTS:
        assert (project / RUN / name).read_bytes() == (uncut / RUN / name).read_bytes(), f"{project.name}: {name}"
    mine, whole = (json.loads((at / RUN / "train_receipt.json").read_bytes()) for at in (project, uncut))
    for key in ("adapters", "loss_log_sha256", "held_out", "steps", "content_sha256"):
        assert mine[key] == whole[key], f"{project.name}: {key}"


class End(NamedTuple):
    """Where a training stands: its loss log, and its tensors as they would be stored."""

    log: bytes
    adapter: list[StoredTensor]
    optimizer: list[StoredTensor]


def end_of(trainer: Trainer, directory: Path) -> End:
    kind = trainer.plan.config.optimizer.kind
    state = export_state(kind, trainer.optimizer, trainer.model.parameters)
    return End((directory / "metrics.jsonl").read_bytes(), store(trainer.model.parameters), store(state))


def go_on(plan: Plan, directory: Path) -> End:
    """Resumes from the newest checkpoint of a ``train/`` directory, by a new trainer, to the last step."""
    newest = latest_checkpoint(directory)
    assert newest is not None
    trainer = Trainer(plan)
    trainer.restore(load_checkpoint(newest))
    train_adapter(trainer, directory)
    return end_of(trainer, directory)


def rehash(checkpoint: Path) -> None:
    """Lets the manifest of a changed checkpoint vouch for the files as they are now."""
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_bytes())
    for name in [name for name in manifest["files"] if not (checkpoint / name).exists()]:
        del manifest["files"][name]
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        entry |= {"sha256": sha256_hex(data), "size_bytes": len(data)}
    path.write_bytes(document(manifest))
