"""Drop reasons that look at the whole pool of rows, and those of paired sources."""

from __future__ import annotations

from collections.abc import Iterable

from kiln_cli import Candidate, DropReason, hookimpl


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return (DUPLICATE_QUERY, *PAIR_REASONS)


def _query_digest(candidate: Candidate) -> bytes:
    return candidate.query_digest


DUPLICATE_QUERY = DropReason(
    name="duplicate_query",
    doc="an earlier row of the same language has the same normalised query",
    scope="pool",
    order=110,
    pointer="/query",
    key=_query_digest,
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
