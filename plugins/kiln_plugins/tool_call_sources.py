"""Chat-shaped rows as function-calling rows: one question, the calls that answer it, and the tools it may use.

What a row says is handed on as JSON text in ``tools`` and ``answers``, so the same checks look at every source. A text
inside the row that is no JSON is handed on as it is: the check that reads it drops the row with the parser's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kiln_cli import DropReason, RowFault, Source, ToolCallRow, hookimpl, strict_json
from kiln_cli.identity import canonical_json
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable

# A row with all of these is another source's, whatever else it holds.
_XLAM_FIELDS = {"query", "tools", "answers"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_NO_PARAMETERS = {"type": "object", "properties": {}}


@hookimpl
def kiln_sources() -> Iterable[Source]:
    return (OPENAI_TOOLS, SHAREGPT_TOOLS)


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return (NOT_SINGLE_TURN,)


NOT_SINGLE_TURN = DropReason(
    name="not_single_turn",
    doc="the conversation is not one question answered by calls",
    scope="line",
    order=-35,
)


def _row(record: dict[str, Any], fields: Callable[[dict[str, Any]], dict[str, object]]) -> ToolCallRow:
    """A row that lacks something is still a row with an id."""
    row_id = record.get("id", msgspec.UNSET)
    try:
        return ToolCallRow(**fields(record), row_id=row_id)  # type: ignore[arg-type]
    except RowFault as fault:
        return ToolCallRow(row_id=row_id, fault=(fault.reason, fault.detail, fault.pointer))


def _convert_openai(record: dict[str, Any]) -> ToolCallRow:
    return _row(record, _openai_fields)


def _convert_sharegpt(record: dict[str, Any]) -> ToolCallRow:
    return _row(record, _sharegpt_fields)


def _openai_fields(record: dict[str, Any]) -> dict[str, object]:
    """System and developer messages first, then one user message, then one assistant message with calls; no more.

    The text of system and developer messages, and what the assistant says beside its calls, is not carried over.
    """
    messages = _turns(record, "messages")
    roles = [message.get("role") for message in messages]
    at = 0
    while roles[at : at + 1] in (["system"], ["developer"]):
        at += 1
    if roles[at:] != ["user", "assistant"]:
        raise _not_single_turn("/messages", roles, "[system], user, assistant")
    calls = messages[at + 1].get("tool_calls")
    if calls is None or calls == []:
        raise RowFault("missing_field", "the assistant message has no tool_calls", f"/messages/{at + 1}/tool_calls")
    return {"query": _text(messages[at].get("content")), "tools": _tools(record), "answers": _answers(calls)}


def _sharegpt_fields(record: dict[str, Any]) -> dict[str, object]:
    """A human turn (behind system turns), its function_call, then at most what came of it: observation and gpt turns.

    The text of system turns and of the turns behind the call is not carried over.
    """
    turns = _turns(record, "conversations")
    speakers = [turn.get("from") for turn in turns]
    at = 0
    while speakers[at : at + 1] == ["system"]:
        at += 1
    rest = speakers[at + 2 :]
    if speakers[at : at + 2] != ["human", "function_call"] or any(who not in ("observation", "gpt") for who in rest):
        raise _not_single_turn("/conversations", speakers, "[system], human, function_call, [observation, gpt]")
    value = turns[at + 1].get("value")
    if value is None:
        raise RowFault("missing_field", "the function_call turn has no value", f"/conversations/{at + 1}/value")
    parsed, fault = _parsed(value)
    answers = value if fault else _answers([parsed] if isinstance(parsed, dict) else parsed)
    return {"query": turns[at].get("value", msgspec.UNSET), "tools": _tools(record), "answers": answers}


def _turns(record: dict[str, Any], field: str) -> list[dict[str, Any]]:
    turns = record.get(field)
    if turns is None:
        raise RowFault("missing_field", f"the row has no {field}", f"/{field}")
    if not isinstance(turns, list):
        raise RowFault("missing_field", f"{field} is no array but {type_name(turns)}", f"/{field}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            detail = f"entry {index + 1} of {field} is no object but {type_name(turn)}"
            raise RowFault("missing_field", detail, f"/{field}/{index}")
    return turns


def _not_single_turn(pointer: str, found: list[object], expected: str) -> RowFault:
    shown = ", ".join(printable(role, 20) for role in found[:8]) + (f", … ({len(found)})" if len(found) > 8 else "")
    return RowFault("not_single_turn", f"the turns are {shown or 'none'}; expected {expected}", pointer)


def _text(content: object) -> object:
    """The text of a content, its parts joined; any other content as it is, which `missing_query` then names."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            return content
        texts.append(text)
    return "".join(texts)


def _tools(record: dict[str, Any]) -> str:
    """The tools as JSON text, OpenAI's wrapping taken off. The row may hold them as a list or as JSON text."""
    given = record.get("tools")
    if given is None:
        raise RowFault("missing_field", "the row has no tools", "/tools")
    value, fault = _parsed(given)
    if fault:
        return str(given)
    return canonical_json([_tool(tool) for tool in value] if isinstance(value, list) else value).decode()


def _tool(entry: Any) -> Any:
    """Of OpenAI's ``{"type": "function", "function": {...}}`` the function; what OpenAI lets out is filled in."""
    function = entry.get("function") if isinstance(entry, dict) and entry.get("type") == "function" else None
    if not isinstance(function, dict):
        return entry
    filled = {"description": "", "parameters": _NO_PARAMETERS}
    return {**filled, **{key: value for key, value in function.items() if value is not None}}


def _answers(calls: object) -> str:
    """The calls as JSON text; or, where a call's arguments are a text that is no JSON, that text."""
    if not isinstance(calls, list):
        return canonical_json(calls).decode()
    plain: list[object] = []
    for entry in calls:
        function = entry.get("function") if isinstance(entry, dict) else None
        call = function if isinstance(function, dict) else entry
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            arguments, fault = _parsed(call["arguments"])
            if fault and call["arguments"].strip():
                return str(call["arguments"])
            call = call if fault else {**call, "arguments": arguments}
        plain.append(call)
    return canonical_json(plain).decode()


def _parsed(value: object) -> tuple[Any, bool]:
    """The value of a JSON text, or what is no text as it is; and whether it is a text that is no JSON."""
    if not isinstance(value, str):
        return value, False
    try:
        return strict_json.parse(value.encode("utf-8")), False
    except strict_json.JsonFault:
        return None, True


def _is_xlam(record: dict[str, Any]) -> bool:
    return "schema_version" in record or record.keys() >= _XLAM_FIELDS


def _recognise_openai(record: dict[str, Any]) -> str | None:
    fits = isinstance(record.get("messages"), list) and "tools" in record and "conversations" not in record
    return "has messages and tools" if fits and not _is_xlam(record) else None


def _recognise_sharegpt(record: dict[str, Any]) -> str | None:
    fits = isinstance(record.get("conversations"), list) and "tools" in record and "messages" not in record
    return "has conversations and tools" if fits and not _is_xlam(record) else None


OPENAI_TOOLS = Source(
    name="openai_tools",
    doc="OpenAI messages and tools, one user message answered by tool_calls; system text is not carried over",
    yields="tool_calls",
    convert=_convert_openai,
    recognise=_recognise_openai,
)
SHAREGPT_TOOLS = Source(
    name="sharegpt_tools",
    doc="ShareGPT conversations and tools, one human turn answered by function_call; system text is not carried over",
    yields="tool_calls",
    convert=_convert_sharegpt,
    recognise=_recognise_sharegpt,
)
