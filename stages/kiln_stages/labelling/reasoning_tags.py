"""Think tags pair up in what is trained: a template that opens a block of its own may leave the row's tag without one.

Some templates look for both tags before they take a think block out of an answer. An answer that holds only the closing
tag then gets an empty block in front, and its own tag stays behind: two closings for one opening. A model trained on
such a turn learns to close what it never opened.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Protocol

from kiln_cli.errors import RowFault
from kiln_stages.labelling.rendering import THINK_CLOSE, THINK_OPEN, Spans

_TAG = re.compile(f"{re.escape(THINK_OPEN)}|{re.escape(THINK_CLOSE)}")


class LabelledText(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def spans(self) -> Spans: ...
    @property
    def content_spans(self) -> Spans: ...


def require_paired_tags(name: str, rendered: LabelledText, turns: list[int]) -> None:
    """Each tag at most once in a trained turn, the opening first; a header may hold the opening in the turn's place.

    Raises RowFault ``unbalanced_reasoning_tags`` with the tags as they are printed.
    """
    if THINK_CLOSE not in rendered.text and THINK_OPEN not in rendered.text:
        return
    ends = [end for _, end in rendered.content_spans]
    for turn, (start, end) in zip(turns, rendered.spans, strict=True):
        before = bisect_right(ends, start) - 1
        header = _TAG.findall(rendered.text, ends[before] if before >= 0 else 0, start)
        trained = _TAG.findall(rendered.text, start, end)
        opened = [THINK_OPEN] if header[-1:] == [THINK_OPEN] else []
        if [*opened, *trained] not in ([], [THINK_OPEN, THINK_CLOSE]):
            printed = " ".join([*opened, *trained])
            raise RowFault(
                "unbalanced_reasoning_tags",
                f"{name} prints message {turn + 1} (assistant) with the tags {printed}",
                f"/messages/{turn}/content",
            )
