"""One JSON array as lines: every element keeps its bytes and its place, and memory holds one block.

An array file is the same rows as a file of JSON lines, only with other bytes between them. So it is laid out as one:
a leading byte-order mark, the brackets of the array and all line ends become blanks, its commas line feeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

from kiln_cli.errors import KilnError
from kiln_cli.lines import BOM, LINE_CAP, TRIMMED

_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
# Up to what matters outside strings: at the array's own level, and deeper, where whole strings are stepped over.
_TO_STRUCTURE = re.compile(rb'[^",\[\]{}]*+')
# No possessive repeat of a group within another: Python 3.11.2 takes a string without an end for a whole one.
_TO_BRACKET = re.compile(rb'[^"\[\]{}]*(?:"[^"\\\r\n]*(?:\\[^\r\n][^"\\\r\n]*)*"[^"\[\]{}]*)*')
_STRING_BODY = re.compile(rb'(?:[^"\\\r\n]++|\\[^\r\n])*+')
_LINE_ENDS_TO_BLANKS = bytes.maketrans(b"\r\n", b"  ")


def begins_array(stream: BinaryIO) -> bool:
    """Whether a file is one JSON array, and not JSON lines of which the first happens to be an array.

    It is where the first value is an array, unless that ends on its line and more lines follow.
    """
    try:
        first = first_line(stream)
        if not first.startswith(b"["):
            return False
        if is_open(first):
            return True
        return not any(block.strip(TRIMMED) for block in iter(lambda: stream.read(1024 * 1024), b""))
    finally:
        stream.seek(0)


def first_line(stream: BinaryIO) -> bytes:
    """The first line that is not blank, trimmed, at most as long as a line may be; empty where there is none."""
    piece = stream.readline(LINE_CAP)
    first = piece.removeprefix(BOM).strip(TRIMMED)
    while piece and not first:
        piece = stream.readline(LINE_CAP)
        first = piece.strip(TRIMMED)
    return first


def is_open(text: bytes) -> bool:
    """Whether brackets are left open at the end of a text."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        first = text[match.start()]
        depth += (first in b"[{") - (first in b"]}")
    return depth > 0


class ArrayLines:
    """Lays the elements of one array out as lines, a block at a time.

    Raises KilnError KLN206 where the text as a whole is no array. Only what parts the elements is looked at: one may be
    broken inside, and is a broken row then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = 0  # bytes of earlier blocks
        self._depth = 0
        self._done = False
        self._in_string = False
        self._escaped = False
        self._filled = False  # the element at hand has begun
        self._elements = 0
        self._element_at = 0

    def convert(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in _without_bom(blocks):
            yield self._lay_out(block)
            self._before += len(block)
        if not self._done:
            inside = f"inside element {self._elements + 1} (from byte {self._element_at})" if self._filled else ""
            raise self._malformed(f"the file ends {inside or 'before the array does'}", 0)

    def _lay_out(self, block: bytes) -> bytes:
        out = bytearray(block.translate(_LINE_ENDS_TO_BLANKS))
        at = 0
        while at < len(block):
            at = self._through_string(block, at) if self._in_string else self._to_structure(block, at, out)
        return bytes(out)

    def _through_string(self, block: bytes, at: int) -> int:
        if self._escaped and block[at] not in b"\r\n":
            self._escaped = False
            at += 1
        end = cast("re.Match[bytes]", _STRING_BODY.match(block, at)).end()
        if end == len(block):
            return end
        if block[end] == ord('"'):
            self._in_string = False
        elif block[end] == ord("\\") and end + 1 == len(block):
            self._escaped = True
        else:
            raise self._malformed("a raw line end stands in a string", end)
        return end + 1

    def _to_structure(self, block: bytes, at: int, out: bytearray) -> int:
        pattern = _TO_BRACKET if self._depth > 1 else _TO_STRUCTURE
        end = cast("re.Match[bytes]", pattern.match(block, at)).end()
        if self._depth < 2 and (text := block[at:end].strip(TRIMMED)):
            self._begin_element(text[:1], block.index(text[:1], at))
        if end == len(block):
            return end
        byte = block[end : end + 1]
        if byte == b'"':
            self._begin_element(byte, end)
            self._in_string = True
        elif byte == b",":
            self._end_element(byte, end)
            self._elements += 1
            out[end] = ord("\n")
        elif byte in b"[{":
            self._open(byte, end, out)
        else:
            self._close(byte, end, out)
        return end + 1

    def _begin_element(self, byte: bytes, at: int) -> None:
        if self._depth == 0:
            where = "behind" if self._done else "before"
            raise self._malformed(f"found {byte.decode('latin-1')!r} {where} the array", at)
        if not self._filled:
            self._filled = True
            self._element_at = self._before + at

    def _end_element(self, byte: bytes, at: int) -> None:
        if not self._filled:
            self._begin_element(byte, at)
            raise self._malformed(f"found {byte.decode('latin-1')!r} where element {self._elements + 1} should be", at)
        self._filled = False

    def _open(self, byte: bytes, at: int, out: bytearray) -> None:
        if self._depth == 0 and byte == b"[" and not self._done:
            out[at] = ord(" ")
        else:
            self._begin_element(byte, at)
        self._depth += 1

    def _close(self, byte: bytes, at: int, out: bytearray) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        if self._depth == 0 or byte == b"}":
            self._begin_element(byte, at)
            raise self._malformed(f"found {byte.decode('latin-1')!r}, which closes nothing", at)
        if self._elements or self._filled:
            self._end_element(byte, at)
        self._depth = 0
        self._done = True
        out[at] = ord(" ")

    def _malformed(self, detail: str, at: int) -> KilnError:
        message = f"{self._name} is no JSON array: {detail}, at byte {self._before + at}"
        return KilnError("KLN206", message, hint="mend it, or export it again")


def _without_bom(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks with blanks in the place of a byte-order mark."""
    iterator = iter(blocks)
    head = b""
    while len(head) < len(BOM) and (block := next(iterator, b"")):
        head += block
    yield b" " * len(BOM) + head[len(BOM) :] if head.startswith(BOM) else head
    yield from iterator
