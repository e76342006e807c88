"""Rows on their way: what a source yields, what prepare writes, what the checks look at."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec

from kiln_cli import strict_json

PREPARED_SCHEMA = "sommelier.prepared_example.v2"
RAW_ROW_SCHEMA = "sommelier.raw_tool_call_row.v1"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a source before anything is known of it.

    ``row_index`` counts non-blank rows from 1; ``line``, ``offset`` and ``length`` are its place in the file;
    ``text`` is the trimmed bytes (None where the line is longer than the cap). ``element`` says that the row is part of
    something larger (a JSON array, a table): it has no line bytes of its own and is identified by its canonical form.
    A plugin's reader may give a parsed ``value`` in place of ``text``.
    """

    row_index: int
    line: int
    offset: int
    length: int
    text: bytes | None
    element: bool = False
    value: Any = None


class ToolCallRow(msgspec.Struct, frozen=True, kw_only=True):
    """An untrusted function-calling row: the fields as found, of any JSON type. ``tools``/``answers`` want JSON text.

    ``source_id`` is a whole example id that the row brings itself; ``row_id`` is one that the data set's name is put
    before. A field that the row lacks is ``msgspec.UNSET``. ``fault`` (reason, detail, pointer) says that the row
    breaks its own schema: it is dropped for that, and its id is taken all the same.
    """

    query: object = msgspec.UNSET
    tools: object = msgspec.UNSET
    answers: object = msgspec.UNSET
    row_id: object = msgspec.UNSET
    source_id: object = msgspec.UNSET
    source_revision: str | None = None
    fault: tuple[str, str, str] | None = None


class ParsedText:
    """The value of a JSON text that stood in a string, or the fault that keeps it from having one."""

    __slots__ = ("fault", "value")

    def __init__(self, text: str, *, proven: bool = False) -> None:
        self.value: Any = None
        self.fault: strict_json.JsonFault | None = None
        data = text.encode("utf-8")
        try:
            self.value = strict_json.parse_again(data) if proven else strict_json.parse(data, negative_zero=False)
        except strict_json.JsonFault as fault:
            self.fault = fault


# Sets of rows tend to use the same tools again and again; then their text is parsed once. Longer texts are not kept.
REPEATED_TEXT = 16 * 1024


@functools.lru_cache(maxsize=2048)
def _parsed_again_and_again(text: str) -> ParsedText:
    return ParsedText(text)


class Candidate:
    """A tool-call row under examination. Each text is parsed once, at the first check that asks for it.

    ``proven`` says that the texts have passed the strict parser before.
    """

    __slots__ = ("_answers", "_digest", "_proven", "_tools", "query", "row")

    def __init__(self, row: ToolCallRow, *, proven: bool = False) -> None:
        self.row = row
        self._proven = proven
        # Without white space at its ends; "" where it is no string.
        self.query: str = row.query.strip() if isinstance(row.query, str) else ""
        self._tools: ParsedText | None = None
        self._answers: ParsedText | None = None
        self._digest: bytes | None = None

    @property
    def query_digest(self) -> bytes:
        """SHA-256 (32 bytes) of the query, case folded, stripped, inner white space collapsed to one space. Unicode
        normal forms, punctuation and digits stay apart."""
        if self._digest is None:
            self._digest = hashlib.sha256(" ".join(self.query.casefold().split()).encode("utf-8")).digest()
        return self._digest

    @property
    def query_sha256(self) -> str:
        """The digest in hex, as records hold it."""
        return self.query_digest.hex()

    @property
    def tools(self) -> ParsedText:
        if self._tools is None:
            text = self.row.tools
            if self._proven or not isinstance(text, str) or len(text) > REPEATED_TEXT:
                self._tools = self._parsed(text)
            else:
                self._tools = _parsed_again_and_again(text)
        return self._tools

    @property
    def answers(self) -> ParsedText:
        if self._answers is None:
            self._answers = self._parsed(self.row.answers)
        return self._answers

    def _parsed(self, text: object) -> ParsedText:
        return ParsedText(text if isinstance(text, str) else "", proven=self._proven)


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
