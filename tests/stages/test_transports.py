"""Every packing gives the same rows; what is damaged, endless or no file is refused by name and in bounded time."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
import types
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.reading import transports
from kiln_stages.reading.array_lines import ArrayLines
from kiln_stages.reading.transports import Plain, open_plain, spool_records

from kiln_cli import KilnError, Record, Source, ToolCallRow, strict_json
from kiln_cli.identity import canonical_json
from kiln_cli.lines import BOM, LINE_CAP, TRIMMED, Line, LineReader

needs_zstandard = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="zstandard is absent")

ROWS: list[dict[str, Any]] = [
    {"query": "naïve \u2028 ☃ “q”", "tools": '[{"name":"f"}]', "n": 1},
    {"query": 'a, b] c} d\\ "e" [f {g', "tools": "[]", "n": -5},
    {"query": "line\nend\r\nand a tab\t", "tools": "", "n": 2**62},
]


def as_lines(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pl.DataFrame(rows).write_parquet(out)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    import zstandard

    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed


def read(path: Path | None, scratch: Path) -> tuple[list[Any], Plain]:
    """The rows of a file as values, and the plain file's account (its stream is closed)."""
    with open_plain(path, scratch) as plain:
        os.fstat(plain.stream.fileno())
        values = [strict_json.parse(line.text or b"") for line in LineReader(plain.stream) if line.text != b""]
        if plain.sha256 is not None and path is not None and path.is_file():
            assert plain.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
            assert plain.size == path.stat().st_size
    assert not scratch.exists() or not any(scratch.iterdir())
    return values, plain


@pytest.fixture
def make(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "rows"
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


LINES = as_lines(ROWS)
ARRAY = json.dumps(ROWS, indent=2).encode()
PACKED: dict[str, tuple[Callable[[], bytes], str, bool]] = {
    "lines": (lambda: LINES, "lines", False),
    "lines without a last line feed": (lambda: LINES[:-1], "lines", False),
    "array": (lambda: ARRAY, "array", True),
    "array on one line": (lambda: json.dumps(ROWS).encode(), "array", True),
    "array with CRLF and blanks around": (
        lambda: b"\r\n \t" + ARRAY.replace(b"\n", b"\r\n") + b"\r\n\n",
        "array",
        True,
    ),
    "gzip": (lambda: gzip.compress(LINES), "gzip", False),
    "gzip of two members": (lambda: gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]), "gzip", False),
    "gzip and padding": (lambda: gzip.compress(LINES) + bytes(512), "gzip", False),
    "gzip of an array": (lambda: gzip.compress(ARRAY), "gzip, array", True),
    "parquet": (lambda: as_parquet(ROWS), "parquet", True),
}
ZSTD: dict[str, tuple[Callable[[], bytes], str, bool]] = {
    "zstd": (lambda: zstd(LINES), "zstd", False),
    "zstd of two frames": (lambda: zstd(LINES[:40]) + zstd(LINES[40:]), "zstd", False),
    "zstd behind a skippable frame": (lambda: b"\x5d\x2a\x4d\x18\x04\0\0\0abcd" + zstd(LINES), "zstd", False),
    "zstd of an array": (lambda: zstd(ARRAY), "zstd, array", True),
}
CASES = [
    *(pytest.param(*case, id=name) for name, case in PACKED.items()),
    *(pytest.param(*case, id=name, marks=needs_zstandard) for name, case in ZSTD.items()),
]


@pytest.mark.parametrize(("data", "packing", "elements"), CASES)
def test_each_packing_gives_the_same_rows(
    data: Callable[[], bytes], packing: str, elements: bool, make: Callable[[bytes], Path], scratch: Path
) -> None:
    values, plain = read(make(data()), scratch)
    assert values == ROWS
    assert (plain.packing, plain.elements, plain.places, plain.had_bom) == (packing, elements, None, False)
    assert (plain.sha256 is None) == (packing == "lines")


