"""Where the time of a training goes: seconds in forward, backward and optimizer, summed over the steps of a process.

Times are for people: they reach no digest and no decision.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class PhaseSeconds(msgspec.Struct, kw_only=True):
    """Seconds on the clock. ``forward`` includes the loss and ``backward`` the check of the gradients.

    Forward and backward end by reading a number from the device, so they hold all work they gave it. The kernels of an
    optimizer step on a CUDA device may still run when its phase ends; the next forward then waits for them.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of a ``with`` block to ``phase``; a block that raises counts as well."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - started)
