"""Which characters of a rendered trajectory are scored, and which are what the environment said.

A trajectory is a list of segments behind a prompt. ``role`` says how a segment is rendered, ``kind`` what becomes of
it: an *action* is scored, an *observation* is what ECHO may learn, *context* is neither.

The place of each segment's content in the rendered text is shown by marks around it (``row_marks``), so text of a
segment that looks like a header or a terminator moves nothing. From there:

- an action runs from the end of its header to its terminator, which is left out. Where the template writes
  ``<|im_start|>{role}`` and a line feed before the content, that is the header, and the terminator is the next
  ``<|im_end|>``. Elsewhere an action of role assistant begins where its label span begins (``labels``) and ends with
  its content. An action of another role is its content, where the template prints it whole.
- an observation is its content. What stands inside of ``<tool_response>`` lines of the content is all that ``env_only``
  takes of it; ``full_obs`` takes the content and the ``<tool_response>`` lines that the template puts around it.

Whatever cannot be placed so is refused by name.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import RowFault
from kiln_cli.text import printable
from kiln_stages.labelling.labels import LabelFinder, content_spans
from kiln_stages.labelling.rendering import ChatTemplate, Message, Spans
from kiln_stages.labelling.row_marks import MarkedRow, Piece, Reading

TURN_OPEN, TURN_CLOSE = "<|im_start|>", "<|im_end|>"
TOOL_OPEN, TOOL_CLOSE = "<tool_response>\n", "\n</tool_response>"

Kind = Literal["action", "observation", "context"]
EnvMask = Literal["env_only", "full_obs"]
Span = tuple[int, int]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """``warning_prefix_len``: how many bytes at the start of an observation's content are a warning."""

    role: str
    content: str
    kind: Kind = "context"
    warning_prefix_len: int = 0


class Trajectory(msgspec.Struct, frozen=True):
    """A rendered trajectory. All spans are character ranges with an exclusive end, in order.

    ``actions`` and ``observations`` are disjoint; ``filtered`` are the observations without their warnings, one for
    each, possibly empty. ``content_spans`` is text that the row supplied; ``notes`` say what the template leaves out
    lawfully.
    """

    text: str
    actions: Spans
    observations: Spans
    filtered: Spans
    content_spans: Spans
    notes: tuple[str, ...] = ()


def read_trajectory(
    finder: LabelFinder, prompt: Sequence[Message], segments: Sequence[Segment], env_mask: EnvMask
) -> Trajectory:
    """Places every segment. ``finder`` has no view: ``prompt`` is rendered as it is.

    Raises RowFault: those of :meth:`LabelFinder.find`; ``template_lost_content`` for a segment that is not printed;
    ``mask_disagreement`` where a segment cannot be placed, or an action and an observation overlap.
    """
    messages = [*prompt, *({"role": segment.role, "content": segment.content} for segment in segments)]
    form, text = finder.template.settle(messages)
    page = _Page(finder.template, form, text)
    labels = _action_labels(finder, prompt, segments)
    actions, observations, filtered = [], [], []
    for number, segment in enumerate(segments):
        owner = len(prompt) + number
        content = page.content(owner, segment, f"/trajectory/{number}")
        if content is None or segment.kind == "context":
            continue
        if segment.kind == "action":
            actions.append(_action(page, owner, segment, content, labels))
        else:
            seen = _observation(text, content, env_mask)
            observations.append(seen)
            warned = _behind_warning(text, content, segment, f"/trajectory/{number}")
            filtered.append((min(max(seen[0], warned), seen[1]), seen[1]))
    found = Trajectory(text, tuple(actions), tuple(observations), tuple(filtered), page.content_spans, page.notes)
    _require_disjoint(found)
    return found


class _Page:
    """A rendered row and the place of each message's content in it."""

    def __init__(self, template: ChatTemplate, form: list[Message], text: str) -> None:
        self.name = printable(template.name)
        self.text = text
        row = MarkedRow(template, form, None, text)
        try:
            reading = row.read_whole()
        except RowFault as fault:
            detail = f"{self.name}: the template takes the row but not a marked copy: {fault.detail}"
            raise RowFault("mask_disagreement", detail) from fault
        if reading.text != text:
            raise RowFault("mask_disagreement", f"{self.name}: marks around the row's strings change what is printed")
        self.notes = _require_printed(self.name, row, reading)
        self.content_spans = content_spans(row, reading)
        self._places = _places(row, reading)
        self._opens, self._closes = (self._of_template(marker) for marker in (TURN_OPEN, TURN_CLOSE))

    def content(self, owner: int, segment: Segment, at: str) -> Span | None:
        """Where the content of a message stands; None for one without any. Raises RowFault."""
        where = f"segment {at.rpartition('/')[2]} ({printable(segment.role)}, {segment.kind})"
        places = self._places.get(owner, [])
        marks = [place.mark for place in places]
        if marks != sorted(set(marks)):
            raise RowFault("mask_disagreement", f"{self.name} prints {where} twice, or out of order", at)
        if places:
            return places[0].start, places[-1].end
        if segment.content and segment.kind != "context":
            raise RowFault("mask_disagreement", f"{where} is white space, and nothing shows where it stands", at)
        return None

    def bounds(self, role: str, content: Span) -> Span | None:
        """The text between the ``<|im_start|>`` header of this role and its terminator, around the content.

        None where the template does not write so, or another message stands between them, too.
        """
        header = f"{TURN_OPEN}{role}\n"
        before, behind = bisect_right(self._opens, content[0]) - 1, bisect_left(self._closes, content[1])
        if before < 0 or behind == len(self._closes) or not self.text.startswith(header, self._opens[before]):
            return None
        start, end = self._opens[before] + len(header), self._closes[behind]
        others = (place for places in self._places.values() for place in places)
        if start > content[0] or any(
            place.start < end and place.end > start and not content[0] <= place.start <= place.end <= content[1]
            for place in others
        ):
            return None
        return start, end

    def _of_template(self, marker: str) -> list[int]:
        """Where a marker stands that no text of the row has a part in."""
        found = []
        for match in re.finditer(re.escape(marker), self.text):
            nearest = bisect_left(self.content_spans, match.end(), key=lambda span: span[0]) - 1
            if nearest < 0 or self.content_spans[nearest][1] <= match.start():
                found.append(match.start())
        return found


