"""Opt-in drop reasons: does each call fit the tools it was given? In force only where ``[data] checks`` names them.

Parameters come in two shapes: JSON Schema (``{"type": "object", "properties": ...}``) and xlam's flat map of names to
``{"type": "int, optional", ...}``. Only an argument's own type is judged, not what its arrays and objects hold; nor a
type that neither shape defines, nor what a schema composes (``anyOf`` and its like).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kiln_cli import Candidate, DropReason, hookimpl
from kiln_cli.strict_json import type_name

if TYPE_CHECKING:
    from kiln_cli.config import DataConfig


@hookimpl
def kiln_drop_reasons() -> Iterable[DropReason]:
    return REASONS


# A call names a function that is not among the row's tools.
def unknown_tool(candidate: Candidate, limits: DataConfig) -> str | None:
    names = {tool["name"] for tool in candidate.tools.value}
    for number, call in enumerate(candidate.answers.value, start=1):
        if call["name"] not in names:
            return f"call {number} names {call['name']!r}, which is not among the tools"
    return None


# A call lacks an argument that its tool requires: in a flat map, one neither marked optional nor with a default.
def missing_argument(candidate: Candidate, limits: DataConfig) -> str | None:
    for number, call, signature in _calls(candidate):
        for name in signature.required:
            if name not in call["arguments"]:
                return f"call {number} of {call['name']!r} lacks the required argument {name!r}"
    return None


# A call gives an argument that its tool does not have; a schema that allows further properties has them all.
def unexpected_argument(candidate: Candidate, limits: DataConfig) -> str | None:
    for number, call, signature in _calls(candidate):
        for name in call["arguments"]:
            if name not in signature.parameters and not signature.open:
                return f"call {number} of {call['name']!r} gives {name!r}, which the tool does not have"
    return None


# A call gives an argument a value of another type than its tool declares; null passes where it is not required.
def argument_type(candidate: Candidate, limits: DataConfig) -> str | None:
    for number, call, signature in _calls(candidate):
        for name, value in call["arguments"].items():
            parameter = signature.parameters.get(name)
            if parameter is None or parameter.test(value) or (value is None and name not in signature.required):
                continue
            found = type_name(value)
            return f"call {number} of {call['name']!r}: {name!r} is declared {parameter.declared}, found {found}"
    return None


# Two tools of the row have one name.
def duplicate_tool(candidate: Candidate, limits: DataConfig) -> str | None:
    seen: set[str] = set()
    for number, tool in enumerate(candidate.tools.value, start=1):
        if tool["name"] in seen:
            return f"tool {number} has the name {tool['name']!r} of an earlier one"
        seen.add(tool["name"])
    return None


REASONS = tuple(
    DropReason(name=check.__name__, doc=doc, scope="row", order=100 + place, pointer=pointer, check=check, opt_in=True)
    for place, (check, pointer, doc) in enumerate(
        (
            (unknown_tool, "/answers", "a call names a function that is not among the tools"),
            (missing_argument, "/answers", "a call lacks an argument that its tool requires"),
            (unexpected_argument, "/answers", "a call gives an argument that its tool does not have"),
            (argument_type, "/answers", "an argument has another type than its tool declares"),
            (duplicate_tool, "/tools", "two tools of the row have one name"),
        ),
        start=1,
    )
)

Test = Callable[[Any], bool]


class Parameter(NamedTuple):
    declared: str
    test: Test


class Signature(NamedTuple):
    """What a tool takes. ``open``: other arguments may be given too."""

    parameters: dict[str, Parameter]
    required: list[str]
    open: bool


def _calls(candidate: Candidate) -> Iterator[tuple[int, dict[str, Any], Signature]]:
    """Each call with what the tool it names takes; calls of unknown tools are another reason's."""
    tools = {tool["name"]: tool for tool in reversed(candidate.tools.value)}  # of one name the first counts
    for number, call in enumerate(candidate.answers.value, start=1):
        if call["name"] in tools:
            yield number, call, _signature(tools[call["name"]]["parameters"])


