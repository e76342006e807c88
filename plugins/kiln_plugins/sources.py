"""Built-in shapes of raw function-calling rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln_cli import Source, ToolCallRow, hookimpl
from kiln_cli.records import RAW_ROW_SCHEMA


@hookimpl
def kiln_sources() -> Iterable[Source]:
    return (XLAM, SOMMELIER)


def _convert_xlam(record: dict[str, Any]) -> ToolCallRow:
    return ToolCallRow(
        query=record.get("query", msgspec.UNSET),
        tools=record.get("tools", msgspec.UNSET),
        answers=record.get("answers", msgspec.UNSET),
        row_id=record.get("id", msgspec.UNSET),
    )


def _recognise_xlam(record: dict[str, Any]) -> str | None:
    fields = ("query", "tools", "answers")
    if "schema_version" in record or not all(field in record for field in fields):
        return None
    return "has query, tools and answers"


def _convert_sommelier(record: dict[str, Any]) -> ToolCallRow:
    revision = record.get("source_revision")
    return ToolCallRow(
        query=record.get("query", msgspec.UNSET),
        tools=record.get("tools", msgspec.UNSET),
        answers=record.get("answers", msgspec.UNSET),
        source_id=record.get("source_id"),
        source_revision=revision if isinstance(revision, str) else None,
        fault=_sommelier_fault(record),
    )


def _sommelier_fault(record: dict[str, Any]) -> tuple[str, str, str] | None:
    found = record.get("schema_version")
    if found != RAW_ROW_SCHEMA:
        return "unknown_schema", f"found {found!r}, expected {RAW_ROW_SCHEMA!r}", "/schema_version"
    for field in ("source_id", "source_revision"):
        if field not in record:
            return "missing_field", f"the row has no {field}", f"/{field}"
    if not isinstance(record["source_revision"], str):
        return "missing_field", "source_revision is no string", "/source_revision"
    return None


def _recognise_sommelier(record: dict[str, Any]) -> str | None:
    return f"schema_version is {RAW_ROW_SCHEMA}" if record.get("schema_version") == RAW_ROW_SCHEMA else None


XLAM = Source(
    name="xlam",
    doc="query, tools and answers; the last two JSON in a string (xlam-function-calling-60k)",
    yields="tool_calls",
    convert=_convert_xlam,
    recognise=_recognise_xlam,
)
SOMMELIER = Source(
    name="sommelier",
    doc=f"rows of {RAW_ROW_SCHEMA}",
    yields="tool_calls",
    convert=_convert_sommelier,
    recognise=_recognise_sommelier,
)
