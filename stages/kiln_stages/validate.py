"""``kiln validate``: is this file what it claims to be? Prints each fault with its place and writes nothing.

Kinds: raw rows (by the rules of prepare), chat rows (``sft``), prepared examples, a config, a manifest, a run.
Reasons of policy (several calls, a query seen before) are notes: they say what prepare will drop, not what is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
import typer

from kiln_cli import strict_json
from kiln_cli.chat import require_structure
from kiln_cli.config import SCHEMA as CONFIG_SCHEMA
from kiln_cli.config import DataConfig, DatasetConfig, load_config
from kiln_cli.errors import KilnError, RowFault, not_built
from kiln_cli.files import open_input, read_bounded
from kiln_cli.lines import LineReader
from kiln_cli.manifests import DOCUMENT_LIMIT, MANIFEST_NAMES, manifest_path
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.receipts import MANIFEST_SCHEMA, RECEIPT_TYPE
from kiln_cli.records import PREPARED_SCHEMA, PreparedExample, Record
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.admission import chat_rows
from kiln_stages.claims import Claim, data_claims, file_claims, manifest_claims
from kiln_stages.screening import Drop, Screen
from kiln_stages.sources import first_object, json_lines, open_rows
from kiln_stages.transports import open_plain

Kind = Literal["raw", "sft", "prepared", "config", "manifest"]
KINDS: tuple[Kind, ...] = ("raw", "sft", "prepared", "config", "manifest")
# Reasons of policy: the row is sound, prepare will not use it.
POLICY = ("multi_call_answer", "duplicate_query")
EXCERPT = 60


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fault or note. ``line`` and ``column`` count from 1 (0: the whole file); columns are bytes of the line."""

    file: str
    line: int = 0
    column: int = 0
    reason: str
    detail: str
    pointer: str = ""
    excerpt: str = ""
    note: bool = False

    def text(self) -> str:
        place = ":".join([self.file, *(str(number) for number in (self.line, self.column) if number)])
        kind = " (note)" if self.note else ""
        where = f" at {self.pointer}" if self.pointer else ""
        return f"{place}: {self.reason}{kind}{where}: {self.detail}" + (f"\n{self.excerpt}" if self.excerpt else "")


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one file was taken for, what was looked at, and what was found (at most ``max_faults`` of it listed)."""

    file: str
    kind: str
    why: str
    rows: int
    faults: int
    notes: int
    findings: list[Finding]


def command(
    files: Annotated[list[Path], typer.Argument(help="Files, or run directories.")],
    kind: Annotated[
        str | None, typer.Option("--kind", help=f"One of {', '.join(KINDS)}; recognised if left out.")
    ] = None,
    source: Annotated[str, typer.Option("--source", help="The rows' shape, for raw and sft.")] = "auto",
    max_faults: Annotated[int, typer.Option("--max-faults", min=1, help="Findings printed for each file.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check files against the contract of their kind. Exit code 1 where there is a fault."""
    reports = run(files, load_plugins(), kind=kind, source=source, max_faults=max_faults)
    if json:
        terminal.json_data({"schema": "kiln.validation.v1", "files": reports})
    else:
        for report in reports:
            terminal.data("\n".join([*(finding.text() for finding in report.findings), _summary(report)]))
    faults = sum(report.faults for report in reports)
    if faults:
        terminal.json = False  # the report is the one JSON object of this command
        raise KilnError("KLN105", f"{faults} faults in {len(reports)} files")


def run(
    files: Iterable[Path], plugins: Plugins, *, kind: str | None = None, source: str = "auto", max_faults: int = 20
) -> list[FileReport]:
    """One report a file. Raises KilnError KLN201 for an unknown kind, KLN204/212 for a file that nothing can read."""
    if kind is not None and kind not in KINDS:
        raise KilnError("KLN201", f"--kind {printable(kind)!r} is none of: {', '.join(KINDS)}", hint="leave it out")
    return [_report(path, plugins, kind, source, max_faults) for path in files]


