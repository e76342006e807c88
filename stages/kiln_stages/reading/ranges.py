"""A file of lines in pieces that several processes read at once: cut at line ends, read by place.

Reads go by ``pread``, so processes that share a descriptor do not disturb each other.
"""

from __future__ import annotations

import hashlib
import io
import os
from itertools import pairwise
from typing import BinaryIO, NamedTuple, cast

from kiln_cli.files import AtomicFile

RANGE_BYTES = 4 * 1024 * 1024
_BLOCK = 1024 * 1024


class Range(NamedTuple):
    """Whole lines of one of several plain files: bytes ``start`` to ``end``."""

    source: int
    start: int
    end: int


def ranges(source: int, stream: BinaryIO, size: int, range_bytes: int) -> list[Range]:
    """Cuts a file at line ends, about every ``range_bytes``."""
    cuts = [0]
    for target in range(range_bytes, size, range_bytes):
        if target > cuts[-1]:
            stream.seek(target - 1)
            while (piece := stream.readline(_BLOCK)) and not piece.endswith(b"\n"):
                pass  # a line of gigabytes is passed over in bounded steps
            cuts.append(stream.tell())
    if cuts[-1] < size:
        cuts.append(size)
    return [Range(source, start, end) for start, end in pairwise(cuts)]


def read_text(stream: BinaryIO, offset: int, length: int) -> bytes:
    """The bytes of a row's line again, by place; safe beside other readers of the same descriptor."""
    return _pread(stream.fileno(), offset, length)


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
        data += more
    return data


def open_range(descriptor: int, part: Range) -> BinaryIO:
    """A range as a stream: whole in memory, unless a line of gigabytes makes it one."""
    length = part.end - part.start
    if length <= 8 * RANGE_BYTES:
        return io.BytesIO(_pread(descriptor, part.start, length))
    return cast(BinaryIO, io.BufferedReader(_RangeReader(descriptor, part), _BLOCK))


class _RangeReader(io.RawIOBase):
    def __init__(self, descriptor: int, part: Range) -> None:
        self._descriptor = descriptor
        self._at, self._end = part.start, part.end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        data = os.pread(self._descriptor, min(len(view), self._end - self._at), self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def hash_stream(stream: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    for offset in range(0, size, _BLOCK):
        digest.update(_pread(stream.fileno(), offset, min(_BLOCK, size - offset)))
    return digest.hexdigest()


def copy_stream(stream: BinaryIO, out: AtomicFile) -> None:
    """Writes all bytes of a plain file, wherever its position stands."""
    size = os.fstat(stream.fileno()).st_size
    for offset in range(0, size, _BLOCK):
        out.write(_pread(stream.fileno(), offset, min(_BLOCK, size - offset)))
