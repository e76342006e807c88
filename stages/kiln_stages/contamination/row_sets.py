"""A set of rows by their keys: read from a file of rows on all cores, or made of the hashes that a receipt holds."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.lines import LineReader
from kiln_cli.receipts import IngestionReceipt
from kiln_cli.records import Record
from kiln_cli.stage_manifests import HeldOutSet
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import IncomingRow
from kiln_stages.contamination.keys import RowKeys, row_keys
from kiln_stages.reading.ranges import Range, hash_stream, open_range, ranges
from kiln_stages.reading.sources import json_lines
from kiln_stages.reading.transports import Plain
from kiln_stages.workers import Workers, available

RANGE_BYTES = 512 * 1024

Role = Literal["trained", "held out"]


class Misfit(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is no conversation, so that it has no prompt to compare."""

    row_index: int
    line: int
    detail: str


class RowSet(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that stand together: a file, a split of a run or of a named data set, the kept rows of a receipt.

    ``name``: how messages call it. ``owner``: the run or data set that it is a split of, and ``role`` what that uses
    the split for. ``by``: "rows" where the rows themselves were read, "hashes" where a receipt's hashes stand for them,
    and ``why`` then says what was missing. ``sha256`` and ``size`` are of the file that was read. ``lines`` are 0 where
    no line is known; ``example_ids`` has the rows that have one, by their place in the set.
    """

    name: str
    by: Literal["rows", "hashes"]
    sha256: str
    size: int
    keys: list[RowKeys]
    row_indices: array[int]
    lines: array[int]
    example_ids: dict[int, str] = {}
    misfits: list[Misfit] = []
    owner: str | None = None
    role: Role | None = None
    why: str = ""

    def place(self, number: int) -> str:
        """A row in words; ``number`` counts from 0."""
        line = f"line {self.lines[number]}" if self.lines[number] else ""
        known = ", ".join(filter(None, (line, printable(self.example_ids.get(number, "")))))
        return f"{self.name} row {self.row_indices[number]}" + (f" ({known})" if known else "")

    def identity(self) -> HeldOutSet:
        """What evidence says of it: enough to see that it is the same set again."""
        return HeldOutSet(name=self.name, by=self.by, rows=len(self.keys), sha256=self.sha256, bytes=self.size)


class KeyedFile(NamedTuple):
    """A plain file of rows, how its records become rows, and whether near duplicates are asked for."""

    plain: Plain
    rows: Callable[[Iterable[Record]], Iterable[IncomingRow]]
    near: bool


class _Part(msgspec.Struct):
    """The rows of one piece of file, counted from its start."""

    keys: list[RowKeys]
    row_indices: list[int]
    line_numbers: list[int]
    example_ids: dict[int, str]
    misfits: list[Misfit]
    lines: int = 0


def read_set(name: str, file: KeyedFile) -> RowSet:
    """Every row of a file by its keys. Raises KilnError KLN206 for a line that its reader refuses altogether, KLN207
    where the file changes meanwhile."""
    plain = file.plain
    before = os.fstat(plain.stream.fileno())
    size = before.st_size
    found = RowSet(
        name=name,
        by="rows",
        sha256=plain.sha256 or hash_stream(plain.stream, size),
        size=plain.size,
        keys=[],
        row_indices=array("q"),
        lines=array("q"),
        example_ids={},
    )
    lines = 0
    with Workers(file, min(available(), max(1, size // RANGE_BYTES))) as workers:
        for packed in workers.map(_keyed_range, ranges(0, plain.stream, size, RANGE_BYTES)):
            part = _decode(packed)
            _add(found, part, plain, lines)
            lines += part.lines
    after = os.fstat(plain.stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise KilnError("KLN207", f"{name} changed while it was read", hint="run again when nothing writes to it")
    return found


def hashed_set(name: str, receipt: IngestionReceipt, sha256: str, size: int, why: str) -> RowSet:
    """The kept rows of a receipt, by hash alone. Its rows are counted as the receipt counts them."""
    indices = _kept_indices(receipt)
    return RowSet(
        name=name,
        by="hashes",
        sha256=sha256,
        size=size,
        keys=[RowKeys(row=row) for row in _kept_hashes(receipt)],
        row_indices=indices,
        lines=array("q", bytes(8 * len(indices))),
        why=why,
    )


def kept_only(rows: RowSet, receipt: IngestionReceipt) -> RowSet | None:
    """Of all rows of a file those that an admission kept; None where they are not the ones that its receipt names."""
    places = [index - 1 for index in _kept_indices(receipt)]
    if len(rows.keys) != receipt.rows_read or [rows.keys[place].row for place in places] != _kept_hashes(receipt):
        return None
    return msgspec.structs.replace(
        rows,
        keys=[rows.keys[place] for place in places],
        row_indices=array("q", (rows.row_indices[place] for place in places)),
        lines=array("q", (rows.lines[place] for place in places)),
        example_ids={
            number: rows.example_ids[place] for number, place in enumerate(places) if place in rows.example_ids
        },
        misfits=[],
    )


def _kept_indices(receipt: IngestionReceipt) -> array[int]:
    rejected = {row.row_index for row in receipt.rejected_rows}
    return array("q", (index for index in range(1, receipt.rows_read + 1) if index not in rejected))


def _kept_hashes(receipt: IngestionReceipt) -> list[bytes | None]:
    return [bytes.fromhex(text.removeprefix("sha256:")) for text in receipt.kept_row_hashes]


def _add(found: RowSet, part: _Part, plain: Plain, lines: int) -> None:
    rows = len(found.keys)

    def line(index: int, number: int) -> int:
        return number + lines if plain.places is None else plain.places.line[index - 1]

    found.keys.extend(part.keys)
    found.example_ids.update((place + rows, name) for place, name in part.example_ids.items())
    found.row_indices.extend(index + rows for index in part.row_indices)
    found.lines.extend(
        line(index + rows, number) for index, number in zip(part.row_indices, part.line_numbers, strict=True)
    )
    for misfit in part.misfits:
        index = misfit.row_index + rows
        found.misfits.append(msgspec.structs.replace(misfit, row_index=index, line=line(index, misfit.line)))


def _keyed_range(file: KeyedFile, piece: Range) -> bytes:
    lines = LineReader(open_range(file.plain.stream.fileno(), piece), start=piece.start, hashed=False)
    part = _Part([], [], [], {}, [])
    for incoming in file.rows(json_lines(lines, elements=file.plain.elements)):
        record = incoming.record
        if incoming.example_id is not None:
            part.example_ids[len(part.keys)] = incoming.example_id
        part.keys.append(row_keys(incoming, near=file.near))
        part.row_indices.append(record.row_index)
        part.line_numbers.append(record.line)
        if incoming.row is None:
            detail = printable(incoming.fault.detail) if incoming.fault is not None else "the row is empty"
            part.misfits.append(Misfit(row_index=record.row_index, line=record.line, detail=detail))
    part.lines = lines.lines
    return _encode(part)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Part).decode
