"""The proof that spans are the assistant's turns. It uses neither the marks nor the gaps by which they were found.

Two experiments on the text. Change all trained strings: the render may change inside of the spans only. Change all
other strings: the spans keep their text. Both are blind to constant text on the wrong side of an edge. So without
generation blocks every edge must also be where a prefix of the conversation, rendered alone, ends; with blocks it
must be the edge of a block, in the second experiment too. Whatever cannot be shown is ``mask_disagreement``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kiln_cli.errors import RowFault
from kiln_stages.labelling.rendering import ChatTemplate, Message, Spans

Printed = TypeVar("Printed")
_TEXT_FIELDS = ("content", "reasoning_content", "thinking", "reasoning")
# Stands in for the end-of-text token, to tell a text that closes the whole render from one that opens a header.
_STAND_IN_EOS = "\ue000end\ue000"


class Claim(msgspec.Struct, frozen=True):
    """``spans`` of ``text`` are the turns ``turns`` (indices into ``form``) as ``template`` prints them."""

    template: ChatTemplate
    form: list[Message]
    tools: list[Any] | None
    text: str
    spans: Spans
    turns: list[int]


def prove(claim: Claim) -> list[str]:
    """Show that the claim holds. Raises RowFault ``mask_disagreement``; returns notes on what may stay."""
    notes = _prove_trained_text(claim)
    _prove_context(claim)
    if claim.template.has_markers:
        return notes
    prefixes = _Prefixes(claim)
    for turn, (start, end) in zip(claim.turns, claim.spans, strict=True):
        if not prefixes.starts(turn, start):
            raise RowFault("mask_disagreement", f"no prompt ends where the span of message {turn + 1} starts")
        if not prefixes.ends(turn, start, end):
            raise RowFault("mask_disagreement", f"the span of message {turn + 1} does not end with its turn")
    return notes


def _prove_trained_text(claim: Claim) -> list[str]:
    """With other words in all trained turns, everything outside of the spans stays."""
    outside, at = [], 0
    for start, end in claim.spans:
        outside.append(claim.text[at:start])
        at = end
    outside.append(claim.text[at:])
    if _stays(claim, outside, call_names=True):
        return []
    # A template may repeat the name of a call in the header of its result, which is not the assistant's to write.
    if any(message.get("tool_calls") for message in claim.form) and _stays(claim, outside, call_names=False):
        return ["template_rewrites_turns: the name of a call is printed again outside of its turn"]
    raise RowFault("mask_disagreement", "text outside of the spans depends on what the assistant says")


def _stays(claim: Claim, outside: list[str], *, call_names: bool) -> bool:
    swap = _Swap(claim.template.watched, call_names=call_names)
    trained = set(claim.turns)
    changed = [swap.message(message) if i in trained else message for i, message in enumerate(claim.form)]
    other = _with_other_words(claim.template.render_form, changed, claim.tools)
    if not (other.startswith(outside[0]) and other.endswith(outside[-1])):
        return False
    at = len(outside[0])
    for part in outside[1:-1]:
        found = other.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return at + len(outside[-1]) <= len(other)


def _prove_context(claim: Claim) -> None:
    """With other words in everything else, the spans keep their text, and are still made of whole generation blocks."""
    swap = _Swap(claim.template.watched)
    trained = set(claim.turns)
    changed = [message if i in trained else swap.message(message) for i, message in enumerate(claim.form)]
    tools = None if claim.tools is None else [swap.tool(tool) for tool in claim.tools]
    other, blocks = _with_other_words(claim.template.render_marked, changed, tools)
    at = 0
    for start, end in claim.spans:
        trained_text = claim.text[start:end]
        at = other.find(trained_text, at)
        if at < 0:
            raise RowFault("mask_disagreement", "the text of a span depends on what others say")
        if claim.template.has_markers and (at := _at_blocks(blocks, other, trained_text, at)) < 0:
            raise RowFault("mask_disagreement", "a span is not made of whole generation blocks")
        at += end - start


def _at_blocks(blocks: Spans, text: str, trained: str, at: int) -> int:
    """Where ``trained`` stands in ``text``, from ``at`` on, between the start of a block and the end of one; or -1."""
    starts, ends = {start for start, _ in blocks}, {end for _, end in blocks}
    while at >= 0 and not (at in starts and at + len(trained) in ends):
        at = text.find(trained, at + 1)
    return at


def _with_other_words(
    render: Callable[[list[Message], list[Any] | None], Printed], form: list[Message], tools: list[Any] | None
) -> Printed:
    try:
        return render(form, tools)
    except RowFault as fault:
        detail = f"the template refuses the row with other words in it: {fault.detail}"
        raise RowFault("mask_disagreement", detail) from fault


class _Swap:
    """Puts other words in the place of strings: one word per segment, equal words for equal segments."""

    def __init__(self, watched: re.Pattern[str], *, call_names: bool = True) -> None:
        self._watched = watched
        self._call_names = call_names
        self._words: dict[str, str] = {}

    def message(self, message: Message) -> Message:
        out = dict(message)
        for field in _TEXT_FIELDS:
            if field in message and isinstance(message[field], str):
                out[field] = self._text(message[field])
        if message.get("tool_calls"):
            out["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return out

    def tool(self, tool: Any) -> Any:
        """Descriptions only: names and types are what templates look at."""
        if not isinstance(tool, dict):
            return tool
        out = {key: self.tool(value) if key == "function" else value for key, value in tool.items()}
        if isinstance(tool.get("description"), str):
            out["description"] = self._text(tool["description"])
        return out

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return self._leaves(call)
        out = dict(call)
        if isinstance(call.get("function"), dict):
            out["function"] = self._call(call["function"])
        if self._call_names and isinstance(call.get("name"), str):
            out["name"] = self._text(call["name"])
        if "arguments" in call:
            out["arguments"] = self._leaves(call["arguments"])
        return out

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._leaves(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._leaves(item) for item in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if not self._watched.search(text):
            return self._word(text)
        parts = self._watched.split(text)  # segments at even places, what was searched for between them
        return "".join(part if i % 2 else self._word(part) for i, part in enumerate(parts))

    def _word(self, part: str) -> str:
        core = part.strip()
        if not core:
            return part
        if core not in self._words:
            # Other first and last characters than the text's own, or a span that is off by one would pass.
            taken = core[0] + core[-1]
            edge = "X" if "X" not in taken else "Y" if "Y" not in taken else "Z"
            self._words[core] = f"{edge}{len(self._words)}w{edge}"
        return self._words[core] if len(core) == len(part) else part.replace(core, self._words[core], 1)


class _Prefixes:
    """Edges of turns as plain renders of the row's prefixes show them."""

    def __init__(self, claim: Claim) -> None:
        self._template, self._form, self._tools, self._text = claim.template, claim.form, claim.tools, claim.text
        self._single = len(claim.turns) == 1
        self._closings: set[str] = set()  # what stands behind the content of this row's turns that are shown to end

    def starts(self, turn: int, start: int) -> bool:
        """Whether a turn starts where the prompt for it ends.

        Where the text goes on otherwise than the prompt (an earlier turn loses its think block, tools move to the
        last question), the text before the turn must end as the prompt ends, or be the text before a plain answer.
        """
        prompt = self._render(turn, True) if turn else None
        if prompt is not None:
            if self._text.startswith(prompt):
                return start == len(prompt)
            content = self._form[turn - 1].get("content")
            known = content.strip() if isinstance(content, str) else ""
            at = prompt.rfind(known) if known else -1
            if at >= 0 and self._text.endswith(prompt[at:], 0, start):
                return True
        return self._text[:start] == self._before_plain_answer(turn)

    def ends(self, turn: int, start: int, end: int) -> bool:
        """Whether a turn that starts at ``start`` ends where the messages up to it end."""
        told = self._render(turn + 1, False)
        if told is None:
            return False
        # One newline behind the end-of-turn text is trained, further ones are not.
        closed = told[: len(told.rstrip("\n")) + 1]
        same = end == len(closed) if self._text.startswith(told) else self._ends_as(closed, end, turn)
        closing = None if self._single else self._closing(turn, start, end, told)
        if closing in self._closings:
            return same
        prompt = self._render(turn + 1, True)
        if prompt is None:
            return False
        if prompt.startswith(told):
            shown = same and (prompt != told or self._goes_on(turn, closed))
            if shown and closing is not None:
                self._closings.add(closing)
            return shown
        header = self._header(turn)
        before = prompt[: -len(header)] if header and prompt.endswith(header) else None
        if before is not None and self._ends_as(before, end, turn):
            return True
        # The last turn may have an ending of its own, which then runs to the end of the text.
        last = turn + 1 == len(self._form) and end == len(self._text)
        return last and not (before is not None and self._text.startswith(before))

    def _closing(self, turn: int, start: int, end: int, told: str) -> str | None:
        """What ``told`` has behind the turn's content; None where the span does not hold the content just once.

        A second turn of the row with the same closing needs no second look at what may follow such a closing.
        """
        known = self._last_words(turn)
        if not known or self._text.count(known, start, end) != 1:
            return None
        at = told.rfind(known)
        return told[at + len(known) :] if at >= 0 else None

    def _ends_as(self, closed: str, end: int, turn: int) -> bool:
        """Whether the text up to ``end`` ends as ``closed``, from the turn's last segment of content on."""
        at = closed.rfind(known) if (known := self._last_words(turn)) else len(closed) - 8
        return self._text.endswith(closed[max(at, 0) :], 0, end)

    def _goes_on(self, turn: int, closed: str) -> bool:
        """Whether other messages can follow ``closed``, where no prompt ever does.

        A template that opens the next turn come what may, prompt or not, would have its header trained.
        """
        known = self._last_words(turn)
        at = closed.rfind(known) if known else -1
        for role in ("user", "tool"):
            following = {"role": role, "content": "x", "tool_call_id": "x00000000"}
            try:
                other = self._template.render_form([*self._form[: turn + 1], following], self._tools)
            except RowFault:
                continue  # this role may not follow; the other may
            if other.startswith(closed) or (at >= 0 and closed[at:] in other):
                return True
        return False

    def _last_words(self, turn: int) -> str:
        content = self._form[turn].get("content")
        return self._template.watched.split(content)[-1].strip() if isinstance(content, str) else ""

    def _before_plain_answer(self, turn: int) -> str | None:
        """The text before a plain answer in this turn's place, up to the end of the prompt where it holds one."""
        word = "XplainX"
        while word in self._text:
            word += "X"
        answer = {"role": "assistant", "content": word}
        try:
            other = self._template.render_form([*self._form[:turn], answer, *self._form[turn + 1 :]], self._tools)
        except RowFault:
            return None  # no evidence; the caller then refuses the row
        before, header = other.partition(word)[0], self._header(turn)
        return before[: before.rindex(header) + len(header)] if header and header in before else before

    def _header(self, turn: int) -> str:
        """What a generation prompt adds after the last message before ``turn`` that is not the assistant's."""
        while turn and self._form[turn - 1]["role"] == "assistant":
            turn -= 1
        form: list[Message] = self._form[:turn] or [{"role": "user", "content": "x"}]
        try:
            prompt = self._template.render_form(form, self._tools, True)
            told = self._template.render_form(form, self._tools, special_tokens={"eos_token": _STAND_IN_EOS})
        except RowFault:
            return ""
        pairs = enumerate(zip(prompt, told, strict=False))
        return prompt[next((i for i, (left, right) in pairs if left != right), min(len(prompt), len(told))) :]

    def _render(self, count: int, prompt: bool) -> str | None:
        if count == len(self._form) and not prompt:
            return self._text
        try:
            return self._template.render_form(self._form[:count], self._tools, prompt)
        except RowFault:
            return None  # no evidence; the caller then refuses the row
