"""A chat row as the template is to see it, where the config asks for another shape than the row's own.

Both views are opt-in and change what is rendered, never the row: its hash is that of the row as given.

- ``[admit] tools = "system"``: tools become text of the system turn, calls become the text of the answer. For templates
  that ignore tools.
- ``[admit] system_turn = "fold"``: the system text goes in front of the first question. For templates that refuse or
  drop a system turn.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import RowFault
from kiln_stages.admitting.prepared_rows import answer_text, tool_system_text
from kiln_stages.labelling.rendering import Message

_BETWEEN = "\n\n"


class RowView(msgspec.Struct, frozen=True):
    """Called with a row's messages and tools, gives those to render. With the defaults, the row's own."""

    tools: Literal["native", "system"] = "native"
    system_turn: Literal["keep", "fold"] = "keep"

    def __call__(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], list[Any] | None]:
        """Raises RowFault: ``tool_arguments_invalid_json`` or ``template_error`` where the row has no such view."""
        if self.tools == "system":
            messages, tools = _with_tools_as_text(messages, tools), None
        if self.system_turn == "fold":
            messages = _folded(messages)
        return messages, tools


def _with_tools_as_text(messages: list[Message], tools: list[Any] | None) -> list[Message]:
    out = [
        _with_calls_as_text(message, i) if message.get("tool_calls") else message for i, message in enumerate(messages)
    ]
    if not tools:
        return out
    text = tool_system_text([_plain_tool(tool) for tool in tools])
    if out and out[0]["role"] == "system":
        given = out[0]["content"]
        return [{**out[0], "content": text + _BETWEEN + given if given else text}, *out[1:]]
    return [{"role": "system", "content": text}, *out]


def _plain_tool(tool: Any) -> Any:
    """A tool as prepared examples write it: without the wrapper that says it is a function."""
    if isinstance(tool, dict) and tool.keys() == {"type", "function"} and tool["type"] == "function":
        return tool["function"]
    return tool


def _with_calls_as_text(message: Message, index: int) -> Message:
    at = f"/messages/{index}/tool_calls"
    calls = [_named_call(call, f"{at}/{number}") for number, call in enumerate(message["tool_calls"])]
    text, given = answer_text(calls), message.get("content") or ""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{given}\n{text}" if given else text}


def _named_call(call: Any, at: str) -> tuple[str, dict[str, Any]]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(name, str):
        raise RowFault("template_error", 'a call without a name cannot be written as text (tools = "system")', at)
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments.encode("utf-8"))
        except strict_json.JsonFault as fault:
            raise RowFault("tool_arguments_invalid_json", f"arguments of {name}: {fault.detail}", at) from None
    if not isinstance(arguments, dict):
        found = strict_json.type_name(arguments)
        raise RowFault("tool_arguments_invalid_json", f"arguments of {name} are {found}, not an object", at)
    return name, arguments


def _folded(messages: list[Message]) -> list[Message]:
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [message["content"] for message in messages[:count] if message["content"]]
    if not count:
        return messages
    if count == len(messages) or messages[count]["role"] != "user":
        raise RowFault(
            "template_error",
            'system_turn = "fold" needs a user message behind the system message',
            f"/messages/{min(count, len(messages) - 1)}/role",
        )
    first = messages[count]
    return [{**first, "content": _BETWEEN.join([*texts, first["content"]])}, *messages[count + 1 :]]
