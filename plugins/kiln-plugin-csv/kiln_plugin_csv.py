"""A source for kiln: function-calling rows in CSV files, one a line, under a header line."""

import csv
from collections.abc import Iterable, Iterator
from typing import Any

from kiln_cli import Record, Source, ToolCallRow, hookimpl

FIELDS = ("query", "tools", "answers")
FAULT = "fault"


@hookimpl
def kiln_sources() -> Iterable[Source]:
    return [
        Source(
            name="csv",
            doc="CSV with a header line that names query, tools and answers",
            yields="tool_calls",
            read=read,
            convert=convert,
            recognise=lambda record: None,  # what is no JSON cannot be recognised by its first row
        )
    ]


def read(lines: Iterable[Any]) -> Iterator[Record]:
    """Each line behind the header as a record with its place in the file. A line that is no CSV row keeps its place."""
    header: list[str] | None = None
    row_index = 0
    for line in lines:
        if line.text == b"":
            continue
        if header is None:
            header = next(csv.reader([(line.text or b"").decode("utf-8", "replace")]))
            continue
        row_index += 1
        yield Record(
            row_index=row_index,
            line=line.number,
            offset=line.offset,
            length=line.length,
            text=None,
            value=parse(line.text, header),
        )


def parse(text: bytes | None, header: list[str]) -> dict[str, str]:
    """The fields of one line by name, or what keeps it from being a row under FAULT."""
    try:
        (fields,) = csv.reader([(text or b"").decode("utf-8")], strict=True)
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        return {FAULT: f"no CSV row: {error}"}
    if len(fields) != len(header):
        return {FAULT: f"fields: {len(fields)}, in the header: {len(header)}"}
    return dict(zip(header, fields, strict=True))


def convert(record: dict[str, Any]) -> ToolCallRow:
    if FAULT in record:
        return ToolCallRow(fault=("missing_field", record[FAULT], ""))
    found = {name: record[name] for name in FIELDS if name in record}
    return ToolCallRow(**found, **({"row_id": record["id"]} if "id" in record else {}))