@pytest.mark.parametrize(("data", "packing", "elements"), CASES)
def test_standard_input_may_be_packed_in_any_way(
    data: Callable[[], bytes], packing: str, elements: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = data()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    values, plain = read(None, scratch)
    assert values == ROWS
    assert (plain.packing, plain.elements, plain.size) == (packing, elements, len(given))
    assert plain.sha256 in (None, hashlib.sha256(given).hexdigest())


@pytest.mark.parametrize("data", [LINES, ARRAY, gzip.compress(ARRAY)], ids=["lines", "array", "gzip"])
def test_a_pipe_into_a_process(data: bytes, scratch: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from kiln_stages.reading.transports import open_plain\n"
        "with open_plain(None, Path(sys.argv[1])) as plain:\n"
        "    print(plain.size, plain.packing, sum(1 for line in plain.stream if line.strip()))\n"
    )
    command = [sys.executable, "-c", script, str(scratch)]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=True)
    packing = {LINES: "lines", ARRAY: "array"}.get(data, "gzip, array")
    assert done.stdout.decode() == f"{len(data)} {packing} 3\n"


def test_a_closed_or_unreadable_standard_input(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("wb", buffering=0) as unreadable:
        for stdin in (None, types.SimpleNamespace(buffer=unreadable)):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert refusal(None, scratch).code == "KLN204"


def test_lines_are_not_copied(make: Callable[[bytes], Path], scratch: Path) -> None:
    path = make(LINES)
    with open_plain(path, scratch) as plain:
        assert os.fstat(plain.stream.fileno()).st_ino == path.stat().st_ino
        assert plain.stream.tell() == 0
    assert not scratch.exists()


# Which files are arrays


@pytest.mark.parametrize(
    ("data", "packing"),
    [
        (b"", "lines"),
        (b"\n \n", "lines"),
        (b'[1, 2]\n{"query": 1}\n', "lines"),
        (b'\n[1, "]"]\r\n\n{}', "lines"),
        (BOM + b"[1]\n[2]\n", "lines"),
        (b'"["\n', "lines"),
        (b"[1, 2]\n \t\n\x0c", "array"),
        (b"[[1], [2]\n, [3]]", "array"),
        (b"\n\n[\n1]", "array"),
        (b"[]", "array"),
        (BOM + b"[1]", "array"),
        (b" " * 3 + b"[" + b" " * LINE_CAP + b"1]", "array"),
        (b" " * (LINE_CAP + 5) + b"[1]", "array"),
    ],
)
def test_an_array_in_the_first_line_is_not_yet_an_array_file(
    data: bytes, packing: str, make: Callable[[bytes], Path], scratch: Path
) -> None:
    with open_plain(make(data), scratch) as plain:
        assert plain.packing == packing
        assert plain.stream.tell() == 0


def test_a_byte_order_mark(make: Callable[[bytes], Path], scratch: Path) -> None:
    values, plain = read(make(BOM + ARRAY), scratch)
    assert (values, plain.had_bom) == (ROWS, True)
    with open_plain(make(BOM + LINES), scratch) as plain:
        lines = LineReader(plain.stream)
        assert [strict_json.parse(line.text or b"") for line in lines] == ROWS
        assert (lines.had_bom, plain.had_bom) == (True, False)


# Arrays


def lay_out(data: bytes, sizes: Iterable[int]) -> bytes:
    def blocks() -> Iterator[bytes]:
        at = 0
        for size in sizes:
            if at < len(data):
                yield data[at : at + size]
                at += size
        if at < len(data):
            yield data[at:]

    return b"".join(ArrayLines("rows.json").convert(blocks()))


values_of_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", '\\"', "],[", "{,}", "\n", "\\u0022"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=12,
)
blanks = st.text(alphabet=" \t\r\n", max_size=3)


