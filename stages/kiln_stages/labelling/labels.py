"""Which characters of a rendered row are trained on, for any chat template.

Trained on is, for every assistant turn of weight not 0, what the model itself has to write: its text, its tool
calls, the end-of-turn text and one newline behind it. The header that opens the turn is written by the chat loop and
is masked.

The row is rendered twice: as it is (R), and with a mark on either side of each string (N, see ``row_marks``). Taking
the marks out of N must give R to the character, so the place of every piece of row data in R is known. What lies
between two pieces is the template's own: a *gap*. Two places in gaps are wanted:

- a header ends where the generation prompt of the messages before the turn ends;
- a turn ends where the messages up to it end, once what the generation prompt adds is taken off.

A template has few distinct gaps. Those of some fixed rows are decided beforehand, any other once a row. Templates
with ``{% generation %}`` blocks are not asked: their blocks are the spans. Nothing here knows any template.
``label_proof`` then shows, by other means, that the spans are right; a row for which it cannot is refused.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import RowFault
from kiln_cli.text import printable
from kiln_stages.labelling.label_proof import Claim, prove
from kiln_stages.labelling.reasoning_tags import require_paired_tags
from kiln_stages.labelling.rendering import BLOCK_CLOSE, BLOCK_OPEN, ChatTemplate, Message, Spans
from kiln_stages.labelling.row_marks import TOOLS, MarkedRow, Piece, Reading
from kiln_stages.labelling.strings import shared_length

TOOLS_IGNORED = 'ignores `tools`; [admit] tools = "system" puts them into the system text'
_FOLD = '; [admit] system_turn = "fold" puts its text into the first user message'
# A row's messages and tools to those that are rendered (``row_views``).
View = Callable[[list[Message], list[Any] | None], tuple[list[Message], list[Any] | None]]
# Which gap holds which edge, found so far: ("header", ...) and ("end", ...) to a number of characters.
Memo = dict[tuple[object, ...], int]


class Rendered(msgspec.Struct, frozen=True):
    """A row as text. All spans are character ranges with an exclusive end, in order and disjoint.

    ``spans`` is what is trained on, one per supervised turn. ``content_spans`` is text that the row supplied, where
    no control token may arise. ``notes`` names what the template leaves out lawfully.
    """

    text: str
    spans: Spans
    content_spans: Spans
    notes: tuple[str, ...] = ()


class LabelFinder:
    """Finds and proves the trained spans of rows under one template.

    A verdict depends on the template and the row alone: what is remembered comes from fixed rows, read once. ``view``
    gives the messages and tools that are rendered for those of the row.
    """

    def __init__(self, template: ChatTemplate, view: View | None = None) -> None:
        self.template = template
        self._view = view
        self._memo: Memo = {}
        for messages, tools in _PROBES:
            memo: Memo = {}
            with contextlib.suppress(RowFault):  # a template need not take every shape
                self._find(messages, tools, memo)
                self._memo = memo | self._memo

    def find(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """The row's text and its spans.

        Raises RowFault: ``no_assistant_message``, ``no_supervised_tokens`` (all of them have weight 0),
        ``template_error`` (the template refuses the row), ``template_lost_content`` (text of the row is not in the
        render), ``unbalanced_reasoning_tags`` (think tags that do not pair up in a trained turn),
        ``mask_disagreement`` (the spans cannot be found, or a proof of them fails).
        """
        if self._view is not None:
            messages, tools = self._view(messages, tools)
        try:
            return self._find(messages, tools, self._memo.copy())
        except RowFault as fault:
            if fault.reason != "mask_disagreement":
                raise
            detail = f"{printable(self.template.name)}: {fault.detail}"
            raise RowFault(fault.reason, detail, fault.pointer) from fault

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """The row's text alone. Raises RowFault where the template refuses the row, or it has no view."""
        if self._view is not None:
            messages, tools = self._view(messages, tools)
        return self.template.render(messages, tools)

    def _find(self, messages: list[Message], tools: list[Any] | None, memo: Memo) -> Rendered:
        """As :meth:`find`; ``memo`` is used, and takes in what this row shows."""
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [i for i in spoken if messages[i].get("weight", 1) != 0]
        if not spoken:
            raise RowFault("no_assistant_message", "a row needs at least one message of role assistant", "/messages")
        if not turns:
            raise RowFault("no_supervised_tokens", "every assistant message has weight 0", "/messages")
        try:
            form, text = self.template.settle(messages, tools)
        except RowFault as fault:
            raise _naming_system(self.template, messages, tools, fault) from fault
        if BLOCK_OPEN in text or BLOCK_CLOSE in text:
            raise RowFault("mask_disagreement", "the row holds U+FDD0 or U+FDD1, which mark generation blocks")
        row = MarkedRow(self.template, form, tools, text)
        try:
            reading = row.read_whole()
        except RowFault as fault:
            detail = f"the template takes the row but not a marked copy: {fault.detail}"
            raise RowFault("mask_disagreement", detail) from fault
        notes = _check_losses(row, reading, spoken[-1])
        if reading.text != text:
            raise RowFault("mask_disagreement", "marks around the row's strings change what the template prints")
        claim = Claim(self.template, form, tools, text, (), turns)
        spans, proven = _proven(row, reading, claim, memo)
        rendered = Rendered(text, spans, content_spans(row, reading), (*notes, *proven))
        if self.template.thinks:
            require_paired_tags(printable(self.template.name), rendered, turns)
        return rendered


