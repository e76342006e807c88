"""Members of a JSON object changed in its text: every other byte of it stays as it was written.

A parser that is followed by an encoder gives an equal value, and may write it otherwise: ``1.50`` as ``1.5``, an
escape as a letter. Here white space, order, escapes and numbers of all that is not changed stay.
"""

from __future__ import annotations

import json
from typing import NamedTuple

_SPACE = " \t\n\r"
_read = json.JSONDecoder().raw_decode


class Member(NamedTuple):
    """Where a member stands in the text: its key begins at ``start``, its value is ``text[value:end]``."""

    key: str
    start: int
    value: int
    end: int


def members(text: str) -> list[Member]:
    """The members of an object in order. ``text`` must be one by :func:`kiln_cli.strict_json.parse_object`."""
    found = []
    at = _behind_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, colon = _read(text, at)
        value = _behind_space(text, _behind_space(text, colon) + 1)
        _, end = _read(text, value)
        found.append(Member(key, at, value, end))
        at = _behind_space(text, end)
        if text[at] == ",":
            at = _behind_space(text, at + 1)
    return found


def values(text: str) -> dict[str, str]:
    """The text of each member's value."""
    return {member.key: text[member.value : member.end] for member in members(text)}


def with_member(text: str, key: str, value: str) -> str:
    """The object with ``value`` (JSON text) under ``key``: in the member's place, or behind the last one."""
    found = members(text)
    for member in found:
        if member.key == key:
            return text[: member.value] + value + text[member.end :]
    at = found[-1].end if found else text.index("{") + 1
    comma = "," if found else ""
    return f"{text[:at]}{comma}{json.dumps(key, ensure_ascii=False)}:{value}{text[at:]}"


def without_member(text: str, key: str) -> str:
    """The object without the member, and without the comma that joined it to another one."""
    found = members(text)
    for place, member in enumerate(found):
        if member.key != key:
            continue
        if place:
            return text[: found[place - 1].end] + text[member.end :]
        behind = found[1].start if len(found) > 1 else member.end
        return text[: member.start] + text[behind:]
    return text


def _behind_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
