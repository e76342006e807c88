"""One correction: what a model answered, what it ought to have answered, and whether that was trained on.

The fields, the rule of what is trained on and the marker are those of the public Kiln server; ``trained_row_sha256``
is ours. It says which texts the marker speaks of, so that a correction that was edited since is seen to be stale.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import ChatRow
from kiln_cli.errors import RowFault
from kiln_cli.lines import LINE_CAP
from kiln_cli.white_space import trimmed

# What training writes, and nobody else.
MARKER = ("trained_into", "trained_at", "trained_row_sha256")

State = Literal["active", "trained", "stale", "unfit"]


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store. Fields that it holds beside these stay in its text (:mod:`json_members`)."""

    request_id: str
    agent: str
    adapter: str | None = None
    user: str
    original: str
    ideal: str
    truncated: bool
    created_at: str
    trained_into: str | None = None
    trained_at: str | None = None
    trained_row_sha256: str | None = None

    def row(self) -> ChatRow:
        """The row that is trained on: one turn, both texts as they are, no system prompt."""
        return ChatRow([{"role": "user", "content": self.user}, {"role": "assistant", "content": self.ideal}])

    def unfit(self) -> str:
        """Why there is nothing in it to train on; "" where there is."""
        if not trimmed(self.user):
            return "user is blank"
        if not trimmed(self.ideal):
            return "ideal is blank"
        return "ideal is the original" if trimmed(self.ideal) == trimmed(self.original) else ""

    def state(self) -> State:
        """``active``: to be trained on. ``trained``: it was. ``stale``: it was, with other texts. ``unfit``: neither.

        A marker that does not say which texts it speaks of is taken for one of these texts.
        """
        if self.trained_into is not None:
            return "trained" if self.trained_row_sha256 in (None, self.row().sha256()) else "stale"
        return "active" if self.active() else "unfit"

    def active(self) -> bool:
        """Whether it is to be trained on: the rule of the public server."""
        return self.trained_into is None and not self.unfit()


def read_correction(text: bytes) -> Correction:
    """The correction of a line without its white space. Raises RowFault ``malformed`` with what is wrong."""
    if len(text) > LINE_CAP:
        raise RowFault("malformed", f"line_too_long: the line has {len(text)} bytes, at most {LINE_CAP}")
    try:
        found = msgspec.convert(strict_json.parse_object(text), Correction)
    except strict_json.JsonFault as fault:
        raise RowFault("malformed", f"{fault.kind}: {fault.detail}", fault.pointer, fault.offset) from None
    except msgspec.ValidationError as error:
        raise RowFault("malformed", str(error)) from None
    if not trimmed(found.request_id):
        raise RowFault("malformed", "request_id is blank", "/request_id")
    return found
