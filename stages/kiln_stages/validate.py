"""``kiln validate``: is this file what it claims to be? Prints each fault with its place and writes nothing.

Kinds: raw rows (by the rules of prepare), chat rows (``sft``), prepared examples, a config, a manifest, a train or an
ingestion receipt, a checkpoint, a run, a named data set, a scored corpus (``opd``), a registry of
teachers. Receipts, checkpoints and a ``split.json`` are held against themselves alone, with nothing around them; a data
set's directory against its rows; a scored corpus without a student, so that its tokens are left to admission.
Reasons of policy (several calls, a query seen before) are notes: they say what prepare will drop, not what is broken.
So are oddities that prepare keeps: a query without a visible character or with U+0000, a tool with a blank name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, BinaryIO, Literal, get_args

import msgspec
import typer

from kiln_cli import strict_json
from kiln_cli.chat import require_structure
from kiln_cli.config import SCHEMA as CONFIG_SCHEMA
from kiln_cli.config import DataConfig, DatasetConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError, RowFault, not_built
from kiln_cli.files import open_input, read_bounded
from kiln_cli.lines import BOM, TRIMMED, LineReader
from kiln_cli.manifests import DOCUMENT_LIMIT, RECEIPT_NAME, manifest_path, parse_receipt, read_document
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.receipts import INGESTION_SCHEMA, RECEIPT_TYPE, IngestionReceipt
from kiln_cli.records import PREPARED_SCHEMA, PreparedExample, Record
from kiln_cli.request_form import is_request
from kiln_cli.stage_manifests import MANIFEST_NAMES, MANIFEST_SCHEMA, MANIFESTS, AdmitManifest
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import chat_rows
from kiln_stages.datasets import checking, entry
from kiln_stages.distilling.checking import corpus_faults
from kiln_stages.distilling.corpus import first_record
from kiln_stages.distilling.ingestion import SCORED_INGESTION_SCHEMA, ScoredIngestion
from kiln_stages.distilling.registry import FILE_NAME as TEACHERS_NAME
from kiln_stages.distilling.registry import SCHEMA as TEACHERS_SCHEMA
from kiln_stages.distilling.registry import read_registry
from kiln_stages.evidence.claims import Claim, data_claims, file_claims, manifest_claims
from kiln_stages.evidence.receipt_claims import receipt_claims
from kiln_stages.preparing.screening import POSITIONAL, Drop, Screen
from kiln_stages.reading.ranges import read_text
from kiln_stages.reading.sources import STDIN, has_rows, json_lines, open_rows, sample_objects
from kiln_stages.reading.transports import open_plain
from kiln_stages.training.checkpoint import MANIFEST, NAME, list_checkpoints, load_checkpoint
from kiln_stages.training.checkpoint_manifest import MANIFEST_TYPE

Kind = Literal[
    "raw", "sft", "prepared", "config", "manifest", "receipt", "ingestion", "checkpoint", "dataset", "opd", "teachers"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
EMPTY = "empty"  # what a file without rows is taken for; nothing else is
# Reasons of policy: the row is sound, prepare will not use it.
POLICY = ("multi_call_answer", "duplicate_query")
ODDITIES = ("invisible_query", "null_character", "blank_tool_name")
EXCERPT = 60
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_COLON = re.compile(rb"[ \t\n\r]*:")


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
    """What one file was taken for and what was found; listed are at most ``max_faults`` faults and as many notes."""

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
    error = _verdict(reports)
    if error is not None:
        terminal.json = False  # the report is the one JSON object of this command
        raise error


def _verdict(reports: list[FileReport]) -> KilnError | None:
    faults = sum(report.faults for report in reports)
    if faults:
        return KilnError("KLN105", f"{counted(faults, 'fault', 'faults')} in {counted(len(reports), 'file', 'files')}")
    if all(report.kind == EMPTY for report in reports):
        held = "the file holds no row" if len(reports) == 1 else f"none of {len(reports)} files holds a row"
        return KilnError("KLN107", held, hint="every line is blank")
    return None


def run(
    files: Iterable[Path], plugins: Plugins, *, kind: str | None = None, source: str = "auto", max_faults: int = 20
) -> list[FileReport]:
    """One report a file. Raises KilnError KLN201 for an unknown kind, KLN204/212 for a file that nothing can read."""
    if kind is not None and kind not in KINDS:
        raise KilnError("KLN201", f"--kind {printable(kind)!r} is none of: {', '.join(KINDS)}", hint="leave it out")
    files = list(files)
    if Path(STDIN) in files:
        raise not_built("validate of standard input", "write it to a file first")
    return [_report(path, plugins, kind, source, max_faults) for path in files]


def _summary(report: FileReport) -> str:
    more = report.faults + report.notes - len(report.findings)
    hidden = f" ({more} more not shown: --max-faults)" if more > 0 else ""
    return (
        f"{report.file}: {report.kind} ({report.why}): {counted(report.rows, 'row', 'rows')}, "
        f"{counted(report.faults, 'fault', 'faults')}, {counted(report.notes, 'note', 'notes')}{hidden}"
    )


def _report(path: Path, plugins: Plugins, kind: str | None, source: str, max_faults: int) -> FileReport:
    if path.is_dir() and kind is None and (NAME.match(path.name) or (path / MANIFEST).is_file()):
        taken, why, findings = "checkpoint", "a directory with a checkpoint's name or manifest", _checkpoint(path)
    elif path.is_dir() and kind == "checkpoint":
        taken, why, findings = kind, "given", _checkpoint(path)
    elif path.is_dir() and (kind == "dataset" or (kind is None and entry.is_dataset(path))):
        taken, why, findings = "dataset", "a directory with a data set's manifest", _dataset(path)
    elif path.is_dir():
        taken, why, findings = "run", "a directory", _run_directory(path)
    else:
        taken, why = (kind, "given") if kind is not None else _recognise(path, plugins)
        findings = iter(()) if taken == EMPTY else _FINDERS[taken](path, plugins, source)
    shown: list[Finding] = []
    rows = faults = notes = 0
    room = {False: max_faults, True: max_faults}  # notes never crowd out faults
    for finding in findings:
        if finding is None:
            rows += 1
            continue
        faults += not finding.note
        notes += finding.note
        if room[finding.note]:
            room[finding.note] -= 1
            shown.append(finding)
    return FileReport(file=printable(path), kind=taken, why=why, rows=rows, faults=faults, notes=notes, findings=shown)


def _recognise(path: Path, plugins: Plugins) -> tuple[str, str]:
    """What a file is taken for and why. Raises KilnError KLN212 where nothing fits."""
    if path.suffix == ".toml":
        return "config", "its name ends in .toml"
    if entry.is_split(path):
        return "dataset", f"schema is {entry.SPLIT_SCHEMA}"
    document = _whole_document(path)
    if document is not None:
        if document.get("schema") in (entry.MANIFEST_SCHEMA, entry.IDENTITY_SCHEMA):
            return "dataset", f"schema is {document['schema']}"
        if document.get("schema") == CONFIG_SCHEMA:
            return "config", f"schema is {CONFIG_SCHEMA}"
        if document.get("receipt_type") == RECEIPT_TYPE:
            return "receipt", f"receipt_type is {RECEIPT_TYPE}"
        if path.suffix == ".json" and is_request(document) and "messages" not in document:
            return "config", "it is a request: a source of rows and their settings"
        if document.get("schema") == MANIFEST_SCHEMA:
            return "manifest", f"schema is {MANIFEST_SCHEMA}"
        if document.get("schema") in (INGESTION_SCHEMA, SCORED_INGESTION_SCHEMA):
            return "ingestion", f"schema is {document['schema']}"
        if document.get("manifest_type") == MANIFEST_TYPE:
            return "checkpoint", f"manifest_type is {MANIFEST_TYPE}"
        if document.get("schema") == TEACHERS_SCHEMA:
            return "teachers", f"schema is {TEACHERS_SCHEMA}"
    with open_input(path) as stream:
        record = first_record(stream)
    if record is not None and record.is_manifest:
        return "opd", "its first record is a teacher's manifest line"
    with TemporaryDirectory() as scratch, open_plain(path, Path(scratch)) as plain:
        samples = list(sample_objects(plain))
        if not samples and not has_rows(plain):
            return EMPTY, "every line of it is blank"
    for sample in samples:
        if "teacher_tokens" in sample:
            return "opd", "its rows have teacher_tokens"
        if sample.get("schema_version") == PREPARED_SCHEMA:
            return "prepared", f"schema_version is {PREPARED_SCHEMA}"
        if (fitting := _rows_kind(sample, plugins)) is not None:
            return fitting
    raise KilnError("KLN212", f"{printable(path)} fits no kind", hint=f"name one with --kind: {', '.join(KINDS)}")


def _rows_kind(sample: dict[str, Any], plugins: Plugins) -> tuple[str, str] | None:
    """Which kind of rows a row is of, and why. A conversation with tools may be both; it is taken for chat rows."""
    fitting = [(source, why) for source in plugins.sources if (why := source.recognise(sample)) is not None]
    chat = [(source, why) for source, why in fitting if source.yields == "chat"]
    if not fitting:
        return None
    source, why = (chat or fitting)[0]
    raw = [other.name for other, _ in fitting if other.yields == "tool_calls"]
    also = f"; prepare reads it as {raw[0]}: --kind raw" if chat and raw else ""
    return ("sft" if chat else "raw"), f"{source.name}: {why}{also}"


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
        dataset, reasons = DatasetConfig(path=path.name), plugins.in_force(())
        screen = Screen(dataset, choice.source, reasons, DataConfig())
        order = {reason.name: number for number, reason in enumerate(reasons)}
        for record in json_lines(LineReader(plain.stream), elements=plain.elements):
            yield None
            screened = screen.screen(record)
            drop, name = screened.drop, screened.example_id
            if name == POSITIONAL:
                name = f"{dataset.dataset_id}:{record.row_index}"
            earlier = record.line if name is None else ids.setdefault(name, record.line)
            # A fault that comes before in the declared order stays the row's reason.
            open_to_it = drop is None or order.get(drop.reason, -1) > order["duplicate_example_id"]
            if earlier != record.line and open_to_it:
                drop = Drop("duplicate_example_id", f"id {name!r} stands in line {earlier}")
            elif drop is None and queries.setdefault(screened.query, record.line) != record.line:
                drop = Drop("duplicate_query", f"the same query as in line {queries[screened.query]}", "/query")
            for found in [drop] if drop is not None else _oddities(screen.example(record, "", None, "", "").example):
                yield _of_row(path, plain.stream, record, found)


def _oddities(example: PreparedExample) -> Iterator[Drop]:
    """What prepare keeps and a person may not have meant."""
    if not any(unicodedata.category(char)[0] in "LMNPS" for char in example.query):
        yield Drop("invisible_query", "no character of the query is visible", "/query")
    if "\0" in example.query:
        yield Drop("null_character", "the query holds U+0000", "/query")
    for number, tool in enumerate(example.tools, start=1):
        if not tool.name.strip():
            yield Drop("blank_tool_name", f"tool {number}: the name is white space", "/tools")


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
                yield _of_row(path, plain.stream, incoming.record, drop)


def _prepared(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    with open_input(path) as stream:
        for record in json_lines(LineReader(stream)):
            yield None
            try:
                msgspec.json.decode(record.text or b"", type=PreparedExample)
            except msgspec.DecodeError as error:
                yield _of_row(path, stream, record, Drop("schema", f"{error}; expected {PREPARED_SCHEMA}"))


def _config(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    try:
        load_config(path)
    except KilnError as error:
        details = error.details if isinstance(error.details, dict) else {}
        for fault in details.get("faults", [error.message]):
            yield Finding(file=printable(path), reason=error.code, detail=printable(fault))


def _manifest(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    kind = next((kind for kind in MANIFESTS if MANIFEST_NAMES[kind.STAGE] == path.name), None)
    if kind is None:
        raise KilnError(
            "KLN212", f"{printable(path.name)} is no manifest's name", hint=", ".join(MANIFEST_NAMES.values())
        )
    yield from _failing(path, manifest_claims(path.parent, kind, None))


def _receipt(path: Path, plugins: Plugins | None = None, source: str = "") -> Iterator[Finding | None]:
    """A train receipt against itself; its files are verify-receipt's to check."""
    try:
        receipt = parse_receipt(path)
    except KilnError as error:
        yield None
        yield Finding(file=printable(path), reason=error.code, detail=error.message)
        return
    yield from _failing(path, receipt_claims(receipt))


