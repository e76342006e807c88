"""Where each string of a row stands in its rendered text: render a copy with marks around the strings.

A mark is a short alphanumeric word with a number, one on either side of a string and inside its outer whitespace, so
that a template that trims, or escapes for JSON, treats the marked string as it treats the plain one. Strings that a
template searches for (``ChatTemplate.watched``: think tags, say) stay whole and outside of the marks, which cuts a
content with a think block into two marked pieces. After rendering, the marks give the place of every piece; a mark
that is missing gives the name of the text that the template dropped.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kiln_cli.errors import RowFault
from kiln_stages.labelling.rendering import (
    BLOCK_CLOSE,
    BLOCK_OPEN,
    THINK_CLOSE,
    ChatTemplate,
    Message,
    Spans,
    split_blocks,
)

TOOLS = -1  # the owner of strings that belong to the row's tools, not to a message
# Short technical words (ids, types, enum values) stay as they are: templates compare them and measure their length.
_WORD = re.compile(r"[A-Za-z0-9_.:/+ -]*\Z")
_THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# The kinds of mark: before a string, behind it, behind a key.
_KINDS = frozenset("bek")
_STAND_IN_EOS = "qEndOfText7q"


class Mark(msgspec.Struct, frozen=True, gc=False):
    """One marked piece of one string: whose it is, what stood around it in the string, and whether it may be lost."""

    owner: int
    where: str
    required: bool
    thinking: bool
    before: str
    after: str


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A place in rendered text that holds the piece of row data with this mark."""

    mark: int
    start: int
    end: int


class Reading(msgspec.Struct, frozen=True):
    """A marked render with the marks taken out."""

    text: str
    pieces: list[Piece]
    blocks: Spans


