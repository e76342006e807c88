"""The second pass of prepare: chosen rows read again by place and written in the order of the splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kiln_cli.files import AtomicFile
from kiln_cli.identity import canonical_json, canonical_parsed
from kiln_cli.lines import BOM, TRIMMED
from kiln_cli.records import Record
from kiln_cli.terminal import Task
from kiln_stages.preparing.pool import Pool
from kiln_stages.preparing.screening import raw_sha256
from kiln_stages.preparing.survey import OpenSource, Survey, read_text
from kiln_stages.preparing.workers import Workers

BATCH_ROWS = 500


class Chosen(NamedTuple):
    """A row that goes into a split: its place, its id, and the id of its root row if it is a pair."""

    source: int
    row: int
    offset: int
    length: int
    example_id: str
    root_id: str | None


class Batch(NamedTuple):
    """Rows to be written one behind the other. ``revisions`` has one text a source."""

    split: str
    rows: tuple[Chosen, ...]
    revisions: tuple[str, ...]


def write_split(
    target: AtomicFile, split: str, rows: list[Chosen], revisions: tuple[str, ...], workers: Workers, task: Task
) -> list[Counter[str]]:
    """Writes one split's rows; the bytes do not depend on the number of workers.

    Returns, for each source, the keys of tools and calls that an example does not hold, by rows that had them.
    """
    batches = (Batch(split, tuple(rows[i : i + BATCH_ROWS]), revisions) for i in range(0, len(rows), BATCH_ROWS))
    lost: list[Counter[str]] = [Counter() for _ in revisions]
    for size, (lines, keys) in zip(_sizes(len(rows)), workers.map(encode_batch, batches), strict=True):
        target.write(lines)
        for source, name in keys:
            lost[source][name] += 1
        task.advance(size)
    return lost


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
    names = list(source.reasons)
    columns = survey.frame.select("row", "line", "offset", "length", "reason", "example_id")
    final, places = pool.reasons_by_row(), source.plain.places
    screened = iter(survey.dropped)
    count = 0
    for row, line, offset, length, reason, example_id in columns.iter_rows():
        known = next(screened) if reason >= 0 else None
        if final[row] < 0:
            continue
        later = pool.later.get(row)
        if later is None and known is not None:
            detail, pointer, sha256 = known
        else:
            detail, pointer = (later.detail, later.pointer) if later is not None else ("", "")
            sha256 = known[2] if known is not None else raw_sha256(_record(source, offset, length))
        if places is not None:
            line, offset, length = places.line[row], places.offset[row], places.length[row]
        target.write(
            canonical_json(
                {
                    "detail": detail,
                    "example_id": example_id,
                    "language": language,
                    "length": length,
                    "line": line,
                    "offset": offset,
                    "pointer": pointer,
                    "reason": names[final[row]],
                    "row_index": row + 1,
                    "row_sha256": sha256,
                }
            )
            + b"\n"
        )
        count += 1
    return count


def _record(source: OpenSource, offset: int, length: int) -> Record:
    raw = read_text(source.plain.stream, offset, length)
    text = (raw.removeprefix(BOM) if offset == 0 else raw).strip(TRIMMED)
    return Record(row_index=0, line=0, offset=offset, length=length, text=text, element=source.plain.elements)


def _sizes(rows: int) -> Iterator[int]:
    for start in range(0, rows, BATCH_ROWS):
        yield min(BATCH_ROWS, rows - start)
