"""Processes that share the work on open files. One worker works in this process; more are forked from it.

Results come back in the order of the tasks, whoever did them. A worker that dies ends the run with its task named.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

from kiln_cli.errors import KilnError
from kiln_cli.text import printable

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

# What forked workers work on. Set before they start: it holds open files and plugins, which no pickle carries.
_shared: Any = None


class _Failed(NamedTuple):
    """A KilnError on its way out of a worker: pickle cannot call the constructor of an exception with keywords."""

    code: str
    message: str
    hint: str
    details: object


class Workers:
    """``count`` processes that all see ``shared``. Use as a context manager."""

    def __init__(self, shared: object, count: int) -> None:
        self._shared = shared
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        global _shared
        if self._count > 1:
            _shared = self._shared
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(
                self._count, mp_context=context, initializer=_start, initargs=(os.getpid(),)
            )
            # The first task forks all workers: now, before this process has other threads (a progress bar's, say).
            self._pool.submit(os.getpid).result()
        return self

    def __exit__(self, *_: object) -> None:
        global _shared
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            _shared = None

    def map(self, function: Callable[[Any, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``function(shared, item)`` for each item, in order. Work begins at once, some items ahead of the reader.

        Raises KilnError KLN403 where a worker process dies, and whatever the function raises.
        """
        if self._pool is None:
            return (function(self._shared, item) for item in items)
        return self._ahead(self._pool, function, iter(items))

    def _ahead(
        self, pool: ProcessPoolExecutor, function: Callable[[Any, Item], Result], items: Iterator[Item]
    ) -> Iterator[Result]:
        running: deque[tuple[Item, Future[Result | _Failed]]] = deque()

        def submit() -> None:
            for item in items:
                running.append((item, pool.submit(_run, function, item)))
                if len(running) >= 2 * self._count:
                    return

        submit()
        return self._collect(running, submit)

    def _collect(
        self, running: deque[tuple[Item, Future[Result | _Failed]]], submit: Callable[[], None]
    ) -> Iterator[Result]:
        while running:
            item, future = running.popleft()
            try:
                result = future.result()
                submit()
            except BrokenProcessPool:
                raise KilnError(
                    "KLN403",
                    f"a worker process died; the first piece of work without a result is {printable(item)}",
                    hint="the system may have been out of memory; try --workers 1",
                ) from None
            if isinstance(result, _Failed):
                raise KilnError(result.code, result.message, hint=result.hint, details=result.details)
            yield result


def available(limit: int | None = None) -> int:
    """How many workers this machine has cores for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, limit or cores))


def _start(parent: int) -> None:
    # Rows are trees without cycles: looking for cycles among them only costs time.
    gc.disable()
    # Ctrl-C reaches every process of a terminal; the parent alone ends the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """No worker outlives its parent, however that ends: it would hold the lock of the run directory."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run(function: Callable[[Any, Item], Result], item: Item) -> Result | _Failed:
    try:
        return function(_shared, item)
    except KilnError as error:
        return _Failed(error.code, error.message, error.hint, error.details)
