"""The renderer gives what transformers gives, and refuses what would make a render differ from run to run."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from types import FunctionType
from typing import Any

import pytest
from jinja2 import Undefined
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kiln_stages.labelling import rendering, template_limits
from kiln_stages.labelling.labels import LabelFinder
from kiln_stages.labelling.rendering import ChatTemplate
from tests_support import shared_path

from kiln_cli.errors import KilnError, RowFault

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
DATE = "2025-01-31"
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "f", "arguments": {"x": 'é<&>"\n', "n": 1.5}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "the x"}},
                "required": ["x"],
            },
        },
    }
]
SHAPES: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "plain": ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], None),
    "system": (
        [
            {"role": "system", "content": " be kind "},
            {"role": "user", "content": "a\n"},
            {"role": "assistant", "content": "\n\nb "},
        ],
        None,
    ),
    "two_turns": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"},
            {"role": "user", "content": "{{ c }}"},
            {"role": "assistant", "content": "d"},
        ],
        None,
    ),
    "reasoning": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "why", "name": None},
        ],
        None,
    ),
    "thinking": ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "w"}], None),
    "calls": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "so", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "abcdef123"},
            {"role": "assistant", "content": "b"},
        ],
        TOOLS,
    ),
    "null_content": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        TOOLS,
    ),
    "no_tools": ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], []),
    "user_last": ([{"role": "system", "content": "s /no_think"}, {"role": "user", "content": "a"}], TOOLS),
}


class TextOfAKind(str):
    """Not a plain str, so no short cut may take it for one."""


def template_files() -> list[pathlib.Path]:
    root = shared_path("data")
    return [root / "tokenizers/smollm2/chat_template.jinja", *sorted((root / "templates").glob("*/*.jinja"))]


def test_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    class FixedClock:
        @staticmethod
        def now() -> Any:
            return utils_datetime(2025, 1, 31)

    utils_datetime = utils.datetime
    monkeypatch.setattr(utils, "datetime", FixedClock)
    compared = 0
    for path in template_files():
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, path.stem, SPECIAL, DATE)
        for shape, (messages, tools) in SHAPES.items():
            for prompt in (False, True):
                try:
                    chat = utils._normalize_chat_messages(messages)
                    expected = utils.render_jinja_template(
                        [chat], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL
                    )[0][0]
                except Exception:
                    with pytest.raises(RowFault, match="template_error"):
                        template.render_form(rendering.normalised(messages), tools, prompt)
                    continue
                found = template.render_form(rendering.normalised(messages), tools, prompt)
                assert found == expected, (path.stem, shape, prompt)
                assert template.render(messages, tools, prompt) == expected
                compared += 1
    assert compared > 200


def test_markers_give_the_spans_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    marked = [path for path in template_files() if "generation %}" in path.read_text(encoding="utf-8")]
    assert len(marked) == 4
    for path in marked:
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, path.stem, SPECIAL)
        assert template.has_markers
        for messages, tools in (SHAPES["system"], SHAPES["two_turns"]):
            texts, spans = utils.render_jinja_template(
                [messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True, **SPECIAL
            )
            assert template.render_marked(messages, tools) == (texts[0], tuple(spans[0]))


@pytest.mark.parametrize("body", [
    "{% set x = m.content %}{{ x }}",  # set for the block alone
    "{{ loop.index }}{% for c in m.content %}{{ c }}{% if loop.first %}{% continue %}{% endif %}-{% endfor %}",
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ shout(m.content) }}",
    "{% if loop.last %}{% macro inner(t) %}<{{ t }}>{% endmacro %}{{ inner(m.content) }}{% endif %}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
])  # fmt: skip
def test_a_block_prints_what_it_prints_in_transformers(body: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{% set ns = namespace(n=0) %}{% set x = 'outer' %}{% macro shout(t) %}{{ t | upper }}!{% endmacro %}"
        "{% for m in messages %}[{% generation %}" + body + "{% endgeneration %}]{{ x }}{{ ns.n }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    texts, spans = utils.render_jinja_template([messages], chat_template=source, return_assistant_tokens_mask=True)
    template = ChatTemplate(source, "blocks")
    assert template.has_markers
    assert template.render(messages) == texts[0]
    assert template.render_marked(messages) == (texts[0], tuple(spans[0]))


def test_a_clock_needs_a_date() -> None:
    source = "{% macro m() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ m() }}"
    with pytest.raises(KilnError, match="date") as error:
        ChatTemplate(source, "clock")
    assert error.value.code == "KLN213"
    assert "[admit] date" in error.value.hint
    assert ChatTemplate(source, "clock", date="2024-02-29").render([{"role": "user", "content": ""}]) == "29 Feb 2024"
    for bad in ("2024-02-30", "yesterday", "20240229"):
        with pytest.raises(KilnError, match="date"):
            ChatTemplate(source, "clock", date=bad)


def test_a_template_that_does_not_compile_is_refused() -> None:
    for source in ("{% for %}", "{{ x | nosuchfilter }}", "{% generation %}"):
        with pytest.raises(KilnError) as error:
            ChatTemplate(source, "broken")
        assert error.value.code == "KLN213"


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__init__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
])  # fmt: skip
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, "hostile").render([{"role": "user", "content": "x"}])
    except RowFault as fault:
        assert fault.reason == "template_error"
    else:
        assert text == ""


def test_short_cuts_give_what_the_sandbox_gives() -> None:
    """Every attribute of the kinds of value that have a short cut, and names that such values lack."""
    ours, plain = rendering._environment(rendering._PlainBlocks, None), ImmutableSandboxedEnvironment()
    space = rendering._Namespace(a=1, text="x", items=[1], method="x".upper, risky="{0.__class__}".format)
    loop = LoopContext([1, 2, 3], ours.undefined)
    next(loop)
    values: list[Any] = [{}, {"a": 1, "items": 2, "_p": 3}, "text", space, loop, [1], 1, None, TextOfAKind("text")]
    compared = 0
    for value in values:
        names = {*dir(type(value)), "a", "text", "items", "method", "risky", "content", "_p", "__nowhere__", "first"}
        for name in sorted(names):
            mine, theirs = ours.getattr(value, name), plain.getattr(value, name)
            if isinstance(theirs, Undefined):
                assert isinstance(mine, Undefined), (value, name)
                assert mine._undefined_exception is theirs._undefined_exception, (value, name)
            elif isinstance(theirs, FunctionType):  # the sandbox's own wrapper of str.format
                assert isinstance(mine, FunctionType), (value, name)
                assert mine.__name__ == theirs.__name__, (value, name)
            else:
                assert (mine, type(mine)) == (theirs, type(theirs)), (value, name)
            compared += 1
    assert compared > 400


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_OUTPUT", 1000)
    template = ChatTemplate("{% for i in range(500) %}{{ 'abc' }}{% endfor %}", "long")
    with pytest.raises(RowFault, match="more than 1000 characters"):
        template.render([{"role": "user", "content": ""}])


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
STEPS = "more than 1000000 steps"
TEXT = "a text of more than 67108864 characters"


@pytest.mark.parametrize(("source", "limit"), [
    (LOOPS, STEPS),
    ("{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}", None),  # the clock
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "more than"),
    ("{% for x in [[[], []]] recursive %}{{ loop([x, x]) }}{% endfor %}", None),  # Python's own limit on depth
    ("{% set n = namespace(s='x' * 99) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", TEXT),
    ("{% set n = namespace(s='x' * 99) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", TEXT),
    ("{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "1000000 elements"),
    ("{% set n = namespace(s='x' * 99) %}{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"
     "{% endfor %}", TEXT),
    ("{% macro m(n) %}{% if n %}{% set x = m(n - 1) %}{{ x }}{{ x }}{% else %}x{% endif %}{% endmacro %}{{ m(60) }}",
     TEXT),
    ("{% macro m(s, n) %}{% if n %}{{ m(s + s, n - 1) }}{% endif %}{% endmacro %}{{ m('x', 60) }}", TEXT),
    ("{% set s = 'x' * 67108864 %}{{ s + s + s + s + s + s + s + s + s + s }}", TEXT),
    ("{% set n = namespace(s='x' * 99) %}{% for i in range(60) %}{% set n.s | upper %}{{ n.s ~ n.s }}{% endset %}"
     "{% endfor %}", TEXT),
    ("{{ 'x' * 999999999999 }}", TEXT),
    ("{{ 999999999999 * messages[0].content }}", TEXT),
    ("{{ ([0] * 99999999) | length }}", "1000000 elements"),
    ("{{ 9 ** 999999999 }}", "100000 bits"),
    ("{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}", "100000 bits"),
    ("{{ '%999999999d' % 1 }}", TEXT),
    ("{{ '%*d' % (999999999, 1) }}", TEXT),
    ("{{ '%999999999d' | format(1) }}", TEXT),
    ("{{ '{:999999999}'.format(1) }}", TEXT),
    ("{{ '{:{}}'.format(1, 999999999) }}", TEXT),
    ("{{ 'x' | center(999999999) }}", TEXT),
    ("{{ 'x'.ljust(999999999) }}", TEXT),
    ("{{ 'x'.zfill(999999999) }}", TEXT),
    ("{{ '\t'.expandtabs(999999999) }}", TEXT),
    ("{{ 'x' | indent(999999999, true) }}", TEXT),
    ("{% set s = 'x' * 99999 %}{{ s | replace('x', s) }}", TEXT),
    ("{% set s = 'x' * 99999 %}{{ s.replace('', s) }}", TEXT),
    ("{% set s = 'x' * 99999 %}{{ s | join(s) }}", TEXT),
    ("{% set s = 'x' * 99999 %}{{ s.join(range(9999) | map('string')) }}", TEXT),
    ("{% set s = 'x' * 99999 %}{{ range(9999) | map('string') | join(s) }}", TEXT),
    ("{{ ['x'] | map('center', 999999999) | first }}", TEXT),
    ("{{ [1] | batch(999999999, 0) | list | length }}", "1000000 elements"),
    ("{{ [1] | slice(999999999) | list | length }}", "1000000 elements"),
    ("{{ {'a': 1} | tojson(indent=99999999) }}", "indent"),
    ("{{ range(99999999) | list | length }}", "Range too big"),
])  # fmt: skip
def test_a_template_cannot_take_all_time_or_memory(source: str, limit: str | None, monkeypatch: Any) -> None:
    if limit in (None, "more than"):  # where the clock may come first; elsewhere a slow machine must not decide
        monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.7)
    started = time.monotonic()
    with pytest.raises(RowFault) as error:
        ChatTemplate(source, "endless").render([{"role": "user", "content": "x"}])
    assert error.value.reason == "template_error"
    assert error.value.detail.startswith("endless: ")
    assert limit is None or limit in error.value.detail
    assert time.monotonic() - started < 30


def test_the_time_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.01)
    with pytest.raises(RowFault, match=r"endless: more than 0\.01 seconds"):
        ChatTemplate(LOOPS, "endless").render([{"role": "user", "content": ""}])


def test_limits_change_nothing_that_a_template_prints() -> None:
    source = (
        "{% macro m(a, b='d') %}{{ a + b ~ 1 }}{% endmacro %}{% set s %}{{ 'q' }}{{ m('x') }}{% endset %}"
        "{% set t | upper %}{{ s + s }}{% endset %}{% for i in range(3) if i != 1 %}{{ loop.index ~ loop.length }}"
        "{% else %}none{% endfor %}{% for i in [] %}{% else %}{{ [1] + [2] }}{% endfor %}{{ t }}{{ '%03d' % 7 }}"
        "{{ 2 ** 3 * 2 }}{{ '-' * 3 }}{{ '{:>3}'.format(s) }}{{ ['a', 1] | join('+') }}{{ ', '.join(['a', 'b']) }}"
        "{{ 'a-b'.replace('-', '+') }}{{ 'x' | center(3) }}{{ 1 + 2 }}{{ (1, 2) + (3,) }}"
        "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
        "{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}c{% endcall %}"
        "{{ [[1, 2], [3]] | map('sum') | list }}"
    )
    ours = ChatTemplate(source, "all")
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=[])
    assert ours.render([{"role": "user", "content": ""}]) == expected


def test_limits_are_those_of_one_render() -> None:
    """Steps of one row are not counted against the next."""
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", "long")
    for _ in range(15):
        assert template.render([{"role": "user", "content": ""}]) == "ok"


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_a_template_that_prints_at_random_is_refused(source: str) -> None:
    with pytest.raises((KilnError, RowFault), match=r"random|lipsum"):
        ChatTemplate(source, "dice").render([{"role": "user", "content": ""}])


def test_errors_carry_the_name_and_the_templates_own_message() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", "strict")
    with pytest.raises(RowFault) as error:
        template.render([{"role": "user", "content": ""}])
    assert (error.value.reason, error.value.detail) == ("template_error", "strict: roles must alternate")


def test_arguments_given_as_text_are_decoded_if_they_hold_an_object() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", "json")
    for given, printed in [('{"a": 1}', '{"a": 1}'), ("[1]", '"[1]"'), ("not json", '"not json"')]:
        row = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
        assert template.render(row) == printed
    wants_text = ChatTemplate("{{ '>' + messages[0].tool_calls[0].arguments }}", "text")
    row = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}]
    assert wants_text.render(row) == '>{"a": 1}'


@pytest.mark.parametrize(("source", "printed"), [
    ("{{ 'content' in messages[0] }}", "False"),
    ("{% if messages[0].content is not none %}{{ '' + messages[0].content }}{% endif %}ok", "ok"),
    ("{{ '<' + messages[0]['content'] + '>' }}", "<>"),
])  # fmt: skip
def test_a_turn_of_calls_alone_has_null_content_as_far_as_the_template_bears_it(source: str, printed: str) -> None:
    row = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}]
    assert ChatTemplate(source, "null").render(row) == printed


def test_unbalanced_blocks_are_refused() -> None:
    for marked in ("\ufdd0\ufdd0a\ufdd1\ufdd1", "a\ufdd1", "\ufdd0a"):
        with pytest.raises(RowFault, match="mask_disagreement"):
            rendering.split_blocks(marked)
    assert rendering.split_blocks("x\ufdd0ab\ufdd1\ufdd0\ufdd1y") == ("xaby", ((1, 3), (3, 3)))


def test_a_row_with_block_characters_is_refused() -> None:
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}", "blocks")
    with pytest.raises(RowFault, match="U\\+FDD0"):
        LabelFinder(template).find([{"role": "assistant", "content": "a\ufdd0b"}])


def test_rendering_leaves_the_messages_alone() -> None:
    row: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": "",
            "weight": 0,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
        }
    ]
    copy = [{**row[0], "tool_calls": [{"function": dict(row[0]["tool_calls"][0]["function"])}]}]
    assert ChatTemplate("{{ messages[0].weight is defined }}", "weight").render(row) == "False"
    assert row == copy


def test_rendering_and_labels_need_no_heavy_package() -> None:
    heavy = ("torch", "transformers", "numpy", "polars", "tokenizers")
    code = f"import sys, kiln_stages.labelling.labels; print([name for name in {heavy} if name in sys.modules])"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
