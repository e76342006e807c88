"""The first pass of prepare: every row screened, in parallel, into a narrow table of places, keys and reasons.

The file is cut at line ends into ranges; a range is screened by itself, so the result does not depend on how many
processes work or where the cuts lie. What comes back are numbers and digests: row bodies stay in the file.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import msgspec

from kiln_cli.files import writing
from kiln_cli.identity import canonical_parsed
from kiln_cli.lines import LineReader
from kiln_cli.records import Record
from kiln_cli.terminal import Task
from kiln_stages.preparing.screening import POSITIONAL, Screen, raw_sha256
from kiln_stages.preparing.workers import Workers
from kiln_stages.reading.transports import Plain

if TYPE_CHECKING:
    import polars as pl

RANGE_BYTES = 4 * 1024 * 1024
VALID = -1
_BLOCK = 1024 * 1024


class OpenSource(NamedTuple):
    """A source as the workers see it: its plain file, its rules, and the declared reasons by name."""

    plain: Plain
    screen: Screen
    reasons: dict[str, int]


class Range(NamedTuple):
    """Whole lines of a source's plain file: bytes ``start`` to ``end``."""

    source: int
    start: int
    end: int


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
    _import_polars()
    if sha256 is None:
        sha256 = _hash(stream, size)
    for part in results:
        dropped.extend(part.dropped)
        frames.append(_frame(part, source, rows, lines))
        rows, lines, blank = rows + len(part.line), lines + part.lines, blank + part.blank
        had_bom |= part.had_bom
        task.advance(len(part.line))
    return Survey(_joined(frames, source), dropped, blank + source.plain.blank, had_bom, sha256, source.plain.size)


def ranges(source: int, stream: BinaryIO, size: int, range_bytes: int) -> list[Range]:
    """Cuts a file at line ends, about every ``range_bytes``."""
    cuts = [0]
    for target in range(range_bytes, size, range_bytes):
        if target > cuts[-1]:
            stream.seek(target - 1)
            while (piece := stream.readline(_BLOCK)) and not piece.endswith(b"\n"):
                pass  # a line of gigabytes is passed over in bounded steps
            cuts.append(stream.tell())
    if cuts[-1] < size:
        cuts.append(size)
    return [Range(source, start, end) for start, end in pairwise(cuts)]


def screen_range(sources: list[OpenSource], part: Range) -> Columns:
    """Screens the rows of one range: a pure function of its bytes."""
    source = sources[part.source]
    out = Columns()
    lines = LineReader(_open_range(source.plain.stream.fileno(), part), start=part.start, hashed=False)
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


def read_text(stream: BinaryIO, offset: int, length: int) -> bytes:
    """The bytes of a row's line again, by place; safe beside other readers of the same descriptor."""
    return _pread(stream.fileno(), offset, length)


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
        data += more
    return data


def _open_range(descriptor: int, part: Range) -> BinaryIO:
    """A range as a stream: whole in memory, unless a line of gigabytes makes it one."""
    length = part.end - part.start
    if length <= 8 * RANGE_BYTES:
        return io.BytesIO(_pread(descriptor, part.start, length))
    return cast(BinaryIO, io.BufferedReader(_RangeReader(descriptor, part), _BLOCK))


class _RangeReader(io.RawIOBase):
    def __init__(self, descriptor: int, part: Range) -> None:
        self._descriptor = descriptor
        self._at, self._end = part.start, part.end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        data = os.pread(self._descriptor, min(len(view), self._end - self._at), self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _hash(stream: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    for offset in range(0, size, _BLOCK):
        digest.update(_pread(stream.fileno(), offset, min(_BLOCK, size - offset)))
    return digest.hexdigest()


def _import_polars() -> None:
    """Has polars hand memory back at once: what its allocator keeps for later use is a third of this stage's peak."""
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")
    importlib.import_module("polars")


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
