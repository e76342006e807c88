"""``kiln diff``: what two runs have in common and what not: rows, labels, settings, versions, and legal resume.

The question about resume is the one that ``kiln resume`` asks, with everything bound compared: could the latest
checkpoint of A be resumed as the training of B? Needs no torch; writes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kiln_cli.terminal import table, terminal
from kiln_cli.text import printable
from kiln_stages.evidence.run_differences import (
    Change,
    RowChange,
    RunDiff,
    resume_between,
    rows_between,
    settings_between,
    versions_between,
)

SHOWN = 10  # rows of a kind that are printed; --json has all


def command(
    left: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run that is admitted.")],
    right: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare two runs: rows, labels, settings, versions, and whether resume is legal."""
    found = run(left, right)
    if json:
        terminal.json_data(found)
    else:
        terminal.data(page(found))


def run(left: Path, right: Path) -> RunDiff:
    """Raises KilnError KLN206 where a run is not admitted or a file of it is damaged, KLN215 for a checkpoint that is,
    KLN202/203 for its config."""
    return RunDiff(
        a=printable(left),
        b=printable(right),
        rows=rows_between(left, right),
        settings=settings_between(left, right),
        versions=versions_between(left, right),
        resume=resume_between(left, right),
    )


def page(found: RunDiff) -> str:
    """The differences as text."""
    rows = found.rows
    counts = [["rows alike", rows.same], ["added", len(rows.added)], ["removed", len(rows.removed)]]
    counts += [["moved", len(rows.moved)], ["tokens or labels changed", len(rows.changed)]]
    lines = [f"A: {found.a}", f"B: {found.b}", table(counts)]
    for title, listed in (("added", rows.added), ("removed", rows.removed), ("moved", rows.moved)):
        lines += _rows(title, listed)
    lines += _rows("changed", rows.changed)
    for title, changes in (("settings", found.settings), ("versions", found.versions)):
        lines += _changes(title, changes)
    if found.equal:
        lines.append("rows, labels, settings and versions are the same")
    answer = {True: "legal", False: "not legal", None: "unknown"}[found.resume.legal]
    lines.append(f"resume of A's checkpoint as B: {answer}: {found.resume.why}")
    return "\n".join([*lines, *_changes("what it is bound to (checkpoint, B)", found.resume.differences)])


def _rows(title: str, rows: list[RowChange]) -> list[str]:
    lines = []
    for row in rows[:SHOWN]:
        where = " -> ".join(place for place in (row.a, row.b) if place)
        name = f" ({printable(row.example_id)})" if row.example_id is not None else ""
        what = f": {row.what}" if row.what else ""
        lines.append(f"  {title}: {where}: {printable(row.row_sha256)}{name}{printable(what)}")
    return lines if len(rows) <= SHOWN else [*lines, f"  {title}: {len(rows) - SHOWN:,} more (--json lists all)"]


def _changes(title: str, changes: list[Change]) -> list[str]:
    if not changes:
        return []
    return [f"{title}:", table([[change.what, change.a, change.b] for change in changes])]
