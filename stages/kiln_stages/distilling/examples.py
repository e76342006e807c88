"""A line of a scored corpus as an example: its shape checked, its numbers not yet.

Fields that are unknown change nothing and are counted, as the public server lets them pass. ``id`` and ``metadata`` are
never looked into. Of each token's candidates the first ``top_k`` are read, whatever stands behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import misfit, normalise
from kiln_cli.errors import RowFault
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable
from kiln_cli.white_space import trimmed
from kiln_stages.distilling.trajectory import Segment
from kiln_stages.labelling.rendering import Message

LINE_CAP = 64 * 1024 * 1024  # bytes of one line: what the public server allows a whole file
KINDS = ("action", "observation", "context")
_FIELDS = frozenset(("id", "messages", "teacher_response", "teacher_tokens", "trajectory", "metadata"))
_ENTRY_FIELDS = frozenset(("token_id", "token", "logprob", "top_logprobs"))
_CANDIDATE_FIELDS = frozenset(("token_id", "logprob"))
_SEGMENT_FIELDS = frozenset(("role", "content", "kind", "tool_call_id", "warning_prefix_len"))
_INTEGERS, _NUMBERS = frozenset((int,)), frozenset((int, float, strict_json.WideDouble))
_NO_NUMBERS = frozenset(("-inf", "inf", "+inf", "-infinity", "infinity", "+infinity", "nan"))


class Entry(NamedTuple):
    """What the teacher says of one token: its id and text where they are given, and its first candidates.

    ``logprobs`` are as parsed: numbers, or NaN for a null or a text that spells no finite number. ``offered``: how many
    candidates the entry has in all.
    """

    token_id: int | None
    token: str | None
    candidate_ids: list[int]
    logprobs: list[float]
    offered: int = 0


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """``messages`` are in normal form; ``ignored`` names fields that change nothing."""

    messages: list[Message]
    response: str
    entries: list[Entry]
    segments: list[Segment]
    ignored: tuple[str, ...] = ()


def trimmed_line(text: bytes) -> bytes:
    """A line without the white space of Unicode around it. Bytes that are no UTF-8 stay as they are."""
    if text[:1] == b"{" and text[-1:] == b"}":
        return text
    try:
        return trimmed(text.decode("utf-8")).encode("utf-8")
    except UnicodeDecodeError:
        return text


def parse_line(text: bytes | None, length: int) -> dict[str, Any]:
    """The object of a line; None stands for one that is too long. Raises RowFault ``invalid_json``."""
    if text is None:
        raise RowFault("invalid_json", f"line_too_long: the line has {length} bytes, at most {LINE_CAP}")
    try:
        value = strict_json.parse(text)
    except strict_json.JsonFault as fault:
        raise RowFault("invalid_json", f"{fault.kind}: {fault.detail}", fault.pointer, fault.offset) from None
    if not isinstance(value, dict):
        raise misfit("", "an object", value, word="row_not_object")
    return value


def to_example(value: dict[str, Any], top_k: int) -> Example:
    """The example that a parsed line is. Raises RowFault ``invalid_json`` for a field of another type than it has."""
    ignored = {printable(key) for key in value.keys() - _FIELDS}
    if "messages" not in value:
        raise misfit("/messages", "an array", msgspec.UNSET)
    row = normalise({"messages": value["messages"]})
    ignored.update(map(printable, row.ignored))
    return Example(
        messages=row.messages,
        response=_field(value, "teacher_response", str, "a string", ""),
        entries=_entries(value, top_k, ignored),
        segments=_segments(value, ignored),
        ignored=tuple(sorted(ignored)),
    )


def first_logprob(value: dict[str, Any]) -> str | None:
    """The JSON pointer of the first numeric ``logprob`` of a parsed line, if it has one."""
    entries = value.get("teacher_tokens")
    for at, entry in enumerate(entries if isinstance(entries, list) else ()):
        if not isinstance(entry, dict):
            continue
        if type(entry.get("logprob")) in _NUMBERS:
            return f"/teacher_tokens/{at}/logprob"
        candidates = entry.get("top_logprobs")
        for number, candidate in enumerate(candidates if isinstance(candidates, list) else ()):
            if isinstance(candidate, dict) and type(candidate.get("logprob")) in _NUMBERS:
                return f"/teacher_tokens/{at}/top_logprobs/{number}/logprob"
    return None


def _entries(value: dict[str, Any], top_k: int, ignored: set[str]) -> list[Entry]:
    items = value.get("teacher_tokens")
    if items is None:
        return []
    if not isinstance(items, list):
        raise misfit("/teacher_tokens", "an array", items)
    return [_entry(item, top_k, f"/teacher_tokens/{at}", ignored) for at, item in enumerate(items)]


def _entry(item: Any, top_k: int, at: str, ignored: set[str]) -> Entry:
    if item is None:  # what servers send for the first token of a prompt; it counts as an entry
        return Entry(None, None, [], [])
    if not isinstance(item, dict):
        raise misfit(at, "an object", item)
    _note_unknown(item, _ENTRY_FIELDS, "teacher_tokens[]", ignored)
    token_id, token = item.get("token_id"), item.get("token")
    if token_id is not None and type(token_id) is not int:
        raise misfit(f"{at}/token_id", "an integer or null", token_id)
    if token is not None and not isinstance(token, str):
        raise misfit(f"{at}/token", "a string or null", token)
    if (own := item.get("logprob")) is not None and type(own) not in _NUMBERS:
        _logprob(own, f"{at}/logprob")
    candidates = item.get("top_logprobs")
    ids, logprobs = _candidates(candidates, top_k, f"{at}/top_logprobs", ignored)
    return Entry(token_id, token, ids, logprobs, len(candidates or ()))


def _candidates(items: Any, top_k: int, at: str, ignored: set[str]) -> tuple[list[int], list[float]]:
    if items is None:
        return [], []
    if not isinstance(items, list):
        raise misfit(at, "an array", items)
    read = items[:top_k]
    try:
        ids, logprobs = [item["token_id"] for item in read], [item["logprob"] for item in read]
        plain = _INTEGERS.issuperset(map(type, ids)) and _NUMBERS.issuperset(map(type, logprobs))
        if plain and all(len(item) == 2 for item in read):
            return ids, logprobs
    except (KeyError, TypeError, IndexError):
        pass  # one of them is not of this shape: find it
    for number, item in enumerate(read):
        if not isinstance(item, dict):
            raise misfit(f"{at}/{number}", "an object", item)
        if type(token_id := item.get("token_id", msgspec.UNSET)) is not int:
            raise misfit(f"{at}/{number}/token_id", "an integer", token_id)
        _note_unknown(item, _CANDIDATE_FIELDS, "teacher_tokens[].top_logprobs[]", ignored)
    scores = [
        _logprob(item.get("logprob", msgspec.UNSET), f"{at}/{number}/logprob") for number, item in enumerate(read)
    ]
    return [item["token_id"] for item in read], scores


def _logprob(value: Any, at: str) -> float:
    """A number as it is; NaN for what servers write in the place of one that JSON cannot hold."""
    if type(value) in _NUMBERS:
        return float(value)
    if value is None or (isinstance(value, str) and value.strip().lower() in _NO_NUMBERS):
        return math.nan
    raise misfit(at, "a number", value)


def _segments(value: dict[str, Any], ignored: set[str]) -> list[Segment]:
    items = value.get("trajectory")
    if items is None:
        return []
    if not isinstance(items, list):
        raise misfit("/trajectory", "an array", items)
    return [_segment(item, f"/trajectory/{at}", ignored) for at, item in enumerate(items)]


def _segment(item: Any, at: str, ignored: set[str]) -> Segment:
    if not isinstance(item, dict):
        raise misfit(at, "an object", item)
    _note_unknown(item, _SEGMENT_FIELDS, "trajectory[]", ignored)
    kind = item.get("kind", "context")
    if kind not in KINDS:
        found = repr(printable(kind)) if isinstance(kind, str) else type_name(kind)
        raise RowFault("invalid_json", f"wrong_type: expected one of {', '.join(KINDS)}, found {found}", f"{at}/kind")
    warning = item.get("warning_prefix_len")
    if warning is not None and (type(warning) is not int or warning < 0):
        found = str(warning) if type(warning) is int else type_name(warning)
        detail = f"wrong_type: expected a number of bytes, found {found}"
        raise RowFault("invalid_json", detail, f"{at}/warning_prefix_len")
    if (call := item.get("tool_call_id")) is not None and not isinstance(call, str):
        raise misfit(f"{at}/tool_call_id", "a string or null", call)
    return Segment(
        role=_field(item, "role", str, "a string", at),
        content=_field(item, "content", str, "a string", at),
        kind=kind,
        warning_prefix_len=warning or 0,
    )


def _field(table: dict[str, Any], key: str, kind: type, expected: str, at: str) -> Any:
    found = table.get(key, msgspec.UNSET)
    if not isinstance(found, kind):
        raise misfit(f"{at}/{key}", expected, found)
    return found


def _note_unknown(item: dict[str, Any], known: Iterable[str], at: str, ignored: set[str]) -> None:
    if unknown := item.keys() - known:
        ignored.update(f"{at}.{printable(key)}" for key in unknown)
