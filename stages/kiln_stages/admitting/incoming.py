"""From records to rows on their way in: prepared examples, or conversations in the shape that a chat source knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import ChatRow, misfit, raw_row_sha256
from kiln_cli.compat_json import compat_row
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import Source
from kiln_cli.identity import Domain, canonical_json, domain_sha256
from kiln_cli.lines import LINE_CAP
from kiln_cli.records import PreparedExample, Record
from kiln_cli.text import printable
from kiln_stages.admitting.prepared_rows import ToolsMode, to_chat_row


class IncomingRow(msgspec.Struct, frozen=True):
    """A row on its way in: ``row``, or the fault that keeps it from being one and the hash of its raw bytes.

    ``prepared``: its record is a line that prepare wrote.
    """

    record: Record
    row: ChatRow | None
    example_id: str | None = None
    fault: RowFault | None = None
    prepared: bool = False

    def sha256(self) -> str:
        if self.row is not None:
            return self.row.sha256()
        text = self.record.text if self.record.text is not None else b""
        if self.record.element:
            try:
                return domain_sha256(Domain.RAW_ELEMENT, canonical_json(strict_json.parse(text)))
            except strict_json.JsonFault:
                pass  # broken inside: there is no canonical form, so its bytes stand for it
        return raw_row_sha256(text)


def prepared_rows(records: Iterable[Record], mode: ToolsMode) -> Iterator[IncomingRow]:
    """Rows of a split file that prepare wrote. Raises KilnError KLN206 for a line that is no prepared example."""
    for record in records:
        try:
            example = msgspec.json.decode(record.text or b"", type=PreparedExample)
        except msgspec.DecodeError as error:
            raise KilnError(
                "KLN206",
                f"the line at byte {record.offset} is no prepared example: {printable(error)}",
                hint="run `kiln prepare` again",
            ) from None
        yield IncomingRow(record, to_chat_row(example, mode), example.example_id, prepared=True)


def chat_rows(
    records: Iterable[Record], source: Source, *, strict: bool = False, compat: bool = False
) -> Iterator[IncomingRow]:
    """Rows of a file in a chat shape; a line that has not the shape keeps its place and carries its fault.

    ``strict`` refuses fields that change nothing; ``compat`` reads messages as the public Kiln server does.
    """
    for record in records:
        try:
            row = compat_row(_text(record)) if compat else _converted(record, source)
            if strict and row.ignored:
                names = printable(", ".join(row.ignored))
                raise RowFault("invalid_json", f"unknown_field: {names}: changes nothing, and [admit] strict is set")
            yield IncomingRow(record, row)
        except RowFault as fault:
            yield IncomingRow(record, None, None, fault)


def _converted(record: Record, source: Source) -> ChatRow:
    row = source.convert(_object(record))
    if not isinstance(row, ChatRow):
        raise KilnError("KLN210", f"source {source.name!r} yielded {type(row).__name__}, not ChatRow")
    return row


def _text(record: Record) -> bytes:
    if record.text is None:
        raise RowFault("invalid_json", f"line_too_long: the line has {record.length} bytes, at most {LINE_CAP}")
    return record.text


def _object(record: Record) -> dict[str, object]:
    """The object of a record. Raises RowFault ``invalid_json``; the finer word is the parser's."""
    try:
        value = strict_json.parse(_text(record))
    except strict_json.JsonFault as fault:
        raise RowFault("invalid_json", f"{fault.kind}: {fault.detail}", fault.pointer, fault.offset) from None
    if not isinstance(value, dict):
        raise misfit("", "an object", value, word="row_not_object")
    return value
