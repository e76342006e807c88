"""Helpers for tests that read the shared data, which is not part of the package."""

from __future__ import annotations

import gzip
import os
import pathlib

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


def shared_path(relative: str) -> pathlib.Path:
    """``relative`` under ``KILN_SHARED`` or ``../shared``. Absent: skip, or fail under ``KILN_REQUIRE_SHARED=1``."""
    root = pathlib.Path(os.environ.get("KILN_SHARED") or _REPOSITORY.parent / "shared")
    path = root / relative
    if not path.exists():
        message = f"shared data is absent: {path}"
        if os.environ.get("KILN_REQUIRE_SHARED") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return path


def packed_text(relative: str) -> str:
    """The text of a gzip file there."""
    return gzip.decompress(shared_path(relative).read_bytes()).decode("utf-8")
