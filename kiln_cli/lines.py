"""The one line reader. A line ends at LF and nowhere else; every byte of the file belongs to exactly one line.

CR, NEL, U+2028 and form feeds end nothing. The last line counts without an LF. One byte-order mark at byte 0 is
stepped over and counted. Lines longer than the cap are passed through unread, so memory stays bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

LINE_CAP = 16 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
# What is trimmed at both ends of a line: ASCII white space without the vertical tab (contract: sft rows, 1.3).
TRIMMED = b" \t\n\x0c\r"


class Line(msgspec.Struct, frozen=True, gc=False):
    """One physical line. ``offset`` and ``length`` (LF included) are bytes of the file; ``number`` counts from 1.

    ``text`` is the trimmed content, or None where the line is longer than the cap; ``b""`` is a blank line.
    """

    number: int
    offset: int
    length: int
    text: bytes | None


class LineReader:
    """Iterates the lines of a binary stream and hashes every byte that passes.

    After the iteration ``sha256`` (hex), ``size`` (bytes), ``lines``, ``blank`` and ``had_bom`` describe the file. A
    stream that holds part of a file says with ``start`` at which byte; ``hashed=False`` leaves the digest out.
    """

    def __init__(self, stream: BinaryIO, cap: int = LINE_CAP, *, start: int = 0, hashed: bool = True) -> None:
        self._stream = stream
        self._cap = cap
        self._start = start
        self._hashed = hashed
        self._digest = hashlib.sha256()
        self.size = 0
        self.lines = 0
        self.blank = 0
        self.had_bom = False

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Line]:
        limit = self._cap + len(BOM) + len(b"\n") + 1  # a line cut here is too long, with or without a mark
        while raw := self._stream.readline(limit):
            offset = self._start + self.size
            length = self._take(raw)
            complete = raw.endswith(b"\n")
            if not complete and len(raw) > self._cap:
                length += self._pass_over_rest()
            self.lines += 1
            if offset == 0 and raw.startswith(BOM):
                self.had_bom = True
                raw = raw[len(BOM) :]
            text = None if len(raw) - complete > self._cap else raw.strip(TRIMMED)
            self.blank += text == b""
            yield Line(self.lines, offset, length, text)

    def _take(self, raw: bytes) -> int:
        if self._hashed:
            self._digest.update(raw)
        self.size += len(raw)
        return len(raw)

    def _pass_over_rest(self) -> int:
        passed = 0
        while raw := self._stream.readline(1024 * 1024):
            passed += self._take(raw)
            if raw.endswith(b"\n"):
                break
        return passed