@st.composite
def array_texts(draw: st.DrawFn) -> tuple[list[Any], bytes]:
    values = draw(st.lists(values_of_json, max_size=6))
    indent = draw(st.sampled_from([None, 0, 1, "\t"]))
    parts = [
        draw(blanks) + json.dumps(value, indent=indent, ensure_ascii=draw(st.booleans())) + draw(blanks)
        for value in values
    ]
    text = draw(blanks) + "[" + draw(blanks) * (not values) + ",".join(parts) + "]" + draw(blanks)
    mark = BOM if draw(st.booleans()) else b""
    return values, mark + text.encode("utf-8", "surrogatepass")


@settings(max_examples=300, deadline=None)
@given(array_texts(), st.lists(st.integers(1, 9), max_size=60))
def test_elements_keep_value_bytes_and_place(case: tuple[list[Any], bytes], sizes: list[int]) -> None:
    values, data = case
    plain = lay_out(data, sizes)
    assert len(plain) == len(data)
    assert plain == lay_out(data, [])
    lines = [line for line in LineReader(io.BytesIO(plain)) if line.text != b""]
    assert [json.loads(line.text or b"") for line in lines] == values
    for line in lines:
        original = data[line.offset : line.offset + line.length].removeprefix(BOM)
        blank = original.translate(bytes.maketrans(b"\r\n", b"  ")).rstrip(TRIMMED)
        if line is lines[0]:
            blank = blank.lstrip(TRIMMED).removeprefix(b"[")
        assert line.text == blank[:-1].strip(TRIMMED)
        assert blank[-1:] == (b"]" if line is lines[-1] else b",")


@pytest.mark.parametrize("row", ['{"a": NaN}', '{"a":1,"a":2}', "nul", "01", "{} {}", '{"a" ["b"}}', '"\\x"', "1e999"])
def test_a_broken_element_stays_a_row(row: str, make: Callable[[bytes], Path], scratch: Path) -> None:
    with open_plain(make(f"[{{}}, {row},\n{{}}]".encode()), scratch) as plain:
        assert [line.text for line in LineReader(plain.stream)] == [b"{}", row.encode(), b"{}"]


MALFORMED = [
    (b"[1,,2]", "found ',' where element 2 should be, at byte 3"),
    (b"[,1]", "found ',' where element 1 should be, at byte 1"),
    (b"[1, \n]", "found ']' where element 2 should be, at byte 5"),
    (b"[1],", "found ',' behind the array, at byte 3"),
    (b"[1] [2]", "found '[' behind the array, at byte 4"),
    (b"[1]}", "found '}' behind the array, at byte 3"),
    (b"[\n1]\nx", "found 'x' behind the array, at byte 5"),
    (b'[1]"', "found '\"' behind the array, at byte 3"),
    (b"[1}", "found '}', which closes nothing, at byte 2"),
    (b"[1, 2", "the file ends inside element 2 (from byte 4), at byte 5"),
    (b"[1, ", "the file ends before the array does, at byte 4"),
    (b"[", "the file ends before the array does, at byte 1"),
    (b'[1, {"a": [', "the file ends inside element 2 (from byte 4), at byte 11"),
    (b'["a, {}]', "the file ends inside element 1 (from byte 1), at byte 8"),
    (b'["a\\"]', "the file ends inside element 1 (from byte 1), at byte 6"),
    (b'["a\nb"]', "a raw line end stands in a string, at byte 3"),
    (b'[{"a\rb": 1}]', "a raw line end stands in a string, at byte 4"),
    (b'[{"a\\\nb": 1}]', "a raw line end stands in a string, at byte 4"),
]


@pytest.mark.parametrize(("data", "detail"), MALFORMED)
def test_a_malformed_array_is_refused_as_a_whole(
    data: bytes, detail: str, make: Callable[[bytes], Path], scratch: Path
) -> None:
    error = refusal(make(data), scratch)
    assert (error.code, error.exit_code) == ("KLN206", 2)
    assert error.message.endswith(f"is no JSON array: {detail}")
    unpacked = refusal(make(gzip.compress(data)), scratch)
    assert unpacked.message.endswith(f"(unpacked) is no JSON array: {detail}")


