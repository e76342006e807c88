"""The second pass of prepare: chosen rows read again by place and written in the order of the splits."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from kiln_cli.files import AtomicFile
from kiln_cli.identity import canonical_parsed
from kiln_cli.lines import BOM, TRIMMED
from kiln_cli.records import Record
from kiln_cli.terminal import Task
from kiln_stages.preparing.pool import Pool
from kiln_stages.preparing.screening import raw_sha256
from kiln_stages.preparing.survey import VALID, OpenSource, Survey
from kiln_stages.reading.ranges import read_text
from kiln_stages.workers import Workers

BATCH_ROWS = 2_000


class Chosen(NamedTuple):
    """A row that goes into a split: its place, its id, and the id of its root row if it is a pair."""

    source: int
    row: int
    offset: int
    length: int
    example_id: str
    root_id: str | None


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """A line of ``data/rejected.jsonl``: where a dropped row lies, what it is known by, and why it was dropped.

    ``repeats``: number of the earlier row of the same file that it repeats, for the reasons that compare rows.
    """

    detail: str
    example_id: str | None
    language: str
    length: int
    line: int
    offset: int
    pointer: str
    reason: str
    repeats: int | None
    row_index: int
    row_sha256: str | None


class Batch(NamedTuple):
    """Rows to be written one behind the other. ``revisions`` has one text a source."""

    split: str
    rows: tuple[Chosen, ...]
    revisions: tuple[str, ...]


class SplitWriter:
    """Writes one split's rows. Workers begin with the first of them at once; the bytes do not depend on how many.

    ``lost`` has, for each source, the keys of tools and calls that an example does not hold, by rows that had them.
    """

    def __init__(self, split: str, rows: list[Chosen], revisions: tuple[str, ...], workers: Workers) -> None:
        self.lost: list[Counter[str]] = [Counter() for _ in revisions]
        starts = range(0, len(rows), BATCH_ROWS)
        batches = [Batch(split, tuple(rows[start : start + BATCH_ROWS]), revisions) for start in starts]
        self._sizes = [len(batch.rows) for batch in batches]
        self._results = workers.map(encode_batch, batches)

    def write(self, target: AtomicFile, task: Task) -> None:
        for size, (lines, keys) in zip(self._sizes, self._results, strict=True):
            target.write(lines)
            for source, name in keys:
                self.lost[source][name] += 1
            task.advance(size)


def encode_batch(sources: list[OpenSource], batch: Batch) -> tuple[bytes, list[tuple[int, str]]]:
    """The lines of a batch, each row parsed again as a typed example; and (source, key) for each lost key."""
    lines = []
    lost: list[tuple[int, str]] = []
    for row in batch.rows:
        source = sources[row.source]
        record = _record(source, row.offset, row.length)
        made = source.screen.example(record, row.example_id, row.root_id, batch.split, batch.revisions[row.source])
        lines.append(canonical_parsed(made.example) + b"\n")
        lost.extend((row.source, name) for name in made.lost_keys)
    return b"".join(lines), lost


def write_rejected(target: AtomicFile, source: OpenSource, language: str, survey: Survey, pool: Pool) -> int:
    """A line of ``rejected.jsonl`` for each dropped row, in row order; returns how many."""
    names, places = list(source.reasons), source.plain.places
    screened = iter(survey.dropped)
    count = 0
    for row, line, offset, length, example_id, at_screening, reason in pool.dropped(survey.frame["reason"]):
        known = next(screened) if at_screening != VALID else None
        later = pool.later.get(row)
        repeats = later.repeats if later is not None else None
        if later is None and known is not None:
            detail, pointer, sha256 = known
        else:
            detail, pointer = (later.detail, later.pointer) if later is not None else ("", "")
            sha256 = known[2] if known is not None else raw_sha256(_record(source, offset, length))
        if places is not None:
            line, offset, length = places.line[row], places.offset[row], places.length[row]
        rejected = Rejected(
            detail, example_id, language, length, line, offset, pointer, names[reason], repeats, row + 1, sha256
        )
        target.write(canonical_parsed(rejected) + b"\n")
        count += 1
    return count


def _record(source: OpenSource, offset: int, length: int) -> Record:
    raw = read_text(source.plain.stream, offset, length)
    text = (raw.removeprefix(BOM) if offset == 0 else raw).strip(TRIMMED)
    return Record(row_index=0, line=0, offset=offset, length=length, text=text, element=source.plain.elements)
