"""``kill -9`` at a hundred random moments of trainings: whatever checkpoint is left loads and is the uncut run's, and
what goes on from it ends in the uncut run's bytes.

Each training is killed up to four times, as ``kiln train`` or as the ``kiln resume`` that followed, and then left to
end. Each is a process group of its own. A third of them have a disk that is slow while a checkpoint is published.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import pytest
from cut_runs import ROWS, RUN, admitted_project, require_equal_runs
from kiln_stages import verify_receipt
from kiln_stages.training.checkpoint import MANIFEST, list_checkpoints, load_checkpoint
from slow_publishing import start

from kiln_cli.files import INCOMPLETE_MARK, TEMP_PREFIX

pytestmark = pytest.mark.faults

KILLS, BEHIND_A_CHECKPOINT, IN_PUBLISHING = 100, 60, 10
KILLS_A_RUN = 4
EPOCHS, INTERVAL = 30, 10
IN_START = 0.2  # share of the kills that are drawn over the time before the first step
SLOW_SECONDS = 0.004  # a call of the disk, where it is slow


class Pace(NamedTuple):
    """Measured on an uncut training: seconds until the first step is logged, and from there to the end."""

    start: float
    steps: float


class Uncut(NamedTuple):
    project: Path
    quick: Pace
    slow: Pace


class Tally:
    """Where kills landed. Several threads add to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.kills = 0
        self.behind = 0
        self.publishing = 0
        self.where: Counter[str] = Counter()

    def add(self, word: str, behind: bool, publishing: bool) -> None:
        with self._lock:
            self.kills += 1
            self.behind += behind
            self.publishing += publishing
            self.where[word] += 1

    def full(self) -> bool:
        return self.kills >= KILLS and self.behind >= BEHIND_A_CHECKPOINT and self.publishing >= IN_PUBLISHING


def trained(project: Path, slow: bool) -> Pace:
    """Trains the project without a cut, in a process."""
    began = time.monotonic()
    process = start(SLOW_SECONDS * slow, "train", project / "kiln.toml", "--out", project / RUN)
    _wait_for_a_step(process, project / RUN)
    first = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return Pace(first - began, time.monotonic() - first)


def _wait_for_a_step(process: subprocess.Popen[str], run: Path) -> None:
    """Until the loss log changes, or the process has ended."""
    log = run / "train" / "metrics.jsonl"
    before = _stamp(log)
    while _stamp(log) == before and process.poll() is None:
        time.sleep(0.002)


def _stamp(log: Path) -> tuple[int, int]:
    try:
        status = log.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def test_kill_9_at_random_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, began = random.SystemRandom().randrange(2**32), time.monotonic()
    with capsys.disabled():
        print(f"\n  kills with seed {seed}", end=" ", flush=True)
    admitted = admitted_project(tmp_path / "admitted", "adam_w", epochs=EPOCHS, interval=INTERVAL)
    whole = [Path(shutil.copytree(admitted, tmp_path / f"whole-{name}")) for name in ("quick", "slow")]
    with ThreadPoolExecutor(2) as pool:
        quick, slow = pool.map(trained, whole, (False, True))
    require_equal_runs(whole[1], whole[0])
    uncut, tally, numbers = Uncut(whole[0], quick, slow), Tally(), count()

    def work() -> None:
        while not tally.full():
            number = next(numbers)
            assert number < KILLS, f"seed {seed}: {tally.where}"
            project = Path(shutil.copytree(admitted, tmp_path / f"run-{number:03}"))
            kill_and_go_on(project, uncut, number % 3 == 0, random.Random(f"{seed}/{number}"), tally)
            shutil.rmtree(project)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result()
    with capsys.disabled():
        print(
            f"\n  {tally.kills} kills: {tally.behind} behind a checkpoint, {tally.publishing} inside publishing, "
            f"{dict(tally.where.most_common())}; {time.monotonic() - began:.0f} s",
            end=" ",
        )


def kill_and_go_on(project: Path, uncut: Uncut, slow: bool, draw: random.Random, tally: Tally) -> None:
    """One training: killed, looked at, gone on with, and at last equal to the uncut one."""
    run = project / RUN
    for _ in range(KILLS_A_RUN):
        debris = _unfinished(run)
        process = start(SLOW_SECONDS * slow, *_next_command(project))
        killed = _killed(process, run, uncut.slow if slow else uncut.quick, draw)
        require_sound(run, uncut.project / RUN)
        if not killed:
            break
        behind = bool(list_checkpoints(run / "train"))
        publishing = bool(_unfinished(run) - debris)
        place = "inside publishing" if publishing else "behind a checkpoint" if behind else "before a checkpoint"
        tally.add(place, behind, publishing)
    else:
        process = start(0, *_next_command(project))
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    require_equal_runs(project, uncut.project)
    assert [claim for claim in verify_receipt.run(run).claims if claim.status == "fails"] == []
    left = [path.name for path in run.rglob("*") if path.name.startswith(TEMP_PREFIX) or INCOMPLETE_MARK in path.name]
    assert left == []


def _next_command(project: Path) -> list[str | Path]:
    """What the error of the other one names: resume where there is a checkpoint, else train again."""
    run = project / RUN
    if list_checkpoints(run / "train") or (run / "train_receipt.json").exists():
        return ["resume", run]
    return ["train", run / "config.resolved.toml" if (run / "train").exists() else project / "kiln.toml", "--out", run]


def _killed(process: subprocess.Popen[str], run: Path, pace: Pace, draw: random.Random) -> bool:
    """Kills the process group after a random time. False where it ended first, which must be well."""
    left = 1 - _committed(run) / (ROWS * EPOCHS)
    if draw.random() < IN_START:
        delay = draw.uniform(0, pace.start)
    else:
        _wait_for_a_step(process, run)
        delay = draw.uniform(0, pace.steps * left)
    time.sleep(delay)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


def _committed(run: Path) -> int:
    found = list_checkpoints(run / "train")
    return found[-1][0] if found else 0


def _unfinished(run: Path) -> set[str]:
    return {path.name for path in (run / "train").glob(f".*{INCOMPLETE_MARK}*")}


def require_sound(run: Path, uncut: Path) -> None:
    """Every checkpoint that is there loads, and is the uncut run's but for the time it was made."""
    for step, path in list_checkpoints(run / "train"):
        checkpoint = load_checkpoint(path)
        whole = load_checkpoint(uncut / "train" / path.name)
        assert checkpoint.loop == whole.loop, step
        assert (checkpoint.adapter, checkpoint.optimizer) == (whole.adapter, whole.optimizer), step
        assert _without_time(path) == _without_time(whole.path), step


def _without_time(checkpoint: Path) -> dict[str, object]:
    manifest: dict[str, object] = json.loads((checkpoint / MANIFEST).read_bytes())
    del manifest["created_at"]
    return manifest