@pytest.mark.parametrize(("data", "detail"), MALFORMED)
def test_the_verdict_does_not_depend_on_blocks(data: bytes, detail: str) -> None:
    for size in (1, 2, 3):
        with pytest.raises(KilnError) as caught:
            lay_out(data, [size] * len(data))
        # A line end behind an escape is met at the escape or, at the end of a block, one byte later.
        where = detail.replace("byte 4", "byte 5") if size == 1 and b"\\\n" in data else detail
        assert caught.value.message.removeprefix("rows.json is no JSON array: ") in (detail, where)


def test_text_before_an_array_is_refused_too() -> None:
    with pytest.raises(KilnError, match="found 'x' before the array, at byte 1"):
        lay_out(b" x[1]", [])


def test_memory_does_not_grow_with_an_array() -> None:
    """One string of 64 MiB, and a depth of 100,000: what is held is a block."""
    import tracemalloc

    block = b"a" * 2**20
    deep = b"[" * 100_000
    tracemalloc.start()
    for blocks in ([b'["', *[block] * 64, b'"]'], [b"[", deep, deep.replace(b"[", b"]"), b"]"]):
        for _ in ArrayLines("big").convert(blocks):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 2**20


# An object that is spread over lines

SPREAD = json.dumps(ROWS[1], indent=2, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("data", "packing"),
    [
        (SPREAD, "object"),
        (SPREAD + b"\n", "object"),
        (b"\n \t\n" + SPREAD.replace(b"\n", b"\r\n") + b"\r\n\n", "object"),
        (BOM + SPREAD, "object"),
        (gzip.compress(SPREAD), "gzip, object"),
        pytest.param(SPREAD + b" " * (LINE_CAP - len(SPREAD)), "object", id="as long as a line may be"),
        (SPREAD.replace(b"\n", b"\r"), "lines"),  # a lone CR ends no line
    ],
)
def test_j9_one_object_spread_over_lines_is_one_row(
    data: bytes, packing: str, make: Callable[[bytes], Path], scratch: Path
) -> None:
    values, plain = read(make(data), scratch)
    assert values == [ROWS[1]]
    assert (plain.packing, plain.elements, plain.had_bom) == (packing, packing != "lines", data.startswith(BOM))


def test_each_byte_of_a_spread_object_keeps_its_place(make: Callable[[bytes], Path], scratch: Path) -> None:
    data = BOM + b"\n" + SPREAD + b"\n"
    with open_plain(make(data), scratch) as plain:
        laid_out = plain.stream.read()
    assert len(laid_out) == len(data)
    assert laid_out == data.replace(BOM, b"   ").replace(b"\n", b" ")


@pytest.mark.parametrize("behind", [b"\n" + SPREAD, b"\n\n" + SPREAD, SPREAD, b"\r\n" + SPREAD, b"\n{\n"])
def test_j9_several_pretty_printed_objects_are_one_error(
    behind: bytes, make: Callable[[bytes], Path], scratch: Path
) -> None:
    """One hint for the file, not an error for each of its lines."""
    error = refusal(make(b"\n" + SPREAD + behind), scratch)
    assert (error.code, error.exit_code) == ("KLN206", 2)
    assert "looks pretty-printed: its first object is spread over lines 2 to 6" in error.message
    assert "jq -c" in error.hint


ROW = b'{"a":1}\n'


@pytest.mark.parametrize(
    "data",
    [
        ROW + SPREAD,  # the first line is a row
        b'{"a":[\n' + ROW,  # broken, not spread
        b'{"a":"x\ny"}\n',  # a raw line end in a string
        b'{"a":\n1}\n' + ROW + ROW,  # one row cut in two among others
        SPREAD + b"\n" + ROW,
        SPREAD + b"\nx",
        b"{\n",
        b"{}{",
        b'{"a":1}{"a":\n2}\n',
        b"{" + b'"a":{\n' * 5000,
        pytest.param(SPREAD + b" " * LINE_CAP, id="longer than a line may be"),
    ],
)
def test_lines_stay_lines_where_no_object_is_the_whole_file(
    data: bytes, make: Callable[[bytes], Path], scratch: Path
) -> None:
    with open_plain(make(data), scratch) as plain:
        assert (plain.packing, plain.elements) == ("lines", False)
        assert plain.stream.read() == data


