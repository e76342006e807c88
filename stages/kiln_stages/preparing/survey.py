"""The first pass of prepare: every row screened, in parallel, into a narrow table of places, keys and reasons.

The file is cut at line ends into ranges; a range is screened by itself, so the result does not depend on how many
processes work or where the cuts lie. What comes back are numbers and digests: row bodies stay in the file.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import msgspec

from kiln_cli.files import writing
from kiln_cli.identity import canonical_parsed
from kiln_cli.lines import LineReader
from kiln_cli.records import Record
from kiln_cli.terminal import Task
from kiln_stages.frames import import_polars
from kiln_stages.preparing.screening import POSITIONAL, Screen, raw_sha256
from kiln_stages.reading.ranges import RANGE_BYTES, Range, hash_stream, open_range, ranges
from kiln_stages.reading.transports import Plain
from kiln_stages.workers import Workers

if TYPE_CHECKING:
    import polars as pl

VALID = -1


class OpenSource(NamedTuple):
    """A source as the workers see it: its plain file, its rules, and the declared reasons by name."""

    plain: Plain
    screen: Screen
    reasons: dict[str, int]


class Columns(msgspec.Struct):
    """The narrow table of a range, a list a column; lines count from the start of the range.

    ``reason`` is an index into the declared reasons, VALID for none. ``dropped`` is one JSON text a dropped row:
    detail, pointer, hash of the raw row.
    """

    lines: int = 0
    blank: int = 0
    had_bom: bool = False
    line: array[int] = msgspec.field(default_factory=lambda: array("q"))
    offset: array[int] = msgspec.field(default_factory=lambda: array("q"))
    length: array[int] = msgspec.field(default_factory=lambda: array("q"))
    reason: array[int] = msgspec.field(default_factory=lambda: array("h"))
    example_id: list[str | None] = []
    query: list[bytes] = []
    keys: list[tuple[str | bytes, ...]] = []
    link: list[str | None] = []
    texts: list[bytes] = []
    group: list[str | None] = []
    stratum: list[str | None] = []
    dropped: list[bytes] = []


class Dropped:
    """Details of the rows that screening drops, in row order, in a temporary file: there may be millions."""

    def __init__(self, scratch: Path) -> None:
        with writing(scratch):
            self._file = cast(BinaryIO, TemporaryFile(dir=scratch))  # noqa: SIM115, closed by `close`

    def extend(self, texts: list[bytes]) -> None:
        self._file.writelines(text + b"\n" for text in texts)

    def __iter__(self) -> Iterator[tuple[str, str, str | None]]:
        """Detail, pointer, and hash of the raw row, of each dropped row."""
        self._file.seek(0)
        for line in self._file:
            yield cast("tuple[str, str, str | None]", tuple(msgspec.json.decode(line)))

    def close(self) -> None:
        self._file.close()


class Survey(NamedTuple):
    """All rows of one source. ``frame`` has a row each: row (from 0), line, offset, length, reason, example_id, query,
    link, texts, group, stratum, and a column a pool reason (``key 0`` ...)."""

    frame: pl.DataFrame
    dropped: Dropped
    blank_lines: int
    had_bom: bool
    sha256: str
    size: int


def survey(
    sources: list[OpenSource], number: int, workers: Workers, scratch: Path, task: Task, range_bytes: int = RANGE_BYTES
) -> Survey:
    """Screens every row of one source; ``workers`` share the list of sources."""
    source = sources[number]
    stream = source.plain.stream
    size = os.fstat(stream.fileno()).st_size
    frames, dropped = [], Dropped(scratch)
    rows = lines = blank = 0
    had_bom = source.plain.had_bom
    sha256 = source.plain.sha256
    results = workers.map(screen_range, ranges(number, stream, size, range_bytes))
    # The workers are busy meanwhile.
    import_polars()
    if sha256 is None:
        sha256 = hash_stream(stream, size)
    for part in results:
        dropped.extend(part.dropped)
        frames.append(_frame(part, source, rows, lines))
        rows, lines, blank = rows + len(part.line), lines + part.lines, blank + part.blank
        had_bom |= part.had_bom
        task.advance(len(part.line))
    return Survey(_joined(frames, source), dropped, blank + source.plain.blank, had_bom, sha256, source.plain.size)


def screen_range(sources: list[OpenSource], part: Range) -> Columns:
    """Screens the rows of one range: a pure function of its bytes."""
    source = sources[part.source]
    out = Columns()
    lines = LineReader(open_range(source.plain.stream.fileno(), part), start=part.start, hashed=False)
    elements = source.plain.elements
    for line in lines:
        if line.text != b"":
            record = Record(
                row_index=0,
                line=line.number,
                offset=line.offset,
                length=line.length,
                text=line.text,
                element=elements,
            )
            _take(out, record, source)
    out.lines, out.blank, out.had_bom = lines.lines, lines.blank, lines.had_bom
    return out


def _take(out: Columns, record: Record, source: OpenSource) -> None:
    screened = source.screen.screen(record)
    drop = screened.drop
    out.line.append(record.line)
    out.offset.append(record.offset)
    out.length.append(record.length)
    out.example_id.append(screened.example_id)
    out.query.append(screened.query)
    out.keys.append(screened.keys)
    out.link.append(screened.link)
    out.texts.append(screened.texts)
    out.group.append(screened.group)
    out.stratum.append(screened.stratum)
    if drop is None:
        out.reason.append(VALID)
    else:
        out.reason.append(source.reasons[drop.reason])
        out.dropped.append(canonical_parsed([drop.detail, drop.pointer, raw_sha256(record)]))


def _frame(columns: Columns, source: OpenSource, rows: int, lines: int) -> pl.DataFrame:
    """The table of one range; ``rows`` and ``lines`` are what stands before it in the file."""
    import polars as pl

    prefix = f"{source.screen.dataset.dataset_id}:"
    identities = [
        f"{prefix}{row}" if name == POSITIONAL else name for row, name in enumerate(columns.example_id, start=rows + 1)
    ]
    data = {
        "row": pl.Series(range(rows, rows + len(columns.line)), dtype=pl.Int64),
        "line": pl.Series(columns.line, dtype=pl.Int64) + lines,
        "offset": pl.Series(columns.offset, dtype=pl.Int64),
        "length": pl.Series(columns.length, dtype=pl.Int64),
        "reason": pl.Series(columns.reason, dtype=pl.Int16),
        "example_id": pl.Series(identities, dtype=pl.String),
        "query": pl.Series(columns.query, dtype=pl.Binary),
    }
    # Columns that nothing will ask for take no memory: a table of millions of rows is mostly made of columns.
    asked_for = source.screen.asked_for
    optional: dict[str, list[Any]] = {
        "link": columns.link,
        "texts": columns.texts,
        "group": columns.group,
        "stratum": columns.stratum,
    }
    for name, values in optional.items():
        dtype = pl.Binary if name == "texts" else pl.String
        size = len(columns.line)
        data[name] = pl.Series(values, dtype=dtype) if name in asked_for else pl.repeat(None, size, eager=True)
    for number in range(source.screen.pool_keys):
        keys = [key[number] if key else None for key in columns.keys]
        data[f"key {number}"] = pl.Series(keys)  # text or bytes, as the reason has it
    return pl.DataFrame(data)


def _joined(frames: list[pl.DataFrame], source: OpenSource) -> pl.DataFrame:
    import polars as pl

    # Relaxed: a range without a valid row has no keys, so it cannot tell of which kind they are.
    return pl.concat(frames or [_frame(Columns(), source, 0, 0)], how="vertical_relaxed")
