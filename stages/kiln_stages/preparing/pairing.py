"""Paired sources: a translated row inherits the split of the root row that it names, or has a declared reason not to.

Root splits never depend on paired sources. A pair must agree with its root row in tools and answers to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kiln_stages.preparing.pool import Pool

if TYPE_CHECKING:
    import polars as pl


class Root(NamedTuple):
    """A root row that is in a split."""

    example_id: str
    split: str
    texts: bytes


class Pair(NamedTuple):
    """A paired row that is accepted: its row number in its source, and the root row it belongs to."""

    row: int
    root: Root


class Pairing:
    """The pairing contract for one source after another."""

    def __init__(self, selected: dict[str, Root], dataset_id: str, queries: dict[bytes, str]) -> None:
        """``selected``: root rows in splits by example id. ``queries``: digest of each query in a split, and which."""
        self._selected = selected
        self._prefix = f"{dataset_id}:"
        self._queries = queries

    def pair(self, pool: Pool, *, release_digests: bool) -> list[Pair]:
        """The accepted rows of one source, in row order; every other row gets its reason in ``pool``.

        ``release_digests``: a row that fails a pairing test does not use up its text (``duplicate_query`` then counts
        accepted rows only, and comes before the pairing tests).
        """
        if not release_digests:
            pool.drop_duplicates()
        else:
            pool.drop_duplicates(without=frozenset({"duplicate_query"}))
        accepted: dict[str, Pair] = {}
        texts: dict[bytes, int] = {}
        for row, link, digest, pair_texts in _rows(pool.left("row", "link", "query", "texts")):
            if release_digests and digest in texts:
                first = texts[digest] + 1
                pool.drop(row, "duplicate_query", f"row {first} has the same key", first)
                continue
            root = self._selected.get(link) or self._selected.get(self._prefix + link)
            fault = self._fault(link, root, accepted, digest, pair_texts)
            if fault is not None:
                pool.drop(row, *fault)
            elif root is not None:
                accepted[root.example_id] = Pair(row, root)
                texts[digest] = row
                self._queries[digest] = root.split
        return list(accepted.values())

    def _fault(
        self, link: str, root: Root | None, accepted: dict[str, Pair], digest: bytes, texts: bytes
    ) -> tuple[str, str, int | None] | None:
        """The first pairing test that fails: reason, detail, and the number of the row that this one repeats."""
        if root is None:
            return "missing_source_example", f"root row {link!r} is in no split", None
        if root.example_id in accepted:
            first = accepted[root.example_id].row + 1
            return "duplicate_source_example", f"row {first} is the pair of {link!r}", first
        if texts[:32] != root.texts[:32]:
            return "pair_tools_mismatch", f"tools differ from those of {root.example_id!r}", None
        if texts[32:] != root.texts[32:]:
            return "pair_answers_mismatch", f"answers differ from those of {root.example_id!r}", None
        other = self._queries.get(digest, root.split)
        if other != root.split:
            return "cross_split_duplicate", f"the query stands in {other}, its root row in {root.split}", None
        return None


def _rows(left: pl.DataFrame) -> Iterator[tuple[int, str, bytes, bytes]]:
    yield from left.iter_rows()
