"""The global steps over the narrow table: who has an id, and which row of several equal ones stays.

Everything is decided by row order, the earliest row first; row bodies are never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kiln_cli.config import DataConfig
from kiln_cli.extensions import DropReason
from kiln_stages.preparing.screening import NOT_ITS_FAULT, plugin_failure
from kiln_stages.preparing.survey import VALID

if TYPE_CHECKING:
    import polars as pl


class Later(NamedTuple):
    """Why a row that screening found valid is dropped all the same; ``repeats`` is the number (from 1) of another row
    that it is too much like."""

    reason: int
    detail: str
    pointer: str
    repeats: int | None = None


class Pool:
    """The rows of one source under the reasons that look beyond one row.

    ``later`` holds what these steps drop, by row. ``valid_rows`` counts the rows before duplicates were dropped.
    """

    def __init__(self, frame: pl.DataFrame, reasons: Iterable[DropReason], limits: DataConfig) -> None:
        self.frame = frame
        self.later: dict[int, Later] = {}
        self.valid_rows = 0
        self._applied = 0
        self._reasons = list(reasons)
        self._limits = limits

    def claim_ids(self, earlier: Iterable[Pool]) -> None:
        """The first object with an id has it, kept or not; rows of ``earlier`` sources come first."""
        import polars as pl

        number = self._index("duplicate_example_id")
        named = self.frame.select("row", "reason", "example_id").filter(pl.col("example_id").is_not_null())
        repeated = ~named["example_id"].is_first_distinct()
        for other in earlier:
            repeated |= named["example_id"].is_in(other.frame["example_id"].drop_nulls().implode())
        # A fault that comes before in the declared order stays the row's reason.
        open_to_it = (named["reason"] == VALID) | (named["reason"] > number)
        for row, name in named.filter(repeated & open_to_it).select("row", "example_id").iter_rows():
            self.later[row] = self._later(number, f"id {name!r} stands in an earlier row")
        self._apply()
        self.valid_rows = int((self.frame["reason"] == VALID).sum())

    def drop_duplicates(self, without: frozenset[str] = frozenset()) -> None:
        """Each pool reason in order, but for those named in ``without``."""
        pool_reasons = [reason for reason in self._reasons if reason.scope == "pool"]
        for column, reason in enumerate(pool_reasons):
            if reason.name not in without:
                self._drop_repeats(reason, f"key {column}")

    def drop(self, row: int, reason: str, detail: str, repeats: int | None = None) -> None:
        """For steps that go row by row (pairing); takes effect with :meth:`left`."""
        self.later[row] = self._later(self._index(reason), detail, repeats)

    def left(self, *columns: str) -> pl.DataFrame:
        """The named columns of the rows that no reason drops, in row order."""
        import polars as pl

        self._apply()
        return self.frame.select("reason", *columns).filter(pl.col("reason") == VALID).drop("reason")

    def rows(self, wanted: Iterable[int], *columns: str) -> dict[int, tuple[Any, ...]]:
        """The named columns of some rows, by row."""
        import polars as pl

        chosen = pl.DataFrame({"row": list(wanted)}, schema={"row": pl.Int64})
        table = self.frame.select("row", *columns)
        found = chosen.join(table, on="row", how="left", maintain_order="left")
        return {entry[0]: entry[1:] for entry in found.iter_rows()}

    def dropped(self, at_screening: pl.Series) -> Iterator[tuple[Any, ...]]:
        """The dropped rows in row order: row, line, offset, length, example_id, the reason at screening, the final one.

        ``at_screening`` has the reason of each row as screening found it.
        """
        import polars as pl

        self._apply()
        columns = ("row", "line", "offset", "length", "example_id", "at_screening", "reason")
        found = self.frame.with_columns(at_screening=at_screening).select(columns)
        return found.filter(pl.col("reason") != VALID).iter_rows()

    def counts(self) -> dict[str, int]:
        """Rows by reason, zeroes included."""
        self._apply()
        found = dict(self.frame["reason"].value_counts().iter_rows())
        return {reason.name: int(found.get(number, 0)) for number, reason in enumerate(self._reasons)}

    def _drop_repeats(self, reason: DropReason, column: str) -> None:
        number = self._index(reason.name)
        left = self.left("row", column)
        rows, keys = left["row"], left[column]
        if reason.match is not None:
            order = rows.to_list()
            try:
                found = list(reason.match(keys.to_list(), self._limits))
            except NOT_ITS_FAULT:
                raise
            except Exception as error:
                raise plugin_failure(f"drop reason {reason.name!r}", error) from error
            pairs = [(order[dropped], order[first]) for dropped, first in found]
        else:
            pairs = _repeats(rows, keys)
        for row, first in pairs:
            self.later[row] = self._later(number, f"row {first + 1} has the same key", first + 1)

    def _apply(self) -> None:
        """Writes the later drops into the table; all other columns stay where they are."""
        if len(self.later) == self._applied:
            return
        self._applied = len(self.later)
        reasons = self.frame["reason"].clone()
        reasons.scatter(list(self.later), [later.reason for later in self.later.values()])
        self.frame = self.frame.with_columns(reasons)

    def _later(self, number: int, detail: str, repeats: int | None = None) -> Later:
        return Later(number, detail, self._reasons[number].pointer, repeats)

    def _index(self, name: str) -> int:
        return next(number for number, reason in enumerate(self._reasons) if reason.name == name)


def _repeats(rows: pl.Series, keys: pl.Series) -> list[tuple[int, int]]:
    """(row, first row of the same key) for each row whose key stands before it."""
    import polars as pl

    table = pl.DataFrame({"row": rows, "key": keys})
    repeated = table.filter(~keys.is_first_distinct())
    # Only keys that are repeated at all: nearly every key is not, and need not be copied.
    firsts = table.join(repeated.select("key"), on="key", how="semi").group_by("key").agg(first=pl.col("row").min())
    joined = repeated.join(firsts, on="key", maintain_order="left")
    return list(joined.select("row", "first").iter_rows())
