"""Rows that a teacher is to score: JSON lines with a conversation and its answer, or with a trajectory.

A row has ``messages`` and ``teacher_response``, or ``messages`` whose last one is the answer, or ``messages`` and a
``trajectory``. ``id`` and ``metadata`` go through as they are; other fields are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.chat import misfit, normalise
from kiln_cli.errors import RowFault
from kiln_cli.files import open_input
from kiln_cli.lines import LineReader
from kiln_cli.text import printable
from kiln_stages.distilling.examples import LINE_CAP, Example, parse_line, to_example, trimmed_line
from kiln_stages.distilling.identity import is_manifest
from kiln_stages.distilling.targets import TargetFinder, Targets

PASSED = ("id", "metadata")
TOKENS = "teacher_tokens"


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as it was given. ``fields`` is what the scored row holds beside ``teacher_tokens``; ``example`` is what is
    rendered of it."""

    line: int
    fields: dict[str, Any]
    example: Example
    ignored: tuple[str, ...]

    def targets(self, finder: TargetFinder) -> Targets:
        """Raises RowFault as :meth:`TargetFinder.find` does."""
        return finder.find(self.example.messages, self.example.response, self.example.segments)


class RefusedRow(msgspec.Struct, frozen=True):
    """A line that is no row to score."""

    line: int
    fault: RowFault


def request_rows(path: Path) -> Iterator[RequestRow | RefusedRow]:
    """The rows of a file in order, blank lines left out. Raises KilnError KLN204 where it cannot be read."""
    with open_input(path) as stream:
        for line in LineReader(stream, LINE_CAP, hashed=False):
            text = line.text if line.text is None else trimmed_line(line.text)
            if text == b"":
                continue
            try:
                yield _row(line.number, parse_line(text, line.length))
            except RowFault as fault:
                yield RefusedRow(line.number, fault)


def _row(line: int, value: dict[str, Any]) -> RequestRow:
    if is_manifest(value):
        raise RowFault("already_scored", "a teacher's manifest: the file is a scored corpus, not rows to score")
    if value.get("tools"):
        raise RowFault("unsupported_field", "a scored row has no tools, so no training would render them", "/tools")
    if not isinstance(value.get("messages"), list):
        raise misfit("/messages", "an array", value.get("messages", msgspec.UNSET))
    if not isinstance(value.get("id") or "", str):
        raise misfit("/id", "a string", value["id"])
    fields = {name: value[name] for name in PASSED if value.get(name) is not None}
    fields |= {"messages": value["messages"], "teacher_response": value.get("teacher_response")}
    if value.get("trajectory"):
        fields["trajectory"] = value["trajectory"]
    if fields["teacher_response"] is None:
        fields["messages"], fields["teacher_response"] = _response(fields)
    if fields["teacher_response"] == "":
        raise RowFault("empty_response", "teacher_response is empty", "/teacher_response")
    left = {name: value[name] for name in value.keys() - fields.keys() - {TOKENS, "trajectory"} - set(PASSED)}
    example = to_example(left | fields, 0)
    ignored = {*example.ignored, *({TOKENS} if value.get(TOKENS) else ())}
    return RequestRow(line=line, fields=fields, example=example, ignored=tuple(sorted(ignored)))


def _response(fields: dict[str, Any]) -> tuple[list[Any], str]:
    """The messages before the answer, and the answer, of a row that does not name it.

    A scored row must have one even beside a trajectory, where nobody reads it; there it is the last action's text.
    """
    messages: list[Any] = fields["messages"]
    if "trajectory" in fields:
        segments = to_example(fields | {"teacher_response": ""}, 0).segments
        actions = [segment.content for segment in segments if segment.kind == "action" and segment.content]
        if not actions:
            raise RowFault("no_action_tokens", "no segment of kind action has any text", "/trajectory")
        return messages, actions[-1]
    if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
        detail = "the row has no teacher_response, no trajectory, and no assistant message at the end of its messages"
        raise RowFault("no_response", detail, "/messages")
    at = f"/messages/{len(messages) - 1}"
    answer = normalise({"messages": messages[-1:]}).messages[0]
    if more := sorted(answer.keys() - {"role", "content"}):
        raise RowFault("unsupported_field", f"an answer to score is text alone; it has {printable(more[0])}", at)
    if not answer["content"]:
        raise RowFault("empty_response", "the last assistant message is empty", at)
    return messages[:-1], answer["content"]
