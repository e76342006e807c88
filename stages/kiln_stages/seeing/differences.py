"""The rows of a run under another template: which change, and where each of them first differs.

The other template is tried as ``kiln admit`` would with it, tools included: prepared rows become conversations with
tools where it prints tools, and text alone where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins
from kiln_cli.terminal import SILENT, Progress, Task, table
from kiln_cli.text import printable
from kiln_stages.admitting.admission import CONTAMINATED, RejectedDetail
from kiln_stages.admitting.contract import Contract
from kiln_stages.admitting.corpus import AdmittedRow
from kiln_stages.admitting.inputs import open_again
from kiln_stages.admitting.pipeline import Job, RowsInput, judged_parts, worker_count
from kiln_stages.seeing import trail
from kiln_stages.seeing.page import PLAIN, Piece, marked, quoted
from kiln_stages.seeing.shown_rows import (
    Admitted,
    Label,
    Outcome,
    Token,
    outcome_of,
    read_row,
    require_same_outcome,
    tools_mode,
)
from kiln_stages.seeing.trail import Offered
from kiln_stages.workers import Workers

AROUND = 8  # tokens shown before and behind the first difference
Kind = Literal["same", "labels", "tokens", "rejected_there", "kept_there", "other_code", "rejected_by_both"]
WORDS: dict[Kind, str] = {
    "same": "the same",
    "labels": "labels differ",
    "tokens": "tokens differ",
    "rejected_there": "rejected by {there} alone",
    "kept_there": "kept by {there} alone",
    "other_code": "rejected by both, for different reasons",
    "rejected_by_both": "rejected by both, for one reason",
}
EQUAL: tuple[Kind, ...] = ("same", "rejected_by_both")


class TemplateName(msgspec.Struct, frozen=True, kw_only=True):
    """A template of a comparison; ``tools``: how the rows' tools come to it."""

    name: str
    sha256: str
    tools: str


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One template's row at the first difference: its token there (None behind the last one) and those around it.

    ``earlier`` and ``later`` are the labels of the next tokens on either side, None where there are no more.
    """

    token: Token | None = None
    before: list[Token] = []
    behind: list[Token] = []
    earlier: Label | None = None
    later: Label | None = None
    code: str | None = None
    detail: str | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A row that changes. ``position``: place, from 0, of the first token that differs; None if a side was rejected."""

    row_index: int
    example_id: str | None
    row_sha256: str
    kind: Kind
    position: int | None
    here: Side
    there: Side


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """``here`` is the run's template. ``counts`` has every kind; ``rows`` the first of the rows that change."""

    schema: str = "kiln.template-diff.v1"
    split: str
    here: TemplateName
    there: TemplateName
    rows_compared: int
    rows_changed: int
    counts: dict[Kind, int]
    rows: list[Difference]


class _Written(NamedTuple):
    """What admission wrote of a row: ids and spans if it was kept."""

    offered: Offered
    ids: list[int] | None
    spans: list[tuple[int, int]] | None


def differences(
    admitted: Admitted, other: Contract, plugins: Plugins, split: str, limit: int, progress: Progress = SILENT
) -> Differences:
    """Compares every row of a split. Raises KilnError KLN201 for a split that the run does not have."""
    if split not in admitted.inputs:
        known = ", ".join(admitted.inputs)
        raise KilnError("KLN201", f"the run has no rows of {split}", hint=f"its splits: {known}")
    counts: dict[Kind, int] = dict.fromkeys(WORDS, 0)
    shown: list[Difference] = []
    with ExitStack() as stack:
        inputs = open_again(admitted.config, admitted.run, plugins, other, admitted.manifest, stack)
        source = next(source for source in inputs if source.split == split)
        rows = admitted.manifest.counts[split]["rows_read"]
        task = stack.enter_context(progress.task(f"compare: {split}", rows, "rows"))
        for was, now in zip(_written(admitted, split), _judged(source, other, task, stack), strict=True):
            kind = _kind(was, now)
            counts[kind] += 1
            if kind not in EQUAL and len(shown) < limit:
                shown.append(_difference(admitted, other, source, was.offered, kind))
    changed = sum(count for kind, count in counts.items() if kind not in EQUAL)
    return Differences(
        split=split,
        here=_name(admitted.contract, source),
        there=_name(other, source),
        rows_compared=sum(counts.values()),
        rows_changed=changed,
        counts=counts,
        rows=shown,
    )


def _name(contract: Contract, source: RowsInput) -> TemplateName:
    mode = tools_mode(contract, prepared=source.ref is not None)
    return TemplateName(name=contract.choice.name, sha256=contract.choice.sha256, tools=mode)


def _judged(
    source: RowsInput, contract: Contract, task: Task, stack: ExitStack
) -> Iterator[AdmittedRow | RejectedDetail]:
    """The outcomes of a source's rows in row order."""
    job = Job([source], contract.admission(source.source_reasons))
    workers = stack.enter_context(Workers(job, worker_count([source], None)))
    for part in judged_parts(job, 0, workers):
        task.advance(part.rows)
        outcomes: list[AdmittedRow | RejectedDetail] = [*(row.unpacked() for row in part.kept), *part.rejected]
        yield from sorted(outcomes, key=lambda row: row.row_index)


