"""``kiln why``: where a row went and why, from the raw file through every stage.

The raw files are read again and held to the manifest of the stage that read them first; what became of the row is told
from evidence, each file of it checked against the manifest that vouches for it. Where a raw file is gone or changed,
evidence alone is asked, and the account says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Annotated

import msgspec
import typer

from kiln_cli.manifests import manifest_path, read_manifest
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.distilling.admitted import require_conversations
from kiln_stages.seeing.journey import (
    AdmitPart,
    FirstRow,
    Journey,
    PreparedRun,
    PreparePart,
    RawPart,
    TrainPart,
    find_given,
)
from kiln_stages.seeing.raw_rows import open_raw_files
from kiln_stages.seeing.selectors import parse

TABLES = ("parquet", "datasets directory")  # their rows have no bytes of their own


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` rows go by the name; the first of them are in ``rows``."""

    schema: str = "kiln.why.v1"
    asked: str
    count: int
    rows: list[Journey]


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    row: Annotated[
        str,
        typer.Argument(
            metavar="ROW", help="A hash or an example id, or the beginning of one; or line:N, row:N, FILE:N, N."
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell where a row went and why, from the raw file through every stage."""
    result = run(run_directory, row, load_plugins())
    if json:
        terminal.json_data(result)
    else:
        terminal.data(account(result))
        if (sha256 := _admitted(result)) is not None:
            terminal.say(f"see it: kiln inspect {printable(run_directory)} {sha256}")


def run(run_directory: Path, text: str, plugins: Plugins) -> Why:
    """Raises KilnError KLN106 where no row goes by the name, KLN201 where several do, KLN206 for a run without a
    manifest, KLN207 for evidence that changed."""
    selector = parse(text)
    admit = read_manifest(run_directory, AdmitManifest) if manifest_path(run_directory, "admit").exists() else None
    if admit is not None:
        require_conversations(admit, "kiln why")
    if admit is not None and admit.previous is None:
        found = find_given(run_directory, admit, selector)
    else:
        prepare = read_manifest(run_directory, PrepareManifest)
        with ExitStack() as stack:
            files = open_raw_files(run_directory, prepare, plugins, stack)
            found = PreparedRun(run_directory, prepare, admit, files).find(selector)
    return Why(asked=text, count=found.count, rows=found.rows)


def _admitted(why: Why) -> str | None:
    """The hash under which the first row can be inspected, if admission has read it."""
    parts = (journey.admit for journey in why.rows if journey.admit is not None)
    return next((printable(part.row_sha256) for part in parts if part.row_sha256 is not None), None)


def account(why: Why) -> str:
    """The stages of each row, a few lines a stage."""
    blocks = [f"{why.count} rows go by this name" + (", the first of them:" if why.count > len(why.rows) else ":")]
    blocks = blocks if why.count > 1 else []
    return "\n\n".join([*blocks, *(_block(journey) for journey in why.rows)])


def _block(journey: Journey) -> str:
    stages: list[tuple[str, list[str]]] = [("raw", list(_raw(journey.raw)))]
    if journey.prepare is not None:
        stages.append(("prepare", list(_prepare(journey.prepare))))
    if journey.admit is not None:
        stages.append(("admit", list(_admit(journey.admit))))
    if journey.train is not None:
        stages.append(("train", list(_train(journey.train))))
    raw = journey.raw
    name = journey.example_id or f"{PurePath(raw.path).name}, row {raw.row_index}"
    lines = [printable(name)]
    for stage, (first, *rest) in stages:
        lines += [f"  {stage:<9}{first}", *(f"  {'':<9}{line}" for line in rest)]
    return "\n".join(lines)


def _raw(part: RawPart) -> Iterator[str]:
    yield printable(part.path) + _place(part)
    if part.row_sha256 is not None:
        yield part.row_sha256
    if part.excerpt is not None:
        excerpt = part.excerpt if part.packing == "lines" else " ".join(part.excerpt.split())
        yield printable(excerpt, 2 * len(excerpt) + 1)
    if part.fault:
        yield f"the file is not read: {printable(part.fault)}"


def _place(part: RawPart) -> str:
    """Line, row and bytes, as far as they are known and mean something."""
    place = f", line {part.line}" if part.line is not None else ""
    if part.row_index is not None and part.row_index != part.line:
        place += f" (row {part.row_index})" if place else f", row {part.row_index}"
    if part.offset is not None and part.length is not None and part.packing not in TABLES:
        place += f", bytes {part.offset} to {part.offset + part.length}"
    return place + (f" ({part.packing})" if part.packing != "lines" else "")


def _prepare(part: PreparePart) -> Iterator[str]:
    if part.outcome == "dropped":
        yield f"dropped: {printable(part.reason)}: {printable(part.detail)}"
        if part.pointer:
            yield f"at {printable(part.pointer)}"
        if part.first is not None:
            yield f"the earlier row: {_first(part.first)}"
    elif part.outcome == "unused":
        yield "unused: a sound row, and no split had room for it"
    else:
        yield f"kept: data/{part.split}.jsonl, row {part.number}"
        if part.pair_of is not None:
            yield f"paired with {printable(part.pair_of)}"


def _first(first: FirstRow) -> str:
    place = f"line {first.line}" if first.line is not None else f"row {first.row_index}"
    return f"{printable(first.path)}, {place}" + (f", {printable(first.example_id)}" if first.example_id else "")


def _admit(part: AdmitPart) -> Iterator[str]:
    if part.outcome == "kept":
        yield f"kept: {part.split} row {part.row_index}, {part.tokens} tokens, {part.supervised_tokens} supervised"
    elif part.outcome == "rejected":
        yield f"rejected: {printable(part.code)}: {printable(part.detail)}"
        yield f"{part.split} row {part.row_index}, in the receipt as {part.reason}"
        if part.pointer:
            yield f"at {printable(part.pointer)}"
    elif part.outcome == "not offered":
        yield "not offered: test rows are kept for evaluation"
    elif part.outcome == "stale":
        yield f"not told: {part.detail}"
    else:
        yield "not run yet"
    if part.row_sha256 is not None:
        yield part.row_sha256


def _train(part: TrainPart) -> Iterator[str]:
    if part.outcome == "trained":
        done = sum(step.loss is not None for step in part.steps)
        yield f"adapter {part.adapter}: {done} of {len(part.steps)} visits" if part.steps else "not visited yet"
        for step in part.steps:
            loss = f"loss {step.loss:.4f}" if step.loss is not None else "still to come"
            yield f"epoch {step.epoch}, step {step.step}: {loss}"
    elif part.outcome == "held out":
        yield f"adapter {part.adapter}: never trained on; held-out rows measure the loss"
    elif part.outcome == "stale":
        yield f"not told: {printable(part.detail)}"
    else:
        yield "not run yet"
