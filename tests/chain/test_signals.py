"""Signals in processes of their own: the first one settles the step and saves, the second one quits now."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cut_runs import RUN, admitted_project, kiln_process, require_equal_runs, train_in_process
from kiln_stages.training.checkpoint import list_checkpoints
from slow_publishing import start
from tiny_model import Kiln

from kiln_cli.files import INCOMPLETE_MARK


def slow(*values: object) -> Any:
    """A case for ``make test-faults``: each is a process or two."""
    return pytest.param(*values, marks=pytest.mark.faults)


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred and fifty steps and no checkpoint but that of a signal."""
    return admitted_project(tmp_path_factory.mktemp("signals") / "project", "muon", epochs=15, interval=1000)


@pytest.fixture(scope="module")
def whole(admitted: Path) -> Path:
    project = Path(shutil.copytree(admitted, admitted.parent / "whole"))
    train_in_process(project)
    return project


def wait(process: subprocess.Popen[str], holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def train_until(project: Path, seconds: float, number: signal.Signals) -> subprocess.Popen[str]:
    """A training that was just sent a signal, some steps in."""
    process = start(seconds, "train", project / "kiln.toml", "--out", project / RUN)
    log = project / RUN / "train" / "metrics.jsonl"
    wait(process, lambda: log.exists() and log.read_bytes().count(b"\n") > 5)
    process.send_signal(number)
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), slow(signal.SIGINT, 130), slow(signal.SIGTERM, 143)]
)
def test_the_first_signal_settles_the_step_publishes_and_names_the_way_on(
    number: signal.Signals, code: int, admitted: Path, whole: Path, tmp_path: Path
) -> None:
    project = Path(shutil.copytree(admitted, tmp_path / "project"))
    process = train_until(project, 0, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    ((step, path),) = list_checkpoints(project / RUN / "train")
    assert (project / RUN / "train" / "metrics.jsonl").read_bytes().count(b"\n") == step
    assert f"stopped after step {step}" in errors and path.name in errors and "next: kiln resume" in errors
    resumed = kiln_process("resume", project / RUN)
    assert resumed.returncode == 0, resumed.stderr
    require_equal_runs(project, whole)


@pytest.mark.parametrize("second", [signal.SIGINT, slow(signal.SIGTERM), slow(signal.SIGHUP)])
def test_the_second_signal_quits_at_once_by_that_signal(
    second: signal.Signals, admitted: Path, tmp_path: Path, kiln: Kiln
) -> None:
    """The disk needs seconds for the checkpoint that the first signal asked for."""
    project = Path(shutil.copytree(admitted, tmp_path / "project"))
    train = project / RUN / "train"
    process = train_until(project, 0.3, signal.SIGINT)
    wait(process, lambda: list(train.glob(f".*{INCOMPLETE_MARK}*")))
    asked = time.monotonic()
    process.send_signal(second)
    process.communicate(timeout=60)
    assert process.returncode == -second
    assert time.monotonic() - asked < 5
    assert list_checkpoints(train) == [], "what was not finished has no name"
    refused = kiln("resume", project / RUN)
    assert refused.code == 2 and "before its first checkpoint" in refused.err
    assert not list(train.glob(f".*{INCOMPLETE_MARK}*")), "and is swept"
