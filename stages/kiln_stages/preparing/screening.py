"""One raw row against the rules: which declared reason drops it, or which example it becomes.

Everything here looks at one row alone and is a pure function of its bytes, so rows may be screened in any order, by any
number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.config import DataConfig, DatasetConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import DropReason, Source
from kiln_cli.identity import Domain, canonical_json, domain_sha256
from kiln_cli.records import Call, Candidate, PreparedExample, Record, Tool, ToolCallRow
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable
from kiln_stages.reading.pointers import at_pointer

# What stands for the id of a row that brings none, until its place among the rows is known.
POSITIONAL = ""
# What the code of a plugin may raise without being at fault.
NOT_ITS_FAULT = (KilnError, MemoryError)


class Drop(NamedTuple):
    """Why a row is dropped; ``offset`` is the byte of the row where the fault was seen, -1 if unknown."""

    reason: str
    detail: str
    pointer: str = ""
    offset: int = -1


class Screened(NamedTuple):
    """The outcome of one row. ``example_id`` is None where the row is no object with a sound id.

    A valid row (``drop`` is None) has the digest of its query (32 bytes), one key a pool reason, and what splitting and
    pairing ask for: the id of its root row, the digest of its tools and answers strings, its group and its stratum.
    """

    example_id: str | None
    drop: Drop | None
    query: bytes = b""
    keys: tuple[str | bytes, ...] = ()
    link: str | None = None
    texts: bytes = b""
    group: str | None = None
    stratum: str | None = None


class Made(NamedTuple):
    """An example, and the keys of its row's tools and calls that it does not hold (``tools[].required``)."""

    example: PreparedExample
    lost_keys: set[str]


