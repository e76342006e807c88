"""Conversations in the shapes that people have: OpenAI messages, content parts, Open Assistant threads, ShareGPT.

Text is carried over as it is. What a row holds beside its conversation is named in ``ChatRow.ignored``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln_cli import ChatRow, RowFault, Source, hookimpl
from kiln_cli.chat import misfit, normalise
from kiln_cli.chat_fields import chat_row, is_number, text, tool_calls, tools
from kiln_cli.records import PREPARED_SCHEMA
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable


@hookimpl
def kiln_sources() -> Iterable[Source]:
    return (MESSAGES, CONTENT_PARTS, OASST, SHAREGPT)


# --- rows of `messages`


def _convert_messages(record: dict[str, Any]) -> ChatRow:
    return normalise(record)


def _convert_oasst(record: dict[str, Any]) -> ChatRow:
    messages = record.get("messages", [])
    if not isinstance(messages, list):
        return normalise(record)  # which refuses it
    return normalise({**record, "messages": [_oasst_message(item, index) for index, item in enumerate(messages)]})


def _oasst_message(message: Any, index: int) -> Any:
    """Role ``prompter`` is the user; ``text`` is another spelling of ``content``."""
    if not isinstance(message, dict):
        return message
    out = {key: value for key, value in message.items() if key != "text"}
    if "text" in message:
        if "content" in message:
            detail = "conflicting_fields: the message has both text and content"
            raise RowFault("invalid_json", detail, f"/messages/{index}/text")
        out["content"] = text(message["text"], f"/messages/{index}/text")
    return {**out, "role": "user"} if message.get("role") == "prompter" else out


def _convert_content_parts(record: dict[str, Any]) -> ChatRow:
    messages = record.get("messages", [])
    if not isinstance(messages, list):
        return normalise(record)  # which refuses it
    ignored: set[str] = set()
    joined = [_joined(item, f"/messages/{index}", ignored) for index, item in enumerate(messages)]
    row = normalise({**record, "messages": joined, "tools": tools(record.get("tools"))})
    return msgspec.structs.replace(row, ignored=tuple(sorted({*row.ignored, *ignored})))


# Parts of a message in the one order that a chat row can hold.
_PARTS = ("reasoning", "text", "tool_call")


def _joined(message: Any, at: str, ignored: set[str]) -> Any:
    """A message whose parts are laid into content, reasoning_content and tool_calls, its loss_weight into weight."""
    if not isinstance(message, dict):
        return message
    out = {key: value for key, value in message.items() if key != "loss_weight"}
    if "loss_weight" in message:
        _add_weight(out, message["loss_weight"], at, ignored)
    if isinstance(message.get("content"), list):
        _add_parts(out, message["content"], at)
    return out


def _add_weight(out: dict[str, Any], weight: object, at: str, ignored: set[str]) -> None:
    """Zero on an assistant turn makes it context. Other turns are never trained on, whatever their weight."""
    if "weight" in out:
        detail = "conflicting_fields: the message has both weight and loss_weight"
        raise RowFault("invalid_json", detail, f"{at}/loss_weight")
    spoken = out.get("role") == "assistant"
    if spoken and is_number(weight):
        out["weight"] = weight
    if not is_number(weight) or weight not in ((0, 1) if spoken else (0,)):
        ignored.add("messages[].loss_weight")


def _add_parts(out: dict[str, Any], parts: list[Any], at: str) -> None:
    texts: dict[str, list[str]] = {"reasoning": [], "text": []}
    calls: list[dict[str, Any]] = []
    before = 0
    for index, part in enumerate(parts):
        pointer = f"{at}/content/{index}"
        kind, value = _kind_and_value(part, pointer)
        if kind != "text" and out.get("role") != "assistant":
            raise _unsupported(f"a {kind} part in a message of role {printable(out.get('role'))!r}", pointer)
        if _PARTS.index(kind) < before:
            raise _unsupported(f"a {kind} part behind a {_PARTS[before]} part: their order would be lost", pointer)
        before = _PARTS.index(kind)
        if kind == "tool_call":
            calls += tool_calls(value, f"{pointer}/value")
        else:
            texts[kind].append(text(value, f"{pointer}/value"))
    out["content"] = "".join(texts["text"])
    _add_new(out, "reasoning_content", "".join(texts["reasoning"]), at)
    _add_new(out, "tool_calls", calls, at)


def _kind_and_value(part: object, pointer: str) -> tuple[str, object]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise _unsupported(f"{type_name(part)} is no part", pointer)
    kind = part.get("type")
    if kind not in _PARTS or "value" not in part:
        raise _unsupported(f"{printable(repr(kind))} is no part of text, reasoning or tool_call with a value", pointer)
    return kind, part["value"]


def _add_new(out: dict[str, Any], field: str, value: Any, at: str) -> None:
    if not value:
        return
    if out.get(field):
        raise RowFault("invalid_json", f"conflicting_fields: {field} stands beside such parts", f"{at}/{field}")
    out[field] = value


def _unsupported(detail: str, pointer: str) -> RowFault:
    return RowFault("invalid_json", f"unsupported_content_part: {detail}", pointer)


def _messages_shape(record: dict[str, Any]) -> str | None:
    """Which of the three shapes of ``messages`` a row has, by its messages; None for rows of other sources."""
    messages = record.get("messages")
    if not isinstance(messages, list) or record.get("schema_version") == PREPARED_SCHEMA:
        return None
    objects = [message for message in messages if isinstance(message, dict)]
    if any(_has_values(message.get("content")) for message in objects):
        return "content_parts"
    return "oasst" if any(message.get("role") == "prompter" for message in objects) else "messages"


def _has_values(content: object) -> bool:
    return isinstance(content, list) and any(isinstance(part, dict) and "value" in part for part in content)


def _recognise_messages(record: dict[str, Any]) -> str | None:
    return "has a list of messages" if _messages_shape(record) == "messages" else None


def _recognise_oasst(record: dict[str, Any]) -> str | None:
    return "has messages of role prompter" if _messages_shape(record) == "oasst" else None


def _recognise_content_parts(record: dict[str, Any]) -> str | None:
    return "has messages of parts with type and value" if _messages_shape(record) == "content_parts" else None


# --- rows of `conversations`

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
_OF_TURN = frozenset(("from", "value", "weight"))


def _convert_sharegpt(record: dict[str, Any]) -> ChatRow:
    turns = record.get("conversations", msgspec.UNSET)
    if not isinstance(turns, list):
        raise misfit("/conversations", "an array of turns", turns)
    ignored = record.keys() - {"conversations", "tools", "system"}
    messages = [_turn(turn, f"/conversations/{index}", ignored) for index, turn in enumerate(turns)]
    if record.get("system") not in (None, ""):
        if messages and messages[0]["role"] == "system":
            detail = "conflicting_fields: the row has both a system field and a system turn"
            raise RowFault("invalid_json", detail, "/system")
        messages.insert(0, {"role": "system", "content": text(record["system"], "/system")})
    return chat_row(messages, tools(record.get("tools")), ignored)


def _turn(turn: object, at: str, ignored: set[str]) -> dict[str, Any]:
    """A speaker that is none of ShareGPT's keeps its name, and so is refused as ``invalid_role``."""
    if not isinstance(turn, dict):
        raise misfit(at, "a turn with from and value", turn)
    speaker = turn.get("from", msgspec.UNSET)
    if not isinstance(speaker, str):
        raise misfit(f"{at}/from", "a string", speaker)
    ignored.update(f"conversations[].{key}" for key in turn.keys() - _OF_TURN)
    message: dict[str, Any] = {"role": _SPEAKERS.get(speaker, speaker)}
    weight = turn.get("weight")
    if message["role"] == "assistant" and is_number(weight):
        message["weight"] = weight
    elif weight is not None:
        ignored.add("conversations[].weight")
    value = turn.get("value", msgspec.UNSET)
    if speaker != "function_call":
        return {**message, "content": text(value, f"{at}/value")}
    if value is msgspec.UNSET:
        raise misfit(f"{at}/value", "a call with name and arguments", value)
    return {**message, "content": "", "tool_calls": tool_calls(value, f"{at}/value")}


def _recognise_sharegpt(record: dict[str, Any]) -> str | None:
    turns = record.get("conversations")
    if not isinstance(turns, list) or "messages" in record:
        return None
    return "has conversations" if all(isinstance(turn, dict) and "from" in turn for turn in turns[:1]) else None


MESSAGES = Source(
    name="messages",
    doc="chat rows: messages with role and content, tools, tool_calls (OpenAI and Hugging Face)",
    yields="chat",
    convert=_convert_messages,
    recognise=_recognise_messages,
)
CONTENT_PARTS = Source(
    name="content_parts",
    doc="messages of text, reasoning and tool_call parts (LLaMA-Factory); loss_weight 0 on an assistant is weight 0",
    yields="chat",
    convert=_convert_content_parts,
    recognise=_recognise_content_parts,
)
OASST = Source(
    name="oasst",
    doc="Open Assistant threads: messages of roles prompter and assistant",
    yields="chat",
    convert=_convert_oasst,
    recognise=_recognise_oasst,
)
SHAREGPT = Source(
    name="sharegpt",
    doc="ShareGPT conversations of from and value, function_call and observation included; tools as JSON text",
    yields="chat",
    convert=_convert_sharegpt,
    recognise=_recognise_sharegpt,
)
