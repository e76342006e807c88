"""The markers that a template prints of its own accord: what opens and closes turns, and calls and results of tools.

Read from renders of probe conversations, whose words no template prints. A tokenizer should have each as one token, and
row text must not turn into one, whether the tokenizer calls it special or not (DeepSeek's does not).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kiln_cli.errors import RowFault
from kiln_stages.labelling.rendering import ChatTemplate, Message

_MARKER = re.compile(r"<\|[^\s<>|]{1,64}\|>|<｜[^\s<>｜]{1,64}｜>|<(?:start|end)_of_turn>")
# Markers in brackets are plain text in some families and tokens in others: all of them are, or none.
_BRACKETED = re.compile(r"\[/?[A-Z][A-Z_]{2,32}\]")

_QUESTION: Message = {"role": "user", "content": "qquestionq"}
_ANSWER: Message = {"role": "assistant", "content": "qanswerq"}
_SYSTEM: Message = {"role": "system", "content": "qsystemq"}
_CALL = {"type": "function", "id": "qcallidqq", "function": {"name": "qnameq", "arguments": {"qkeyq": "qvalueq"}}}
_CALLS: list[Message] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "qresultq", "tool_call_id": "qcallidqq", "name": "qnameq"},
    _ANSWER,
]
_TOOLS = [
    {"type": "function", "function": {"name": "qnameq", "description": "qtoolq", "parameters": {"type": "object"}}}
]


def plain_renders(template: ChatTemplate) -> Iterator[str]:
    """Conversations without tools, as far as the template takes them."""
    exchange = [_QUESTION, _ANSWER]
    yield from _renders(template, [exchange, exchange * 2, [_SYSTEM, *exchange]], None)


def printed_markers(template: ChatTemplate) -> frozenset[str]:
    """All markers, those of calls, results and declared tools among them."""
    texts = [*plain_renders(template), *_renders(template, [_CALLS], _TOOLS), *_renders(template, [_CALLS], None)]
    return frozenset(marker for text in texts for marker in (*markers_in(text), *bracketed_in(text)))


def markers_in(text: str) -> list[str]:
    return _MARKER.findall(text)


def bracketed_in(text: str) -> list[str]:
    return _BRACKETED.findall(text)


def _renders(template: ChatTemplate, conversations: list[list[Message]], tools: list[Any] | None) -> Iterator[str]:
    for messages in conversations:
        for prompt in (False, True):
            try:
                yield template.render(messages, tools, prompt)
            except RowFault:
                continue  # it refuses such a conversation, so it prints no marker for one
