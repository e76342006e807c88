"""The rule of repeated scores: the same position of the same tokens may be scored twice only with the same numbers.

What is kept of a row is two digests of 16 bytes and the place of its line: some 250 bytes, whatever its length. Where
two rows of the same tokens have other scores, the earlier line is read again, and the first position that differs is
told with both numbers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from kiln_cli.errors import RowFault
from kiln_cli.identity import length_prefixed
from kiln_stages.admitting.packed_numbers import pack_float32
from kiln_stages.distilling.corpus import Kept, Place
from kiln_stages.distilling.rows import PackedScoredRow, ScoredRow

# The digest of a row's scores and its place, as they are kept; rows of one key stand one behind the other.
_RECORD = struct.Struct("<16s4Q")


class SeenRows:
    """Grows by :meth:`add`. ``again``: a row that was kept, from its line in the file."""

    def __init__(self, again: Callable[[Place], PackedScoredRow]) -> None:
        self._again = again
        self._rows: dict[bytes, bytes] = {}
        self.duplicates = 0

    def add(self, kept: Kept) -> RowFault | None:
        """None for a row whose scores are new, or repeat what an earlier row of the same tokens says.

        Else RowFault ``conflicting_duplicate``.
        """
        row = kept.row
        scores = _digest(row.action_targets, row.teacher_token_ids, row.teacher_logprobs)
        tokens = _digest(row.input_ids)
        known = self._rows.get(tokens, b"")
        earlier = list(_RECORD.iter_unpack(known))
        if any(same == scores for same, *_ in earlier):
            self.duplicates += 1
            return None
        here = row.unpacked() if earlier else None
        for _, *place in earlier:
            if here is not None and (fault := _conflict(here, self._again(Place(*place)).unpacked())) is not None:
                return fault
        self._rows[tokens] = known + _RECORD.pack(scores, *kept.place)
        return None


def _conflict(here: ScoredRow, there: ScoredRow) -> RowFault | None:
    """The first target that both rows have with other candidates or scores."""
    if here.input_ids != there.input_ids:
        return None
    others = dict(
        zip(there.action_targets, zip(there.teacher_token_ids, there.teacher_logprobs, strict=True), strict=True)
    )
    for at, target in enumerate(here.action_targets):
        ids, scores = here.teacher_token_ids[at], here.teacher_logprobs[at]
        other_ids, other_scores = others.get(target, (ids, scores))
        if ids == other_ids and pack_float32(scores) == pack_float32(other_scores):
            continue
        mine, its = list(zip(ids, scores, strict=True)), list(zip(other_ids, other_scores, strict=True))
        number = next(n for n, pair in enumerate(zip(mine, its, strict=True)) if repr(pair[0]) != repr(pair[1]))
        return RowFault(
            "conflicting_duplicate",
            f"the same tokens as in line {there.line}, scored otherwise: candidate {number} is {_shown(mine[number])}, "
            f"there {_shown(its[number])}",
            f"/teacher_tokens/{at}/top_logprobs/{number}",
        )
    return None


def _shown(candidate: tuple[int, float]) -> str:
    return f"id {candidate[0]} at {candidate[1]:.9g}"


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(map(length_prefixed, parts))).digest()[:16]
