"""An opt-in drop reason for queries that are almost the same: ``near_duplicate_query``.

A query is case folded and its white space collapsed, as for ``duplicate_query``. What is compared are its 3-shingles:
every three words in a row, words being what white space parts; a text of fewer words is one shingle. Two queries are
near duplicates where the Jaccard similarity of their sets of shingles is at least ``[data] near_duplicate_threshold``.

MinHash and bands (package rensa) only find the pairs that are worth comparing; a pair at the threshold escapes them
once in a million. The similarity itself is counted exactly, and the same rows give the same drops: the seed is fixed.
Time grows with the number of pairs worth comparing: millions of queries from one mould take long.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kiln_cli import Candidate, DropReason, KilnError, hookimpl

if TYPE_CHECKING:
    from kiln_cli.config import DataConfig

SHINGLE = 3
_SEED = 42
_PERMUTATIONS = 256  # at most, but for very low thresholds
_ESCAPE = 1e-6
_BATCH = 1_000


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return (NEAR_DUPLICATE_QUERY,)


def normalised_query(candidate: Candidate) -> str:
    return " ".join(candidate.query.casefold().split())


def match(queries: Sequence[str], limits: DataConfig) -> Iterator[tuple[int, int]]:
    """Yields (index of a row to drop, index of the first kept row that it repeats), in the order of the rows.

    A row is compared with kept rows alone, so the first of a family stays and a dropped row drops no others. Raises
    KilnError KLN301 where rensa is not installed.
    """
    rensa = _rensa()
    threshold = limits.near_duplicate_threshold
    bands, rows = banding(threshold)
    index = rensa.RMinHashLSH(threshold, bands * rows, bands)
    for start in range(0, len(queries), _BATCH):
        batch = [shingles(query) for query in queries[start : start + _BATCH]]
        signatures = rensa.RMinHash.from_token_sets([sorted(parts) for parts in batch], bands * rows, _SEED)
        for place, (parts, signature) in enumerate(zip(batch, signatures, strict=True), start=start):
            near = (kept for kept in sorted(index.query(signature)) if _similar(parts, queries[kept], threshold))
            first = next(near, None)
            if first is None:
                index.insert(place, signature)
            else:
                yield place, first


@functools.lru_cache(maxsize=50_000)
def shingles(query: str) -> frozenset[str]:
    """Every three words in a row of a normalised query, or the whole of a shorter one."""
    words = query.split(" ")
    return frozenset(" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1)))


def banding(threshold: float) -> tuple[int, int]:
    """Bands, and rows a band: as many rows as keep what escapes below one in a million with 256 permutations.

    A pair of similarity s meets in a band of r rows with probability s^r, and escapes b bands with (1 - s^r)^b.
    """
    if threshold == 1.0:
        return 1, 16
    best = (_bands(threshold, 1), 1)
    for rows in range(2, 33):
        bands = _bands(threshold, rows)
        if bands * rows <= _PERMUTATIONS:
            best = bands, rows
    return best


def _bands(threshold: float, rows: int) -> int:
    return max(1, math.ceil(math.log(_ESCAPE) / math.log1p(-(threshold**rows))))


def _similar(parts: frozenset[str], other: str, threshold: float) -> bool:
    others = shingles(other)
    shared = len(parts & others)
    return shared >= threshold * (len(parts) + len(others) - shared)


def _rensa() -> Any:
    try:
        return importlib.import_module("rensa")
    except ImportError as error:
        raise KilnError(
            "KLN301", f"near_duplicate_query needs the package rensa: {error}", hint="pip install rensa"
        ) from None


NEAR_DUPLICATE_QUERY = DropReason(
    name="near_duplicate_query",
    doc="an earlier row of the same language has nearly the same query ([data] near_duplicate_threshold)",
    scope="pool",
    order=115,
    pointer="/query",
    opt_in=True,
    key=normalised_query,
    match=match,
)
