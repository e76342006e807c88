"""Texts that are almost the same: MinHash finds the few that are worth comparing, exact Jaccard similarity decides.

What is compared are a text's 3-shingles: every three words in a row, words being what single spaces part; a text of
fewer words is one shingle. MinHash and bands (package rensa) only find candidates; a pair at the threshold escapes them
once in a million. The similarity itself is counted exactly, and the same texts give the same answers: the seed is
fixed. Time grows with the number of pairs worth comparing: millions of texts from one mould take long.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

from kiln_cli.errors import KilnError

SHINGLE = 3
_SEED = 42
_PERMUTATIONS = 256  # at most, but for very low thresholds
_ESCAPE = 1e-6


class Sketch(NamedTuple):
    """A text on its way to be compared: its shingles, and its MinHash."""

    text: str
    parts: frozenset[str]
    signature: Any


class Near(NamedTuple):
    """The text that another is near: its place among the added ones, from 0, and their Jaccard similarity."""

    place: int
    similarity: float


class NearTexts:
    """Texts that others are compared with. Memory: the texts, and a signature each.

    rensa works on one row at a time here: its other calls start threads of their own, which a fork would not survive.
    Raises KilnError KLN301, naming ``purpose``, where rensa is not installed.
    """

    def __init__(self, threshold: float, purpose: str) -> None:
        self._rensa = _rensa(purpose)
        self._threshold = threshold
        bands, rows = banding(threshold)
        self._permutations = bands * rows
        self._index = self._rensa.RMinHashLSH(threshold, self._permutations, bands)
        self._texts: list[str] = []

    def sketch(self, text: str) -> Sketch:
        """``text``: normalised, its words parted by single spaces."""
        parts = shingles(text)
        signature = self._rensa.RMinHash(self._permutations, _SEED)
        signature.update(sorted(parts))
        return Sketch(text, parts, signature)

    def first_near(self, sketch: Sketch) -> Near | None:
        """The first added text whose similarity is at least the threshold."""
        for place in sorted(self._index.query(sketch.signature)):
            others = shingles(self._texts[place])
            shared = len(sketch.parts & others)
            union = len(sketch.parts) + len(others) - shared
            if shared >= self._threshold * union:
                return Near(place, shared / union)
        return None

    def add(self, sketch: Sketch) -> int:
        """Adds the text; returns its place."""
        place = len(self._texts)
        self._index.insert(place, sketch.signature)
        self._texts.append(sketch.text)
        return place


@functools.lru_cache(maxsize=8192)  # of long texts a few kilobytes each
def shingles(text: str) -> frozenset[str]:
    """Every three words in a row of a normalised text, or the whole of a shorter one."""
    words = text.split(" ")
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


def _rensa(purpose: str) -> Any:
    try:
        return importlib.import_module("rensa")
    except ImportError as error:
        raise KilnError("KLN301", f"{purpose} needs the package rensa: {error}", hint="pip install rensa") from None
