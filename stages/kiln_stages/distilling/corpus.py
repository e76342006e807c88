"""A scored corpus file: its manifest line, and its examples judged in order, on all cores and in bounded memory.

The manifest line is judged before any example is read. Then every line is; of the faults the contract reports the first
by kind: a line that is no example, a manifest line in the wrong place, a score in a corpus without a manifest, and only
then what is wrong with an example. So a file with a fault is read to its end, unless nothing can come before it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from enum import IntEnum
from typing import BinaryIO, NamedTuple

import msgspec

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.lines import LineReader
from kiln_cli.text import printable
from kiln_stages.distilling.examples import LINE_CAP, first_logprob, parse_line, to_example, trimmed_line
from kiln_stages.distilling.identity import MANIFEST_BYTES, is_manifest
from kiln_stages.distilling.judging import Judge
from kiln_stages.distilling.rows import PackedScoredRow
from kiln_stages.reading.ranges import Range, open_range, ranges, read_text
from kiln_stages.workers import Workers

RANGE_BYTES = 1024 * 1024


class Phase(IntEnum):
    """Which faults come before which, wherever in the file they are."""

    LINE = 0
    MANIFEST = 1
    UNNAMED = 2
    EXAMPLE = 3


class CorpusFault(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``line`` counts from 1; ``example`` from 1, the manifest line left out, 0 where a line is none."""

    phase: int
    line: int
    example: int
    code: str
    pointer: str
    detail: str

    def text(self, path: str) -> str:
        number = f" example {self.example}:" if self.example else ""
        where = f" at {self.pointer}" if self.pointer else ""
        return f"{path}:{self.line}:{number} {self.code}{where}: {printable(self.detail, 1000)}"


class FirstRecord(NamedTuple):
    """The first line that is not blank: its place, and its bytes up to the line end (LF, or CR and LF), cut where they
    are more than a manifest can have."""

    number: int
    offset: int
    line: bytes
    is_manifest: bool


class Job(NamedTuple):
    """What the processes share. ``judge`` is None for a corpus without a manifest: there nothing can be judged.

    ``manifest_at``: the byte where the manifest line begins, -1 without one.
    """

    stream: BinaryIO
    judge: Judge | None
    manifest_at: int


class Place(NamedTuple):
    """Where an example stands: the file's bytes, and its numbers there."""

    row_index: int
    line: int
    offset: int
    length: int


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """An example that holds, and the bytes of its line in the file."""

    row: PackedScoredRow
    offset: int
    length: int

    @property
    def place(self) -> Place:
        return Place(self.row.row_index, self.row.line, self.offset, self.length)


class Part(msgspec.Struct):
    """What became of the lines of one piece of file, in order. Counts of kept examples alone: ``proven``, ``beyond``,
    ``suspect`` (see ``judging.Verdict``). ``ignored`` and ``notes``: by how many examples."""

    lines: int = 0
    blank: int = 0
    examples: int = 0
    kept: list[Kept] = []
    faults: list[CorpusFault] = []
    proven: int = 0
    beyond: int = 0
    suspect: int = 0
    ignored: dict[str, int] = {}
    notes: dict[str, int] = {}


def first_record(stream: BinaryIO) -> FirstRecord | None:
    """The first line with anything on it; None for a file of blank lines. ``stream`` is read from its start."""
    stream.seek(0)
    for line in LineReader(stream, cap=LINE_CAP, hashed=False):
        if line.text is not None and not trimmed_line(line.text):
            continue
        whole = read_text(stream, line.offset, min(line.length, MANIFEST_BYTES + 2))
        return FirstRecord(line.number, line.offset, _without_line_end(whole), _calls_itself_manifest(line.text))
    return None


def _without_line_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _calls_itself_manifest(text: bytes | None) -> bool:
    try:
        return text is not None and is_manifest(parse_line(trimmed_line(text), len(text)))
    except RowFault:
        return False


