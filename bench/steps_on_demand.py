"""Programs that train by turns: both stay loaded, and each makes its next steps only when it is told to.

A worker says a line of JSON when it is ready, reads a number of steps, makes them and says what they took, until its
stdin ends. What it or its libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_ANSWERS = os.fdopen(os.dup(1), "w")


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=_ANSWERS, flush=True)


def demands(ready: dict[str, Any]) -> Iterator[int]:
    """The numbers of steps that are asked for, until stdin ends."""
    os.dup2(2, 1)
    say(ready)
    for line in sys.stdin:
        yield int(line)


def peak_mb() -> float:
    """The most memory that this process had at once, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


class Clock:
    """Seconds on the clock, and of all processors, since it was made."""

    def __init__(self) -> None:
        self._started, self._before = time.perf_counter(), time.process_time()

    def spent(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._started,
            "processor": time.process_time() - self._before,
        }


class Worker:
    """The other end: a worker's process."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._answer()

    def make(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = self._answer()
        if self._process.wait() != 0:
            raise SystemExit(f"{' '.join(self._command)} ended with {self._process.returncode}")
        return last

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
