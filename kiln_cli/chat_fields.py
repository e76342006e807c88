"""Fields of rows in foreign shapes as parts of a chat row: text, tools, tool calls.

All raise RowFault ``invalid_json`` whose detail begins with one of ``kiln_cli.chat.MISFITS``. What is read is kept
whole: a tool or a call that holds more than kiln knows of goes into the chat row with all it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import ChatRow, misfit, normalise
from kiln_cli.errors import RowFault
from kiln_cli.strict_json import type_name


def chat_row(messages: list[dict[str, Any]], tools: list[Any] | None, ignored: Iterable[str]) -> ChatRow:
    """The row of these messages; ``ignored`` names what the foreign row holds beside them."""
    row = normalise({"messages": messages, "tools": tools})
    return msgspec.structs.replace(row, ignored=tuple(sorted({*row.ignored, *ignored})))


def text(value: object, pointer: str) -> str:
    if value is msgspec.UNSET:
        raise misfit(pointer, "text", value)
    if not isinstance(value, str):
        raise RowFault("invalid_json", f"content_not_string: {pointer} is {type_name(value)}; expected text", pointer)
    return value


def tools(value: object, pointer: str = "/tools") -> list[Any] | None:
    """Tools as a list, or as a text that holds one; None and a blank text are no tools.

    A bare function (``{"name": ..., "parameters": ...}``) gets OpenAI's wrapping, as chat templates expect it.
    """
    if isinstance(value, str):
        value = _parsed(value, pointer) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, list):
        raise misfit(pointer, "an array of tools", value)
    return [_wrapped(tool) for tool in value]


def tool_calls(value: object, pointer: str) -> list[dict[str, Any]]:
    """The calls of one object with name and arguments, of an array of these, or of a text that holds either."""
    parsed = _parsed(value, pointer) if isinstance(value, str) else value
    if parsed == []:
        raise RowFault("invalid_json", f"missing_field: {pointer} holds no call", pointer)
    if isinstance(parsed, list):
        return [_call(call, f"{pointer}/{index}") for index, call in enumerate(parsed)]
    return [_call(parsed, pointer)]


def is_number(value: object) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrapped(tool: Any) -> Any:
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool and "type" not in tool
    return {"type": "function", "function": tool} if bare else tool


def _call(value: object, pointer: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise misfit(pointer, "an object with name and arguments", value)
    if isinstance(value.get("function"), dict):
        return value  # wrapped already
    for field, kinds, expected in (("name", str, "a string"), ("arguments", (dict, str), "an object or a text")):
        found = value.get(field, msgspec.UNSET)
        if not isinstance(found, kinds):
            raise misfit(pointer, f"{expected} as {field} of the call", found)
    function = {key: item for key, item in value.items() if key != "id"}
    named = {"id": value["id"]} if "id" in value else {}
    return {"type": "function", **named, "function": function}


def _parsed(value: str, pointer: str) -> Any:
    try:
        return strict_json.parse(value.encode("utf-8"))
    except strict_json.JsonFault as fault:
        detail = f"text_not_json: the text at {pointer} is no JSON: {fault.kind}: {fault.detail}"
        raise RowFault("invalid_json", detail, pointer) from None
