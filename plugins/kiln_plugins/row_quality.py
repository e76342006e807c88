"""Drop reasons that look at one line or one row, in check order. Each check's rule stands above it in words.

A check returns None for a sound row, or what was found and expected. Later checks may rely on earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kiln_cli import Candidate, DropReason, hookimpl
from kiln_cli.counting import counted
from kiln_cli.strict_json import type_name

if TYPE_CHECKING:
    from kiln_cli.config import DataConfig


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return (*LINE_REASONS, *ROW_REASONS)


def _missing(value: object) -> str | None:
    if value is msgspec.UNSET:
        return "the field is absent"
    if not isinstance(value, str):
        return f"expected a string, found {type_name(value)}"
    return None if value.strip() else "the string is empty or white space"


# The query is absent, not a string, or white space only.
def missing_query(candidate: Candidate, limits: DataConfig) -> str | None:
    return _missing(candidate.row.query)


# The tools are absent, not a string, or white space only.
def missing_tools(candidate: Candidate, limits: DataConfig) -> str | None:
    return _missing(candidate.row.tools)


# The answers are absent, not a string, or white space only.
def missing_answers(candidate: Candidate, limits: DataConfig) -> str | None:
    return _missing(candidate.row.answers)


# The query, stripped, has fewer code points than min_query_chars.
def query_too_short(candidate: Candidate, limits: DataConfig) -> str | None:
    length = len(candidate.query)
    if length >= limits.min_query_chars:
        return None
    return f"{counted(length, 'character', 'characters')}, at least {limits.min_query_chars}"


# The query, stripped, has more code points than max_query_chars.
def query_too_long(candidate: Candidate, limits: DataConfig) -> str | None:
    length = len(candidate.query)
    if length <= limits.max_query_chars:
        return None
    return f"{counted(length, 'character', 'characters')}, at most {limits.max_query_chars}"


# The tools string is not JSON by the strict contract.
def invalid_tools_json(candidate: Candidate, limits: DataConfig) -> str | None:
    fault = candidate.tools.fault
    return fault.detail if fault else None


# The tools are no list of objects, each with a non-empty string name, a string description, an object parameters.
def invalid_tool_shape(candidate: Candidate, limits: DataConfig) -> str | None:
    tools = candidate.tools.value
    if not isinstance(tools, list):
        return f"expected an array of tools, found {type_name(tools)}"
    for index, tool in enumerate(tools):
        if not _is_tool(tool) and (fault := _tool_fault(tool)) is not None:
            return f"tool {index + 1}: {fault}"
    return None


def _is_tool(tool: Any) -> bool:
    """The rule in one expression: nearly all tools pass it, and then nobody asks what is wrong."""
    return (
        isinstance(tool, dict)
        and isinstance(name := tool.get("name"), str)
        and name != ""
        and isinstance(tool.get("description"), str)
        and isinstance(tool.get("parameters"), dict)
    )


def _tool_fault(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return f"expected an object, found {type_name(tool)}"
    return (
        _name_fault(tool)
        or _type_fault(tool, "description", str, "a string")
        or _type_fault(tool, "parameters", dict, "an object")
    )


# The answers string is not JSON by the strict contract.
def invalid_answers_json(candidate: Candidate, limits: DataConfig) -> str | None:
    fault = candidate.answers.fault
    return fault.detail if fault else None


# The answers are no non-empty list of objects, each with a non-empty string name and an object arguments.
def invalid_answer_shape(candidate: Candidate, limits: DataConfig) -> str | None:
    calls = candidate.answers.value
    if not isinstance(calls, list):
        return f"expected an array of calls, found {type_name(calls)}"
    if not calls:
        return "the array of calls is empty"
    for index, call in enumerate(calls):
        if not isinstance(call, dict):
            return f"call {index + 1}: expected an object, found {type_name(call)}"
        if (fault := _name_fault(call) or _type_fault(call, "arguments", dict, "an object")) is not None:
            return f"call {index + 1}: {fault}"
    return None


# The answers hold more calls than max_calls (1 by default): a decision about scope, not about quality.
def multi_call_answer(candidate: Candidate, limits: DataConfig) -> str | None:
    calls = len(candidate.answers.value)
    return f"{counted(calls, 'call', 'calls')}, at most {limits.max_calls}" if calls > limits.max_calls else None


def _name_fault(value: dict[str, Any]) -> str | None:
    return _type_fault(value, "name", str, "a string") or ("name is empty" if value["name"] == "" else None)


def _type_fault(value: dict[str, Any], field: str, kind: type, expected: str) -> str | None:
    if isinstance(value.get(field), kind):
        return None
    found = type_name(value[field]) if field in value else "nothing"
    return f"{field}: expected {expected}, found {found}"


def _line(name: str, order: int, doc: str) -> DropReason:
    return DropReason(name=name, doc=doc, scope="line", order=order)


LINE_REASONS = (
    _line("line_too_long", -80, "the line is longer than 16 MiB"),
    _line("invalid_utf8", -70, "the line is not UTF-8"),
    _line("invalid_row_json", -60, "the line is not JSON by the strict contract"),
    _line("row_not_object", -50, "the line is JSON but no object"),
    _line("unknown_schema", -40, "the row's schema_version is not the source's"),
    _line("missing_field", -30, "the row lacks a field that its schema requires"),
    _line("invalid_example_id", -20, "the row's id is null, of a wrong type, or blank"),
    _line("duplicate_example_id", -10, "an earlier row has the same id"),
)
ROW_REASONS = tuple(
    DropReason(name=check.__name__, doc=doc, scope="row", order=10 * place, pointer=pointer, check=check)
    for place, (check, pointer, doc) in enumerate(
        (
            (missing_query, "/query", "query is absent, not a string, or only white space"),
            (missing_tools, "/tools", "tools is absent, not a string, or only white space"),
            (missing_answers, "/answers", "answers is absent, not a string, or only white space"),
            (query_too_short, "/query", "the stripped query is shorter than [data] min_query_chars"),
            (query_too_long, "/query", "the stripped query is longer than [data] max_query_chars"),
            (invalid_tools_json, "/tools", "tools is not JSON by the strict contract"),
            (invalid_tool_shape, "/tools", "tools is no list of objects with name, description and parameters"),
            (invalid_answers_json, "/answers", "answers is not JSON by the strict contract"),
            (invalid_answer_shape, "/answers", "answers is no non-empty list of objects with name and arguments"),
            (multi_call_answer, "/answers", "answers holds more than [data] max_calls calls"),
        ),
        start=1,
    )
)
