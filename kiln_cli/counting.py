"""Counts in messages: ``1 row``, ``1,234 rows``."""

from __future__ import annotations


def counted(count: int, one: str, more: str) -> str:
    """The count and what it counts, ``one`` of it or ``more``."""
    return f"{count:,} {one if count == 1 else more}"
