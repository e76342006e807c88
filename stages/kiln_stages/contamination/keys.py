"""What a row can be found again by: the keys of a row, and the rules that compare them.

The *source row* is the JSON value as it was given, the *example* the prompt and its answer: the messages without system
turns and without the tool results at the end, the last one apart where it is the assistant's. ``weight`` is left out:
it says what is trained on, not what is said. A prepared example is looked at as a conversation in the template's own
tool format, however it was rendered.

The normal form of a source row is that of ``row_identities.py``. The normal form of an example goes further: each
string is brought to that form and then to Unicode's NFC, so that composed and decomposed letters are one, and arguments
of a call given as text are the object that they hold. Compatibility forms (ligatures, full-width letters) stay apart.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import ChatRow
from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.prepared_chat import native_row
from kiln_cli.records import PreparedExample, Record
from kiln_stages.admitting.incoming import IncomingRow
from kiln_stages.row_identities import content_sha256, group_id, normal_text, normalized_sha256, session_id


class RowKeys(NamedTuple):
    """32 bytes a digest, None where the row has no such key. ``open_prompt``: the prompt of a row that has no answer.

    ``text`` is what near duplicates are found by; None where nobody asked for it.
    """

    row: bytes | None = None
    source: bytes | None = None
    example: bytes | None = None
    normal_source: bytes | None = None
    normal_example: bytes | None = None
    prompt: bytes | None = None
    open_prompt: bytes | None = None
    group: str | None = None
    session: str | None = None
    text: str | None = None


class Rule(NamedTuple):
    """``pairs``: which key of one row is compared with which of the other."""

    doc: str
    pairs: tuple[tuple[str, str], ...]


# In this order; a row's first rule that fits is the one it is told by. Near duplicates come last and have no key.
RULES = {
    "same_row": Rule("the same conversation, by the hash that receipts hold", (("row", "row"),)),
    "same_source_row": Rule("the same JSON value", (("source", "source"),)),
    "same_example": Rule("the same prompt and answer", (("example", "example"),)),
    "normal_source_row": Rule(
        "the same JSON value but for white space and case of its texts", (("normal_source", "normal_source"),)
    ),
    "normal_example": Rule(
        "the same prompt and answer but for white space, case and Unicode composition",
        (("normal_example", "normal_example"),),
    ),
    "same_prompt": Rule(
        "the same prompt, in normal form, where one of the rows has no answer",
        (("prompt", "open_prompt"), ("open_prompt", "prompt")),
    ),
    "same_group": Rule("the same group_id", (("group", "group"),)),
    "same_session": Rule("the same session_id", (("session", "session"),)),
}
NEAR = "near_duplicate"
NEAR_DOC = "prompt and answer share so many of their words, three in a row"


def row_keys(incoming: IncomingRow, *, near: bool) -> RowKeys:
    """The keys of a row as it comes in. A row that is no conversation has those of its JSON value, if it is one."""
    keys = _source_keys(incoming.record)._replace(row=_digest(incoming.sha256()))
    row = _conversation(incoming)
    return keys if row is None else _with_example(keys, row, near)


def _source_keys(record: Record) -> RowKeys:
    try:
        value = strict_json.parse(record.text or b"")
    except strict_json.JsonFault:
        return RowKeys()
    return RowKeys(
        source=_digest(content_sha256(value)),
        normal_source=_digest(normalized_sha256(value)),
        group=group_id(value),
        session=session_id(value),
    )


def _conversation(incoming: IncomingRow) -> ChatRow | None:
    """The row; for a line that prepare wrote, as its template would have it that knows tools."""
    if not incoming.prepared or incoming.record.text is None:
        return incoming.row
    return native_row(msgspec.json.decode(incoming.record.text, type=PreparedExample))


def _with_example(keys: RowKeys, row: ChatRow, near: bool) -> RowKeys:
    prompt, target = _prompt_and_target(row)
    if not prompt and target is None:
        return keys
    folded, answer = _folded(prompt), _folded(target)
    asked = _sha256(folded)
    return keys._replace(
        example=_sha256({"messages": prompt, "target": target}),
        normal_example=_sha256({"messages": folded, "target": answer}),
        prompt=asked,
        open_prompt=asked if target is None else None,
        text=_text([*folded, *([] if answer is None else [answer])]) if near else None,
    )


def _prompt_and_target(row: ChatRow) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    messages = [
        {key: value for key, value in message.items() if key != "weight"}
        for message in row.messages
        if message["role"] != "system"
    ]
    while messages and messages[-1]["role"] == "tool":
        messages.pop()
    target = messages.pop() if messages and messages[-1]["role"] == "assistant" else None
    return messages, target


def _folded(value: Any) -> Any:
    """The value with every string in normal form, NFC included, and the arguments of calls as objects."""
    if isinstance(value, str):
        text = normal_text(value)
        return text if text.isascii() else unicodedata.normalize("NFC", text)
    if isinstance(value, list):
        return [_folded(item) for item in value]
    if isinstance(value, dict):
        return {key: _folded(_arguments(item) if key == "arguments" else item) for key, item in value.items()}
    return value


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = strict_json.parse(value.encode("utf-8"))
    except strict_json.JsonFault:
        return value
    return parsed if isinstance(parsed, dict) else value


def _text(messages: list[dict[str, Any]]) -> str | None:
    """All that is said in these messages, roles left out; None where nothing is."""
    return " ".join(text for message in messages for text in _said({**message, "role": None})) or None


def _said(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _said(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _said(item)
    elif value is not None:
        yield canonical_json(value).decode("utf-8")


def _sha256(value: Any) -> bytes:
    return bytes.fromhex(sha256_hex(canonical_json(value)))


def _digest(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("sha256:"))
