"""A teacher's candidates at one position: which are kept, in which order, and how they are written.

Scores are natural logarithms of probabilities over the teacher's whole vocabulary, in float32. Kept are the K largest,
largest first; of equal ones the lower id comes first, also where the K-th and the next are equal. So the same scores
give the same row. What is kept passes the rules that admission has (``scores.py``), or the row is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from kiln_stages.distilling.examples import Entry
from kiln_stages.distilling.scores import SENTINEL, candidate_fault


class Scored(NamedTuple):
    """One position. ``candidates``: (token id, logprob) as kept. ``logprob``: of the token that stands there; None
    where the teacher gave no score for it."""

    candidates: list[tuple[int, float]]
    logprob: float | None

    @property
    def mass(self) -> float:
        """The probability of all candidates together."""
        return math.fsum(math.exp(logprob) for _, logprob in self.candidates)

    def written(self, token_id: int, token: str) -> dict[str, object]:
        """The entry of ``teacher_tokens``: a score that there is none of is left out."""
        entry: dict[str, object] = {"token": token, "token_id": token_id}
        if self.logprob is not None:
            entry["logprob"] = shortest(self.logprob)
        entry["top_logprobs"] = [
            {"token_id": number, "logprob": shortest(logprob)} for number, logprob in self.candidates
        ]
        return entry


def scored(scores: Iterable[tuple[int, float]], chosen: int, at: int, top_k: int, vocabulary: int) -> Scored:
    """Position ``at`` (counted in targets), where token ``chosen`` stands, of scores in any order, possibly more.

    What is no score at all is refused wherever it stands, since it may hide one of the best; of ``chosen`` alone, which
    servers score beside the best K, it only goes missing. Raises RowFault with the codes of
    :func:`kiln_stages.distilling.scores.candidate_fault`.
    """
    narrowed = {number: narrow(logprob) for number, logprob in scores}

    def place(pair: tuple[int, float]) -> tuple[bool, float, int]:
        number, logprob = pair
        found = logprob > SENTINEL  # NaN is not
        return found or number == chosen, -logprob if found else math.inf, number

    kept = sorted(narrowed.items(), key=place)[:top_k]
    entry = Entry(chosen, None, [number for number, _ in kept], [logprob for _, logprob in kept])
    if (fault := candidate_fault(entry, entry.logprobs, at, top_k, vocabulary)) is not None:
        raise fault
    own = narrowed.get(chosen)
    return Scored(kept, own if own is not None and SENTINEL < own <= 0 else None)


def narrow(value: float) -> float:
    """The nearest float32; infinite where the value is larger than any."""
    try:
        (narrowed,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(narrowed)


def shortest(value: float) -> float:
    """The double of the fewest decimal digits that narrows to this float32: how a score is written."""
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if narrow(short) == value:
            return short
    return value
