"""Rows on their way: what a source yields, what prepare writes, what the checks look at."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import msgspec

from kiln_cli import strict_json

PREPARED_SCHEMA = "sommelier.prepared_example.v2"
RAW_ROW_SCHEMA = "sommelier.raw_tool_call_row.v1"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a source before anything is known of it.

    ``row_index`` counts non-blank rows from 1; ``line``, ``offset`` and ``length`` are its place in the file;
    ``text`` is the trimmed bytes (None where the line is longer than the cap). Where ``text`` is None and ``value`` is
    set, the row is an element of a larger value and has no bytes of its own.
    """

    row_index: int
    line: int
    offset: int
    length: int
    text: bytes | None
    value: Any = None


class ToolCallRow(msgspec.Struct, frozen=True, kw_only=True):
    """An untrusted function-calling row: the fields as found, of any JSON type. ``tools``/``answers`` want JSON text.

    ``source_id`` is a whole example id that the row brings itself; ``row_id`` is one that the data set's name is put
    before. A field that the row lacks is ``msgspec.UNSET``.
    """

    query: object = msgspec.UNSET
    tools: object = msgspec.UNSET
    answers: object = msgspec.UNSET
    row_id: object = msgspec.UNSET
    source_id: object = msgspec.UNSET
    source_example_id: object = msgspec.UNSET
    source_revision: str | None = None


class ParsedText:
    """The value of a JSON text that stood in a string, or the fault that keeps it from having one."""

    __slots__ = ("fault", "value")

    def __init__(self, text: str) -> None:
        self.value: Any = None
        self.fault: strict_json.JsonFault | None = None
        try:
            self.value = strict_json.parse(text.encode("utf-8"))
        except strict_json.JsonFault as fault:
            self.fault = fault


class Candidate:
    """A tool-call row under examination. Each text is parsed once, at the first check that asks for it."""

    def __init__(self, row: ToolCallRow) -> None:
        self.row = row

    @cached_property
    def query(self) -> str:
        """The query without white space at its ends; "" where it is no string."""
        return self.row.query.strip() if isinstance(self.row.query, str) else ""

    @cached_property
    def query_sha256(self) -> str:
        """Hex SHA-256 of the query, case folded, stripped, inner white space collapsed to one space. Unicode normal
        forms, punctuation and digits stay apart."""
        return hashlib.sha256(" ".join(self.query.casefold().split()).encode("utf-8")).hexdigest()

    @cached_property
    def tools(self) -> ParsedText:
        return ParsedText(self.row.tools if isinstance(self.row.tools, str) else "")

    @cached_property
    def answers(self) -> ParsedText:
        return ParsedText(self.row.answers if isinstance(self.row.answers, str) else "")


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class PreparedExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``sommelier.prepared_example.v2``: a row that has proven its shape. Nothing downstream parses strings again."""

    schema_version: str = PREPARED_SCHEMA
    example_id: str
    source_id: str
    language: str
    source_example_id: str | None
    query: str
    tools: list[Tool]
    gold_calls: list[Call]
    split: str
    query_sha256: str
    source_revision: str
