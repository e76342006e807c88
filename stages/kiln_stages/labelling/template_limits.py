"""What one render of a foreign template may cost: steps, seconds, and the size of any value it makes.

A chat template is a program. Jinja's sandbox keeps it inside; it does not keep it short. So each template is rewritten
before it is compiled: every body of a loop and of a macro counts a step, and joining two values that are not constants
checks the size of the result first. Operators, methods and filters that can make much from little do the same. None
of this changes what a template prints.

The step limit is the same on every machine. The time limit is for the rest, and is looked at every 64 steps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.visitor
from jinja2 import nodes

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_TEXT = 64 * 1024 * 1024  # characters of a text, or of a whole render
MAX_ITEMS = 1_000_000  # elements of a list that an operator or a filter makes
MAX_BITS = 100_000  # of an integer

_LOOK = 64
# No template syntax can name these: a filter's name holds no space.
_TICK, _JOINED, _SUM, _BOUND = "kiln tick", "kiln joined", "kiln sum", "kiln bound"
_FEW = 8
_NUMBER = re.compile(r"\d+")


class LimitExceeded(Exception):
    """A render went over one of its limits; the text says which."""


class LimitedContext(jinja2.runtime.Context):
    """The context of one render, with its steps and the time of its first look at the clock."""

    steps = 0
    started: float | None = None

    def look(self) -> None:
        """Called every ``_LOOK`` steps. Raises LimitExceeded."""
        if self.steps > MAX_STEPS:
            raise LimitExceeded(f"more than {MAX_STEPS} steps (bodies of loops and macros) in one render")
        if self.started is None:  # few rows come this far, so none pays for the clock before
            self.started = time.monotonic()
        elif time.monotonic() > self.started + MAX_SECONDS:
            raise LimitExceeded(f"more than {MAX_SECONDS:g} seconds for one render")


class Limiter(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that its steps are counted and the sizes of its values are checked."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _tick(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, _tick(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(node)
        node.body.insert(0, _tick(node.lineno))
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _BOUND, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """A printed sum of few parts grows nothing: the render's own limit counts it."""
        node.nodes = [
            self._visit_terms(part) if isinstance(part, nodes.Add) and _terms(part) <= _FEW else self.visit(part)
            for part in node.nodes
        ]
        return node

    def _visit_terms(self, node: nodes.Expr) -> nodes.Expr:
        if not isinstance(node, nodes.Add):
            visited: nodes.Expr = self.visit(node)
            return visited
        node.left, node.right = self._visit_terms(node.left), self._visit_terms(node.right)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), _JOINED, node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const):
            return node  # grows by what stands in the source, and a step was counted for that
        return _filter(nodes.Tuple([node.left, node.right], "load"), _SUM, node.lineno)


def limit_environment(environment: jinja2.Environment) -> None:
    """Put guards on filters and globals of an environment whose templates are rewritten by ``Limiter``."""
    filters: dict[str, Callable[..., Any]] = environment.filters
    filters.update({_TICK: _count_step, _JOINED: _join_parts, _SUM: _add_pair, _BOUND: bounded})
    for name, guard in _FILTER_GUARDS.items():
        filters[name] = _guarded(filters[name], guard)
    filters["join"] = _join
    # These print something else each time, which no evidence can hold.
    del filters["random"]
    del environment.globals["lipsum"]