def _proven(row: MarkedRow, reading: Reading, claim: Claim, memo: Memo) -> tuple[Spans, list[str]]:
    """The spans of the claim's turns, and the notes of their proof."""
    remembered = bool(memo)
    try:
        spans = _spans(row, reading, claim.turns, memo)
        return spans, prove(msgspec.structs.replace(claim, spans=spans))
    except RowFault:
        if not remembered:
            raise
    # What other rows taught must not decide whether this one is refused.
    memo.clear()
    spans = _spans(row, reading, claim.turns, memo)
    return spans, prove(msgspec.structs.replace(claim, spans=spans))


def _spans(row: MarkedRow, reading: Reading, turns: list[int], memo: Memo) -> Spans:
    if row.template.has_markers:
        return _block_spans(row, reading, turns)
    owned: dict[int, list[int]] = {}
    for at, piece in enumerate(reading.pieces):
        owned.setdefault(row.marks[piece.mark].owner, []).append(at)
    spans = []
    for turn in turns:
        if turn not in owned:
            raise RowFault("mask_disagreement", f"message {turn + 1} (assistant) leaves no text to find it by")
        start = _header_end(row, reading, turn, owned[turn][0], memo)
        spans.append((start, _turn_end(row, reading, turn, owned[turn], memo)))
    if any(left[1] > right[0] for left, right in pairwise(spans)):
        raise RowFault("mask_disagreement", "two turns overlap in the rendered text")
    return tuple(spans)


def _header_end(row: MarkedRow, reading: Reading, turn: int, first: int, memo: Memo) -> int:
    gap_start = reading.pieces[first - 1].end if first else 0
    gap = reading.text[gap_start : reading.pieces[first].start]
    key = ("header", gap, first > 0, turn > 0 and row.form[turn - 1]["role"])
    if key not in memo:
        memo[key] = _header_length(row, reading, turn, first, gap)
    return gap_start + memo[key]


def _turn_end(row: MarkedRow, reading: Reading, turn: int, owned: list[int], memo: Memo) -> int:
    last = owned[-1]
    until = reading.pieces[last + 1].start if last + 1 < len(reading.pieces) else len(reading.text)
    gap = reading.text[reading.pieces[last].end : until]
    following = row.form[turn + 1]["role"] if turn + 1 < len(row.form) else None
    # A string printed twice, here and again in a later turn, hides which piece is the turn's last.
    plain = len(owned) == 1 or (
        len({reading.pieces[at].mark for at in owned}) == len(owned) and last - owned[0] + 1 == len(owned)
    )
    key = ("end", gap, following)
    if plain and key in memo:
        return reading.pieces[last].end + memo[key]
    data_end, length = _ending(row, reading, turn)
    if plain and data_end == reading.pieces[last].end:
        memo[key] = length
    return data_end + length


def _naming_system(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, fault: RowFault
) -> RowFault:
    """The refusal of a row, with the role named where it is the system message that the template does not take."""
    others = [message for message in messages if message["role"] != "system"]
    if fault.reason != "template_error" or not 0 < len(others) < len(messages):
        return fault
    try:
        template.settle(others, tools)
    except RowFault:
        return fault
    at = next(i for i, message in enumerate(messages) if message["role"] == "system")
    detail = f"{fault.detail}; it takes the row without message {at + 1} (system){_FOLD}"
    return RowFault(fault.reason, detail, f"/messages/{at}/role")