def judged_parts(job: Job, path: str, workers: Workers) -> Iterator[Part]:
    """The parts of the file in order, lines and examples counted from its start.

    Raises KilnError KLN207 where the file changes meanwhile.
    """
    before = os.fstat(job.stream.fileno())
    lines = examples = 0
    for packed in workers.map(judge_range, ranges(0, job.stream, before.st_size, RANGE_BYTES)):
        part = _decode_part(packed)
        yield _placed(part, lines, examples)
        lines, examples = lines + part.lines, examples + part.examples
    after = os.fstat(job.stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        message = f"{printable(path)} changed while it was read"
        raise KilnError("KLN207", message, hint="run again when nothing writes to it")


def judge_range(job: Job, piece: Range) -> bytes:
    """Judges the lines of one piece: a pure function of its bytes."""
    if multiprocessing.parent_process() is not None:  # each process has a core; threads of their own would fight
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stream = open_range(job.stream.fileno(), piece)
    lines = LineReader(stream, cap=LINE_CAP, start=piece.start, hashed=False)
    part = Part()
    for line in lines:
        text = None if line.text is None else trimmed_line(line.text)
        if line.offset == job.manifest_at:
            continue
        if text == b"":
            part.blank += 1
            continue
        try:
            value = parse_line(text, line.length)
            if is_manifest(value):
                at = "another stands before it" if job.manifest_at >= 0 else "it is not the first record"
                part.faults.append(fault_of(Phase.MANIFEST, line.number, 0, RowFault("manifest_not_first", at)))
                continue
            part.examples += 1
            if job.judge is None:
                if (pointer := first_logprob(value)) is not None:
                    detail = "a score, and no manifest line names the teacher whose it is"
                    fault = RowFault("logprobs_without_manifest", detail, pointer)
                    part.faults.append(fault_of(Phase.UNNAMED, line.number, part.examples, fault))
                continue
            example = to_example(value, job.judge.top_k)
        except RowFault as fault:
            part.faults.append(fault_of(Phase.LINE, line.number, 0, fault))
            continue
        verdict = job.judge.judge(example, part.examples, line.number)
        part.faults += [fault_of(Phase.EXAMPLE, line.number, part.examples, fault) for fault in verdict.faults]
        if verdict.row is not None:
            part.kept.append(Kept(verdict.row, line.offset, line.length))
            part.proven, part.beyond = part.proven + verdict.proven, part.beyond + verdict.beyond
            part.suspect += verdict.suspect
        for counts, names in ((part.ignored, example.ignored), (part.notes, verdict.notes)):
            for name in names:
                counts[name] = counts.get(name, 0) + 1
    part.lines = lines.lines
    return _encode_part(part)


def judge_again(job: Job, place: Place) -> PackedScoredRow:
    """A row that was kept, from its line in the file. Raises KilnError KLN207 where it no longer holds."""
    line = read_text(job.stream, place.offset, place.length)
    try:
        assert job.judge is not None, "only an example that was judged is judged again"
        example = to_example(parse_line(trimmed_line(line), place.length), job.judge.top_k)
        row = job.judge.judge(example, place.row_index, place.line).row
    except RowFault:
        row = None
    if row is None:
        message = f"line {place.line} changed while the file was read"
        raise KilnError("KLN207", message, hint="run again when nothing writes to it")
    return row


def fault_of(phase: Phase, line: int, example: int, fault: RowFault) -> CorpusFault:
    """A fault of a row as one of the corpus; text of plugins may be no UTF-8."""
    detail = fault.detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return CorpusFault(phase=phase, line=line, example=example, code=fault.reason, pointer=fault.pointer, detail=detail)


def _placed(part: Part, lines: int, examples: int) -> Part:
    """Lines and examples of a part counted from the start of the file."""
    for at, kept in enumerate(part.kept):
        row = msgspec.structs.replace(kept.row, row_index=kept.row.row_index + examples, line=kept.row.line + lines)
        part.kept[at] = msgspec.structs.replace(kept, row=row)
    for at, fault in enumerate(part.faults):
        number = fault.example + examples if fault.example else 0
        part.faults[at] = msgspec.structs.replace(fault, line=fault.line + lines, example=number)
    return part


_encode_part = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(Part).decode
