"""From a prepared example to the chat row to train on: by the template's own tool support, or by a system turn."""

from __future__ import annotations

from typing import Any, Literal

from kiln_cli.chat import ChatRow, normalise
from kiln_cli.errors import RowFault
from kiln_cli.identity import Domain, canonical_json, domain_sha256
from kiln_cli.prepared_chat import native_row, tool_object
from kiln_cli.records import PreparedExample
from kiln_stages.labelling.labels import LabelFinder

# ``kiln-cli.tool-prompt.v1``: one fixed sentence. Its digest stands in manifests; change it, change the name.
TOOL_PROMPT = (
    'Answer by calling the functions below: reply with one JSON object {"name": ..., "arguments": ...}, '
    "or with an array of such objects for several calls, and nothing else."
)
TOOL_PROMPT_NAME = "kiln-cli.tool-prompt.v1"

ToolsMode = Literal["native", "system"]


def tool_prompt_sha256() -> str:
    return domain_sha256(Domain.TOOL_PROMPT_TEXT, TOOL_PROMPT.encode("utf-8"))


def to_chat_row(example: PreparedExample, mode: ToolsMode) -> ChatRow:
    """native: [user, assistant with tool_calls] and tools. system: [system, user, assistant], text alone."""
    return native_row(example) if mode == "native" else _system(example)


def choose_mode(wanted: Literal["auto", "native", "system"], finder: LabelFinder) -> ToolsMode:
    """``auto`` is native where a probe shows that the template renders tools and calls, system otherwise."""
    if wanted != "auto":
        return wanted
    try:
        rendered = finder.find(_PROBE.messages, _PROBE.tools)
    except RowFault:
        return "system"
    trained = "".join(rendered.text[start:end] for start, end in rendered.spans)
    context = rendered.text.replace(trained, "")
    shows_tool = all(text in context for text in ("probe_tool", "probe_description", "probe_parameter"))
    shows_call = all(text in trained for text in ("probe_tool", "probe_parameter", "probe_argument"))
    return "native" if shows_tool and shows_call else "system"


def tool_system_text(tools: list[Any]) -> str:
    """The instruction and the tools as canonical JSON."""
    return f"{TOOL_PROMPT}\n{canonical_json(tools).decode('utf-8')}"


def answer_text(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls, by name and arguments, as the text of an answer: one object, or an array of several."""
    texts = [_call_text(name, arguments) for name, arguments in calls]
    return texts[0] if len(texts) == 1 else "[" + ",".join(texts) + "]"


def _system(example: PreparedExample) -> ChatRow:
    messages = [
        {"role": "system", "content": tool_system_text([tool_object(tool) for tool in example.tools])},
        {"role": "user", "content": example.query},
        {"role": "assistant", "content": answer_text([(call.name, call.arguments) for call in example.gold_calls])},
    ]
    return normalise({"messages": messages})


def _call_text(name: str, arguments: dict[str, Any]) -> str:
    """The name first, then the arguments in canonical form: the order in which a model is to write them."""
    return f'{{"name":{canonical_json(name).decode()},"arguments":{canonical_json(arguments).decode()}}}'


_PROBE = normalise(
    {
        "messages": [
            {"role": "user", "content": "probe question"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "probe_tool", "arguments": {"probe_parameter": "probe_argument"}},
                    }
                ],
            },
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "probe_tool",
                    "description": "probe_description",
                    "parameters": {"type": "object", "properties": {"probe_parameter": {"type": "string"}}},
                },
            }
        ],
    }
)