def _written(admitted: Admitted, split: str) -> Iterator[_Written]:
    """What admission wrote of a split's rows, in row order."""
    offered = [row for row in trail.offered_rows(admitted.run, admitted.manifest) if row.split == split]
    tokens = trail.all_tokens(admitted.run, admitted.manifest, split)
    for row in sorted(offered, key=lambda row: row.row_index):
        yield _Written(row, *(next(tokens) if row.place is not None else (None, None)))


def _kind(was: _Written, now: AdmittedRow | RejectedDetail) -> Kind:
    if was.offered.fault is not None and was.offered.fault.code == CONTAMINATED:
        return "rejected_by_both"  # no template makes it another row
    if isinstance(now, RejectedDetail):
        if was.offered.fault is None:
            return "rejected_there"
        return "rejected_by_both" if was.offered.fault.code == now.code else "other_code"
    if was.ids is None:
        return "kept_there"
    if was.ids != now.input_ids:
        return "tokens"
    return "same" if was.spans == now.label_spans else "labels"


def _difference(admitted: Admitted, other: Contract, source: RowsInput, row: Offered, kind: Kind) -> Difference:
    incoming = admitted.row(row.split, row.row_index)
    here = outcome_of(admitted.contract, admitted.inputs[row.split], incoming)
    require_same_outcome(admitted, row, incoming, here)
    there = outcome_of(other, source, read_row(source, row.row_index))
    position = _first_difference(here.tokens, there.tokens) if here.fault is None and there.fault is None else None
    return Difference(
        row_index=row.row_index,
        example_id=row.example_id,
        row_sha256=row.row_sha256,
        kind=kind,
        position=position,
        here=_side(here, position),
        there=_side(there, position),
    )


def _first_difference(here: Sequence[Token], there: Sequence[Token]) -> int:
    pairs = zip(here, there, strict=False)
    found = (place for place, (a, b) in enumerate(pairs) if (a.id, a.label) != (b.id, b.label))
    return next(found, min(len(here), len(there)))


def _side(outcome: Outcome, position: int | None) -> Side:
    if position is None:
        fault = outcome.fault
        return Side(code=fault.code, detail=fault.detail) if fault is not None else Side()
    tokens, start, end = outcome.tokens, max(position - AROUND, 0), position + 1 + AROUND
    return Side(
        token=tokens[position] if position < len(tokens) else None,
        before=tokens[start:position],
        behind=tokens[position + 1 : end],
        earlier=tokens[start - 1].label if start else None,
        later=tokens[end].label if end < len(tokens) else None,
    )


def differences_page(found: Differences, *, colours: bool) -> Iterator[Piece]:
    """All of it, ready for ``terminal.styled``."""
    here, there = printable(found.here.name), printable(found.there.name)
    if here == there:
        here, there = "this", "the other"
    rows: list[list[object]] = [[f"{found.split}: rows compared", found.rows_compared]]
    rows += [["  " + WORDS[kind].format(there=there), count] for kind, count in found.counts.items() if count]
    yield f"{here} ({found.here.sha256[:19]}…) beside {there} ({found.there.sha256[:19]}…)\n", PLAIN
    if found.here.tools != found.there.tools:
        yield f"tools: {found.here.tools} under {here}, {found.there.tools} under {there}\n", PLAIN
    yield table(rows), PLAIN
    width = max(len(here), len(there))
    for row in found.rows:
        named = "  ".join(filter(None, (row.example_id, row.row_sha256)))
        words = WORDS[row.kind].format(there=there)
        at = f" from token {row.position} on" if row.position is not None else ""
        yield f"\n\n{found.split} row {row.row_index}  {printable(named)}: {words}{at}", PLAIN
        for name, side in ((here, row.here), (there, row.there)):
            yield f"\n  {name:<{width}}  ", PLAIN
            yield from _shown_side(side, "\n" + " " * (width + 4), colours)
    if found.rows_changed > len(found.rows):
        more = counted(found.rows_changed - len(found.rows), "more row changes", "more rows change")
        yield f"\n\n{more}; --limit shows more of them", PLAIN


def _shown_side(side: Side, indent: str, colours: bool) -> Iterator[Piece]:
    if side.code is not None:
        yield f"rejected: {printable(side.code)}: {printable(side.detail)}", PLAIN
        return
    if side.token is None and not side.before:
        yield "kept", PLAIN
        return
    yield from _one_line(side, colours)
    if side.token is None:
        yield f"{indent}no token: the row ends here", PLAIN
    else:
        yield f"{indent}{quoted(side.token.text)}, id {side.token.id}, {side.token.label}", PLAIN


def _one_line(side: Side, colours: bool) -> Iterator[Piece]:
    """The tokens of a side on one line, with an ellipsis for what is left out on either end."""
    tokens = [*side.before, *([side.token] if side.token else []), *side.behind]
    shown = [msgspec.structs.replace(token, text=printable(token.text, len(token.text) + 1)) for token in tokens]
    if side.earlier is not None:
        shown.insert(0, Token(id=-1, text="…", label=side.earlier))
    if side.later is not None:
        shown.append(Token(id=-1, text="…", label=side.later))
    yield from marked(shown, colours=colours)
