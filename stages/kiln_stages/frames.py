"""Imports polars where a stage needs it and not before: it takes 200 ms, and keeps memory unless told not to."""

from __future__ import annotations

import importlib
import os


def import_polars() -> None:
    """Has polars hand memory back at once: what its allocator keeps for later use is a third of a stage's peak."""
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")
    importlib.import_module("polars")