class Screen:
    """The row-local rules of one data set, in declared order. ``pool_keys``: how many keys a valid row has;
    ``asked_for``: which of link, texts, group and stratum anything will look at.

    ``pairing`` says that rows of several sources will be compared, so that their texts need digests.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        source: Source,
        reasons: Iterable[DropReason],
        limits: DataConfig,
        *,
        pairing: bool = False,
    ) -> None:
        self.dataset = dataset
        self._source = source
        self._limits = limits
        self._pairing = pairing
        self._prefix = f"{dataset.dataset_id}:"
        reasons = list(reasons)
        self._checks = [(r, r.check) for r in reasons if r.scope == "row" and r.check is not None]
        self._keyed = [r for r in reasons if r.scope == "pool" and r.key is not None]
        self.pool_keys = len(self._keyed)
        optional = {
            "link": dataset.source_id_column is not None,
            "texts": pairing,
            "group": limits.group_by is not None,
            "stratum": limits.stratify_by is not None,
        }
        self.asked_for = frozenset(name for name, asked in optional.items() if asked)

    def screen(self, record: Record) -> Screened:
        try:
            value = parse_record(record)
            row = self._convert(value)
        except RowFault as fault:
            return Screened(None, _drop(fault))
        if row.fault is not None:
            return Screened(self._claimed_id(row), Drop(*row.fault))
        try:
            link = self._link(value)
            example_id = self._example_id(row)
        except RowFault as fault:
            return Screened(self._claimed_id(row), _drop(fault))
        candidate = Candidate(row)
        for reason, check in self._checks:
            try:
                detail = check(candidate, self._limits)
            except NOT_ITS_FAULT:
                raise
            except Exception as error:
                raise plugin_failure(f"drop reason {reason.name!r}", error) from error
            if detail is not None:
                return Screened(example_id, Drop(reason.name, detail, reason.pointer))
        return self._valid(example_id, candidate, value, link)

    def identify(self, record: Record) -> str | None:
        """The example id that a row claims, POSITIONAL where it brings none; None where it is no sound object."""
        try:
            return self._claimed_id(self._convert(parse_record(record)))
        except RowFault:
            return None

    def example(self, record: Record, example_id: str, root_id: str | None, split: str, revision: str) -> Made:
        """The typed example of a row that was screened as valid."""
        row = self._convert(strict_json.parse_again(record.text or b""))
        candidate = Candidate(row, proven=True)
        tools, calls = candidate.tools.value, candidate.answers.value
        example = PreparedExample(
            example_id=example_id,
            source_id=example_id,
            language=self.dataset.language,
            source_example_id=root_id,
            query=candidate.query,
            tools=[Tool(tool["name"], tool["description"], tool["parameters"]) for tool in tools],
            gold_calls=[Call(call["name"], call["arguments"]) for call in calls],
            split=split,
            query_sha256=candidate.query_sha256,
            source_revision=revision if row.source_revision is None else row.source_revision,
        )
        return Made(example, _lost_keys("tools", tools, 3) | _lost_keys("answers", calls, 2))

    def _valid(self, example_id: str, candidate: Candidate, value: dict[str, Any], link: str | None) -> Screened:
        limits = self._limits
        return Screened(
            example_id,
            None,
            candidate.query_digest,
            tuple([self._key(reason, candidate) for reason in self._keyed]),
            link,
            _texts_digest(candidate.row) if self._pairing else b"",
            _label(limits.group_by, candidate, value),
            _label(limits.stratify_by, candidate, value),
        )

    def _convert(self, value: dict[str, Any]) -> ToolCallRow:
        try:
            row = self._source.convert(value)
        except (RowFault, *NOT_ITS_FAULT):
            raise
        except Exception as error:
            raise plugin_failure(f"source {self._source.name!r}", error) from error
        if not isinstance(row, ToolCallRow):
            raise KilnError("KLN210", f"source {self._source.name!r} yielded {type(row).__name__}, not ToolCallRow")
        return row

    def _key(self, reason: DropReason, candidate: Candidate) -> str | bytes:
        try:
            return reason.key(candidate) if reason.key is not None else ""
        except NOT_ITS_FAULT:
            raise
        except Exception as error:
            raise plugin_failure(f"drop reason {reason.name!r}", error) from error

    def _example_id(self, row: ToolCallRow) -> str:
        if row.source_id is not msgspec.UNSET:
            return _require_id(row.source_id, "/source_id", numbers=False)
        if row.row_id is msgspec.UNSET:
            return POSITIONAL
        return self._prefix + _require_id(row.row_id, "/id", numbers=True)

    def _claimed_id(self, row: ToolCallRow) -> str | None:
        """The id that a faulty row takes all the same: the first object with an id has it, kept or not."""
        try:
            return self._example_id(row)
        except RowFault:
            return None

    def _link(self, value: dict[str, Any]) -> str | None:
        """What a row of a paired source names as its root row."""
        column = self.dataset.source_id_column
        if column is None:
            return None
        found = value.get(column)
        if isinstance(found, str) and found.strip():
            return found
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found)
        what = type_name(found) if column in value else "nothing"
        raise RowFault("missing_field", f"{column}: expected the id of a root row, found {what}", f"/{column}")


def plugin_failure(what: str, error: Exception) -> KilnError:
    """What to raise where the code of a plugin raises ``error``."""
    return KilnError(
        "KLN210",
        f"{printable(what)} fails: {printable(f'{type(error).__name__}: {error}')}",
        hint="mend or uninstall the plugin that brings it; `kiln plugins` names it",
    )


def _drop(fault: RowFault) -> Drop:
    return Drop(fault.reason, fault.detail, fault.pointer, fault.offset)


def _lost_keys(field: str, values: list[dict[str, Any]], held: int) -> set[str]:
    """Keys of tools or calls that an example does not hold; ``held`` is how many it does."""
    return {
        f"{field}[].{key}"
        for value in values
        if len(value) > held
        for key in value
        if key not in ("name", "description", "parameters", "arguments")
    }


def parse_record(record: Record) -> dict[str, Any]:
    """The object of a record. Raises RowFault with the reason of prepare that fits (``invalid_utf8`` and so on)."""
    if record.text is None:
        raise RowFault("line_too_long", f"the line has {record.length} bytes")
    try:
        value = strict_json.parse(record.text, negative_zero=False)
    except strict_json.JsonFault as fault:
        reason = "invalid_utf8" if fault.kind == "invalid_utf8" else "invalid_row_json"
        raise RowFault(reason, fault.detail, offset=fault.offset) from None
    if not isinstance(value, dict):
        raise RowFault("row_not_object", f"expected an object, found {type_name(value)}")
    return value


def raw_sha256(record: Record) -> str | None:
    """Identity of the raw row: its trimmed bytes, or for an element of something larger its canonical form.

    None for a line that was passed over as too long. An element that does not parse is known by its bytes.
    """
    if record.text is None:
        return None
    if record.element:
        try:
            return domain_sha256(Domain.RAW_ELEMENT, canonical_json(strict_json.parse(record.text)))
        except strict_json.JsonFault:
            pass  # broken inside: there is no canonical form, so its bytes stand for it
    return domain_sha256(Domain.RAW_TOOL_CALL_ROW, record.text)


def _texts_digest(row: ToolCallRow) -> bytes:
    """Tools and answers strings of a row, 32 bytes each: pairs must agree to the byte."""
    return b"".join(hashlib.sha256(str(text).encode("utf-8")).digest() for text in (row.tools, row.answers))


def _label(rule: str | None, candidate: Candidate, value: dict[str, Any]) -> str | None:
    """A row's group or stratum: the function it calls first (``tool``), or what a JSON pointer finds in it."""
    if rule is None:
        return None
    if rule == "tool":
        return str(candidate.answers.value[0]["name"])
    found = at_pointer(value, rule)
    if found is msgspec.UNSET:
        return None
    return canonical_json(found).decode("utf-8")


def _require_id(value: object, pointer: str, *, numbers: bool) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    expected = "a string or an integer" if numbers else "a string"
    found = "a blank string" if isinstance(value, str) else type_name(value)
    raise RowFault("invalid_example_id", f"expected {expected}, found {found}", pointer)
