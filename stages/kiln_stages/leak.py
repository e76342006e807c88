"""``kiln leak``: whether a row, a group or a near duplicate stands in two sets of rows that must be apart.

A set is a file of rows, the kept rows of a receipt, or a split of a run or of a named data set. Two splits of one run
or data set are apart, and so are what one trains on and another holds out; what two runs both train on may be the same.
A file or a receipt is apart from everything else. Rows are compared by the rules of `[admit] held_out`
([config.md](config.md), *Held-out rows*); each row is counted and told once, by the first rule that fits. Rows with one
prompt and different answers are told of by themselves: no rule forbids them. Exit code 1 says that something leaks.

The normal form of texts: runs of Unicode White_Space are one space, none at the ends, lower case, then NFC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import msgspec
import typer

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.contamination.overlaps import Meeting, Overlaps, Place, RuleCount, overlaps
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.references import open_reference
from kiln_stages.contamination.row_sets import Misfit, RowSet

SHOWN = 20  # rows that are named without --all


class SetLine(msgspec.Struct, frozen=True, kw_only=True):
    """A set of rows. ``by``: "rows" or "hashes"; ``why``: what kept the rows from being read. ``in_part``: rows that
    are no conversations and were compared by their JSON value alone, the first of them named in ``first``."""

    name: str
    rows: int
    by: Literal["rows", "hashes"]
    sha256: str
    why: str
    in_part: int
    first: Misfit | None


class LeakReport(msgspec.Struct, frozen=True, kw_only=True):
    """``leaks`` and ``other_answers`` are the first of ``leaks_total`` and ``other_answers_total``."""

    schema: str = "kiln.leak.v1"
    near_threshold: float | None
    sets: list[SetLine]
    counts: list[RuleCount]
    leaks_total: int
    leaks: list[Meeting]
    other_answers_total: int
    other_answers: list[Meeting]
    not_compared: list[tuple[str, str]]


def command(
    named: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Files, receipts, RUN, RUN:SPLIT, NAME, NAME:SPLIT.")
    ],
    near: Annotated[
        float | None, typer.Option("--near", min=0, max=1, help="Also near duplicates, so much alike or more.")
    ] = None,
    registry: Annotated[Path, typer.Option("--registry", help="The directory of named data sets.")] = Path(".kiln"),
    everything: Annotated[bool, typer.Option("--all", help=f"Name every row, not the first {SHOWN}.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell which rows, groups or near duplicates stand in two sets that must be apart."""
    if near == 0:
        raise KilnError("KLN201", "--near 0 calls everything alike", hint="give a similarity above 0, 0.8 say")
    limit = None if everything else SHOWN
    found = run(named, load_plugins(), near=near, registry=registry, limit=limit, progress=terminal)
    if json:
        terminal.json_data(found)
    else:
        terminal.data(page(found))
    if found.leaks_total:
        terminal.json = False  # the report is the one JSON object of this command
        rows = counted(found.leaks_total, "row stands", "rows stand")
        raise KilnError("KLN111", f"{rows} in two sets that must be apart")


def run(
    named: Iterable[str],
    plugins: Plugins,
    *,
    near: float | None = None,
    registry: Path = Path(".kiln"),
    limit: int | None = SHOWN,
    progress: Progress = SILENT,
) -> LeakReport:
    """Compares all that is named. ``limit``: so many rows are named, all for None.

    Raises KilnError KLN201 where there is nothing to compare, and as ``open_reference`` does.
    """
    sets = _sets(list(named), plugins, near, registry, progress)
    found = overlaps(sets, near, progress)
    if len(found.not_compared) == len(sets) * (len(sets) - 1) // 2:
        raise _nothing_apart(sets)
    return _report(sets, found, near, limit)


def page(found: LeakReport) -> str:
    """The report as text."""
    lines = [f"{row.name}: {counted(row.rows, 'row', 'rows')}{_limits(row)}" for row in found.sets]
    lines += [f"not compared, both may have the same rows: {a}, {b}" for a, b in found.not_compared]
    lines.append(_count_table(found.counts) if found.counts else "no row stands in two of them")
    lines += [_line(meeting) for meeting in found.leaks]
    lines += _more(found.leaks_total, len(found.leaks))
    if found.other_answers_total:
        rows = counted(found.other_answers_total, "row", "rows")
        lines.append(f"one prompt, other answers (no leak by itself): {rows}")
        lines += [_line(meeting) for meeting in found.other_answers]
        lines += _more(found.other_answers_total, len(found.other_answers))
    return "\n".join(lines)


def _sets(named: list[str], plugins: Plugins, near: float | None, registry: Path, progress: Progress) -> list[RowSet]:
    sets: list[RowSet] = []
    with TemporaryDirectory(prefix="kiln-leak-") as scratch:
        reader = Reader(plugins, Path(), Path(scratch), registry, near=near is not None)
        with progress.task("leak: read", len(named), "inputs") as task:
            for given in named:
                sets += open_reference(given, reader).sets
                task.advance()
    names = [rows.name for rows in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise KilnError("KLN201", f"{twice} is named twice", hint="a set of rows is compared with others")
    return sets


def _nothing_apart(sets: Sequence[RowSet]) -> KilnError:
    listed = ", ".join(rows.name for rows in sets) or "nothing"
    return KilnError(
        "KLN201",
        f"nothing to compare: {listed}",
        hint="name two sets of rows, or a run with splits; two runs may train on the same rows",
    )


def _report(sets: Sequence[RowSet], found: Overlaps, near: float | None, limit: int | None) -> LeakReport:
    return LeakReport(
        near_threshold=near,
        sets=[
            SetLine(
                name=rows.name,
                rows=len(rows.keys),
                by=rows.by,
                sha256=rows.sha256,
                why=rows.why,
                in_part=len(rows.misfits),
                first=rows.misfits[0] if rows.misfits else None,
            )
            for rows in sets
        ],
        counts=found.counts,
        leaks_total=len(found.leaks),
        leaks=found.leaks[:limit],
        other_answers_total=len(found.other_answers),
        other_answers=found.other_answers[:limit],
        not_compared=found.not_compared,
    )


def _limits(row: SetLine) -> str:
    if row.by == "hashes":
        return f", by hash alone, which finds the same conversations ({row.why})"
    if row.first is None:
        return ""
    first = f"row {row.first.row_index} (line {row.first.line}): {row.first.detail}"
    return f", {row.in_part:,} of them no conversations and compared by their JSON alone; {first}"


def _count_table(counts: list[RuleCount]) -> str:
    head = ["", "rows of the first", "rows of the second"]
    rows = [[f"{count.a} | {count.b}: {count.rule}", count.rows_a, count.rows_b] for count in counts]
    return table([head, *rows])


def _line(meeting: Meeting) -> str:
    what = f" ({meeting.what})" if meeting.what else ""
    return printable(f"{meeting.rule}{what}: {_shown(meeting.a)} = {_shown(meeting.b)}")


def _shown(place: Place) -> str:
    line = f"line {place.line}" if place.line is not None else None
    known = ", ".join(filter(None, (line, place.example_id)))
    return f"{place.set} row {place.row_index}" + (f" ({known})" if known else "")


def _more(total: int, shown: int) -> list[str]:
    return [f"and {total - shown:,} more (--all names them)"] if total > shown else []
