"""Rows of any other shape: which of their fields hold what of a conversation (``--map user=/prompt``).

A path is a JSON pointer (``/data/turns/0``) or names with dots between (``data.turns.0``). What no path leads to is
named in ``ChatRow.ignored``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kiln_cli.chat import ChatRow, misfit
from kiln_cli.chat_fields import chat_row, text, tools
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Source
from kiln_cli.text import printable

TARGETS = ("messages", "tools", "system", "user", "assistant")
_ONE_TURN = ("system", "user", "assistant")
_INDEX = re.compile(r"0|[1-9][0-9]*")

Path = tuple[str, ...]


def parse_map(items: Iterable[str]) -> dict[str, str]:
    """``field=path`` texts as pairs. Raises KilnError KLN201 for a text without one of the three, or a field twice."""
    pairs: dict[str, str] = {}
    for item in items:
        target, sign, path = item.partition("=")
        if not (target and sign and path):
            raise _usage(f"{printable(item)!r} is no field=path")
        if target in pairs:
            raise _usage(
                f"{printable(target)!r} is mapped twice, to {printable(pairs[target])!r} and {printable(path)!r}"
            )
        pairs[target] = path
    return pairs


def mapped_source(pairs: Mapping[str, str]) -> Source:
    """A chat source that finds ``messages`` (in OpenAI's form), or one ``user`` and one ``assistant`` turn behind an
    optional ``system`` turn, and ``tools`` beside either, where the pairs say.

    Raises KilnError KLN201 for a target that does not exist, a path that is none, and pieces that make no conversation.
    """
    _require_conversation(pairs)
    paths = {target: _parts(target, path) for target, path in pairs.items()}
    if len(set(paths.values())) < len(paths):
        raise _usage("two fields are mapped to one path")
    shown = ", ".join(f"{target}={path}" for target, path in pairs.items())
    return Source(
        name="map",
        doc=f"rows by --map: {printable(shown)}",
        yields="chat",
        # Partials of functions, not closures: sources travel to other processes.
        convert=functools.partial(_convert, paths),
        recognise=_never,
    )


def _never(record: dict[str, Any]) -> None:
    """A mapped source is asked for by its map, never recognised."""


def _require_conversation(pairs: Mapping[str, str]) -> None:
    unknown = [target for target in pairs if target not in TARGETS]
    if unknown:
        raise _usage(f"{printable(unknown[0])!r} is no field of a conversation")
    if "messages" in pairs:
        beside = [target for target in _ONE_TURN if target in pairs]
        if beside:
            raise _usage(f"messages is a whole conversation, and {beside[0]} is mapped beside it")
        return
    missing = [target for target in ("user", "assistant") if target not in pairs]
    if missing:
        given = ", ".join(map(printable, pairs)) or "nothing"
        raise _usage(f"{given} is mapped and {' and '.join(missing)} not")


def _parts(target: str, path: str) -> Path:
    if path.startswith("/"):
        parts = path[1:].split("/")
        sound = re.search(r"~(?![01])", path) is None
        parts = [part.replace("~1", "/").replace("~0", "~") for part in parts]
    else:
        parts = path.split(".")
        sound = all(parts)
    if not sound:
        raise _usage(f"{target}={printable(path)}: the path is neither a JSON pointer nor names with dots between")
    return tuple(parts)


def _usage(detail: str) -> KilnError:
    hint = f"map messages (and tools), or user and assistant (and system, tools); the fields are: {', '.join(TARGETS)}"
    return KilnError("KLN201", f"--map: {detail}", hint=hint)


def _convert(paths: Mapping[str, Path], record: dict[str, Any]) -> ChatRow:
    """Raises RowFault ``invalid_json`` where a path leads nowhere, or to a value of another type."""
    found = {target: _at(record, path) for target, path in paths.items()}
    ignored = set(_beside(record, list(paths.values()), ""))
    given = tools(found.get("tools"), _pointer(paths.get("tools", ())))
    if "messages" in found:
        messages = found["messages"]
        if not isinstance(messages, list):
            raise misfit(_pointer(paths["messages"]), "an array of messages", messages)
        return chat_row(messages, given, ignored)
    turns = [
        {"role": role, "content": text(found[role], _pointer(paths[role]))}
        for role in _ONE_TURN
        if role in found and not (role == "system" and found[role] is None)
    ]
    return chat_row(turns, given, ignored)


def _at(record: dict[str, Any], path: Path) -> Any:
    found: Any = record
    for part in path:
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and _INDEX.fullmatch(part) and int(part) < len(found):
            found = found[int(part)]
        else:
            raise misfit(_pointer(path), f"a value at {printable(_pointer(path))}", msgspec.UNSET)
    return found


def _beside(value: Any, paths: list[Path], at: str) -> Iterable[str]:
    """The fields that stand beside the paths, by their dotted names, at every object that a path goes through."""
    heads: dict[str, list[Path]] = {}
    for path in paths:
        heads.setdefault(path[0], []).append(path[1:])
    in_array = isinstance(value, list)
    entries = ((str(n), item) for n, item in enumerate(value)) if in_array else value.items()
    for key, item in entries:
        name = f"{at}[]" if in_array else f"{at}.{key}" if at else key
        if key not in heads:
            yield name
        elif all(heads[key]):  # no path ends here
            yield from _beside(item, heads[key], name)


def _pointer(path: Path) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)