def test_what_is_wrong_inside_a_spread_object_is_a_fault_of_its_row(
    make: Callable[[bytes], Path], scratch: Path
) -> None:
    for inside, kind in (
        (b'"a":NaN', "not_finite"),
        (b'"a":1,\n"a":2', "duplicate_key"),
        (b'"a":1' + b"0" * 5000, "integer"),
    ):
        with open_plain(make(b"{\n" + inside + b"\n}\n"), scratch) as plain:
            assert plain.packing == "object"
            (line,) = LineReader(plain.stream)
        with pytest.raises(strict_json.JsonFault) as caught:
            strict_json.parse(line.text or b"")
        assert caught.value.kind.startswith(kind)


# What is refused


def refusal(path: Path | None, scratch: Path) -> KilnError:
    with pytest.raises(KilnError) as caught, open_plain(path, scratch):
        pass
    assert not scratch.exists() or not any(scratch.iterdir())
    return caught.value


GZIP = gzip.compress(LINES, mtime=0)
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip cut": (lambda: GZIP[:-9], "gzip: .*end"),
    "gzip with a wrong checksum": (lambda: GZIP[:-8] + b"xxxx" + GZIP[-4:], "gzip: CRC"),
    "gzip with a broken body": (lambda: GZIP[:20] + b"\xff" * 20 + GZIP[40:], "gzip: "),
    "gzip with text behind": (lambda: GZIP + b"hello", "gzip: Not a gzipped file"),
    "parquet cut": (lambda: as_parquet(ROWS)[:-20], "parquet: "),
    "parquet by name alone": (lambda: b"PAR1 and no more", "parquet: "),
}
DAMAGED_ZSTD: dict[str, tuple[Callable[[], bytes], str]] = {
    "zstd cut": (lambda: zstd(LINES)[:-3], "zstd: the last frame has no end"),
    "zstd with text behind": (lambda: zstd(LINES) + b"hello, world", "zstd: "),
    "zstd with a broken body": (lambda: zstd(LINES * 9)[:12] + b"\xff" * 40, "zstd: "),
}


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        *(pytest.param(*case, id=name) for name, case in DAMAGED.items()),
        *(pytest.param(*case, id=name, marks=needs_zstandard) for name, case in DAMAGED_ZSTD.items()),
    ],
)
def test_a_damaged_file_is_refused(
    data: Callable[[], bytes], detail: str, make: Callable[[bytes], Path], scratch: Path
) -> None:
    error = refusal(make(data()), scratch)
    assert error.code == "KLN206"
    assert f"rows is damaged: {detail}".split(".*")[0] in error.message


@pytest.mark.parametrize(
    "packer", [pytest.param(gzip.compress, id="gzip"), pytest.param(zstd, id="zstd", marks=needs_zstandard)]
)
def test_a_bomb_is_stopped_early(
    packer: Callable[[bytes], bytes], make: Callable[[bytes], Path], scratch: Path
) -> None:
    path = make(packer(bytes(2**26)) * 40)  # 2.5 GiB unpacked
    started = time.monotonic()
    error = refusal(path, scratch)
    assert error.code == "KLN206"
    assert "grows more than 200 times" in error.message
    assert time.monotonic() - started < 60


