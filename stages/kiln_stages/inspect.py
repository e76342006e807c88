"""``kiln inspect``: a row as it is trained on, its text, labels and ids; or the rows that another template changes.

The row is rendered and tokenized again and held to what admission wrote: what is shown is what was admitted, or the
command refuses. Rejected rows are shown too, with their code and as much as the template prints of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kiln_cli.errors import Exit, KilnError
from kiln_cli.files import write_file
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import SILENT, Progress, terminal
from kiln_cli.text import printable
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.admitting.model_files import TemplateChoice
from kiln_stages.seeing import trail
from kiln_stages.seeing.differences import Differences, differences, differences_page
from kiln_stages.seeing.html_page import html_page
from kiln_stages.seeing.page import Header, row_page
from kiln_stages.seeing.selectors import Selector, parse, select
from kiln_stages.seeing.shown_rows import TRAINED, Outcome, Token, open_admitted, outcome_of, require_same_outcome
from kiln_stages.seeing.trail import Offered

Split = Literal["corpus", "heldout"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    detail: str
    pointer: str


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A row as admitted. ``spans``: trained characters of ``text``, ends excluded; token texts, joined, are ``text``.

    ``element``: the row is part of something larger (an array, a table), and ``line`` counts the parts.
    ``rejected`` is None for a kept row. ``text`` is None where the template prints nothing for a rejected row.
    ``proven``: the labels are; those of a rejected row may not be. ``same_as``: other rows of the same hash.
    """

    schema: str = "kiln.inspection.v1"
    split: str
    row_index: int
    path: str
    line: int
    element: bool
    example_id: str | None
    row_sha256: str
    template: str
    template_sha256: str
    rejected: Fault | None
    notes: list[str]
    same_as: list[int]
    text: str | None
    spans: list[tuple[int, int]]
    proven: bool
    tokens: list[Token]


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run that is admitted.")],
    row: Annotated[
        str | None,
        typer.Argument(metavar="ROW", help="A row's number in the split, its hash or example id, or line:N."),
    ] = None,
    split: Annotated[
        Split | None, typer.Option("--split", help="Where row numbers count; corpus if not given.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Add a table of all tokens with their ids.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the row as an HTML file.")] = None,
    diff: Annotated[
        str | None, typer.Option("--diff", help="Another template, by name or file; exit 1 if it changes a row.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="With --diff: rows that are shown.")] = 10,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show a row as it is trained on: its text, which of it is trained, and its token ids."""
    if (row is None) == (diff is None) or (diff is not None and (ids or html is not None)):
        raise KilnError("KLN201", "give a ROW, or --diff TEMPLATE without one", hint="kiln inspect RUN 1")
    if diff is not None:
        if Path(diff).is_file():
            diff = str(Path(diff).resolve())  # else it is a name, or a path that counts from the config's directory
        found = run_differences(
            run_directory, diff, load_plugins(), split=split or "corpus", limit=limit, progress=terminal
        )
        if json:
            terminal.json_data(found)
        else:
            terminal.styled(differences_page(found, colours=terminal.colours))
        if found.rows_changed:
            raise typer.Exit(Exit.FAULTS_FOUND)
        return
    result = run(run_directory, row or "", load_plugins(), split=split)
    if html is not None:
        write_file(html, html_page(header(result), result.tokens, ids=ids))
        terminal.say(f"written: {printable(html)}")
    if json:
        terminal.json_data(result)
    elif html is None:
        terminal.styled(row_page(header(result), result.tokens, colours=terminal.colours, ids=ids))
        terminal.say(f"where it came from: kiln why {printable(run_directory)} {printable(result.row_sha256)}")


def run(run_directory: Path, text: str, plugins: Plugins, *, split: Split | None = None) -> Inspection:
    """One row by number, hash or id.

    Raises KilnError KLN106 where there is no such row, KLN201 where the text names several, KLN207 where the row is not
    what was admitted any more, and as admission does for what is missing.
    """
    with ExitStack() as stack:
        admitted = open_admitted(run_directory, plugins, stack)
        selector = parse(text)
        if selector.number is not None:
            selector = Selector(text, row=selector.number)
        by_place = selector.line is not None or selector.row is not None
        wanted = split or ("corpus" if by_place else None)
        offered = (row for row in trail.offered_rows(run_directory, admitted.manifest) if wanted in (None, row.split))
        searched = [f"{name}: {source.path}" for name, source in admitted.inputs.items() if wanted in (None, name)]
        if admitted.manifest.previous is not None:
            searched.append("not the rows that prepare dropped or left unused: `kiln why` tells of those")
        rows = select(selector, offered, searched).rows
        incoming = admitted.row(rows[0].split, rows[0].row_index)
        outcome = outcome_of(admitted.contract, admitted.inputs[rows[0].split], incoming)
        require_same_outcome(admitted, rows[0], incoming, outcome)
        if rows[0].fault is not None and outcome.fault is None:
            outcome = msgspec.structs.replace(outcome, fault=rows[0].fault)  # it met a held-out row
        choice = admitted.contract.choice
        return _inspection(rows, outcome, incoming.record.element, choice)


def run_differences(
    run_directory: Path,
    template: str,
    plugins: Plugins,
    *,
    split: Split = "corpus",
    limit: int = 10,
    progress: Progress = SILENT,
) -> Differences:
    """The rows of a split that change under another template. Raises KilnError as :func:`run` does."""
    with ExitStack() as stack:
        admitted = open_admitted(run_directory, plugins, stack)
        other = build_contract(admitted.config, load_terms(admitted.config, plugins, template))
        return differences(admitted, other, plugins, split, limit, progress)


def header(shown: Inspection) -> Header:
    """The facts above a row."""
    facts = [("from", f"{shown.path}, {'row' if shown.element else 'line'} {shown.line}")]
    facts += [("example id", shown.example_id)] if shown.example_id is not None else []
    facts += [("hash", shown.row_sha256), ("template", f"{shown.template} ({shown.template_sha256[:19]}…)")]
    if shown.rejected is not None:
        fault = shown.rejected
        where = f" at {fault.pointer}" if fault.pointer else ""
        facts.append(("rejected", f"{fault.code}: {fault.detail}{where}"))
    facts.append(("tokens", _tokens(shown)))
    facts += [("note", note) for note in shown.notes]
    facts += [("same row", ", ".join(map(str, shown.same_as)))] if shown.same_as else []
    return Header(title=f"{shown.split} row {shown.row_index}", facts=facts)


def _tokens(shown: Inspection) -> str:
    if not shown.tokens:
        return "none: the template does not print the row"
    supervised = sum(token.label == TRAINED for token in shown.tokens)
    if shown.proven:
        return f"{len(shown.tokens)}, {supervised} supervised"
    return f"{len(shown.tokens)}, " + (f"{supervised} labelled, not proven" if shown.spans else "labels not found")


def _inspection(rows: list[Offered], outcome: Outcome, element: bool, template: TemplateChoice) -> Inspection:
    row, fault = rows[0], outcome.fault
    return Inspection(
        split=row.split,
        row_index=row.row_index,
        path=row.path,
        line=row.line,
        element=element,
        example_id=row.example_id,
        row_sha256=row.row_sha256,
        template=template.name,
        template_sha256=template.sha256,
        rejected=Fault(code=fault.code, detail=fault.detail, pointer=fault.pointer) if fault is not None else None,
        notes=list(outcome.notes),
        same_as=[other.row_index for other in rows[1:]],
        text=outcome.text,
        spans=list(outcome.spans),
        proven=outcome.proven,
        tokens=outcome.tokens,
    )
