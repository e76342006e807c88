"""Wall time, peak memory and ratios of programs that take turns. Machines are noisy: a single time means little."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.02


class Cost(NamedTuple):
    """Seconds on the clock, and of all processors together, which other work on the machine hardly changes."""

    wall: float
    processor: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.processor - other.processor)


def cost(command: list[str]) -> Cost:
    """Of a whole process and all that it starts, start-up included. What was written before is flushed first: kiln's
    own flushes would else wait for the other program's pages."""
    os.sync()
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    require_success(command, subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def seconds(command: list[str]) -> float:
    return cost(command).wall


def output(command: list[str]) -> str:
    """What a program that measures itself prints on its last line."""
    os.sync()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    require_success(command, done.returncode)
    return done.stdout.strip().splitlines()[-1]


def peak_mb(command: list[str]) -> float:
    """Peak memory of a process and all that it starts, in MB: the sum of the proportional set sizes, sampled."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = [0.0]
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    require_success(command, process.wait())
    watcher.join()
    return peak[0] / 1e6


def require_success(command: list[str], code: int) -> None:
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}")


def spread(ratios: Sequence[float]) -> str:
    """The median of the pairs' ratios, and how far they lie apart."""
    return f"{statistics.median(ratios):.2f} (median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f})"


def _watch(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    while process.poll() is None:
        peak[0] = max(peak[0], sum(_proportional_size(pid) for pid in _tree(process.pid)))
        time.sleep(SAMPLE_SECONDS)


def _tree(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread has ended meanwhile
    return found


def _proportional_size(pid: int) -> int:
    """Bytes of memory of a process, shared pages counted by their share; 0 where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
