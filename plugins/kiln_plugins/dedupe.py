"""Drop reasons that look at the whole pool of rows, and those of paired sources.

``duplicate_query`` is always in force. Two more are opt-in: ``conflicting_answer`` tells a repeated query with other
answers from one that repeats all, and ``unicode_duplicate_query`` takes composed and decomposed letters for one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kiln_cli import Candidate, DropReason, hookimpl
from kiln_cli.identity import canonical_json, sha256_hex

if TYPE_CHECKING:
    from kiln_cli.config import DataConfig


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return (CONFLICTING_ANSWER, DUPLICATE_QUERY, UNICODE_DUPLICATE_QUERY, *PAIR_REASONS)


def _query_digest(candidate: Candidate) -> bytes:
    return candidate.query_digest


def query_and_answers(candidate: Candidate) -> str:
    """The digest of the normalised query, a space, and that of the answers as parsed: how they are written is no
    matter."""
    return f"{candidate.query_sha256} {sha256_hex(canonical_json(candidate.answers.value))}"


def conflicts(keys: Sequence[str], limits: DataConfig) -> Iterator[tuple[int, int]]:
    """Yields (index of a row, index of the first row with its query) where the answers of the two differ."""
    first: dict[str, tuple[int, str]] = {}
    for place, key in enumerate(keys):
        query, _, answers = key.partition(" ")
        known, known_answers = first.setdefault(query, (place, answers))
        if answers != known_answers:
            yield place, known


def composed_query(candidate: Candidate) -> str:
    """The query in Unicode's NFC, case folded, white space collapsed. Case is folded on the decomposed form, as
    Unicode's canonical caseless matching has it."""
    folded = unicodedata.normalize("NFD", candidate.query).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


CONFLICTING_ANSWER = DropReason(
    name="conflicting_answer",
    doc="an earlier row of the same language has the same normalised query and other answers",
    scope="pool",
    order=108,
    pointer="/answers",
    opt_in=True,
    key=query_and_answers,
    match=conflicts,
)
DUPLICATE_QUERY = DropReason(
    name="duplicate_query",
    doc="an earlier row of the same language has the same normalised query",
    scope="pool",
    order=110,
    pointer="/query",
    key=_query_digest,
)
UNICODE_DUPLICATE_QUERY = DropReason(
    name="unicode_duplicate_query",
    doc="an earlier row of the same language has the same normalised query but for the composition of its letters",
    scope="pool",
    order=112,
    pointer="/query",
    opt_in=True,
    key=composed_query,
)
PAIR_REASONS = tuple(
    DropReason(name=name, doc=doc, scope="pair", order=order)
    for order, (name, doc) in zip(
        range(120, 170, 10),
        (
            ("missing_source_example", "the root row that a paired row names is in no split"),
            ("duplicate_source_example", "the root row that a paired row names has a pair already"),
            ("pair_tools_mismatch", "a paired row's tools string differs from its root row's"),
            ("pair_answers_mismatch", "a paired row's answers string differs from its root row's"),
            ("cross_split_duplicate", "a paired row's query stands in another split"),
        ),
        strict=True,
    )
)