def _check_losses(row: MarkedRow, reading: Reading, last_spoken: int) -> list[str]:
    """Required text must be in the render. Thinking of an earlier turn may go, if the template prints it when last."""
    found = {piece.mark for piece in reading.pieces}
    if found.issuperset(range(len(row.marks))):
        return []
    notes: list[str] = []
    for number, mark in enumerate(row.marks):
        if number in found or not mark.required:
            continue
        if mark.thinking and mark.owner < last_spoken:
            alone = row.prefix(mark.owner + 1, False)
            if alone is not None and any(piece.mark == number for piece in alone.pieces):
                notes.append(f"template_rewrites_turns: thinking of message {mark.owner + 1} is left out")
                continue
        name = printable(row.template.name)
        if mark.owner == TOOLS and not any(row.marks[other].owner == TOOLS for other in found):
            raise RowFault(
                "template_lost_content",
                f"the template {name} {TOOLS_IGNORED}",
                "/tools",
            )
        system = mark.owner != TOOLS and row.form[mark.owner]["role"] == "system"
        detail = f"{name} does not print {printable(mark.where)}{_FOLD if system else ''}"
        raise RowFault("template_lost_content", detail)
    return list(dict.fromkeys(notes))


def content_spans(row: MarkedRow, reading: Reading) -> Spans:
    """Where row text stands in R: the pieces, and what stood around them in their string if the template kept it."""
    spans: list[tuple[int, int]] = []
    for piece in sorted(reading.pieces, key=lambda piece: piece.start):
        mark = row.marks[piece.mark]
        start, end = piece.start, piece.end
        if mark.before and reading.text.startswith(mark.before, max(start - len(mark.before), 0), start):
            start -= len(mark.before)
        if mark.after and reading.text.startswith(mark.after, end):
            end += len(mark.after)
        if spans and start <= spans[-1][1]:
            spans[-1] = (min(spans[-1][0], start), max(spans[-1][1], end))
        elif start < end:
            spans.append((start, end))
    return tuple(spans)


def _block_spans(row: MarkedRow, reading: Reading, turns: list[int]) -> Spans:
    """Generation blocks as spans: a block is the turn's whose data it holds; without data, the turn's before it."""
    blocks = [block for block in reading.blocks if block[0] < block[1]]
    ends = [end for _, end in blocks]
    owners: list[set[int]] = [set() for _ in blocks]
    for piece in reading.pieces:
        mark = row.marks[piece.mark]
        at = bisect_left(ends, piece.end)
        inside = at < len(blocks) and blocks[at][0] <= piece.start
        if inside:
            owners[at].add(mark.owner)
        if mark.owner in turns and not inside and mark.required:
            raise RowFault("mask_disagreement", f"{printable(mark.where)} is outside of the generation blocks")
    spans: dict[int, tuple[int, int]] = {}
    current = TOOLS
    for (start, end), owner in zip(blocks, owners, strict=True):
        if len(owner) > 1 or any(o == TOOLS or row.form[o]["role"] != "assistant" for o in owner):
            raise RowFault("mask_disagreement", "a generation block holds text of another turn")
        current = next(iter(owner), current)
        if current in spans and spans[current][1] != start:
            raise RowFault("mask_disagreement", f"message {current + 1} has two generation blocks apart")
        spans[current] = (spans[current][0] if current in spans else start, end)
    missing = [turn for turn in turns if turn not in spans]
    if missing or TOOLS in spans:
        found = len(turns) - len(missing)
        supervised = counted(len(turns), "supervised turn", "supervised turns")
        raise RowFault("mask_disagreement", f"{supervised}, generation blocks for {found}")
    return tuple(spans[turn] for turn in turns)


def _header_length(row: MarkedRow, reading: Reading, turn: int, first: int, gap: str) -> int:
    """How much of the gap before a turn is header: as much as the prompt for it shows."""
    asked = row.prefix(turn, True)
    anchor = reading.pieces[first - 1].mark if first else None
    if asked is not None and (asked.pieces[-1].mark if asked.pieces else None) == anchor:
        tail = asked.text[asked.pieces[-1].end if asked.pieces else 0 :]
        shared = shared_length(tail, gap)
        if shared in (len(tail), len(gap)):
            return shared
        # The prompt opens something that this turn does not (a think block). A turn of plain text shows where it
        # may begin; without it the two could share the first characters of two different tags.
        begun = _before_plain_turn(row, turn)
        shared = shared_length(tail, begun)
        if begun and shared in (len(tail), len(begun)) and gap.startswith(begun[:shared]):
            return shared
    if asked is None and (begun := _before_plain_turn(row, turn)) and gap.startswith(begun):
        header = _prompt_header(row, turn)
        return begun.rindex(header) + len(header) if header and header in begun else len(begun)
    raise RowFault("mask_disagreement", f"no prompt shows where the header of message {turn + 1} ends")


def _before_plain_turn(row: MarkedRow, turn: int) -> str:
    """The gap before a turn of one word in this turn's place; empty when the template refuses it."""
    number = len(row.marks)
    content = f"{row.word}{number:06d}bx{row.word}{number:06d}e"
    plain = {"role": "assistant", "content": content}
    try:
        reading = row.read([*row.messages[:turn], plain, *row.messages[turn + 1 :]])
    except RowFault:
        return ""
    end = 0
    for piece in reading.pieces:
        if piece.mark == number:
            return reading.text[end : piece.start]
        end = piece.end
    return ""


