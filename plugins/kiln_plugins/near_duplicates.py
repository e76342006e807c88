"""An opt-in drop reason for queries that are almost the same: ``near_duplicate_query``.

A query is case folded and its white space collapsed, as for ``duplicate_query``. Two queries are near duplicates where
the Jaccard similarity of their words, three in a row, is at least ``[data] near_duplicate_threshold``; how it is
counted stands in ``kiln_cli/similarity.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kiln_cli import Candidate, DropReason, hookimpl
from kiln_cli.similarity import NearTexts

if TYPE_CHECKING:
    from kiln_cli.config import DataConfig


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
    texts = NearTexts(limits.near_duplicate_threshold, "near_duplicate_query")
    kept: list[int] = []
    for place, query in enumerate(queries):
        sketch = texts.sketch(query)
        near = texts.first_near(sketch)
        if near is None:
            texts.add(sketch)
            kept.append(place)
        else:
            yield place, kept[near.place]


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