def _ingestion(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    """An ingestion receipt: its form, then every contradiction in it."""
    yield None
    try:
        receipt = _read_ingestion(path)
    except KilnError as error:
        yield Finding(file=printable(path), reason=error.code, detail=error.message)
        return
    for fault in receipt.faults():
        yield Finding(file=printable(path), reason="contradiction", detail=printable(fault))


def _read_ingestion(path: Path) -> IngestionReceipt | ScoredIngestion:
    if (_whole_document(path) or {}).get("schema") == SCORED_INGESTION_SCHEMA:
        return read_document(path, ScoredIngestion, SCORED_INGESTION_SCHEMA)
    return read_document(path, IngestionReceipt, INGESTION_SCHEMA)


def _checkpoint_manifest(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    """A checkpoint by its manifest: the directory around it is the checkpoint."""
    return _checkpoint(path.parent)


def _checkpoint(path: Path) -> Iterator[Finding | None]:
    """A checkpoint as resume loads it: names and kinds of its files, limits, sizes, digests, tensors, loop state."""
    yield None
    try:
        load_checkpoint(path)
    except KilnError as error:
        yield Finding(file=printable(path), reason=error.code, detail=error.message)


def _dataset(path: Path, plugins: Plugins | None = None, source: str = "") -> Iterator[Finding | None]:
    """A split.json against its own rows; a data set, named by its directory or another of its files, against them."""
    if path.is_dir() or path.name in (entry.MANIFEST, entry.IDENTITY):
        directory = path if path.is_dir() else path.parent
        verified = checking.verify_directory(directory)
        yield from repeat(None, verified.rows)
        for difference in verified.differences:
            yield Finding(file=printable(directory / difference.file), reason="differs", detail=difference.detail)
        return
    try:
        split = entry.read_split(path)
    except KilnError as error:
        yield Finding(file=printable(path), reason=error.code, detail=error.message)
        return
    yield from (None for _ in split.rows)
    for fault in checking.split_faults(split):
        yield Finding(file=printable(path), reason="contradiction", detail=fault)


def _run_directory(path: Path) -> Iterator[Finding | None]:
    """Each stage's manifest that is there, the files it vouches for, and how one stage's evidence fits the next."""
    if not any(manifest_path(path, stage).exists() for stage in MANIFEST_NAMES):
        raise KilnError("KLN212", f"{printable(path)} is no run directory", hint="it holds no manifest")
    if not manifest_path(path, "admit").exists():
        yield from _failing(path, data_claims(path, None))
        return
    yield from _failing(path, _admit_claims(path))
    if (path / RECEIPT_NAME).exists():
        yield from _receipt(path / RECEIPT_NAME)
    for _, checkpoint in list_checkpoints(path / "train"):
        yield from _checkpoint(checkpoint)


def _admit_claims(path: Path) -> Iterator[Claim]:
    manifest = yield from manifest_claims(path, AdmitManifest, None)
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


def _opd(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    """A scored corpus: manifest line, shapes and scores. Tokens are admission's to check, which has a student."""
    for fault in corpus_faults(path):
        if fault is None:
            yield None
        else:
            detail = printable(fault.detail, 1000)
            yield Finding(
                file=printable(path), line=fault.line, reason=fault.code, detail=detail, pointer=fault.pointer
            )


def _teachers(path: Path, plugins: Plugins, source: str) -> Iterator[Finding | None]:
    """A registry of teachers: its form, the rules of identities, and that each revision is its identity's."""
    if path.name != TEACHERS_NAME:
        raise KilnError("KLN212", f"{printable(path.name)} is no registry's name", hint=TEACHERS_NAME)
    try:
        registry = read_registry(path.parent)
    except KilnError as error:
        yield Finding(file=printable(path), reason=error.code, detail=error.message)
        return
    yield from (None for _ in registry.teachers)


_FINDERS = {
    "raw": _raw,
    "sft": _sft,
    "prepared": _prepared,
    "config": _config,
    "manifest": _manifest,
    "receipt": _receipt,
    "ingestion": _ingestion,
    "checkpoint": _checkpoint_manifest,
    "dataset": _dataset,
    "opd": _opd,
    "teachers": _teachers,
}


def _of_row(path: Path, stream: BinaryIO, record: Record, drop: Drop) -> Finding:
    place = _place(record, drop)
    return Finding(
        file=printable(path),
        line=record.line,
        column=_trimmed(stream, record) + place + 1 if place >= 0 else 0,
        reason=drop.reason,
        detail=printable(drop.detail),
        pointer=drop.pointer,
        excerpt=_excerpt(record.text or b"", place),
        note=drop.reason in (*POLICY, *ODDITIES),
    )


def _place(record: Record, drop: Drop) -> int:
    """The byte of the row where the fault lies: its offset, else the field's key, else the start; -1 for no text."""
    if record.text is None:
        return -1
    if drop.offset >= 0:
        return drop.offset
    return _key_place(record.text, drop.pointer.split("/")[1]) if drop.pointer else 0


def _key_place(text: bytes, field: str) -> int:
    """Where the key of a field stands in the text of an object, 0 if nowhere; not a value or a key further inside."""
    depth = 0
    for token in _TOKENS.finditer(text):
        if token.group() in (b"{", b"["):
            depth += 1
        elif token.group() in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token.group() == f'"{field}"'.encode() and _COLON.match(text, token.end()):
            return token.start()
    return 0


def _trimmed(stream: BinaryIO, record: Record) -> int:
    """How many bytes of the line stand before the row's text: a byte-order mark, white space."""
    line = read_text(stream, record.offset, record.length)
    text = line.removeprefix(BOM) if record.offset == 0 else line
    return len(line) - len(text.lstrip(TRIMMED))


def _excerpt(text: bytes, place: int) -> str:
    """The part of the row around the fault and a caret below it; control characters shown as escapes."""
    if place < 0:
        return ""
    start = _to_character(text, max(place - EXCERPT // 3, 0), place)
    before = printable(text[start:place].decode("utf-8", "replace"), EXCERPT)
    after = text[place : start + EXCERPT].decode("utf-8", "ignore" if _is_utf8(text) else "replace")
    return f"    {before}{printable(after, EXCERPT)}\n    {' ' * sum(map(_width, before))}^"


def _to_character(text: bytes, start: int, end: int) -> int:
    """The first byte from ``start`` on that does not stand inside a character."""
    while start < end and text[start] & 0xC0 == 0x80:
        start += 1
    return start


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _width(char: str) -> int:
    """Columns of a terminal."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