def _require_printed(name: str, row: MarkedRow, reading: Reading) -> tuple[str, ...]:
    """Raises RowFault ``template_lost_content`` for text that is not printed; thinking may go, and is noted."""
    found = {piece.mark for piece in reading.pieces}
    notes = []
    for number, mark in enumerate(row.marks):
        if number in found or not mark.required:
            continue
        if not mark.thinking:
            raise RowFault("template_lost_content", f"{name} does not print {printable(mark.where)}")
        notes.append(f"template_rewrites_turns: thinking of message {mark.owner + 1} is left out")
    return tuple(dict.fromkeys(notes))


def _places(row: MarkedRow, reading: Reading) -> dict[int, list[Piece]]:
    """Where the pieces of each message stand, white space around them included where the template kept it."""
    found: dict[int, list[Piece]] = {}
    for piece in reading.pieces:
        mark = row.marks[piece.mark]
        start, end = piece.start, piece.end
        if mark.before and reading.text.startswith(mark.before, max(start - len(mark.before), 0), start):
            start -= len(mark.before)
        if mark.after and reading.text.startswith(mark.after, end):
            end += len(mark.after)
        found.setdefault(mark.owner, []).append(Piece(piece.mark, start, end))
    return found


def _action_labels(finder: LabelFinder, prompt: Sequence[Message], segments: Sequence[Segment]) -> dict[int, Span]:
    """The proven label span of each action of role assistant, by message; all other turns are context."""
    turns = [
        len(prompt) + number
        for number, segment in enumerate(segments)
        if (segment.role, segment.kind) == ("assistant", "action")
    ]
    if not turns:
        return {}
    messages: list[Message] = [*prompt, *({"role": one.role, "content": one.content} for one in segments)]
    weighed = [
        {**message, "weight": 0} if message["role"] == "assistant" and at not in turns else message
        for at, message in enumerate(messages)
    ]
    return dict(zip(turns, finder.find(weighed).spans, strict=True))


def _action(page: _Page, owner: int, segment: Segment, content: Span, labels: dict[int, Span]) -> Span:
    label, bounds = labels.get(owner), page.bounds(segment.role, content)
    if bounds is not None:
        # Of a template with generation blocks the block may begin with the header's line feed.
        if label is not None and not (
            page.text[label[0] : bounds[0]].strip() == "" and label[0] <= content[0] and content[1] <= label[1]
        ):
            raise RowFault("mask_disagreement", f"{page.name}: the turn of an action is not where its label span is")
        return bounds
    if label is not None:
        return label[0], content[1]
    if page.text[content[0] : content[1]].strip() != segment.content.strip():
        detail = f"{page.name} prints an action of role {printable(segment.role)} in other words"
        raise RowFault("mask_disagreement", detail)
    return content


def _observation(text: str, content: Span, env_mask: EnvMask) -> Span:
    start, end = content
    if env_mask == "full_obs":
        wrapped = text.endswith(TOOL_OPEN, 0, start) and text.startswith(TOOL_CLOSE, end)
        return (start - len(TOOL_OPEN), end + len(TOOL_CLOSE)) if wrapped else content
    opened, closed = text.find(TOOL_OPEN, start, end), text.rfind(TOOL_CLOSE, start, end)
    return (opened + len(TOOL_OPEN), closed) if 0 <= opened <= closed - len(TOOL_OPEN) else content


def _behind_warning(text: str, content: Span, segment: Segment, at: str) -> int:
    """Where an observation goes on behind its warning. Raises RowFault ``invalid_warning_prefix``."""
    size = segment.warning_prefix_len
    if size == 0:
        return content[0]
    data = segment.content.encode("utf-8")
    try:
        warning = data[:size].decode("utf-8")
    except UnicodeDecodeError:
        raise RowFault(
            "invalid_warning_prefix",
            f"warning_prefix_len is {counted(size, 'byte', 'bytes')}, which ends inside of a character",
            f"{at}/warning_prefix_len",
        ) from None
    if size > len(data):
        detail = f"warning_prefix_len is {size}, the content has {counted(len(data), 'byte', 'bytes')}"
        raise RowFault("invalid_warning_prefix", detail, f"{at}/warning_prefix_len")
    printed = text[content[0] : content[1]]
    lead = segment.content.find(printed) if printed else -1
    if lead < 0:
        detail = "the template prints the observation in other words, so its warning cannot be told from the rest"
        raise RowFault("invalid_warning_prefix", detail, f"{at}/warning_prefix_len")
    return content[0] + max(len(warning) - lead, 0)


def _require_disjoint(found: Trajectory) -> None:
    ordered = sorted([*found.actions, *found.observations])
    if any(left[1] > right[0] for left, right in pairwise(ordered)):
        raise RowFault("mask_disagreement", "an action and another action or an observation overlap")
