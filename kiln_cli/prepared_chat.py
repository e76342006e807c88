"""A prepared example as a conversation in the template's own tool format: what admit trains on, and what a file of
prepared examples is read as."""

from __future__ import annotations

from typing import Any

from kiln_cli.chat import ChatRow, normalise
from kiln_cli.records import PreparedExample, Tool


def native_row(example: PreparedExample) -> ChatRow:
    """[user, assistant with tool_calls] and tools, under OpenAI's wrapping; a call has no id."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in example.gold_calls
    ]
    messages = [
        {"role": "user", "content": example.query},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    tools = [{"type": "function", "function": tool_object(tool)} for tool in example.tools]
    return normalise({"messages": messages, "tools": tools})


def tool_object(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
