"""One raw row against the rules: which declared reason drops it, or which example it becomes.

Everything here looks at one row alone and is a pure function of its bytes, so rows may be screened in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kiln_cli import strict_json
from kiln_cli.config import DataConfig, DatasetConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import DropReason, Source
from kiln_cli.identity import Domain, canonical_json, domain_sha256
from kiln_cli.records import Call, Candidate, PreparedExample, Record, Tool, ToolCallRow
from kiln_cli.strict_json import type_name


class Drop(msgspec.Struct, frozen=True):
    """Why a row is dropped; ``offset`` is the byte of the row where the fault was seen, -1 if unknown."""

    reason: str
    detail: str
    pointer: str = ""
    offset: int = -1


class Screened(msgspec.Struct, frozen=True):
    """The outcome of one row: ``drop`` or, for a valid row, its query's digest and ``keys`` (one a pool reason)."""

    record: Record
    example_id: str | None
    drop: Drop | None
    query_sha256: str = ""
    keys: tuple[str, ...] = ()


class Screen:
    """The row-local rules of one data set, in declared order."""

    def __init__(
        self, dataset: DatasetConfig, source: Source, reasons: Iterable[DropReason], limits: DataConfig
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._limits = limits
        reasons = list(reasons)
        self._checks = [(r, r.check) for r in reasons if r.scope == "row" and r.check is not None]
        self._keys = [r.key for r in reasons if r.scope == "pool" and r.key is not None]

    def screen(self, record: Record) -> Screened:
        try:
            row = self._convert(record)
            example_id = self._example_id(record, row)
        except RowFault as fault:
            return Screened(record, None, Drop(fault.reason, fault.detail, fault.pointer, fault.offset))
        candidate = Candidate(row)
        for reason, check in self._checks:
            detail = check(candidate, self._limits)
            if detail is not None:
                return Screened(record, example_id, Drop(reason.name, detail, reason.pointer))
        return Screened(record, example_id, None, candidate.query_sha256, tuple(key(candidate) for key in self._keys))

    def example(self, record: Record, split: str, revision: str) -> PreparedExample:
        """The typed example of a row that was screened as valid."""
        row = self._convert(record)
        candidate = Candidate(row)
        example_id = self._example_id(record, row)
        tools, calls = candidate.tools.value, candidate.answers.value
        return PreparedExample(
            example_id=example_id,
            source_id=example_id,
            language=self._dataset.language,
            source_example_id=None,
            query=candidate.query,
            tools=[Tool(tool["name"], tool["description"], tool["parameters"]) for tool in tools],
            gold_calls=[Call(call["name"], call["arguments"]) for call in calls],
            split=split,
            query_sha256=candidate.query_sha256,
            source_revision=revision if row.source_revision is None else row.source_revision,
        )

    def _convert(self, record: Record) -> ToolCallRow:
        row = self._source.convert(parse_record(record))
        if not isinstance(row, ToolCallRow):
            raise KilnError("KLN210", f"source {self._source.name!r} yielded {type(row).__name__}, not ToolCallRow")
        return row

    def _example_id(self, record: Record, row: ToolCallRow) -> str:
        if row.source_id is not msgspec.UNSET:
            return _require_id(row.source_id, "/source_id", numbers=False)
        if row.row_id is msgspec.UNSET:
            return f"{self._dataset.dataset_id}:{record.row_index}"
        return f"{self._dataset.dataset_id}:{_require_id(row.row_id, '/id', numbers=True)}"


def parse_record(record: Record) -> dict[str, object]:
    """The object of a record. Raises RowFault with the reason of prepare that fits (``invalid_utf8`` and so on)."""
    if record.text is None:
        if isinstance(record.value, dict):
            return record.value
        if record.value is None:
            raise RowFault("line_too_long", f"the line has {record.length} bytes")
        raise RowFault("row_not_object", f"expected an object, found {type_name(record.value)}")
    try:
        value = strict_json.parse(record.text)
    except strict_json.JsonFault as fault:
        reason = "invalid_utf8" if fault.kind == "invalid_utf8" else "invalid_row_json"
        raise RowFault(reason, fault.detail, offset=fault.offset) from None
    if not isinstance(value, dict):
        raise RowFault("row_not_object", f"expected an object, found {type_name(value)}")
    return value


def raw_sha256(record: Record) -> str | None:
    """Identity of the raw row; None for a line that was passed over as too long."""
    if record.text is not None:
        return domain_sha256(Domain.RAW_TOOL_CALL_ROW, record.text)
    if record.value is not None:
        return domain_sha256(Domain.RAW_ELEMENT, canonical_json(record.value))
    return None


def _require_id(value: object, pointer: str, *, numbers: bool) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    expected = "a string or an integer" if numbers else "a string"
    found = "a blank string" if isinstance(value, str) else type_name(value)
    raise RowFault("invalid_example_id", f"expected {expected}, found {found}", pointer)
