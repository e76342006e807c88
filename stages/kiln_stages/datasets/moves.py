"""Rows that are in another split than before, and why: nothing of a split changes in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kiln_cli.counting import counted
from kiln_cli.text import printable
from kiln_stages.datasets.entry import SplitManifest
from kiln_stages.datasets.partition import Component, RowKeys, Split, partition

Reason = Literal["settings", "union", "separation", "repair"]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """``row_number``: in data.jsonl as it is now. ``reason``: ``settings`` were changed; a ``union`` of its component
    with other rows, or its ``separation`` from rows that are gone, gave it another key; or the ``repair`` of an empty
    split, then or now."""

    row_number: int
    content_sha256: str
    before: Split
    after: Split
    reason: Reason
    detail: str


class _Placed:
    """The rows of a split manifest and the components that they are in."""

    def __init__(self, manifest: SplitManifest) -> None:
        self.manifest = manifest
        self.keys: Sequence[RowKeys] = [row.keys() for row in manifest.rows]
        components = partition(self.keys, manifest.config)
        self.component: Mapping[int, Component] = {row: each for each in components for row in each.rows}
        # Rows of one content have one normalised hash: they are in one component.
        self.row = {keys.content_sha256: number for number, keys in enumerate(self.keys)}


def moves(before: SplitManifest, after: SplitManifest) -> list[Move]:
    """Every row of both whose split differs, in the order of ``after``; a row is known by its content."""
    splits = {row.content_sha256: row.split for row in before.rows}
    moved = [row for row in after.rows if splits.get(row.content_sha256, row.split) != row.split]
    if not moved:
        return []
    was, now = _Placed(before), _Placed(after)
    reasons: dict[tuple[str, str], tuple[Reason, str]] = {}  # by component: all of its rows move, and for one reason
    found = []
    for row in moved:
        old, new = was.component[was.row[row.content_sha256]], now.component[row.row_number - 1]
        if (old.key, new.key) not in reasons:
            reasons[old.key, new.key] = _why(was, now, old, new)
        reason, detail = reasons[old.key, new.key]
        found.append(
            Move(
                row_number=row.row_number,
                content_sha256=row.content_sha256,
                before=splits[row.content_sha256],
                after=row.split,
                reason=reason,
                detail=detail,
            )
        )
    return found


def _why(was: _Placed, now: _Placed, old: Component, new: Component) -> tuple[Reason, str]:
    if was.manifest.config != now.manifest.config:
        return "settings", "; ".join(_settings(was.manifest, now.manifest))
    if old.key == new.key:
        return "repair", "; ".join([_drawn(new), *_repair(old, new)])
    repaired = f"; {new.split} would be empty without it" if new.repaired else ""
    if (link := _joined(was, now, old, new)) is not None:
        return "union", f"{link}; the key of the component is now {new.key}: {_drawn(new)}{repaired}"
    were, are = counted(len(old.rows), "row was", "rows were"), counted(len(new.rows), "is", "are")
    gone = f"{were} its component, {are}"
    return "separation", f"{gone}; its key is now {new.key}: {_drawn(new)}{repaired}"


def _settings(before: SplitManifest, after: SplitManifest) -> Iterator[str]:
    left, right = msgspec.to_builtins(before.config), msgspec.to_builtins(after.config)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            yield f"{name} {printable(left.get(name, 'none'))} -> {printable(right.get(name, 'none'))}"


def _drawn(component: Component) -> str:
    return f"bucket {component.bucket} gives {component.drawn}"


def _repair(old: Component, new: Component) -> Iterator[str]:
    if old.repaired:
        yield f"it filled {old.split}, which was empty"
    if new.repaired:
        yield f"{new.split} would be empty without it"


def _joined(was: _Placed, now: _Placed, old: Component, new: Component) -> str | None:
    """The first row that joined what was the component, and what it shares with it; None where none did."""
    members = {was.keys[row].content_sha256 for row in old.rows}
    links = {link for row in new.rows if now.keys[row].content_sha256 in members for link in now.keys[row].links()}
    for row in new.rows:
        if now.keys[row].content_sha256 not in members:
            for kind, text in now.keys[row].links():
                if (kind, text) in links:
                    return f"row {row + 1} has the same {kind} ({printable(text, 80)})"
    return None
