"""The chat row: its model, its normal form, its hash. Contract: ``docs/artifacts.md``, *chat rows*.

The normal form holds exactly what the hash covers, so two rows share an identity if and only if they train alike. Rows
of the five message fields hash byte for byte as the public Kiln server does; rows that use ``tools``,
``reasoning_content`` or ``weight`` 0 hash under a domain of their own.

A value that does not fit the model is ``invalid_json``; its detail begins with one of MISFITS and a colon.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import RowFault
from kiln_cli.identity import Domain, canonical_json, domain_sha256
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable

ROLES = ("system", "user", "assistant", "tool")
# Why a parsed value is no row, beside what the JSON parser itself refuses (``strict_json.JsonFault.KINDS``).
MISFITS = (
    "row_not_object",
    "missing_field",
    "wrong_type",
    "content_not_string",
    "unsupported_content_part",
    "conflicting_fields",
    "text_not_json",
    "several_instances",
)
TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_KNOWN = frozenset(("role", "content", "tool_calls", "name", "tool_call_id"))
_OF_ASSISTANTS = frozenset((*_REASONING, "weight"))
# A switch of OpenAI's request: it says how many calls an answer may have, and the row holds the calls themselves.
_KNOWN_OF_ROW = frozenset(("messages", "tools", "parallel_tool_calls"))


class ChatRow(msgspec.Struct, frozen=True):
    """One conversation in normal form: ``messages`` and ``tools`` are plain JSON values, ``content`` always a string.

    ``ignored`` names the fields of the input that change nothing (``messages[].loss_weight``), for the report.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    ignored: tuple[str, ...] = ()

    def canonical(self) -> bytes:
        value: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            value["tools"] = self.tools
        return canonical_json(value)

    @property
    def extended(self) -> bool:
        """Whether the row uses a field that the five-field model does not have."""
        return bool(self.tools) or any("weight" in m or "reasoning_content" in m for m in self.messages)

    def sha256(self) -> str:
        domain = Domain.SFT_EXTENDED_ROW if self.extended else Domain.SFT_PARSED_ROW
        return domain_sha256(domain, self.canonical())


def normalise(value: object) -> ChatRow:
    """The normal form of a parsed JSON value. Raises RowFault ``invalid_json`` where it does not fit the model."""
    if not isinstance(value, dict):
        raise misfit("", "an object", value, word="row_not_object")
    ignored = {key for key in value if key not in _KNOWN_OF_ROW}
    messages = value.get("messages", [])
    if not isinstance(messages, list):
        raise misfit("/messages", "an array", messages)
    normal = [_message(message, f"/messages/{index}", ignored) for index, message in enumerate(messages)]
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise misfit("/tools", "an array", tools)
    return ChatRow(normal, tools or None, tuple(sorted(ignored)))


def require_structure(row: ChatRow, *, arguments: bool = True) -> None:
    """Raises RowFault ``empty_messages``, ``invalid_role`` or ``tool_arguments_invalid_json``, in this order.

    ``arguments=False`` takes any text for the arguments of a call, as the public Kiln server does.
    """
    if not row.messages:
        raise RowFault("empty_messages", "the row has no messages", "/messages")
    for index, message in enumerate(row.messages):
        if message["role"] not in ROLES:
            detail = f"message {index + 1} has role {message['role']!r}; expected one of {', '.join(ROLES)}"
            raise RowFault("invalid_role", detail, f"/messages/{index}/role")
    for index, message in enumerate(row.messages if arguments else ()):
        for number, call in enumerate(message.get("tool_calls", ())):
            _require_arguments(call, f"/messages/{index}/tool_calls/{number}")


def _require_arguments(call: object, at: str) -> None:
    """Arguments given as text hold one JSON object: only so do they render as the same arguments given as an object."""
    if not isinstance(call, dict):
        return
    _require_arguments(call.get("function"), f"{at}/function")
    text = call.get("arguments")
    if not isinstance(text, str):
        return
    try:
        value = strict_json.parse(text.encode("utf-8"))
    except strict_json.JsonFault as fault:
        detail = f"{printable(text, 40)!r} is no JSON: {fault.kind}: {fault.detail}"
        raise RowFault("tool_arguments_invalid_json", detail, f"{at}/arguments") from None
    if not isinstance(value, dict):
        detail = f"the text holds {type_name(value)}, expected an object"
        raise RowFault("tool_arguments_invalid_json", detail, f"{at}/arguments")


def raw_row_sha256(text: bytes) -> str:
    """Identity of a line that could not be parsed: its trimmed bytes under a domain of their own."""
    return domain_sha256(Domain.SFT_RAW_ROW, text)


def _message(value: object, at: str, ignored: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise misfit(at, "an object", value)
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and type(role) is str and type(content) is str:
        return {"role": role, "content": content}  # nothing else to read, as in most messages
    normal: dict[str, Any] = {"role": _string(value, "role", at), "content": _content(content, at)}
    calls = value.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise misfit(f"{at}/tool_calls", "an array or null", calls)
        normal["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if value.get(key) is not None:
            normal[key] = _string(value, key, at)
    # A table has every column in every row, so null stands for a field that is not there.
    extra = {key for key, item in value.items() if key not in _KNOWN and not (item is None and key in _OF_ASSISTANTS)}
    if normal["role"] == "assistant":
        extra -= _assistant_extras(value, normal, at)
    ignored.update(f"messages[].{key}" for key in extra)
    return normal


def _assistant_extras(value: dict[str, Any], normal: dict[str, Any], at: str) -> set[str]:
    """Adds reasoning and a zero weight to the normal form; returns the keys that it has read."""
    reasoning: str | None = None
    for key in _REASONING:
        text = value.get(key)
        if text is None:
            continue
        if not isinstance(text, str):
            raise misfit(f"{at}/{key}", "a string or null", text)
        if text and reasoning is not None and text != reasoning:
            detail = "conflicting_fields: two spellings of the reasoning differ"
            raise RowFault("invalid_json", detail, f"{at}/{key}")
        reasoning = text or reasoning
    if reasoning:
        normal["reasoning_content"] = reasoning
    read = set(_REASONING)
    weight = value.get("weight")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool):
        read.add("weight")
        if weight == 0:
            normal["weight"] = 0
    return read


def _content(value: object, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise misfit(f"{at}/content", "a string, null or an array of parts", value, word="content_not_string")
    return "".join(_part(part, f"{at}/content/{index}") for index, part in enumerate(value))


def _part(value: object, at: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") in TEXT_PARTS and isinstance(value.get("text"), str):
        text: str = value["text"]
        return text
    kind = repr(value.get("type")) if isinstance(value, dict) else type_name(value)
    raise RowFault("invalid_json", f"unsupported_content_part: {kind} is no text part", at)


def _string(value: dict[str, Any], key: str, at: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise misfit(f"{at}/{key}", "a string", text if key in value else msgspec.UNSET)
    return text


def misfit(pointer: str, expected: str, found: object, *, word: str = "wrong_type") -> RowFault:
    """A field of another type than expected, or (``found`` is ``msgspec.UNSET``) none at all."""
    if found is msgspec.UNSET:
        return RowFault("invalid_json", f"missing_field: expected {expected}, found nothing", pointer)
    return RowFault("invalid_json", f"{word}: expected {expected}, found {type_name(found)}", pointer)