def test_a_ratio_counts_only_above_the_limit(
    make: Callable[[bytes], Path], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(gzip.compress(b" " * 2_000_000))
    assert read(path, scratch)[0] == []
    monkeypatch.setattr(transports, "RATIO_COUNTS_FROM", 1_000_000)
    assert refusal(path, scratch).code == "KLN206"


def test_what_is_no_file_is_refused(tmp_path: Path, scratch: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for name in ("fifo", "absent", "directory", "splits"):
        assert refusal(tmp_path / name, scratch).code == "KLN204"
    assert "several splits" in refusal(tmp_path / "splits", scratch).message


@pytest.mark.parametrize(("package", "data"), [("zstandard", b"\x28\xb5\x2f\xfd"), ("datasets", None)])
def test_a_missing_package_is_named(
    package: str, data: bytes | None, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "rows"
    if data is None:
        saved_dataset(path)
    else:
        path.write_bytes(data)
    error = refusal(path, scratch)
    assert (error.code, error.exit_code, error.hint) == ("KLN301", 3, f"pip install {package}")


def test_a_file_that_changes_meanwhile(
    make: Callable[[bytes], Path], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(gzip.compress(LINES))
    digest = transports._sha256

    def meddle(stream: Any) -> str:
        with path.open("ab") as file:
            file.write(b"x")
        return digest(stream)

    monkeypatch.setattr(transports, "_sha256", meddle)
    assert refusal(path, scratch).code == "KLN207"


def test_scratch_space_that_is_refused(make: Callable[[bytes], Path], tmp_path: Path) -> None:
    (tmp_path / "scratch").write_text("a file")
    with pytest.raises(KilnError) as caught, open_plain(make(ARRAY), tmp_path / "scratch" / "below"):
        pass
    assert caught.value.code == "KLN402"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk(make: Callable[[bytes], Path], scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb") as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: full)
        assert refusal(make(ARRAY), scratch).code == "KLN402"


# Rows that were never text


def test_parquet_is_read_in_slices(
    make: Callable[[bytes], Path], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "PARQUET_ROWS", 7)
    rows = [{"id": index, "query": f"row {index}", "nested": [{"a": None}]} for index in range(50)]
    with open_plain(make(as_parquet(rows)), scratch) as plain:
        assert plain.stream.read() == b"".join(canonical_json(row) + b"\n" for row in rows)


def test_a_value_without_json_form_is_a_fault_of_its_row(make: Callable[[bytes], Path], scratch: Path) -> None:
    frame = pl.DataFrame({"x": [1.5, float("nan"), None], "at": [pl.date(2026, 1, 2)] * 3}, strict=False)
    out = io.BytesIO()
    frame.with_columns(at=pl.date(2026, 1, 2)).write_parquet(out)
    with open_plain(make(out.getvalue()), scratch) as plain:
        lines = [line.text or b"" for line in LineReader(plain.stream)]
    assert strict_json.parse(lines[0]) == {"x": 1.5, "at": "2026-01-02"}
    assert strict_json.parse(lines[2]) == {"x": None, "at": "2026-01-02"}
    with pytest.raises(strict_json.JsonFault, match="NaN"):
        strict_json.parse(lines[1])


@pytest.mark.parametrize("row", [{"a": "\ud800"}, {"a": 2**70}, {"a": float("inf")}])
def test_such_a_row_never_parses(row: dict[str, Any]) -> None:
    line = transports._row_line(row)
    assert line.count(b"\n") == 1
    with pytest.raises(strict_json.JsonFault):
        strict_json.parse(line)


def saved_dataset(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text("{}")
    (path / "data-00000-of-00001.arrow").write_bytes(b"arrow")


def test_a_saved_dataset(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")
    fake.load_from_disk = lambda path: ROWS if path == str(tmp_path / "saved") else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    saved_dataset(tmp_path / "saved")
    values, plain = read(tmp_path / "saved", scratch)
    files = [
        [name, hashlib.sha256(data).hexdigest(), len(data)]
        for name, data in (("data-00000-of-00001.arrow", b"arrow"), ("state.json", b"{}"))
    ]
    assert values == ROWS
    assert (plain.packing, plain.elements, plain.size) == ("datasets directory", True, 7)
    assert plain.sha256 == hashlib.sha256(json.dumps(files, separators=(",", ":")).encode()).hexdigest()


def test_a_saved_dataset_that_does_not_load(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("datasets")
    fake.load_from_disk = lambda path: 1 // 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    saved_dataset(tmp_path / "saved")
    assert refusal(tmp_path / "saved", scratch).code == "KLN206"


# A plugin's own reader


def csv_rows(lines: Iterable[Line]) -> Iterator[Record]:
    """A header line, then ``query;n`` a line."""
    rows = (line for line in lines if line.text)
    next(rows)
    for index, line in enumerate(rows, start=1):
        query, _, n = (line.text or b"").decode().partition(";")
        yield Record(
            row_index=index,
            line=line.number,
            offset=line.offset,
            length=line.length,
            text=None,
            value={"query": query, "n": n},
        )


def source(read: Callable[[Iterable[Line]], Iterator[Record]] | None) -> Source:
    return Source(
        name="table",
        doc="a table",
        yields="tool_calls",
        convert=lambda record: ToolCallRow(),
        recognise=lambda record: None,
        read=read,
    )


CSV = BOM + b"query;n\n\nwhat?;1\nwho, me;2\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_readers_records_become_lines(
    pack: Callable[[bytes], bytes], make: Callable[[bytes], Path], scratch: Path
) -> None:
    path = make(pack(CSV))
    with ExitStack() as stack:
        given = stack.enter_context(open_plain(path, scratch))
        plain = stack.enter_context(spool_records(source(csv_rows), given, scratch))
        assert plain.stream.read() == b'{"n":"1","query":"what?"}\n{"n":"2","query":"who, me"}\n'
    assert plain.places == (array("q", [3, 4]), array("q", [12, 20]), array("q", [8, 10]))
    assert (plain.elements, plain.blank, plain.had_bom, plain.size) == (True, 1, True, path.stat().st_size)
    assert plain.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def records(*texts: bytes | None) -> Callable[[Iterable[Line]], Iterator[Record]]:
    """A reader that looks at no line and yields these texts."""

    def read(lines: Iterable[Line]) -> Iterator[Record]:
        for index, text in enumerate(texts, start=1):
            yield Record(row_index=index, line=index, offset=0, length=0, text=text)

    return read


def test_texts_of_a_reader_stay_one_line_each(make: Callable[[bytes], Path], scratch: Path) -> None:
    reader = records(b'{"b":1, "a":2}', b'{"b":1,\n"a":2}', b'{"a":"x\ny"}', b"no json", None)
    path = make(CSV)
    with open_plain(path, scratch) as given, spool_records(source(reader), given, scratch) as plain:
        texts = [line.text for line in LineReader(plain.stream)]
    assert texts == [b'{"b":1, "a":2}', b'{"a":2,"b":1}', b'{"a":"x\vy"}', b"no json", None]
    assert plain.sha256 == hashlib.sha256(CSV).hexdigest()  # though the reader read nothing


def counts_wrong(lines: Iterable[Line]) -> Iterator[Record]:
    yield Record(row_index=2, line=1, offset=0, length=0, text=b"{}")


def divides(lines: Iterable[Line]) -> Iterator[Record]:
    yield Record(row_index=1 // 0, line=1, offset=0, length=0, text=b"{}")


@pytest.mark.parametrize(
    ("reader", "detail"),
    [(counts_wrong, "row_index is 2, expected 1"), (divides, "ZeroDivisionError"), (None, "no reader")],
)
def test_a_reader_that_fails_is_named(
    reader: Callable[[Iterable[Line]], Iterator[Record]] | None,
    detail: str,
    make: Callable[[bytes], Path],
    scratch: Path,
) -> None:
    with (
        open_plain(make(CSV), scratch) as given,
        pytest.raises(KilnError, match=detail) as caught,
        spool_records(source(reader), given, scratch),
    ):
        pass
    assert caught.value.code == "KLN210"
    assert "'table'" in caught.value.message
