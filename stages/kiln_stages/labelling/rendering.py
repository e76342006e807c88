"""From messages to text: a Hugging Face chat template, run in a sandbox, with the same result as transformers.

A chat template is a Jinja program that somebody else wrote. It sees the messages, the tools, the special tokens and
whether a generation prompt is wanted, and prints the conversation as one string. Three rules keep that string evidence:

- the text equals what transformers' ``apply_chat_template(..., tokenize=False)`` gives for the same messages;
- the template reads no clock: ``strftime_now`` formats one date from the config, or the template is refused;
- row text is data. It is passed as values and never becomes template source.

``{% generation %}`` tags print nothing in a plain render. In a marked render they print two private characters, which
``render_marked`` takes out again and returns as spans. A render has limits on its output, its steps and its time
(``template_limits``). It is a pure function of its arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, NoneType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import LoopContext, Macro

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.text import printable
from kiln_stages.labelling.strings import any_of
from kiln_stages.labelling.template_limits import (
    GROWING_METHODS,
    MAX_TEXT,
    LimitedContext,
    Limiter,
    bounded,
    check_format,
    check_operator,
    limit_environment,
    limited_arguments,
)

MAX_OUTPUT = MAX_TEXT
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Unicode noncharacters: no text meant for interchange holds them, and a row that does is refused.
BLOCK_OPEN, BLOCK_CLOSE = "\ufdd0", "\ufdd1"

Message = dict[str, Any]
Spans = tuple[tuple[int, int], ...]

_LOOP_FACTS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
_DICT_NAMES = frozenset(dir(dict))
_PLAIN_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_" and name not in ("format", "format_map"))
_PLAIN_VALUES = frozenset({bool, int, str, list, dict, NoneType})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_METHODS = frozenset(
    {
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "find",
        "rfind",
        "index",
        "replace",
        "startswith",
        "endswith",
        "removeprefix",
        "removesuffix",
    }
)


_JSON = json.JSONEncoder(ensure_ascii=False)


class ChatTemplate:
    """One compiled chat template.

    Raises KilnError KLN213 when the source does not compile, or names ``strftime_now`` while no date is given.
    """

    def __init__(
        self, source: str, name: str, special_tokens: Mapping[str, str] | None = None, date: str | None = None
    ) -> None:
        self.name = name
        self.thinks = THINK_OPEN in source or THINK_CLOSE in source
        self.sha256 = "sha256:" + hashlib.sha256(source.encode("utf-8")).hexdigest()
        clock = None if date is None else _frozen_clock(date)
        try:
            environment = _environment(_PlainBlocks, clock)
            blocks = environment.extensions[_PlainBlocks.identifier]
            tree = environment.parse(source)
            if clock is None and "strftime_now" in jinja2.meta.find_undeclared_variables(tree):
                raise KilnError(
                    "KLN213",
                    f"the chat template {printable(name)} asks for today's date (strftime_now)",
                    hint='give it a fixed one: [admit] date = "2025-01-31"',
                )
            self._plain = environment.from_string(source)
            self.has_markers = isinstance(blocks, _PlainBlocks) and blocks.found
            self._marked = _environment(_MarkedBlocks, clock).from_string(source) if self.has_markers else self._plain
        except (jinja2.TemplateError, RecursionError) as error:
            raise KilnError(
                "KLN213", f"the chat template {printable(name)} does not compile: {printable(error)}"
            ) from error
        # What every render sees; a render gets a copy, so that none can leave anything behind for the next.
        self._variables: dict[str, Any] = {**self._plain.globals, "documents": None, **(special_tokens or {})}
        # What the template itself searches message text for. Whoever alters a row for an experiment keeps these whole.
        self.watched: re.Pattern[str] = any_of({THINK_OPEN, THINK_CLOSE, *_searched_strings(tree)})

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The text of ``messages``. Raises RowFault ``template_error`` when the template refuses them."""
        return self.settle(messages, tools, add_generation_prompt)[1]

    def render_marked(self, form: Sequence[Message], tools: list[Any] | None = None) -> tuple[str, Spans]:
        """The text of messages as they are, and the character span of each ``{% generation %}`` block.

        Raises RowFault ``template_error``, ``mask_disagreement`` when the blocks do not pair up.
        """
        return split_blocks(self.render_form(form, tools, marked=True))

    def settle(
        self, messages: Sequence[Message], tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> tuple[list[Message], str]:
        """The first of the row's forms (:func:`row_forms`) that the template takes, and its text.

        Raises RowFault ``template_error`` with the refusal of the first form when it takes none.
        """
        first: RowFault | None = None
        for form in row_forms(messages):
            try:
                return form, self.render_form(form, tools, add_generation_prompt)
            except RowFault as fault:
                first = first or fault
        raise first or RowFault("template_error", f"{printable(self.name)}: no messages")

    def render_form(
        self,
        form: Sequence[Message],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        *,
        marked: bool = False,
        special_tokens: Mapping[str, str] | None = None,
    ) -> str:
        """Run the template once on messages as they are, ``special_tokens`` laid over the template's own.

        Raises RowFault ``template_error``.
        """
        template = self._marked if marked else self._plain
        variables: dict[str, Any] = {
            **self._variables,
            "messages": form,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if special_tokens:
            variables.update(special_tokens)
        parts: list[str] = []
        size = 0
        try:
            # What Template.generate does, without copying the variables twice.
            context = LimitedContext(template.environment, variables, template.name, template.blocks)
            for part in template.root_render_func(context):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise RowFault("template_error", f"{printable(self.name)}: more than {MAX_OUTPUT} characters")
                parts.append(part)
        except RowFault:
            raise
        except Exception as error:  # foreign code: whatever it raises is its verdict on this row
            raise RowFault("template_error", f"{printable(self.name)}: {printable(error)}") from error
        return "".join(parts)


def normalised(messages: Sequence[Message]) -> list[Message]:
    """Messages as transformers hands them over: null fields dropped, reasoning under both names templates read.

    ``weight`` is ours: it says what is trained and is never shown to a template.
    """
    out = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if not kept.keys().isdisjoint(_REASONING):
            reasoning = next(kept[key] for key in _REASONING if key in kept)
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        out.append(kept)
    return out


def row_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The forms in which a row is offered to a template, best first; a row without tool calls has one.

    A call's ``arguments`` given as JSON text are decoded when they hold an object; texts as they are come last. The
    content of a turn that is calls alone is null. transformers drops a null field, which is the first form. Templates
    that test ``content is none`` fail on the missing field and want the null; templates that concatenate want ``""``.
    """
    plain = normalised(messages)
    if not any(message.get("tool_calls") for message in plain):
        yield plain
        return
    decoded = [_with_decoded_arguments(message) for message in plain]
    silent = [bool(message.get("tool_calls")) and not message.get("content") for message in plain]
    for form in (decoded, plain) if decoded != plain else (plain,):
        if not any(silent):
            yield form
            continue
        yield [_without_content(message) if empty else message for message, empty in zip(form, silent, strict=True)]
        for content in (None, ""):
            pairs = zip(form, silent, strict=True)
            yield [{**message, "content": content} if empty else message for message, empty in pairs]


def split_blocks(marked: str) -> tuple[str, Spans]:
    """Take the block characters out of a marked render. Raises RowFault ``mask_disagreement`` unless they pair up."""
    before, *opened = marked.split(BLOCK_OPEN)
    parts, spans = [before], []
    position = len(before)
    for piece in opened:
        inside, closed, behind = piece.partition(BLOCK_CLOSE)
        if not closed and piece is opened[-1]:
            raise RowFault("mask_disagreement", "a generation block of the template is not closed")
        if not closed or BLOCK_CLOSE in behind:
            raise RowFault("mask_disagreement", "generation blocks of the template are nested or unbalanced")
        spans.append((position, position + len(inside)))
        parts += (inside, behind)
        position += len(inside) + len(behind)
    if BLOCK_CLOSE in before:
        raise RowFault("mask_disagreement", "generation blocks of the template are nested or unbalanced")
    return "".join(parts), tuple(spans)


def _with_decoded_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_decoded_call(call) for call in calls]} if calls else message


def _decoded_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    out = {**call, "function": _decoded_call(call["function"])} if isinstance(call.get("function"), dict) else call
    text = out.get("arguments")
    if isinstance(text, str):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return out  # not JSON: the text itself is what the row wants printed
        if isinstance(value, dict):
            return {**out, "arguments": value}
    return out


def _without_content(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content"}


def _searched_strings(tree: nodes.Template) -> set[str]:
    """String constants that the template gives to ``split``, ``startswith``, ``replace`` and their like."""
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS:
            found.update(const.value for arg in call.args for const in _constants(arg))
    for use in tree.find_all(nodes.Filter):
        if use.name == "replace":
            found.update(const.value for arg in use.args for const in _constants(arg))
    return {text for text in found if text.strip()}


def _constants(node: nodes.Expr) -> Iterator[nodes.Const]:
    candidates = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    return (const for const in candidates if isinstance(const.value, str))


class _PlainBlocks(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` that prints its body. What the body sets, it sets for itself alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)
    edges: tuple[str, ...] = ()
    found = False  # whether the environment has parsed such a block

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [nodes.Output([nodes.TemplateData(edge)]) for edge in self.edges]
        return nodes.Scope([*edges[:1], *body, *edges[1:]]).set_lineno(line)


class _MarkedBlocks(_PlainBlocks):
    """The same, between two private characters."""

    edges = (BLOCK_OPEN, BLOCK_CLOSE)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which could reach the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: a template may set an attribute `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _DictType:
    """``dict(...)`` and ``dict.fromkeys(...)`` without the attributes of the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with its verdict on the most frequent accesses written down instead of reasoned anew.

    Each short cut returns what the sandbox itself returns; whatever it does not name goes to the sandbox.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_FACTS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _PLAIN_TEXT_METHODS:
                return getattr(obj, attribute)
        elif kind is _Namespace and not attribute.startswith("_"):
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
            if type(value) in _PLAIN_VALUES:
                return value
        return super().getattr(obj, attribute)

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return limited

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Limiter().visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in _PLAIN_TEXT_METHODS:
            if __obj.__name__ in GROWING_METHODS:
                args = limited_arguments(__obj.__self__, __obj.__name__, args, kwargs)
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return bounded(result) if type(__obj) is Macro else result


def _environment(blocks: type[jinja2.ext.Extension], clock: Callable[[str], str] | None) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[blocks, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    limit_environment(environment)
    environment.globals.update(raise_exception=_raise_exception, dict=_DictType(), namespace=_Namespace)
    if clock is not None:
        environment.globals["strftime_now"] = clock
    return environment


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not start with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it stands: Jinja's own filter escapes ``<`` and ``&`` for HTML."""
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _JSON.encode(value)  # as below, with an encoder made once
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _frozen_clock(date: str) -> Callable[[str], str]:
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) is None:
        raise KilnError("KLN213", f"[admit] date is {printable(date)!r}, expected yyyy-mm-dd")
    try:
        return datetime.fromisoformat(date).strftime
    except ValueError as error:
        raise KilnError("KLN213", f"[admit] date is {printable(date)!r}: {error}") from error
