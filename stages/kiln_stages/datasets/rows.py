"""The rows of a data set's file: what each is known by, and where its bytes lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import raw_row_sha256
from kiln_cli.errors import KilnError
from kiln_cli.identity import canonical_parsed, sha256_hex
from kiln_cli.lines import BOM, LINE_CAP, LineReader
from kiln_cli.records import Record
from kiln_cli.text import printable
from kiln_stages.datasets.partition import RowKeys
from kiln_stages.reading.pointers import at_pointer
from kiln_stages.reading.sources import json_lines
from kiln_stages.row_identities import group_id, normal_values, session_id


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``offset`` and ``length``: its line in the file, line end included. ``malformed``: it is no JSON."""

    keys: RowKeys
    offset: int
    length: int
    malformed: bool


def read_rows(stream: BinaryIO, group_by: str | None, name: str) -> list[Row]:
    """Every row of a plain file of lines. Raises KilnError KLN206 for a line above the cap: no stage could read it."""
    stream.seek(0)
    return [
        Row(keys=keys, offset=record.offset, length=record.length, malformed=malformed)
        for record in json_lines(LineReader(stream, hashed=False))
        for keys, malformed in [row_keys(row_text(record, name), group_by)]
    ]


def row_text(record: Record, name: str) -> bytes:
    if record.text is None:
        raise KilnError(
            "KLN206",
            f"{printable(name)} line {record.line} has {record.length} bytes, and a row has at most {LINE_CAP}",
            hint="take the line out, or shorten the row",
        )
    return record.text


def row_keys(text: bytes, group_by: str | None) -> tuple[RowKeys, bool]:
    """What a row is known by, and whether it is no JSON: then its bytes stand for it, as in an ingestion receipt."""
    try:
        value = strict_json.parse(text)
    except strict_json.JsonFault:
        raw = raw_row_sha256(text)
        return RowKeys(content_sha256=raw, normalized_sha256=raw), True
    keys = RowKeys(
        content_sha256=_sha256(value),
        normalized_sha256=_sha256(normal_values(value)),
        group_id=group_id(value),
        session_id=session_id(value),
        group_by_sha256=None if group_by is None else _value_at(value, group_by),
    )
    return keys, False


def lines_of(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Rows as the blocks of a file that reads as exactly these rows: at byte 0 a mark would be stepped over."""
    for number, text in enumerate(texts):
        if number == 0 and text.startswith(BOM):
            yield b"\n"
        yield text + b"\n"


def _value_at(value: object, pointer: str) -> str | None:
    """The hash of what a row is grouped by; None where there is nothing, null or blank text: then it is in no group."""
    found = at_pointer(value, pointer)
    if found is msgspec.UNSET or found is None or (isinstance(found, str) and not found.strip()):
        return None
    return _sha256(found)


def _sha256(value: object) -> str:
    """As ``row_identities.content_sha256``, of a value that the strict parser made."""
    return "sha256:" + sha256_hex(canonical_parsed(value))
