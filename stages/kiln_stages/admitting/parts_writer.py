"""Rows to a Parquet file in bounded memory: parts on disk, joined at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

from kiln_cli.files import FS, TEMP_PREFIX, AtomicFile, open_input, writing
from kiln_stages.frames import import_polars

if TYPE_CHECKING:
    import polars as pl

Row = TypeVar("Row")


class PartsWriter(ABC, Generic[Row]):
    """Writes rows one by one. Use as a context manager; afterwards ``file`` describes what was written.

    Every ``part_rows`` rows, or sooner where they weigh ``part_bytes``, become a part on disk; at the end the parts are
    joined, with ``group_rows`` rows in a row group, which is what a reader must hold at once. So the bytes depend on
    the rows alone, and a failure leaves what was there before. Raises KilnError KLN402 where the disk refuses.
    """

    part_rows: ClassVar[int]
    part_bytes: ClassVar[int] = 1 << 62
    group_rows: ClassVar[int]

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._weight = 0
        self._parts: list[Path] = []
        self._scratch = path.parent / f"{TEMP_PREFIX}{path.stem}"  # swept, if this process is killed, by the next one
        self.file: AtomicFile | None = None

    @abstractmethod
    def frame(self, rows: Sequence[Row]) -> pl.DataFrame:
        """The rows of one part as columns."""

    def weight(self, row: Row) -> int:
        """About how many bytes a row takes, where ``part_bytes`` asks."""
        return 0

    def __enter__(self) -> Self:
        import_polars()
        with writing(self._path):
            FS.make_directory(self._scratch)
        return self

    def write(self, row: Row) -> None:
        self._rows.append(row)
        self._weight += self.weight(row)
        if len(self._rows) == self.part_rows or self._weight >= self.part_bytes:
            self._write_part()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._rows or not self._parts:
                    self._write_part()
                self.file = self._join()
        finally:
            with writing(self._path):
                FS.remove_tree(self._scratch)

    def _write_part(self) -> None:
        part = self._scratch / f"{len(self._parts):08d}.arrow"
        with writing(part):
            self.frame(self._rows).write_ipc(part)
        self._parts.append(part)
        self._rows, self._weight = [], 0

    def _join(self) -> AtomicFile:
        import polars as pl

        joined = self._scratch / "joined.parquet"
        with writing(joined):
            try:
                pl.scan_ipc(self._parts).sink_parquet(
                    joined, compression="zstd", statistics=False, row_group_size=self.group_rows, maintain_order=True
                )
            except pl.exceptions.PolarsError as error:  # here polars tells of a full disk in terms of its own
                raise OSError(str(error)) from error
        with AtomicFile(self._path) as out, open_input(joined) as stream:
            while block := stream.read(1024 * 1024):
                out.write(block)
        return out
