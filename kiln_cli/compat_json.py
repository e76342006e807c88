"""Rows as the public Kiln server reads them, for ``compat = "kiln"``: what it takes is taken, what it drops is dropped.

It differs from the strict reading in this. A struct may be an array of its fields in order. A key that it knows may
stand once; of a key twice elsewhere the last counts. Unknown fields (``tools``, ``weight``, ...) and content parts
other than text are dropped. Integers beyond 64 bits become doubles, and decimals are read with one float operation,
not rounded correctly. What is dropped need only be JSON by its syntax: lone surrogates, infinite numbers and any depth
pass there. Contract: ``docs/artifacts.md``, *rows as the public server reads them*.
"""

from __future__ import annotations

import json
import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import msgspec

from kiln_cli.chat import TEXT_PARTS, ChatRow, misfit
from kiln_cli.counting import counted
from kiln_cli.errors import RowFault
from kiln_cli.strict_json import MAX_DEPTH, WIDE_FROM, WideDouble

_ROW = ("messages",)
_MESSAGE = ("role", "content", "tool_calls", "name", "tool_call_id")
# Nesting of the arrays and objects that are always there: the row, its messages, one message.
_IN_MESSAGE = 3


def compat_row(text: bytes) -> ChatRow:
    """The row of one trimmed line. Raises RowFault ``invalid_json`` where the server could not read it.

    ``ignored`` names every field that is dropped, also those that the extended row model would train on.
    """
    ignored: set[str] = set()
    row = _fields(_tree(_decoded(text)), _ROW, "", "", ignored)
    messages = row.get("messages", [])
    if type(messages) is not list:
        raise misfit("/messages", "an array", _sample(messages))
    normal = [_message(message, f"/messages/{index}", ignored) for index, message in enumerate(messages)]
    ignored.discard("parallel_tool_calls")  # nor is it named when read strictly: it speaks of the request
    return ChatRow(normal, None, tuple(sorted(ignored)))


def require_json(text: bytes) -> None:
    """Raises RowFault ``invalid_json`` for a text that is no JSON by its syntax, whatever it says."""
    _tree(_decoded(text))


# --- syntax


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise _fault("invalid_utf8", f"byte 0x{byte:02x}: {error.reason}", offset=error.start) from None


class _Pairs(list[tuple[str, Any]]):
    """An object with every key that stands in it, in order."""


class _Numeral(str):
    """A number as written."""

    __slots__ = ()