def _summary(report: FileReport) -> str:
    more = report.faults + report.notes - len(report.findings)
    hidden = f" ({more} more not shown: --max-faults)" if more > 0 else ""
    return (
        f"{report.file}: {report.kind} ({report.why}): {report.rows} rows, "
        f"{report.faults} faults, {report.notes} notes{hidden}"
    )


def _report(path: Path, plugins: Plugins, kind: str | None, source: str, max_faults: int) -> FileReport:
    if path.is_dir():
        taken, why, findings = "run", "a directory", _run_directory(path)
    else:
        taken, why = (kind, "given") if kind is not None else _recognise(path, plugins)
        findings = _FINDERS[taken](path, plugins, source)
    shown: list[Finding] = []
    rows = faults = notes = 0
    for finding in findings:
        if finding is None:
            rows += 1
            continue
        faults += not finding.note
        notes += finding.note
        if len(shown) < max_faults:
            shown.append(finding)
    return FileReport(file=printable(path), kind=taken, why=why, rows=rows, faults=faults, notes=notes, findings=shown)


def _recognise(path: Path, plugins: Plugins) -> tuple[str, str]:
    """What a file is taken for and why. Raises KilnError KLN212 where nothing fits."""
    if path.suffix == ".toml":
        return "config", "its name ends in .toml"
    document = _whole_document(path)
    if document is not None:
        if document.get("schema") == CONFIG_SCHEMA:
            return "config", f"schema is {CONFIG_SCHEMA}"
        if document.get("schema") == MANIFEST_SCHEMA:
            return "manifest", f"schema is {MANIFEST_SCHEMA}"
        if document.get("receipt_type") == RECEIPT_TYPE:
            raise not_built("validate for train receipts", "use `kiln verify-receipt`")
    with TemporaryDirectory() as scratch, open_plain(path, Path(scratch)) as plain:
        sample = first_object(plain)
    if sample is not None and sample.get("schema_version") == PREPARED_SCHEMA:
        return "prepared", f"schema_version is {PREPARED_SCHEMA}"
    for source in plugins.sources:
        if sample is not None and (why := source.recognise(sample)) is not None:
            return ("raw" if source.yields == "tool_calls" else "sft"), f"{source.name}: {why}"
    raise KilnError("KLN212", f"{printable(path)} fits no kind", hint=f"name one with --kind: {', '.join(KINDS)}")


def _whole_document(path: Path) -> dict[str, Any] | None:
    """A pretty-printed JSON object, as documents of evidence are; None for JSON lines and all else."""
    with open_input(path) as stream:
        if stream.read(2) != b"{\n":
            return None
    try:
        return strict_json.parse_object(read_bounded(path, DOCUMENT_LIMIT))
    except (strict_json.JsonFault, KilnError):
        return None


