"""Tables of settings as typed structs: decoding with every fault gathered, the place of a fault, and ``--set``.

A struct derived from :class:`Section` states types and bounds in its annotations. Nothing here knows what the settings
are about; ``config.py`` does.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.key_lines import line_of
from kiln_cli.text import printable


class CrossFault(NamedTuple):
    """A fault that no field's type can state; reported when the fields it is about are sound themselves."""

    fields: tuple[str, ...]
    text: str


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of settings. Types and bounds stand in the annotations; ``faults`` adds what they cannot say.

    ``SHORT_FOR`` names the field that a plain string in place of the table stands for.
    """

    SHORT_FOR: ClassVar[str | None] = None

    def faults(self) -> Iterable[CrossFault]:
        return ()


S = TypeVar("S", bound=Section)


def decode(kind: type[S], value: object, refused: Mapping[str, str], faults: list[str], at: str = "") -> S | None:
    """``value`` as a section; adds one text a fault to ``faults`` and returns None where there is any.

    ``refused`` names keys that are no oversight but refused for a reason, in any table. ``at``: the section's own key.
    """
    return _decode_section(kind, value, at, refused, faults)


def assign(value: dict[str, Any], assignment: str) -> None:
    """Carries out ``section.key=value`` on a table not yet decoded. Raises KilnError KLN201."""
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts) or not _is_unicode(assignment):
        raise KilnError(
            "KLN201", f"--set {printable(assignment)!r} is not section.key=value", hint="for example train.epochs=2"
        )
    target: Any = value
    for part in parts[:-1]:
        if isinstance(target, list) and part.isdigit() and int(part) < len(target):
            target = target[int(part)]
        elif isinstance(target, dict):
            target = target.setdefault(part, {})
        else:
            raise KilnError("KLN201", f"--set {printable(key)!r}: there is no {printable(part)!r}")
    if not isinstance(target, dict):
        raise KilnError("KLN201", f"--set {printable(key)!r}: {printable(parts[-2])!r} is no table")
    target[parts[-1]] = _toml_value(text.strip())


def place(path: Path, text: str, fault: str) -> str:
    """``file:line`` of the key that a fault begins with, or of the table that holds it; the file alone where neither
    stands in it (``--set``)."""
    dotted = re.match(r"[A-Za-z0-9_.\[\]]+", fault)
    line = line_of(path, text, dotted.group().rstrip(".")) if dotted else 0
    return f"{printable(path)}:{line}:" if line else f"{printable(path)}:"


def unknown_key(key: str, fields: Iterable[str], at: str, refused: Mapping[str, str]) -> str:
    """The fault of a key that the table ``at`` does not have."""
    path = printable(f"{at}.{key}" if at else key)
    if key in refused:
        return f"{path} is refused: {refused[key]}"
    near = difflib.get_close_matches(key, list(fields), n=1)
    return f"{path} is no key" + (f"; did you mean {near[0]!r}?" if near else "")


def without_none(value: Any) -> Any:
    """``value`` without the keys that hold None, at every depth: TOML has no null."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def _is_unicode(text: str) -> bool:
    """Arguments that are no UTF-8 reach Python as lone surrogates, which no file of evidence can hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _toml_value(text: str) -> Any:
    """``text`` as a TOML value; what is none is a plain string, so that shells need no double quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _decode_section(kind: type[S], value: object, at: str, refused: Mapping[str, str], faults: list[str]) -> S | None:
    if not isinstance(value, dict):
        faults.append(f"{at or 'the config'} must be a table, found {printable(repr(value))}")
        return None
    before = len(faults)
    unsound: set[str] = set()
    fields = _fields(kind)
    faults.extend(unknown_key(key, fields, at, refused) for key in value if key not in fields)
    arguments = {}
    for name, field in fields.items():
        path = f"{at}.{name}" if at else name
        if name not in value:
            if field.required:
                faults.append(f"{path} is missing")
                unsound.add(name)
            continue
        count = len(faults)
        decoded = _decode_field(field.type, value[name], path, refused, faults)
        if len(faults) == count:
            arguments[field.name] = decoded
        else:
            unsound.add(name)
    if not any(fields[name].required for name in unsound):
        section = kind(**arguments)
        prefix = f"{at}." if at else ""
        faults.extend(prefix + fault.text for fault in section.faults() if unsound.isdisjoint(fault.fields))
        if len(faults) == before:
            return section
    return None


@cache
def _fields(kind: type[Section]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a section by their keys. Kept, since annotations are text that is read anew each time."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _decode_field(kind: Any, value: Any, path: str, refused: Mapping[str, str], faults: list[str]) -> Any:
    kind = _optional_section(kind) or kind
    if isinstance(kind, type) and issubclass(kind, Section):
        if kind.SHORT_FOR is not None and isinstance(value, str):
            value = {kind.SHORT_FOR: value}
        return _decode_section(kind, value, path, refused, faults)
    if get_origin(kind) is list and isinstance(get_args(kind)[0], type) and issubclass(get_args(kind)[0], Section):
        items = value if isinstance(value, list) else [value]
        inner = get_args(kind)[0]
        return [_decode_section(inner, item, f"{path}[{i}]", refused, faults) for i, item in enumerate(items)]
    try:
        decoded = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        allowed = ", ".join(_choices(kind))
        expected = f"expected one of: {allowed}" if allowed else _lower_first(str(error))
        faults.append(f"{path} = {printable(repr(value))}: {expected}")
        return None
    if isinstance(decoded, float) and not math.isfinite(decoded):
        faults.append(f"{path} = {decoded}: expected a finite number")
    return decoded


def _optional_section(kind: Any) -> type[Section] | None:
    """The section of a field that may be left out altogether (``Section | None``), else None."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    sections = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
    return sections[0] if len(sections) == len(parts) == 1 and get_origin(kind) is not list else None


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, also of an optional one."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:].replace("`", "")
