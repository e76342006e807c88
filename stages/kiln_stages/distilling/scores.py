"""The rules of a teacher's scores: of one example's tokens, and of one token's candidates.

Every number is rounded to float32 before any rule is asked. The order is that of the public server: the count of
entries; every token's own id; then token by token its candidates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from kiln_cli.counting import counted
from kiln_cli.errors import RowFault
from kiln_cli.text import printable
from kiln_stages.distilling.examples import Entry

# How far the mass of rounded probabilities may come out above one: 32 times the epsilon of float32.
MASS_LIMIT = 1 + 32 * 2.0**-23
# What servers write for a probability of zero, which JSON cannot hold; no model scores a token so.
SENTINEL = -9999.0
SUSPECT = -100.0  # another such stand-in, but also a number that a model may give: noted, not refused


TextOf = Callable[[int], str]  # the text of a target, by its number; asked for messages alone


def require_count(entries: Sequence[Entry], targets: Sequence[int], text_of: TextOf) -> None:
    """One entry a target. ``targets``: the id of each.

    Raises RowFault ``teacher_token_count_mismatch`` with both counts and the first entry that differs.
    """
    if len(entries) == len(targets):
        return
    counts = f"expected {counted(len(targets), 'entry', 'entries')}, one for each target, found {len(entries)}"
    detail = f"{counts}; {_first_difference(entries, targets, text_of)}"
    raise RowFault("teacher_token_count_mismatch", detail, "/teacher_tokens")


def _first_difference(entries: Sequence[Entry], targets: Sequence[int], text_of: TextOf) -> str:
    for at, (entry, token_id) in enumerate(zip(entries, targets, strict=False)):
        wanted = _named(token_id, text_of(at))
        if entry.token_id is None and entry.token is None:
            return f"entry {at} names no token, the target is {wanted}"
        if entry.token_id not in (None, token_id) or (entry.token_id is None and entry.token != text_of(at)):
            return f"entry {at} is {_named(entry.token_id, entry.token)}, the target is {wanted}"
    shorter = min(len(entries), len(targets))
    if shorter == len(entries):
        return f"the first target without an entry is {shorter}, {_named(targets[shorter], text_of(shorter))}"
    return f"the first entry without a target is {shorter}, {_named(entries[shorter].token_id, entries[shorter].token)}"


def _named(token_id: int | None, text: str | None) -> str:
    shown = "" if text is None else repr(printable(text, 40))
    return " ".join(part for part in (shown, "" if token_id is None else f"(id {token_id})") if part) or "unnamed"


def id_faults(
    entries: Sequence[Entry], targets: Sequence[int], text_of: TextOf, *, required: bool
) -> Iterator[RowFault]:
    """Every entry's own id against its target: ``token_id_mismatch``; ``token_id_missing`` where one is required."""
    for at, (entry, token_id) in enumerate(zip(entries, targets, strict=True)):
        pointer = f"/teacher_tokens/{at}/token_id"
        if entry.token_id is None:
            if required:
                wanted = _named(token_id, text_of(at))
                detail = f"the entry names no token_id, and every one must; the target is {wanted}"
                yield RowFault("token_id_missing", detail, pointer)
        elif entry.token_id != token_id:
            detail = f"token_id is {entry.token_id}, the target is {_named(token_id, text_of(at))}"
            yield RowFault("token_id_mismatch", detail, pointer)


def narrowed(entry: Entry) -> array[float]:
    """The candidates' scores in float32; what is beyond its range is infinite."""
    return array("f", entry.logprobs)


def candidate_fault(entry: Entry, scores: Sequence[float], at: int, top_k: int, vocabulary: int) -> RowFault | None:
    """The first rule that the first ``top_k`` candidates of entry ``at`` break; ``scores`` are theirs in float32.

    ``vocabulary``: ids are below it. Codes in order: ``too_few_candidates``; of each candidate
    ``token_id_out_of_vocab`` and ``logprob_not_finite``; ``duplicate_candidate``; ``logprob_positive`` and
    ``logprob_sentinel``; ``logprobs_not_sorted``; ``mass_above_one``.
    """
    ids = entry.candidate_ids
    if (
        len(ids) == top_k
        and min(ids) >= 0
        and max(ids) < vocabulary
        and len(set(ids)) == top_k
        and scores[0] <= 0
        and all(left >= right for left, right in pairwise(scores))  # NaN is neither
        and scores[-1] > SENTINEL
        and sum(map(math.exp, scores)) <= MASS_LIMIT
    ):
        return None
    return next(_faults(entry, scores, f"/teacher_tokens/{at}/top_logprobs", top_k, vocabulary), None)


def _faults(entry: Entry, scores: Sequence[float], at: str, top_k: int, vocabulary: int) -> Iterator[RowFault]:
    ids = entry.candidate_ids
    if len(ids) < top_k:
        yield RowFault("too_few_candidates", f"expected at least {top_k} candidates, found {len(ids)}", at)
        return
    for number, (token_id, score) in enumerate(zip(ids, scores, strict=True)):
        if not 0 <= token_id < vocabulary:
            detail = f"token_id is {token_id}, expected 0..{vocabulary - 1}"
            yield RowFault("token_id_out_of_vocab", detail, f"{at}/{number}/token_id")
        if not math.isfinite(score):
            found = "null or no number" if math.isnan(entry.logprobs[number]) else f"{entry.logprobs[number]:g}"
            detail = f"logprob is {found}, expected a number that is finite as a 32-bit float"
            yield RowFault("logprob_not_finite", detail, f"{at}/{number}/logprob")
    places: dict[int, int] = {}
    for number, token_id in enumerate(ids):
        if (earlier := places.setdefault(token_id, number)) != number:
            detail = f"token_id {token_id} stands at {earlier} and at {number}"
            yield RowFault("duplicate_candidate", detail, f"{at}/{number}/token_id")
    for number, score in enumerate(scores):
        if score > 0:
            yield RowFault("logprob_positive", f"logprob is {score:g}, expected at most 0", f"{at}/{number}/logprob")
        if score <= SENTINEL:
            detail = f"logprob is {score:g}, which servers write for minus infinity; expected above {SENTINEL:g}"
            yield RowFault("logprob_sentinel", detail, f"{at}/{number}/logprob")
    for number, (left, right) in enumerate(pairwise(scores), start=1):
        if left < right:
            detail = f"logprob is {right:.9g}, above {left:.9g} of the candidate before it"
            yield RowFault("logprobs_not_sorted", detail, f"{at}/{number}/logprob")
    mass = sum(map(math.exp, scores))
    if mass > MASS_LIMIT:
        yield RowFault(
            "mass_above_one", f"the candidates' probabilities add up to {mass!r}, at most {MASS_LIMIT!r}", at
        )
