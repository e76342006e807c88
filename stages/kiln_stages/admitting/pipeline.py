"""The rows of opened inputs through the contract: on all cores, in order, in memory that a few pieces of file bound.

A file is cut at line ends; a piece is judged by itself, so the outcome does not depend on how many processes work or
where the cuts lie. What a process hands back counts rows and lines from the start of its piece.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.lines import LineReader
from kiln_cli.receipts import FileRef
from kiln_cli.records import Record
from kiln_cli.text import printable
from kiln_stages.admitting.admission import Admission, RejectedDetail
from kiln_stages.admitting.corpus import PackedRow
from kiln_stages.admitting.given import Given
from kiln_stages.admitting.incoming import IncomingRow
from kiln_stages.reading.ranges import Range, hash_stream, open_range, ranges
from kiln_stages.reading.sources import json_lines
from kiln_stages.reading.transports import Plain
from kiln_stages.workers import Workers, available

RANGE_BYTES = 512 * 1024


class RowsInput(msgspec.Struct, frozen=True, kw_only=True):
    """A file to admit. ``split``: what it becomes (``corpus`` or ``heldout``). ``receipt_source`` and ``locator``: what
    the ingestion receipt says of where it came from. ``rows``: how its records become rows; ``shape``: the source's
    name. ``ref``: what an earlier manifest says of the file; ``path`` and ``base``: how this stage's own names it.

    ``given``: where rows that lie in no file come from. ``handed_over``: they are yet to be copied to ``path``.
    """

    split: str
    receipt_source: str
    locator: str | None
    plain: Plain
    rows: Callable[[Iterable[Record]], Iterable[IncomingRow]]
    path: str
    base: str = "config"
    shape: str | None = None
    ref: FileRef | None = None
    source_reasons: tuple[str, ...] = ()
    given: Given | None = None
    handed_over: bool = False


class Job(NamedTuple):
    """What the processes share."""

    inputs: list[RowsInput]
    admission: Admission


class Part(msgspec.Struct):
    """What became of the rows of one piece of file, in order: outcomes by kind, and what was noted by how many rows."""

    rows: int = 0
    lines: int = 0
    blank: int = 0
    byte_order_marks: int = 0
    kept: list[PackedRow] = []
    rejected: list[RejectedDetail] = []
    ignored: dict[str, int] = {}
    notes: dict[str, int] = {}


def worker_count(inputs: list[RowsInput], limit: int | None) -> int:
    """As many processes as there are cores; one where the files are too small to be worth a second."""
    size = sum(os.fstat(rows.plain.stream.fileno()).st_size for rows in inputs)
    return min(available(limit), max(1, size // RANGE_BYTES))


def judged_parts(job: Job, number: int, workers: Workers) -> Iterator[Part]:
    """The parts of input ``number`` in order, rows and lines counted from the start of the file.

    Raises KilnError KLN207 where the file changes meanwhile.
    """
    plain = job.inputs[number].plain
    before = os.fstat(plain.stream.fileno())
    rows = lines = 0
    for packed in workers.map(judge_range, ranges(number, plain.stream, before.st_size, RANGE_BYTES)):
        part = _decode_part(packed)
        yield _placed(part, job.inputs[number], rows, lines)
        rows, lines = rows + part.rows, lines + part.lines
    after = os.fstat(plain.stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise KilnError(
            "KLN207",
            f"{printable(job.inputs[number].path)} changed while it was read",
            hint="run again when nothing writes to it",
        )


def judge_range(job: Job, piece: Range) -> bytes:
    """Judges the rows of one piece: a pure function of its bytes."""
    if multiprocessing.parent_process() is not None:  # each process has a core; threads of their own would fight
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = job.inputs[piece.source]
    lines = LineReader(open_range(source.plain.stream.fileno(), piece), start=piece.start, hashed=False)
    part = Part()
    incoming = source.rows(json_lines(lines, elements=source.plain.elements))
    for outcome, ignored, notes in job.admission.judge(source.split, incoming):
        if isinstance(outcome, PackedRow):
            part.kept.append(outcome)
        else:
            part.rejected.append(outcome)
        for counts, names in ((part.ignored, ignored), (part.notes, notes)):
            for name in names:
                counts[name] = counts.get(name, 0) + 1
    part.rows, part.lines = len(part.kept) + len(part.rejected), lines.lines
    part.blank, part.byte_order_marks = lines.blank, int(lines.had_bom)
    return _encode_part(part)


def input_reference(source: RowsInput, rows: int | None) -> FileRef:
    """How the manifest names the file; its digest is over the bytes as given, or as copied into the run.

    Raises KilnError KLN207 where the file is not what the manifest before says of it.
    """
    plain = source.plain
    size = os.fstat(plain.stream.fileno()).st_size
    packed = plain.sha256 is not None and source.base != "run"
    sha256 = plain.sha256 if packed and plain.sha256 else hash_stream(plain.stream, size)
    if source.ref is None:
        return FileRef(
            path=source.path,
            base="run" if source.base == "run" else "config",
            kind="chat_rows",
            sha256=sha256,
            bytes=plain.size if packed else size,
            rows=rows,
        )
    if sha256 != source.ref.sha256:
        raise KilnError(
            "KLN207",
            f"{printable(source.path)} changed while it was read: sha256 is {sha256}, expected {source.ref.sha256}",
            hint="run again when nothing writes to it",
        )
    return source.ref


def _placed(part: Part, source: RowsInput, rows: int, lines: int) -> Part:
    plain, ids = source.plain, source.given.ids if source.given is not None else None

    def place(index: int, line: int) -> dict[str, Any]:
        name = {} if ids is None else {"example_id": ids[index - 1]}
        return name | {"row_index": index, "line": line if plain.places is None else plain.places.line[index - 1]}

    for at, kept in enumerate(part.kept):
        part.kept[at] = msgspec.structs.replace(kept, **place(kept.row_index + rows, kept.line + lines))
    for at, detail in enumerate(part.rejected):
        index = detail.row_index + rows
        where = place(index, detail.line + lines)
        if plain.places is not None:
            where |= {"offset": plain.places.offset[index - 1], "length": plain.places.length[index - 1]}
        part.rejected[at] = msgspec.structs.replace(detail, **where)
    return part


_encode_part = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(Part).decode
