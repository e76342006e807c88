"""The seeded split: shuffle the deduplicated pool, then slice fixed counts in the order train, validation, test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from kiln_cli.config import DataConfig
from kiln_cli.errors import KilnError

SPLITS = ("train", "validation", "test")

T = TypeVar("T")


def requested(limits: DataConfig) -> dict[str, int]:
    return {"train": limits.n_train, "validation": limits.n_validation, "test": limits.n_test}


def split_pool(pool: Sequence[T], sizes: dict[str, int], seed: int) -> tuple[dict[str, list[T]], list[T]]:
    """Each split's members in shuffled order, and the unused rest.

    The shuffle is ``random.Random(seed)`` over the whole pool before it is cut, so other sizes move the borders but not
    the order. Raises KilnError KLN205 where the pool is too small.
    """
    need = sum(sizes.values())
    if len(pool) < need:
        raise KilnError("KLN205", f"too few rows for the splits: need {need}, got {len(pool)}")
    shuffled = list(pool)
    random.Random(seed).shuffle(shuffled)
    splits: dict[str, list[T]] = {}
    start = 0
    for name, size in sizes.items():
        splits[name] = shuffled[start : start + size]
        start += size
    return splits, shuffled[start:]


def require_disjoint(keys: dict[str, list[str]]) -> None:
    """Re-checks the leakage invariant: no key stands in two splits. Raises KilnError KLN501: dedupe forbids it."""
    seen: dict[str, str] = {}
    for split, members in keys.items():
        for key in members:
            if seen.setdefault(key, split) != split:
                raise KilnError("KLN501", f"query {key} stands in both {seen[key]} and {split}")
