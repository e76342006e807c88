"""What a text on the command line or in a config names: a file of rows, a receipt, a run or a split of one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.files import NAME_PATTERN, open_input, read_bounded
from kiln_cli.manifests import DOCUMENT_LIMIT, read_ingestion, read_receipt
from kiln_cli.receipts import INGESTION_SCHEMA, RECEIPT_TYPE
from kiln_cli.stage_manifests import MANIFEST_NAMES, MANIFEST_SCHEMA
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import chat_rows
from kiln_stages.contamination.named_sets import dataset_sets
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.row_sets import KeyedFile, RowSet, read_set
from kiln_stages.contamination.runs import RUN_SPLITS, receipt_set, run_exists, run_sets
from kiln_stages.datasets.entry import names
from kiln_stages.datasets.partition import SPLITS
from kiln_stages.reading.mapping import mapped_source
from kiln_stages.reading.sources import Choice, open_rows
from kiln_stages.reading.transports import Plain

FORMS = "name a file of rows, a receipt, a RUN or RUN:train, RUN:validation, RUN:test, or a named data set's NAME:train"
_DOCUMENT_BEGINS = b'{\n  "'  # as all evidence is written


class Reference(NamedTuple):
    """What a text named. ``kind``: file, ingestion receipt, train receipt, run or data set."""

    given: str
    kind: str
    sets: list[RowSet]


def open_reference(given: str, reader: Reader) -> Reference:
    """The sets of rows that a text names: what lies at that path, else a named data set.

    Raises KilnError: KLN204 where it names nothing, KLN206/207 where a file is damaged or not what its manifest says,
    KLN212 for rows that no source fits and for a data set that the registry has not.
    """
    name = printable(given)
    path, split = _path_and_split(given, reader.base_dir)
    if path is None:
        return _dataset(given, reader)
    if path.is_dir() and run_exists(path):
        run = printable(given if split is None else given.removesuffix(f":{split}"))
        return Reference(given, "run", list(run_sets(run, path, split, reader)))
    kind, document = _document(path)
    if kind == "manifest":
        if path.name not in MANIFEST_NAMES.values():
            raise KilnError("KLN206", f"{name} is a manifest outside its run, and holds no hash of a row", hint=FORMS)
        return Reference(given, "run", list(run_sets(name.removesuffix(f"/{path.name}"), path.parent, None, reader)))
    if document is not None:
        return Reference(given, kind, [receipt_set(name, path, document, reader)])
    return Reference(given, "file", [_file_set(name, path, reader)])


def _path_and_split(given: str, base_dir: Path) -> tuple[Path | None, str | None]:
    """The path that is there, and the split behind it; None and None where there is neither."""
    if (base_dir / given).exists():
        return base_dir / given, None
    before, _, split = given.rpartition(":")
    if before and split in RUN_SPLITS and run_exists(base_dir / before):
        return base_dir / before, split
    return None, None


def _dataset(given: str, reader: Reader) -> Reference:
    name, colon, split = given.partition(":")
    if NAME_PATTERN.match(name) and (split in SPLITS if colon else name in names(reader.registry)):
        return Reference(given, "data set", list(dataset_sets(name, split or None, reader)))
    raise KilnError("KLN204", f"{printable(given)!r} names nothing that is there", hint=FORMS)


def _document(path: Path) -> tuple[str, Any]:
    """What a document of evidence is, with its value; ("", None) for anything else."""
    if path.is_dir() or path.stat().st_size > DOCUMENT_LIMIT:
        return "", None
    with open_input(path) as stream:
        if stream.read(len(_DOCUMENT_BEGINS)) != _DOCUMENT_BEGINS:
            return "", None
    try:
        value = strict_json.parse_object(read_bounded(path, DOCUMENT_LIMIT))
    except strict_json.JsonFault:
        return "", None  # rows, and the reader of rows says what is wrong with them
    if value.get("schema") == MANIFEST_SCHEMA:
        return "manifest", value
    if value.get("schema") == INGESTION_SCHEMA:
        return "ingestion receipt", read_ingestion(path)
    if value.get("receipt_type") == RECEIPT_TYPE:
        return "train receipt", read_receipt(path)
    return "", None


def _file_set(name: str, path: Path, reader: Reader) -> RowSet:
    compat = reader.settings.compat == "kiln"
    with ExitStack() as stack:
        plain, choice = _open(path, reader, stack)
        rows = partial(chat_rows, source=choice.source, compat=compat)
        return read_set(name, KeyedFile(plain, rows, reader.near))


def _open(path: Path, reader: Reader, stack: ExitStack) -> tuple[Plain, Choice]:
    """In the shape that fits; in the one that ``[admit] map`` describes where none does."""
    sources, settings = reader.plugins.sources, reader.settings
    try:
        wanted = "messages" if settings.compat is not None else "auto"
        return stack.enter_context(open_rows(path, wanted, sources, "chat", reader.scratch))
    except KilnError as error:
        if error.code != "KLN212" or not settings.map:
            raise
    return stack.enter_context(open_rows(path, mapped_source(settings.map), sources, "chat", reader.scratch))