_TOKEN = re.compile(
    r"""[ \t\n\r]*(?:
      (?P<mark>[\[\]{}:,"])
    | (?P<numeral>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    | (?P<word>true|false|null)
    | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_SPACE = " \t\n\r"
_WORDS = {"true": True, "false": False, "null": None}
_CLOSING = {"[": "]", "{": "}"}
_VALUE = "a value"


def _tree(source: str) -> Any:
    """The value of a JSON text before anything is decided: objects as pairs, numbers as written, surrogates as found.

    No recursion, so that no depth is too deep here.
    """
    around: list[list[Any]] = []
    keys: list[str] = []
    at = 0
    while True:
        before = at
        kind, value, at = _token(source, at)
        if kind in _CLOSING:
            inner: list[Any] = _Pairs() if kind == "{" else []
            following, _, after = _token(source, at)
            if following != _CLOSING[kind]:
                around.append(inner)
                at = _key(source, at, keys) if kind == "{" else at
                continue
            value, at = inner, after
        elif kind != _VALUE:
            raise _unexpected(source, before, kind, _VALUE)
        while around:
            outer = around[-1]
            is_object = type(outer) is _Pairs
            outer.append((keys.pop(), value) if is_object else value)
            before = at
            kind, _, at = _token(source, at)
            if kind == ",":
                at = _key(source, at, keys) if is_object else at
                break
            if kind != ("}" if is_object else "]"):
                raise _unexpected(
                    source, before, kind, "a comma or the end of the " + ("object" if is_object else "array")
                )
            value = around.pop()
        else:
            break
    if rest := source[at:].strip(_SPACE):
        raise _fault(
            "trailing_data",
            counted(len(rest), "character", "characters") + " behind the value",
            offset=_byte(source, at),
        )
    return value


def _token(source: str, at: int) -> tuple[str, Any, int]:
    """What stands at ``at``: a punctuation mark, a value (with it) or the end, and where it ends."""
    match = _TOKEN.match(source, at)
    if match is None:
        raise _fault("syntax", f"no JSON at column {at + 1}", offset=_byte(source, at))
    if mark := match["mark"]:
        if mark != '"':
            return mark, None, match.end()
        try:
            text, after = scanstring(source, match.end(), True)
        except json.JSONDecodeError as error:
            detail = f"{error.msg} at column {error.pos + 1}"
            raise _fault("syntax", detail, offset=_byte(source, error.pos)) from None
        return _VALUE, text, after
    if numeral := match["numeral"]:
        return _VALUE, _Numeral(numeral), match.end()
    if word := match["word"]:
        return _VALUE, _WORDS[word], match.end()
    return "the end", None, match.end()


def _key(source: str, at: int, keys: list[str]) -> int:
    """Puts the key at ``at`` on the stack; returns where its value begins."""
    kind, key, after = _token(source, at)
    if type(key) is not str:
        raise _unexpected(source, at, kind, "a key")
    kind, _, colon = _token(source, after)
    if kind != ":":
        raise _unexpected(source, after, kind, "a colon")
    keys.append(key)
    return colon


def _unexpected(source: str, at: int, kind: str, expected: str) -> RowFault:
    return _fault("syntax", f"expected {expected}, found {kind} at column {at + 1}", offset=_byte(source, at))


def _byte(source: str, at: int) -> int:
    return len(source[:at].encode("utf-8"))


# --- the row model


def _fields(node: Any, names: tuple[str, ...], at: str, prefix: str, ignored: set[str]) -> dict[str, Any]:
    """The known fields of a struct, from an object or from an array of them in order."""
    if type(node) is list:
        if len(node) > len(names):
            raise _fault("trailing_data", f"{len(node)} elements for {counted(len(names), 'field', 'fields')}", at)
        return dict(zip(names, node, strict=False))
    if type(node) is not _Pairs:
        raise misfit(at, "an object", _sample(node), word="wrong_type" if at else "row_not_object")
    fields: dict[str, Any] = {}
    for key, value in node:
        if key not in names:
            ignored.add(prefix + _text(key, at))
        elif key in fields:
            raise _fault("duplicate_key", f"key {key!r} stands twice", f"{at}/{key}")
        else:
            fields[key] = value
    return fields


def _message(node: Any, at: str, ignored: set[str]) -> dict[str, Any]:
    fields = _fields(node, _MESSAGE, at, "messages[].", ignored)
    normal = {
        "role": _string(fields.get("role", msgspec.UNSET), f"{at}/role"),
        "content": _content(fields.get("content"), f"{at}/content", ignored),
    }
    calls = fields.get("tool_calls")
    if calls is not None:
        if type(calls) is not list:
            raise misfit(f"{at}/tool_calls", "an array or null", _sample(calls))
        normal["tool_calls"] = _value(calls, f"{at}/tool_calls", _IN_MESSAGE + 1)
    for key in ("name", "tool_call_id"):
        if fields.get(key) is not None:
            normal[key] = _string(fields[key], f"{at}/{key}")
    return normal


def _content(node: Any, at: str, ignored: set[str]) -> str:
    if node is None:
        return ""
    if type(node) is str:
        return _text(node, at)
    if type(node) is not list:
        raise misfit(at, "a string, null or an array of parts", _sample(node), word="content_not_string")
    texts = []
    # The server holds the parts as values before it looks at them, so that each must be a sound one.
    for part in _value(node, at, _IN_MESSAGE + 1):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            ignored.add("messages[].content[]")
    return "".join(texts)


def _string(node: Any, at: str) -> str:
    if type(node) is not str:
        raise misfit(at, "a string", _sample(node))
    return _text(node, at)


# --- kept values


def _value(node: Any, at: str, depth: int) -> Any:
    """A plain JSON value; ``depth`` counts the arrays and objects around and with it, the row being 1."""
    if isinstance(node, list) and depth > MAX_DEPTH:
        raise _fault("too_deep", f"more than {MAX_DEPTH} nested arrays or objects", at)
    if type(node) is _Pairs:
        return {_text(key, at): _value(value, at, depth + 1) for key, value in node}
    if type(node) is list:
        return [_value(value, at, depth + 1) for value in node]
    if type(node) is _Numeral:
        return _number(node, at)
    return _text(node, at) if type(node) is str else node


def _text(text: str, at: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _fault("lone_surrogate", f"\\u{ord(text[error.start]):04x} in a string", at) from None
    return text


_PARTS = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?)([0-9]+))?")
_U64_MAX = 2**64 - 1
_EXPONENT_MAX = 2**31 - 1
_POWERS = [float(f"1e{n}") for n in range(309)]


def _number(numeral: str, at: str) -> int | float:
    """An integer of i64..u64, else a double by the server's rule."""
    match = _PARTS.fullmatch(numeral)
    assert match is not None
    sign, whole, fraction, exponent_sign, exponent_digits = match.groups()
    significand, taken = _take(0, whole)
    exponent = len(whole) - taken
    if fraction is None and exponent_digits is None and exponent == 0:
        if not sign:
            return significand
        if 0 < significand <= 2**63:
            return -significand
    if fraction is not None:
        # Taken up again even where digits before the point were dropped: a smaller one may fit.
        significand, taken = _take(significand, fraction)
        exponent -= taken
    size = _written_exponent(exponent_digits or "")
    if size > _EXPONENT_MAX:
        value = 0.0 if significand == 0 or exponent_sign == "-" else math.inf
    else:
        value = _scaled(significand, exponent - size if exponent_sign == "-" else exponent + size)
    if math.isinf(value):
        raise _fault("not_finite", f"number {numeral[:40]} overflows to infinity", at)
    value = -value if sign else value
    return WideDouble(value) if abs(value) >= WIDE_FROM else value


def _take(significand: int, digits: str) -> tuple[int, int]:
    """``significand`` with as many of the digits behind it as a u64 can hold, and how many those are."""
    for taken, digit in enumerate(digits):
        longer = significand * 10 + int(digit)
        if longer > _U64_MAX:
            return significand, taken
        significand = longer
    return significand, len(digits)


def _written_exponent(digits: str) -> int:
    """The exponent; anything above 32 bits for one of more digits than that has (int() refuses very long ones)."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= 10 else _EXPONENT_MAX + 1


def _scaled(significand: int, exponent: int) -> float:
    """significand x 10^exponent in one multiplication or division; below 10^-308, one more for each further 308."""
    value = float(significand)
    while abs(exponent) > 308:
        if value == 0.0:
            return value
        if exponent > 0:
            return math.inf
        value /= _POWERS[308]
        exponent += 308
    return value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]


def _sample(node: Any) -> Any:
    """A plain value of the node's type, for a message."""
    if type(node) is _Pairs:
        return {}
    return 0 if type(node) is _Numeral else node


def _fault(word: str, detail: str, pointer: str = "", offset: int = -1) -> RowFault:
    return RowFault("invalid_json", f"{word}: {detail}", pointer, offset)
