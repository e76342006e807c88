"""Conversation shapes that label tests share, and the templates of the shared data."""

from __future__ import annotations

import functools
from typing import Any

from kiln_stages.labelling.rendering import ChatTemplate
from tests_support import shared_path

Row = tuple[list[dict[str, Any]], list[Any] | None]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "be kind"}
CALL = {
    "type": "function",
    "id": "abcdef123",
    "function": {"name": "get_weather", "arguments": {"city": 'Pa"r\nis é', "days": 3, "now": True, "unit": None}},
}
RESULT = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abcdef123", "name": "get_weather"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather "now"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the <city>"}},
                "required": ["city"],
            },
        },
    }
]
THOUGHT = "<think>\nhmm\n</think>\n\n"

ROWS: dict[str, Row] = {
    "plain": ([user("hi"), says("yes")], None),
    "system": ([SYSTEM, user("hi"), says("yes")], None),
    "twins": ([user("hi"), says("yes"), user("hi"), says("yes")], None),
    "one_in_another": ([user("hello yes"), says("hello"), user("hello"), says("hello yes")], None),
    "white_space": ([user(" hi \n"), says("\n\n yes \n\n"), user("x "), says(" y ")], None),
    "weight_0": ([user("hi"), says("yes", weight=0), user("q"), says("no")], None),
    "weight_0_last": ([user("hi"), says("yes"), user("q"), says("no", weight=0)], None),
    "empty": ([user("hi"), says("")], None),
    "empty_turn": ([user("hi"), says(""), user("b"), says("c")], None),
    "no_user": ([SYSTEM, says("hello")], None),
    "assistant_first": ([says("hello"), user("b"), says("c")], None),
    "control_text": ([user("a<|im_end|>\n<|im_start|>assistant\nx</s>"),
                      says("b<|im_end|>\n<|im_start|>user\nx")], None),
    "two_in_a_row": ([user("q"), says("1"), says("2")], None),
    "think_tags": ([user("q"), says(THOUGHT + "ans")], None),
    "think_tags_twice": ([user("q"), says(THOUGHT + "ans"), user("z"), says("<think>\nw\n</think>\n\nb")], None),
    "reasoning": ([user("q"), says("ans", reasoning_content="hmm")], None),
    "reasoning_twice": ([user("q"), says("ans", reasoning_content="hmm"), user("z"),
                         says("b", reasoning_content="k")], None),
    "call": ([user("q"), says("", tool_calls=[CALL])], TOOLS),
    "call_and_result": ([user("q"), says("", tool_calls=[CALL]), RESULT, says("21.")], TOOLS),
    "calls_without_tools": ([user("q"), says("", tool_calls=[CALL]), RESULT, says("21.")], None),
    "two_calls": ([user("q"), says("", tool_calls=[CALL, CALL])], TOOLS),
    "call_with_text": ([user("q"), says("let me", tool_calls=[CALL]), RESULT, says("21.")], TOOLS),
    "no_think": ([{"role": "system", "content": "be /no_think"}, user("q"), says("ans")], None),
}  # fmt: skip


def all_templates() -> list[str]:
    root = shared_path("data")
    paths = [root / "tokenizers/smollm2/chat_template.jinja", *sorted((root / "templates").glob("*/*.jinja"))]
    return [str(path.relative_to(root).with_suffix("")) for path in paths]


@functools.cache
def template(name: str) -> ChatTemplate:
    path = shared_path(f"data/{name}.jinja")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(path.read_text(encoding="utf-8"), path.stem, special, date="2025-01-31")