def _ending(row: MarkedRow, reading: Reading, turn: int) -> tuple[int, int]:
    """Where the turn's data ends in R, and how much of the gap behind it is still the turn."""
    asked, told = row.prefix(turn + 1, True), row.prefix(turn + 1, False)
    if asked is None or told is None:
        refusal = _refusal(row, turn + 1)
        raise RowFault("mask_disagreement", f"the messages up to {turn + 1} cannot be rendered alone{refusal}")
    last = _last_owned(row, asked, turn)
    # The same string may stand again behind the turn, so count: the n-th time here is the n-th time there.
    times = sum(piece.mark == last.mark for piece in asked.pieces if piece.end <= last.end)
    places = [at for at, piece in enumerate(reading.pieces) if piece.mark == last.mark]
    if len(places) < times:
        raise RowFault("mask_disagreement", f"message {turn + 1} ends otherwise when it is the last")
    at = places[times - 1]
    data_end = reading.pieces[at].end
    until = reading.pieces[at + 1].start if at + 1 < len(reading.pieces) else len(reading.text)
    gap = reading.text[data_end:until]
    asked_tail, told_tail = asked.text[last.end :], told.text[_last_owned(row, told, turn).end :]
    ending: str | None = told_tail
    if not asked_tail.startswith(told_tail):
        header = _prompt_header(row, turn)
        ending = asked_tail[: -len(header)] if header and asked_tail.endswith(header) else None
    if ending is None or not gap.startswith(ending):
        if turn + 1 < len(row.form) or until < len(reading.text):
            raise RowFault("mask_disagreement", f"nothing shows where message {turn + 1} (assistant) ends")
        ending = gap  # the last turn has its own ending, which is all that is left
    return data_end, _one_newline(ending)


def _refusal(row: MarkedRow, count: int) -> str:
    """What the template says to the first ``count`` messages, in brackets."""
    try:
        row.read(row.messages[:count])
        row.read(row.messages[:count], True)
    except RowFault as fault:
        return f" ({fault.detail})"
    return ""


def _last_owned(row: MarkedRow, reading: Reading, turn: int) -> Piece:
    for piece in reversed(reading.pieces):
        if piece.mark < len(row.marks) and row.marks[piece.mark].owner == turn:
            return piece
    raise RowFault("mask_disagreement", f"message {turn + 1} (assistant) leaves no text when it is the last")


def _prompt_header(row: MarkedRow, turn: int) -> str:
    """What a generation prompt adds after the last message before ``turn`` that is not the assistant's own.

    Where there is none, after a user message.
    """
    while turn and row.form[turn - 1]["role"] == "assistant":
        turn -= 1
    if turn:
        asked, told = row.prefix(turn, True), row.prefix(turn, False, True)
    else:
        probe = [{"role": "user", "content": "x"}]
        try:
            asked, told = row.read(probe, True), row.read(probe, False, True)
        except RowFault:
            return ""
    if asked is None or told is None:
        return ""
    return asked.text[shared_length(asked.text, told.text) :]


def _one_newline(ending: str) -> int:
    """The length of an end-of-turn text up to one newline behind it."""
    return min(len(ending.rstrip("\n")) + 1, len(ending))


def _probe_call(content: str) -> Message:
    function = {"name": "first_probe", "arguments": {"which": "one"}}
    call = {"type": "function", "id": "probe0001", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _probes() -> Iterator[tuple[list[Message], list[Any] | None]]:
    """Rows of the usual shapes, whose gaps are the gaps of most rows."""
    system, asks = {"role": "system", "content": "Rules first."}, {"role": "user", "content": "Which one?"}
    says = {"role": "assistant", "content": "This one."}
    result = {"role": "tool", "content": "one is free", "tool_call_id": "probe0001"}
    parameters = {"type": "object", "properties": {"which": {"type": "string"}}}
    description = {"name": "first_probe", "description": "Looks at one.", "parameters": parameters}
    tools = [{"type": "function", "function": description}]
    for opening in ([], [system]):
        yield [*opening, asks, says, asks, says], None
        yield [*opening, asks, says, asks, _probe_call(""), result, says, asks, says], tools
        yield [*opening, asks, _probe_call(""), result, says], tools
        yield [*opening, asks, _probe_call("")], tools
    yield [asks, {**says, "reasoning_content": "Both are free."}], None
    yield [asks, {**says, "content": "<think>\nBoth are free.\n</think>\n\nThis one."}], None


_PROBES = list(_probes())