class MarkedRow:
    """A row's form with marks around its strings, and what renders of it and of its prefixes show."""

    def __init__(self, template: ChatTemplate, form: list[Message], tools: list[Any] | None, text: str) -> None:
        self.template = template
        self.form = form
        self.marks: list[Mark] = []
        number = 0
        while (word := f"qk{number}z") in text:
            number += 1
        self.word = word
        self._prefixes: dict[tuple[int, bool, bool], Reading | None] = {}
        self.tools = None
        if tools is not None:
            self.tools = [self._tool(tool, f"tools[{i}]", 0) for i, tool in enumerate(tools)]
        self.messages = [self._message(message, i) for i, message in enumerate(form)]

    def read_whole(self) -> Reading:
        """The reading of all messages. Raises RowFault ``template_error``."""
        reading = self._prefixes[len(self.messages), False, False] = self.read(self.messages)
        return reading

    def read(self, messages: list[Message], prompt: bool = False, stand_in: bool = False) -> Reading:
        """Render marked messages and take the marks out. Raises RowFault ``template_error``."""
        special = {"eos_token": _STAND_IN_EOS} if stand_in else None
        marked = self.template.render_form(
            messages, self.tools, prompt, marked=self.template.has_markers, special_tokens=special
        )
        first, *rest = marked.split(self.word)
        parts = [first]
        pieces: list[Piece] = []
        opened: dict[int, int] = {}
        count = self._printed if self.template.has_markers else len
        position = count(first)
        for chunk in rest:
            digits, kind, text = chunk[:6], chunk[6:7], chunk[7:]
            if not (digits.isdecimal() and kind in _KINDS):
                text = self.word + chunk  # a template that cuts text left half a mark, which is then found in the text
            elif kind == "b":
                opened[int(digits)] = position
            elif kind == "k":
                pieces.append(Piece(int(digits), position, position))
            elif (number := int(digits)) in opened:
                pieces.append(Piece(number, opened.pop(number), position))
            parts.append(text)
            position += count(text)
        if not self.template.has_markers:
            return Reading("".join(parts), pieces, ())
        text, blocks = split_blocks("".join(parts))
        return Reading(text, pieces, blocks)

    @staticmethod
    def _printed(text: str) -> int:
        """The length of marked text without block characters, which ``split_blocks`` takes out."""
        return len(text) - text.count(BLOCK_OPEN) - text.count(BLOCK_CLOSE)

    def prefix(self, count: int, prompt: bool, stand_in: bool = False) -> Reading | None:
        """The reading of the first ``count`` messages; None when there are none or the template refuses them."""
        key = (count, prompt, stand_in)
        if key not in self._prefixes:
            try:
                self._prefixes[key] = self.read(self.messages[:count], prompt, stand_in) if count else None
            except RowFault:
                self._prefixes[key] = None
        return self._prefixes[key]

    def _message(self, message: Message, index: int) -> Message:
        out = dict(message)
        where = f"message {index + 1} ({message.get('role')})"
        content = message.get("content")
        calls = message.get("tool_calls")
        if isinstance(content, str):
            bare = message.get("role") == "assistant" and not calls and not message.get("reasoning_content")
            out["content"] = self._string(content, index, f"{where} content", even_blank=bare)
        if isinstance(message.get("reasoning_content"), str):
            text = self._string(message["reasoning_content"], index, f"{where} reasoning", thinking=True)
            out.update({field: text for field in _THINKING_FIELDS if field in message})
        if calls:
            calls = [self._call(call, index, f"{where} tool_calls[{i}]") for i, call in enumerate(calls)]
            out["tool_calls"] = calls
        for field in ("name", "tool_call_id"):
            if field in message:
                out[field] = self._loose(message[field], index, f"{where} {field}")
        return out

    def _call(self, call: Any, owner: int, where: str) -> Any:
        if not isinstance(call, dict):
            return self._value(call, owner, where)
        out = {}
        for key, value in call.items():
            if key == "function":
                out[key] = self._call(value, owner, where)
            elif key in ("name", "arguments"):
                out[key] = self._value(value, owner, f"{where} {key}")
            else:
                out[key] = self._loose(value, owner, where)
        return out

    def _tool(self, tool: Any, where: str, depth: int) -> Any:
        """A tool's own name and description must be printed; templates rewrite the schema below them as they like."""
        if not isinstance(tool, dict):
            return self._loose(tool, TOOLS, where)
        out: dict[str, Any] = {}
        for key, value in tool.items():
            if depth < 2 and key in ("name", "description") and isinstance(value, str):
                out[key] = self._string(value, TOOLS, f"{where} {key}")
            elif depth == 0 and key == "function":
                out[key] = self._tool(value, where, 1)
            else:
                out[self._loose_key(key, where)] = self._loose(value, TOOLS, where)
        return out

    def _value(self, value: Any, owner: int, where: str) -> Any:
        """Strings and keys at any depth. A key gets one mark behind it, so that sorting keys keeps their order."""
        if isinstance(value, str):
            return self._string(value, owner, where)
        if isinstance(value, dict):
            return {
                key + self._add(Mark(owner, where, True, False, key, ""), "k"): self._value(item, owner, where)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, owner, where) for item in value]
        return value

    def _loose(self, value: Any, owner: int, where: str) -> Any:
        """Strings that a template may leave out or compare: marked only when they could hold a control token."""
        if isinstance(value, str):
            return value if _WORD.match(value) else self._string(value, owner, where, required=False)
        if isinstance(value, dict):
            return {self._loose_key(key, where): self._loose(item, owner, where) for key, item in value.items()}
        if isinstance(value, list):
            return [self._loose(item, owner, where) for item in value]
        return value

    def _loose_key(self, key: str, where: str) -> str:
        return key if _WORD.match(key) else key + self._add(Mark(TOOLS, where, False, False, key, ""), "k")

    def _string(
        self,
        text: str,
        owner: int,
        where: str,
        *,
        required: bool = True,
        thinking: bool = False,
        even_blank: bool = False,
    ) -> str:
        if not self.template.watched.search(text) and (core := text.strip()):
            lead = text[: len(text) - len(text.lstrip())] if len(core) < len(text) else ""
            tail = text[len(lead) + len(core) :]
            opening = self._add(Mark(owner, where, required, thinking, lead, tail), "b")
            return f"{lead}{opening}{core}{opening[:-1]}e{tail}"
        segments = self.template.watched.split(text)  # at odd places what the template searches for
        filled = [i for i in range(0, len(segments), 2) if segments[i].strip()]
        if not filled:
            if not text.strip() and not even_blank:
                return text
            segments, filled = [text], [0]  # nothing but searched words: marked as a whole
        closing = max((i for i, segment in enumerate(segments) if segment == THINK_CLOSE), default=-1)
        out, before = [], ""
        for i, segment in enumerate(segments):
            if i not in filled:
                out.append(segment)
                before += segment
                continue
            core = segment.strip()
            lead = segment[: len(segment) - len(segment.lstrip())]
            tail = segment[len(segment.rstrip()) :] if core else ""
            after = tail + "".join(segments[i + 1 :]) if i == filled[-1] else ""
            mark = Mark(owner, where, required, thinking or i < closing, before + lead, after)
            opening = self._add(mark, "b")
            out += [lead, opening, core, opening[:-1] + "e", tail]
            before = tail
        return "".join(out)

    def _add(self, mark: Mark, kind: str) -> str:
        self.marks.append(mark)
        return f"{self.word}{len(self.marks) - 1:06d}{kind}"