def _raw(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    ids: dict[str, int] = {}
    queries: dict[bytes, int] = {}
    with (
        TemporaryDirectory() as scratch,
        open_rows(path, source, plugins.sources, "tool_calls", Path(scratch)) as (plain, choice),
    ):
        screen = Screen(DatasetConfig(path=path.name), choice.source, plugins.in_force(()), DataConfig())
        for record in json_lines(LineReader(plain.stream), elements=plain.elements):
            yield None
            screened = screen.screen(record)
            drop = screened.drop
            if screened.example_id and ids.setdefault(screened.example_id, record.line) != record.line:
                drop = Drop(
                    "duplicate_example_id", f"id {screened.example_id!r} stands in line {ids[screened.example_id]}"
                )
            elif drop is None and queries.setdefault(screened.query, record.line) != record.line:
                drop = Drop("duplicate_query", f"the same query as in line {queries[screened.query]}", "/query")
            if drop is not None:
                yield _of_row(path, record, drop)


def _sft(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    with (
        TemporaryDirectory() as scratch,
        open_rows(path, source, plugins.sources, "chat", Path(scratch)) as (
            plain,
            choice,
        ),
    ):
        records = json_lines(LineReader(plain.stream), elements=plain.elements)
        for incoming in chat_rows(records, choice.source):
            yield None
            try:
                if incoming.row is None:
                    raise incoming.fault or RowFault("invalid_json", "the row is empty")
                require_structure(incoming.row)
            except RowFault as fault:
                drop = Drop(fault.reason, fault.detail, fault.pointer, fault.offset)
                yield _of_row(path, incoming.record, drop)


def _prepared(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    with open_input(path) as stream:
        for record in json_lines(LineReader(stream)):
            yield None
            try:
                msgspec.json.decode(record.text or b"", type=PreparedExample)
            except msgspec.DecodeError as error:
                yield _of_row(path, record, Drop("schema", f"{error}; expected {PREPARED_SCHEMA}"))


def _config(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    try:
        load_config(path)
    except KilnError as error:
        details = error.details if isinstance(error.details, dict) else {}
        for fault in details.get("faults", [error.message]):
            yield Finding(file=printable(path), reason=error.code, detail=printable(fault))


def _manifest(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    stage = next((stage for stage, name in MANIFEST_NAMES.items() if name == path.name), None)
    if stage is None:
        raise KilnError(
            "KLN212", f"{printable(path.name)} is no manifest's name", hint=", ".join(MANIFEST_NAMES.values())
        )
    yield from _failing(path, manifest_claims(path.parent, stage, None))


def _run_directory(path: Path) -> Iterator[Finding | None]:
    """Each stage's manifest that is there, the files it vouches for, and how one stage's evidence fits the next."""
    if not any(manifest_path(path, stage).exists() for stage in MANIFEST_NAMES):
        raise KilnError("KLN212", f"{printable(path)} is no run directory", hint="it holds no manifest")
    if not manifest_path(path, "admit").exists():
        yield from _failing(path, data_claims(path, None))
        return
    yield from _failing(path, _admit_claims(path))


def _admit_claims(path: Path) -> Iterator[Claim]:
    manifest = yield from manifest_claims(path, "admit", None)
    if manifest is not None:
        yield from file_claims(path, manifest)
        if manifest.previous is not None:
            yield from data_claims(path, manifest.previous)


def _failing(path: Path, claims: Iterable[Claim]) -> Iterator[Finding | None]:
    for claim in claims:
        yield None
        if claim.status != "holds":
            unknown = claim.status == "not checkable here"
            yield Finding(file=printable(path), reason=claim.name, detail=claim.detail, note=unknown)


_FINDERS = {"raw": _raw, "sft": _sft, "prepared": _prepared, "config": _config, "manifest": _manifest}


def _of_row(path: Path, record: Record, drop: Drop) -> Finding:
    column = _column(record, drop)
    return Finding(
        file=printable(path),
        line=record.line,
        column=column,
        reason=drop.reason,
        detail=printable(drop.detail),
        pointer=drop.pointer,
        excerpt=_excerpt(record, column),
        note=drop.reason in POLICY,
    )


def _column(record: Record, drop: Drop) -> int:
    """The byte of the line, counted from 1, where the fault lies: its offset, else the field's key, else the start."""
    if record.text is None:
        return 0
    if drop.offset >= 0:
        return drop.offset + 1
    field = drop.pointer.split("/")[1] if drop.pointer else ""
    place = record.text.find(f'"{field}"'.encode()) if field else -1
    return place + 1 if place >= 0 else 1


def _excerpt(record: Record, column: int) -> str:
    """The part of the line around the fault and a caret below it; control characters shown as escapes."""
    if record.text is None or not column:
        return ""
    start = max(column - 1 - EXCERPT // 3, 0)
    before = printable(record.text[start : column - 1].decode("utf-8", "replace"), EXCERPT)
    after = printable(record.text[column - 1 : start + EXCERPT].decode("utf-8", "replace"), EXCERPT)
    return f"    {before}{after}\n    {' ' * len(before)}^"
