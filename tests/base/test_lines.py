"""The line reader: where lines end, what is trimmed, the cap, and the account of every byte."""

from __future__ import annotations

import hashlib
import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kiln_cli.lines import BOM, LINE_CAP, LineReader


def texts(data: bytes, cap: int = LINE_CAP) -> list[bytes | None]:
    return [line.text for line in LineReader(io.BytesIO(data), cap)]


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\n", [b"a", b""]),
        (b"\n", [b""]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\rb", [b"a\rb"]),
        (b"a\x0bb\x0cc\x1cd", [b"a\x0bb\x0cc\x1cd"]),
        ("a\u2028b\u2029c\u0085d".encode(), ["a\u2028b\u2029c\u0085d".encode()]),
        (b" \t\x0c\r{} \t\x0c\r\r\n", [b"{}"]),
        (b"\x0b{}\x0b\n", [b"\x0b{}\x0b"]),
        (b"\xc2\xa0{}\n", [b"\xc2\xa0{}"]),
        (b"a\x00b\n\x00\n", [b"a\x00b", b"\x00"]),
        (b" \t\r\n\x0c\n", [b"", b""]),
    ],
)
def test_lines(data: bytes, expected: list[bytes]) -> None:
    assert texts(data) == expected


def test_places_and_counts() -> None:
    reader = LineReader(io.BytesIO(b"ab\n\n \r\ncd"))
    found = [(line.number, line.offset, line.length, line.text) for line in reader]
    assert found == [(1, 0, 3, b"ab"), (2, 3, 1, b""), (3, 4, 3, b""), (4, 7, 2, b"cd")]
    assert (reader.size, reader.lines, reader.blank, reader.had_bom) == (9, 4, 2, False)


def test_one_mark_at_byte_zero_is_stripped_and_counted() -> None:
    reader = LineReader(io.BytesIO(BOM + b"{}\n"))
    (line,) = list(reader)
    assert (line.text, line.offset, line.length) == (b"{}", 0, 6)
    assert reader.had_bom
    assert reader.sha256 == hashlib.sha256(BOM + b"{}\n").hexdigest()


@pytest.mark.parametrize(
    "data, expected, mark",
    [
        (BOM + BOM + b"{}\n", [BOM + b"{}"], True),
        (b"{}\n" + BOM + b"{}\n", [b"{}", BOM + b"{}"], False),
        (b" " + BOM + b"{}\n", [BOM + b"{}"], False),
        (BOM, [b""], True),
        (BOM + b"\n{}", [b"", b"{}"], True),
        (BOM[:2], [BOM[:2]], False),
    ],
)
def test_marks_elsewhere_stay(data: bytes, expected: list[bytes], mark: bool) -> None:
    reader = LineReader(io.BytesIO(data))
    assert [line.text for line in reader] == expected
    assert reader.had_bom is mark


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("start", [b"", BOM])
def test_the_cap_counts_the_line_without_mark_and_feed(start: bytes, end: bytes) -> None:
    assert texts(start + b"x" * 10 + end, cap=10) == [b"x" * 10]
    for extra in (1, 2, 3, 4, 5, 100):
        assert texts(start + b"x" * (10 + extra) + end, cap=10) == [None], extra


def test_white_space_does_not_help_a_long_line() -> None:
    """A line is too long by its bytes; what stands behind the cap is never mistaken for trimmed space."""
    assert texts(BOM + b"{}" + b" " * 20 + b"garbage\n{}", cap=10) == [None, b"{}"]


def test_lines_behind_a_long_one_keep_their_places() -> None:
    data = b"a\n" + b"x" * 3_000_000 + b"\nb\n"
    reader = LineReader(io.BytesIO(data), cap=100)
    found = [(line.number, line.offset, line.length, line.text) for line in reader]
    assert found == [(1, 0, 2, b"a"), (2, 2, 3_000_001, None), (3, 3_000_003, 2, b"b")]
    assert reader.sha256 == hashlib.sha256(data).hexdigest()


def test_a_long_line_is_passed_over_in_pieces() -> None:
    class Watched(io.BytesIO):
        largest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            self.largest = max(self.largest, len(line))
            return line

    stream = Watched(b"x" * 5_000_000 + b"\n{}")
    assert [line.text for line in LineReader(stream, cap=1000)] == [None, b"{}"]
    assert stream.largest <= 1024 * 1024


PIECES = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\r", b" ", BOM, b"x", b"xxxx", b"\x0b", b"\x0c", b"\xff"]), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(PIECES.map(b"".join) | st.binary(max_size=60), st.integers(1, 12))
@example(BOM + b"x" * 8, 8)
@example(b"x" * 9, 8)
def test_lines_tile_the_file(data: bytes, cap: int) -> None:
    """Every byte belongs to one line; each text is what an independent reading of its place gives."""
    reader = LineReader(io.BytesIO(data), cap)
    end = 0
    lines = list(reader)
    for number, line in enumerate(lines, start=1):
        assert (line.number, line.offset) == (number, end)
        end += line.length
        raw = data[line.offset : end]
        assert raw.find(b"\n") in (-1, len(raw) - 1)
        body = raw.removesuffix(b"\n")
        if line.offset == 0:
            body = body.removeprefix(BOM)
        assert line.text == (None if len(body) > cap else body.strip(b" \t\n\x0c\r"))
    assert end == len(data) == reader.size
    assert len(lines) == len(data.split(b"\n")) - data.endswith(b"\n") - (data == b"")
    assert reader.sha256 == hashlib.sha256(data).hexdigest()
    assert reader.had_bom == data.startswith(BOM)
    assert reader.blank == sum(line.text == b"" for line in lines)
