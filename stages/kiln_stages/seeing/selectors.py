"""How a person names a row: by place, by hash or the beginning of one, by example id or the beginning of one.

A plain number is a line or the row's own id. What fits exactly is taken; of what fits by its beginning there may be
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.text import printable

SHORTEST_HASH = 4  # hex digits that stand for a hash without "sha256:" before them
LISTED = 10
EXACT, SHORT, BEGINNING = range(3)

_HASH = re.compile(r"(sha256:)?([0-9a-f]{1,64})", re.IGNORECASE)
_PLACE = re.compile(r"(.+):([0-9]{1,18})", re.DOTALL)


class Nameable(Protocol):
    """What a row can be called by. ``hashes`` are whole (``sha256:...``); ``path`` is the file that it stands in."""

    @property
    def path(self) -> str: ...
    @property
    def line(self) -> int | None: ...
    @property
    def row_index(self) -> int | None: ...
    @property
    def example_id(self) -> str | None: ...
    @property
    def hashes(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=Nameable)


class Selector(msgspec.Struct, frozen=True):
    """A text that names a row, taken apart. ``digest``: hex digits, the beginning of a hash or a whole one."""

    text: str
    line: int | None = None
    row: int | None = None
    place: tuple[str, int] | None = None
    number: int | None = None
    digest: str | None = None

    def rank(self, row: Nameable) -> int | None:
        """How the text fits a row: EXACT (an id, a hash, line:N, row:N), SHORT (a line, the row's own id) or
        BEGINNING; None where it does not."""
        if self.line is not None or self.row is not None:  # no id or hash is asked for: they take time to find
            wanted, found = (self.line, row.line) if self.line is not None else (self.row, row.row_index)
            return EXACT if wanted == found else None
        if row.example_id == self.text or (self.digest is not None and f"sha256:{self.digest}" in row.hashes):
            return EXACT
        if self._stands_there(row) or _own_id(row.example_id) == self.text:
            return SHORT
        if self.number is not None:
            return None
        begins_hash = self.digest is not None and any(hash_[7:].startswith(self.digest) for hash_ in row.hashes)
        begins_id = row.example_id is not None and row.example_id.startswith(self.text)
        return BEGINNING if begins_hash or begins_id else None

    def _stands_there(self, row: Nameable) -> bool:
        if self.place is None:
            return self.number is not None and self.number == row.line
        path, line = self.place
        return line == row.line and path in (row.path, PurePath(row.path).name)


def parse(text: str) -> Selector:
    """Raises KilnError KLN201 for a text that can name nothing."""
    if not text.strip():
        raise KilnError("KLN201", "an empty text names no row", hint=_FORMS)
    place = _PLACE.fullmatch(text)
    if place is not None and place[1] in ("line", "row"):
        number = int(place[2])
        return Selector(text, line=number) if place[1] == "line" else Selector(text, row=number)
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return Selector(text, number=int(text))
    found = _HASH.fullmatch(text)
    digest = found[2].lower() if found is not None and (found[1] or len(found[2]) >= SHORTEST_HASH) else None
    return Selector(text, place=(place[1], int(place[2])) if place is not None else None, digest=digest)


class Named(NamedTuple, Generic[R]):
    """The rows that a selector names, in order, the first few of ``total``."""

    rows: list[R]
    total: int


def select(selector: Selector, rows: Iterable[R], searched: Iterable[str]) -> Named[R]:
    """The row that a selector names; several where they have one hash or one id.

    Raises KilnError KLN106 where there is none, with what was searched, and KLN201 where the text fits several rows by
    number or by beginning.
    """
    best: int | None = None
    found: list[R] = []
    count = 0
    identities: set[object] = set()
    for row in rows:
        rank = selector.rank(row)
        if rank is None or (best is not None and rank > best):
            continue
        if best is None or rank < best:
            best, count = rank, 0
            found.clear()
            identities.clear()
        count += 1
        if len(found) < LISTED:
            found.append(row)
            identities.add(_identity(selector, row))
    if not found:
        raise not_found(selector.text, searched)
    if best != EXACT and len(identities) > 1:
        listed = "".join(f"\n  {describe(row)}" for row in found)
        more = f"\n  and {count - LISTED} more" if count > LISTED else ""
        raise KilnError(
            "KLN201",
            f"{printable(repr(selector.text))} names {count} rows:{listed}{more}",
            hint=f"say line:{selector.number}, or the whole id" if selector.number is not None else "give more of it",
        )
    return Named(found, count)


def not_found(text: str, searched: Iterable[str]) -> KilnError:
    places = "\n".join(f"  {printable(place)}" for place in searched)
    return KilnError("KLN106", f"no row is named {printable(repr(text))}; searched:\n{places}", hint=_FORMS)


def describe(row: Nameable) -> str:
    """A row in a few words: where it stands and what it is called."""
    names = [row.example_id or "", *row.hashes]
    return printable(f"{row.path}:{row.line}  {'  '.join(filter(None, names))}")


def _own_id(example_id: str | None) -> str | None:
    """An example id without the data set's name before it."""
    return None if example_id is None else example_id.partition(":")[2] or example_id


def _identity(selector: Selector, row: Nameable) -> object:
    """What two rows must share to be shown together: the hash that fits, else their place."""
    if selector.digest is not None:
        for hash_ in row.hashes:
            if hash_[7:].startswith(selector.digest):
                return hash_
    return row.path, row.line


_FORMS = "name a row by line:N, row:N, its example id, its hash, or the beginning of either"