def limited_arguments(text: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments for a method of ``GROWING_METHODS``. Raises LimitExceeded where the result would be too large."""
    if method == "join" and args and not isinstance(args[0], (list, tuple, str)):
        args = (list(args[0]), *args[1:])
    _METHOD_GUARDS[method](text, *args, **kwargs)
    return args


def check_format(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before ``text`` is used as a format, for ``%`` and for ``str.format``. Raises LimitExceeded."""
    values = [*args, *kwargs.values()]
    widths = sum(map(_int, _NUMBER.findall(text))) + sum(abs(value) for value in values if isinstance(value, int))
    longest = max((len(str(value)) for value in values if not isinstance(value, int)), default=0)
    _check_text(widths + len(text) + (text.count("%") + text.count("{")) * longest)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before ``left operator right``, for ``*``, ``**`` and ``%``. Raises LimitExceeded."""
    if operator == "%":
        if isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            check_format(left, values, right if isinstance(right, dict) else {})
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MAX_BITS:
            raise LimitExceeded(f"an integer of more than {MAX_BITS} bits")
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(one, str):
                _check_text(len(one) * times)
            elif isinstance(times, int) and isinstance(one, (list, tuple)):
                _check_items(len(one) * times)


def bounded(text: str) -> str:
    """The output of a macro or of a block that is kept. Raises LimitExceeded."""
    _check_text(len(text))
    return text


def _terms(node: nodes.Expr) -> int:
    return _terms(node.left) + _terms(node.right) if isinstance(node, nodes.Add) else 1


def _tick(line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(None), _TICK, line), lineno=line)


def _filter(value: nodes.Expr, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)


@jinja2.pass_context
def _count_step(context: LimitedContext, _: None) -> None:
    context.steps += 1
    if not context.steps % _LOOK:
        context.look()


def _join_parts(parts: tuple[Any, ...]) -> str:
    """``a ~ b``."""
    texts = [str(part) for part in parts]
    _check_text(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    parts = value if isinstance(value, (list, tuple, str)) else list(value)
    _joined(parts, d)
    return str(jinja2.filters.do_join(context, parts, d, attribute))


def _add_pair(pair: tuple[Any, Any]) -> Any:
    """``a + b``."""
    left, right = pair
    if type(left) is str:
        if type(right) is str and len(left) + len(right) > MAX_TEXT:
            _check_text(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        _check_items(len(left) + len(right))
    return left + right


def _check_text(size: int) -> None:
    if size > MAX_TEXT:
        raise LimitExceeded(f"a text of more than {MAX_TEXT} characters")


def _check_items(size: int) -> None:
    if size > MAX_ITEMS:
        raise LimitExceeded(f"a list of more than {MAX_ITEMS} elements")


def _int(digits: str) -> int:
    return int(digits) if len(digits) < 19 else MAX_TEXT + 1


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _guarded(function: Callable[..., Any], guard: Callable[..., None]) -> Callable[..., Any]:
    """``function`` with ``guard`` called before it on the same arguments, but for what Jinja puts in front."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # copies the mark by which Jinja knows what to put in front
    def limited(*args: Any, **kwargs: Any) -> Any:
        guard(*args[skipped:], **kwargs)
        return function(*args, **kwargs)

    return limited


def _wide(text: Any, *sizes: Any, **named: Any) -> None:
    """Filters and methods whose numbers are widths of the result, once or for each line."""
    size = sum(map(_number, sizes)) + sum(map(_number, named.values()))
    lines = str(text).count("\n") + 1 if size > 256 else 1
    _check_text(size * lines)


def _tabs(text: str, tabsize: Any = 8) -> None:
    _check_text(len(text) + text.count("\t") * _number(tabsize))


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    size, found = len(str(new)), len(str(text))
    if size * (found + 1) > MAX_TEXT:
        _check_text(found + size * (str(text).count(str(old)) if str(old) else found + 1))


def _joined(parts: Any, glue: Any) -> None:
    size = len(str(glue)) * len(parts)
    _check_text(size + sum(len(part) for part in parts if isinstance(part, str)))


def _parts(value: Any, count: Any = 0, *_: Any, **named: Any) -> None:
    _check_items(max(_number(count), *map(_number, [0, *named.values()])))


def _json(value: Any, *args: Any, indent: Any = None, **_: Any) -> None:
    for width in (*args[1:2], indent):
        if _number(width) > 1024 or (isinstance(width, str) and len(width) > 1024):
            raise LimitExceeded("an indent of more than 1024 characters")


def _start(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise LimitExceeded("a sum that does not start from a number")


def _text_joined(glue: str, parts: Any) -> None:
    _joined(parts, glue)


def _formatted(text: Any, *args: Any, **kwargs: Any) -> None:
    check_format(str(text), args, kwargs)


_FILTER_GUARDS: dict[str, Callable[..., None]] = {
    "center": _wide,
    "indent": _wide,
    "wordwrap": _wide,
    "replace": _replaced,
    "format": _formatted,
    "batch": _parts,
    "slice": _parts,
    "tojson": _json,
    "sum": _start,
}
_METHOD_GUARDS: dict[str, Callable[..., None]] = {
    "center": _wide,
    "ljust": _wide,
    "rjust": _wide,
    "zfill": _wide,
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _text_joined,
}
GROWING_METHODS = frozenset(_METHOD_GUARDS)
