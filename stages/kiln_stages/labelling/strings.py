"""What texts have in common, and patterns for any of them."""

from __future__ import annotations

import re
from collections.abc import Collection


def shared_length(left: str, right: str) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_prefix(texts: Collection[str]) -> str:
    """What all texts begin with; ``""`` for none. Of sorted texts, the first and the last differ soonest."""
    first, last = min(texts, default=""), max(texts, default="")
    return first[: shared_length(first, last)]


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern for the longest of ``texts`` at the leftmost place, as its one group; it never matches where none are.

    What all texts begin with is written once: ``re`` then looks for it before anything else, which is far faster.
    """
    if not texts:
        return re.compile("((?!))")
    shared = shared_prefix(texts)
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    rest = "|".join(re.escape(text[len(shared) :]) for text in ordered)
    return re.compile(f"({re.escape(shared)}(?:{rest}))")
