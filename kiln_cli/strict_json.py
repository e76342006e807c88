"""One hostile-JSON contract for every stage, the same on every platform and Python version.

A text is refused for: invalid UTF-8, any byte of broken syntax, text behind the value, a raw control character, a lone
surrogate, a duplicate key at any depth, NaN and Infinity, a number that overflows to infinity, an integer outside
-2^63..2^64-1, and 128 or more nested arrays and objects (127 pass). ``-0`` is the double -0.0, where asked for.

msgspec parses in the fast path. What it does not check is found by cheap tests of the raw bytes; where one of those
fires, a slow path with the standard library's parser gives the exact verdict. Both paths give equal values.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec

MAX_DEPTH = 127
INT_MIN, INT_MAX = -(2**63), 2**64 - 1

WIDE_FROM = 1e16
# Numbers that msgspec reads otherwise than the contract: negative zero, and integers that may need over 64 bits. Long
# runs of digits are looked for in a copy with every digit a nought, which is seven times faster than a pattern.
_NEGATIVE_ZERO = re.compile(rb"-0(?![0-9.eE])")
_NO_DIGITS = bytes(byte for byte in range(256) if byte not in b"0123456789")
_TO_NOUGHTS = bytes.maketrans(b"123456789", b"000000000")
_LONG_INTEGER = b"0" * 19
# Possessive: a string of megabytes must cost no memory for ways back that are never taken.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class WideDouble(float):
    """A double of 1e16 or more: the ones whose canonical text msgspec does not write by itself."""

    __slots__ = ()


class JsonFault(ValueError):
    """Why a text is refused. ``kind`` is one of KINDS; ``offset`` is the byte offset in the text, -1 if unknown.

    ``pointer`` is the JSON pointer of a key that stands twice, where the rest of the text is sound.
    """

    KINDS = (
        "invalid_utf8",
        "syntax",
        "trailing_data",
        "too_deep",
        "duplicate_key",
        "not_finite",
        "integer_out_of_range",
        "lone_surrogate",
    )

    def __init__(self, kind: str, detail: str, offset: int = -1, pointer: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.offset = offset
        self.pointer = pointer


def parse(text: bytes, *, negative_zero: bool = True) -> Any:
    """The value of one JSON text. Raises :class:`JsonFault`.

    ``negative_zero=False`` reads ``-0`` as the integer 0, as most parsers do.
    """
    try:
        return _parse(text, negative_zero)
    except RecursionError:
        _require_shallow(text)
        # The text is shallow, so the caller must be deep: the verdict must not depend on that.
        return _parse_on_another_stack(text, negative_zero)


def parse_again(text: bytes) -> Any:
    """The value of a text that :func:`parse` has accepted before (negative zero aside): no test is made twice."""
    return _decode(text)


def _parse(text: bytes, negative_zero: bool) -> Any:
    # Escapes may stand for a colon or a digit; a negative zero is read as 0. A false alarm costs time only.
    if (b"\\" in text and b"\\u003" in text) or (
        negative_zero and b"-0" in text and _NEGATIVE_ZERO.search(text) is not None
    ):
        return _parse_suspect(text, negative_zero)
    try:
        value = _decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return _parse_suspect(text, negative_zero)
    colons = text.count(b":")
    # A key written twice leaves one colon less in the value. Colons inside strings stand in both.
    sound = _flat_colons(value) == colons if type(value) is dict else False
    return value if sound or _is_sound(text, value, colons) else _parse_suspect(text, negative_zero)


def _flat_colons(value: dict[str, Any]) -> int:
    """The colons that an object of strings and small numbers is written with; -1 for any other."""
    colons = len(value)
    for key, item in value.items():
        colons += key.count(":")
        kind = type(item)
        if kind is str:
            colons += item.count(":")
        elif item is not None and kind is not bool and (kind is not int or not INT_MIN <= item <= INT_MAX):
            return -1
    return colons


def _is_sound(text: bytes, value: Any, colons: int) -> bool:
    """Whether a decoded value has no fault that msgspec lets pass: too deep, an integer too long, a key twice.

    Each object around another costs a colon, so brackets and colons bound the depth. A row of many small objects is
    beyond that bound, and its brackets are looked at.
    """
    return (
        (text.count(b"[") + colons < MAX_DEPTH or _nests_little(text))
        and (len(text.translate(None, _NO_DIGITS)) < 19 or _LONG_INTEGER not in text.translate(_TO_NOUGHTS))
        and colons == _encode(value).count(b":")
    )


def _nests_little(text: bytes) -> bool:
    """Whether a text of sound syntax nests at most ``MAX_DEPTH`` arrays and objects: of its brackets, strings left out,
    the innermost pairs are taken away, one level at a time."""
    brackets = _STRINGS.sub(b"", text).translate(_ALIKE, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _parse_suspect(text: bytes, negative_zero: bool) -> Any:
    _require_shallow(text)
    return _parse_exactly(text, negative_zero)


def parse_object(text: bytes) -> dict[str, Any]:
    """As :func:`parse`, for a text that must be an object; its wide doubles are plain ones."""
    value = parse(text)
    if not isinstance(value, dict):
        raise JsonFault("syntax", f"expected an object, found {type_name(value)}", 0)
    found: dict[str, Any] = plain(value)
    return found


def plain(value: Any) -> Any:
    """The value with every double a plain one: msgspec makes no builtin and no JSON of a wide one by itself."""
    return msgspec.to_builtins(value, enc_hook=float)


def type_name(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if isinstance(value, float):
        return "a number"
    names = {bool: "a boolean", int: "a number", str: "a string", list: "an array", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _require_utf8(text: bytes) -> None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise JsonFault(
            "invalid_utf8", f"byte 0x{byte:02x} at offset {error.start}: {error.reason}", error.start
        ) from None


def _require_shallow(text: bytes) -> None:
    _require_utf8(text)
    depth = 0
    for match in _BRACKETS.finditer(text):
        first = text[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                detail = f"more than {MAX_DEPTH} nested arrays or objects at offset {match.start()}"
                raise JsonFault("too_deep", detail, match.start())
        elif first in b"]}":
            depth -= 1


def _parse_exactly(text: bytes, negative_zero: bool) -> Any:
    _require_utf8(text)
    source = text.decode("utf-8")
    try:
        value = (_EXACT if negative_zero else _EXACT_PLAIN_ZERO).decode(source)
    except json.JSONDecodeError as error:
        raise _syntax_fault(source, error) from None
    except JsonFault as fault:
        located = _repeated_key(source) if fault.kind == "duplicate_key" else None
        raise (located or fault) from None
    _require_no_surrogates(value)
    return value


def _syntax_fault(source: str, error: json.JSONDecodeError) -> JsonFault:
    """Columns count characters of the text from 1."""
    found = repr(source[error.pos]) if error.pos < len(source) else "the end of the text"
    offset = _byte_offset(source, error.pos)
    if error.msg == "Extra data" and source[: error.pos].rstrip()[-1:] in ("}", "]", '"'):
        return JsonFault("trailing_data", f"the value is followed by {found} at column {error.pos + 1}", offset)
    return JsonFault("syntax", f"{error.msg} at column {error.pos + 1}, found {found}", offset)


class _Repeated(dict[str, Any]):
    """An object with a key that was written twice."""

    key: str


def _mark_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    marked = _Repeated(value)
    marked.key = _first_repeated(pairs)
    return marked


def _repeated_key(source: str) -> JsonFault | None:
    """The outermost first key that stands twice, with its place; None where another fault hides it."""
    try:
        value = json.loads(source, object_pairs_hook=_mark_repeated, parse_int=len)
    except json.JSONDecodeError:
        return None
    waiting: list[tuple[Any, str, int]] = [(value, "", 1)]
    for item, pointer, depth in waiting:
        if isinstance(item, _Repeated):
            where = f"the object at {pointer}" if pointer else "the outermost object"
            detail = f"key {item.key!r} stands twice in {where} (depth {depth})"
            return JsonFault("duplicate_key", detail, pointer=f"{pointer}/{_escaped(item.key)}")
        if isinstance(item, dict):
            waiting += [(inner, f"{pointer}/{_escaped(key)}", depth + 1) for key, inner in item.items()]
        elif isinstance(item, list):
            waiting += [(inner, f"{pointer}/{index}", depth + 1) for index, inner in enumerate(item)]
    return None


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _parse_on_another_stack(text: bytes, negative_zero: bool) -> Any:
    values: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            values.append(_parse(text, negative_zero))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return values[0]


def _byte_offset(source: str, position: int) -> int:
    return len(source[:position].encode("utf-8"))


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise JsonFault("duplicate_key", f"key {_first_repeated(pairs)!r} stands twice in one object")
    return value


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise ValueError("no key stands twice")


def _integer_or_negative_zero(digits: str) -> int | float:
    return -0.0 if digits == "-0" else _integer(digits)


def _integer(digits: str) -> int:
    # 20 digits hold 2^64-1; the length is tested first, since CPython refuses to convert very long ones.
    if len(digits) <= 21 and INT_MIN <= (value := int(digits)) <= INT_MAX:
        return value
    shown = digits if len(digits) <= 40 else f"{digits[:40]}… ({len(digits)} digits)"
    raise JsonFault("integer_out_of_range", f"integer {shown} is outside -2^63..2^64-1")


def _double(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise JsonFault("not_finite", f"number {digits[:40]} overflows to infinity")
    return WideDouble(value) if abs(value) >= WIDE_FROM else value


def _refuse_constant(name: str) -> float:
    raise JsonFault("not_finite", f"{name} is not JSON")


def _exact_decoder(parse_int: Callable[[str], int | float]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object_without_duplicates,
        parse_int=parse_int,
        parse_float=_double,
        parse_constant=_refuse_constant,
        strict=True,
    )


_EXACT = _exact_decoder(_integer_or_negative_zero)
_EXACT_PLAIN_ZERO = _exact_decoder(_integer)
_decode = msgspec.json.Decoder(float_hook=_double).decode
_encode = msgspec.json.Encoder(enc_hook=float).encode


def _require_no_surrogates(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise JsonFault("lone_surrogate", f"lone surrogate \\u{code:04x} in a string") from None
    elif isinstance(value, list):
        for item in value:
            _require_no_surrogates(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_no_surrogates(key)
            _require_no_surrogates(item)