_OBJECTS = ("object", "dict")
_COMPOSED = ("anyOf", "oneOf", "allOf", "not", "$ref", "if", "patternProperties")


def _signature(declared: dict[str, Any]) -> Signature:
    properties = declared.get("properties")
    if declared.get("type") in _OBJECTS or (
        isinstance(properties, dict) and not isinstance(properties.get("type"), str)
    ):
        properties = properties if isinstance(properties, dict) else {}
        required = declared.get("required")
        further = declared.get("additionalProperties") not in (None, False)
        return Signature(
            {name: Parameter(_shown(schema), _schema_test(schema)) for name, schema in properties.items()},
            [name for name in required if isinstance(name, str)] if isinstance(required, list) else [],
            further or any(key in declared for key in _COMPOSED),
        )
    return Signature(
        {name: _flat_parameter(entry) for name, entry in declared.items()},
        [name for name, entry in declared.items() if _is_required(entry)],
        open=False,
    )


_OPTIONAL = re.compile(r",?\s*\boptional\b(?!\s*\[)\s*", re.IGNORECASE)


def _is_required(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or "default" in entry:
        return False
    declared = entry["type"]
    return _OPTIONAL.search(declared) is None and not declared.strip().lower().startswith("optional[")


def _flat_parameter(entry: object) -> Parameter:
    declared = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(declared, str):
        return Parameter("without a type", _anything)
    return Parameter(declared, _flat_test(_OPTIONAL.sub("", declared)))


def _anything(value: object) -> bool:
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    """As JSON Schema has it: 5.0 is an integer too."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _is(kind: type) -> Test:
    return lambda value: isinstance(value, kind)


_ARRAY, _NULL = _is(list), _is(type(None))
_TESTS: dict[str, Test] = {
    **dict.fromkeys(("str", "string", "char", "character"), _is(str)),
    **dict.fromkeys(("int", "integer", "long", "short", "byte", "bigint"), _is_integer),
    **dict.fromkeys(("float", "number", "double", "decimal"), _is_number),
    **dict.fromkeys(("bool", "boolean"), _is(bool)),
    **dict.fromkeys(("list", "array", "arraylist", "tuple", "set", "queue", "stack"), _ARRAY),
    **dict.fromkeys(("dict", "object", "hashmap", "hashtable", "map"), _is(dict)),
    **dict.fromkeys(("null", "none", "nonetype"), _NULL),
}
_GENERIC = re.compile(r"([a-z]+)\s*(?:\[(.*)\]|<(.*)>)\Z", re.IGNORECASE | re.DOTALL)


def _flat_test(declared: str) -> Test:
    """The test of a flat type: ``int``, ``List[str]``, ``Union[int, str]``, ``Optional[float]``, ``int[]``."""
    declared = declared.strip()
    generic = _GENERIC.match(declared)
    if generic is None:
        return _TESTS.get(declared.lower(), _anything)
    name, inner = generic[1].lower(), generic[2] or generic[3] or ""
    if name in ("optional", "union"):
        return _any_of([_NULL] * (name == "optional") + [_flat_test(part) for part in _top_level(inner)])
    return _TESTS.get(name, _anything) if inner else _ARRAY


def _any_of(tests: list[Test]) -> Test:
    return lambda value: any(test(value) for test in tests)


def _top_level(text: str) -> list[str]:
    """Splits at the commas that stand in no bracket."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[<") - (char in "]>")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _shown(schema: object) -> str:
    declared = schema.get("type") if isinstance(schema, dict) else None
    return " or ".join(map(str, declared)) if isinstance(declared, list) else str(declared or "without a type")


def _schema_test(schema: object) -> Test:
    """The test of a JSON Schema's ``type``: a name or a list of names."""
    declared = schema.get("type") if isinstance(schema, dict) else None
    kinds = declared if isinstance(declared, list) else [declared]
    return _any_of([_TESTS.get(kind.lower(), _anything) if isinstance(kind, str) else _anything for kind in kinds])
