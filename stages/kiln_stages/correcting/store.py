"""The store of corrections: ``corrections/data.jsonl`` below the registry, one JSON object a line, new ones at the top.

Who changes it holds a lock, reads it whole, and replaces it by rename. Lines that are no corrections, blank lines, line
ends and unknown fields come through every change byte for byte: only the members that are meant are written anew.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.files import read_bounded, run_lock, write_file
from kiln_cli.lines import BOM, TRIMMED
from kiln_cli.text import printable
from kiln_stages.correcting.correction import MARKER, Correction, State, read_correction
from kiln_stages.correcting.json_members import values, with_member, without_member

STORE = "corrections/data.jsonl"
SIZE_LIMIT = 1024 * 1024 * 1024
WAIT_SECONDS = 60.0  # for another process that changes the store, which takes it a moment
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")

LineState = State | Literal["repeated", "malformed", "blank"]
STATES: tuple[LineState, ...] = ("active", "trained", "stale", "unfit", "repeated", "malformed")


class Line:
    """A physical line. ``raw`` has its line end; ``number`` counts from 1, and is 0 for one that was just added.

    ``correction`` is None for a blank line, and for one whose ``fault`` says why it is none. ``repeated``: an earlier
    line has the same request id, and that one counts.
    """

    def __init__(self, number: int, raw: bytes) -> None:
        self.number = number
        self.raw = raw
        self.fault = ""
        self.repeated = False
        self._state: LineState | None = None
        self.correction: Correction | None = None
        if text := self.text:
            try:
                self.correction = read_correction(text)
            except RowFault as fault:
                self.fault = fault.detail

    @property
    def text(self) -> bytes:
        return self.raw.strip(TRIMMED)

    def state(self) -> LineState:
        if self._state is None:
            self._state = self._find_state()
        return self._state

    def _find_state(self) -> LineState:
        if self.correction is None:
            return "malformed" if self.fault else "blank"
        return "repeated" if self.repeated else self.correction.state()

    def replace(self, text: str) -> bool:
        """Puts another object in the line's place, between the white space as it stands. False where it is the same.

        Raises RowFault where the object is no correction; the line is then as it was.
        """
        old, new = self.text, text.encode("utf-8")
        if new == old:
            return False
        correction = read_correction(new)
        at = self.raw.index(old)
        self.raw, self.correction, self._state = self.raw[:at] + new + self.raw[at + len(old) :], correction, None
        return True


class Store:
    """The lines of a store at one moment, and the changes that are made to them."""

    def __init__(self, data: bytes = b"") -> None:
        self._mark = BOM if data.startswith(BOM) else b""
        found = enumerate(_LINES.findall(data[len(self._mark) :]), start=1)
        self._lines = [Line(number, raw) for number, raw in found]
        self._added: list[Line] = []  # the newest last
        self._current: dict[str, Line] = {}
        for line in self._lines:
            if line.correction is not None:
                line.repeated = self._current.setdefault(line.correction.request_id, line) is not line
        self.changed = False

    @property
    def lines(self) -> list[Line]:
        return [*reversed(self._added), *self._lines]

    @property
    def had_bom(self) -> bool:
        return bool(self._mark)

    def data(self) -> bytes:
        """The bytes of the store as it is now."""
        return self._mark + b"".join(line.raw for line in self.lines)

    def get(self, request_id: str) -> Line | None:
        """The line that counts for a request id."""
        return self._current.get(request_id)

    def active(self) -> list[Correction]:
        """The corrections that are to be trained on, in the store's order."""
        found = (line.correction for line in self.lines if line.correction is not None and not line.repeated)
        return [correction for correction in found if correction.active()]

    def counts(self) -> dict[str, int]:
        """Lines by state, zeroes included; blank lines are none."""
        states = Counter(line.state() for line in self.lines)
        return {state: states[state] for state in STATES}

    def add(self, text: str) -> Line:
        """A new line at the top. Raises RowFault where ``text`` is no correction."""
        read_correction(text.encode("utf-8"))
        line = Line(0, text.encode("utf-8") + b"\n")
        assert line.correction is not None and line.correction.request_id not in self._current
        self._added.append(line)
        self._current[line.correction.request_id] = line
        self.changed = True
        return line

    def set_members(self, line: Line, given: Mapping[str, str]) -> bool:
        """Members of a line by key, as JSON text. False where all of them stand there already."""
        text = line.text.decode("utf-8")
        there = values(text)
        for key, value in given.items():
            if there.get(key) != value:
                text = with_member(text, key, value)
        return self._replace(line, text)

    def clear_marker(self, line: Line) -> bool:
        """Makes a correction one that was never trained on. False where it is one."""
        text = line.text.decode("utf-8")
        for key in MARKER:
            text = without_member(text, key)
        return self._replace(line, text)

    def _replace(self, line: Line, text: str) -> bool:
        replaced = line.replace(text)
        self.changed |= replaced
        return replaced


def store_path(registry: Path) -> Path:
    return registry / STORE


def read_store(path: Path) -> Store:
    """Raises KilnError KLN204 where there is no store, or it is no regular file."""
    if not path.exists():
        raise KilnError(
            "KLN204",
            f"there is no store of corrections at {printable(path)}",
            hint="`kiln corrections add` begins one; --registry (in a config: [admit] registry) names its directory",
        )
    return Store(read_bounded(path, SIZE_LIMIT))


@contextmanager
def changing(path: Path, purpose: str) -> Iterator[Store]:
    """The store under its lock; what the block changed is written at its end, unless it raises.

    A store that is not there yet is empty. Raises KilnError KLN401 where another process holds it for a minute, KLN204
    for a link, which would be replaced instead of what it leads to, KLN402 where the disk refuses.
    """
    with run_lock(path.parent, purpose, "then run this again", wait_seconds=WAIT_SECONDS):
        if path.is_symlink():
            raise KilnError("KLN204", f"{printable(path)} is a link", hint="put the file itself there")
        store = read_store(path) if path.exists() else Store()
        yield store
        if store.changed:
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
            write_file(path, store.data(), mode)
