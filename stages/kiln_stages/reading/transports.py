"""However rows are packed, the stages see one plain file of lines: JSON text a line, seekable, read through one handle.

JSON lines lie as they are. gzip, zstd and standard input are unpacked into a temporary file without a name. The
elements of a JSON array, and an object that is spread over lines, are laid out as lines, byte for byte in their places.
Parquet files, Hugging Face ``datasets`` directories and what a plugin's own reader yields become one canonical JSON
text a row.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import itertools
import json
import os
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Source
from kiln_cli.files import FS, hash_file, open_input, writing
from kiln_cli.identity import canonical_json
from kiln_cli.lines import BOM, LINE_CAP, LineReader
from kiln_cli.records import Record
from kiln_cli.text import printable
from kiln_stages.reading.array_lines import ArrayLines, begins_array
from kiln_stages.reading.spread_object import spread_object

# A packed file that grows more than this is taken for an attack; real rows grow 3 to 20 times.
MAX_RATIO = 200
RATIO_COUNTS_FROM = 64 * 1024 * 1024
PARQUET_ROWS = 10_000  # rows in memory at a time
_BLOCK = 1024 * 1024
_ZSTD_BITE = 512  # packed bytes at a time: a bite of a crafted file grows to 16 MiB at most


class Places(NamedTuple):
    """Where each row stood in what was given: line, byte offset and length, an entry a row."""

    line: array[int]
    offset: array[int]
    length: array[int]


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    """A plain file of lines and how it came about. ``size`` and ``sha256`` are of the bytes as given, still packed.

    ``elements``: rows have no line bytes of their own; their identity is their canonical form. ``blank`` and
    ``had_bom`` tell of blank lines and a byte-order mark that the plain file no longer shows. ``places`` is set where
    a row's place in the plain file is not its place in what was given or, for gzip and zstd, unpacked.
    """

    stream: BinaryIO  # seekable, with a descriptor
    size: int
    packing: str
    elements: bool
    sha256: str | None  # None for plain lines: they are hashed while they are read
    blank: int = 0
    had_bom: bool = False
    places: Places | None = None


@contextmanager
def open_plain(path: Path | None, scratch: Path) -> Iterator[Plain]:
    """The rows of a file, of a saved ``datasets`` directory, or of standard input (None), as a plain file.

    Temporary files lie in ``scratch`` and have no name. Raises KilnError: KLN204 for what cannot be read, KLN206 for a
    packed file that is damaged, grows beyond measure, is an array that is no JSON as a whole, or holds several
    pretty-printed objects, KLN207 for one that changes meanwhile, KLN301 for a package that is missing, KLN402 where
    the scratch space is refused.
    """
    with ExitStack() as stack:
        if path is None:
            given = stack.enter_context(spooled(_standard_input(), scratch))
            yield _unpack(given, "standard input", stack, scratch)
        elif path.is_dir():
            size, sha256, lines = _dataset_directory(path)
            stream = stack.enter_context(spooled(lines, scratch))
            yield Plain(stream=stream, size=size, packing="datasets directory", elements=True, sha256=sha256)
        else:
            yield _unpack(stack.enter_context(open_input(path)), printable(path), stack, scratch)


@contextmanager
def spool_records(source: Source, plain: Plain, scratch: Path) -> Iterator[Plain]:
    """The rows that the source's own reader makes of a plain file, one canonical JSON text a line.

    The reader runs once; ``places`` holds where each row stood. Raises KilnError KLN210 where the plugin fails.
    """
    lines = LineReader(plain.stream)
    places = Places(array("q"), array("q"), array("q"))
    with spooled(_record_lines(source, lines, places), scratch) as stream:
        for _ in lines:
            pass  # what the reader left unread belongs to the digest too
        yield Plain(
            stream=stream,
            size=plain.size,
            packing=plain.packing,
            elements=True,
            sha256=plain.sha256 or lines.sha256,
            blank=lines.blank,
            had_bom=plain.had_bom or lines.had_bom,
            places=places,
        )


def _standard_input() -> Iterator[bytes]:
    try:
        if sys.stdin is None:
            raise OSError("it is closed")
        yield from _blocks(sys.stdin.buffer)
    except OSError as error:
        detail = f"cannot read standard input: {error.strerror or error}"
        raise KilnError("KLN204", detail, hint="name a file, or pipe rows in") from None


def _unpack(given: BinaryIO, name: str, stack: ExitStack, scratch: Path) -> Plain:
    before = os.fstat(given.fileno())
    packing, blocks = _packing(given, name, before.st_size)
    stream, had_bom = given, False
    if blocks is not None:
        stream = stack.enter_context(spooled(blocks, scratch))
        name = f"{name} (unpacked)"
    laid_out, lines = ("", None) if packing == "parquet" else _laid_out(stream, name)
    if lines is not None:
        had_bom = stream.read(len(BOM)) == BOM
        stream.seek(0)
        stream = stack.enter_context(spooled(lines, scratch))
    sha256 = None if stream is given else _sha256(given)
    after = os.fstat(given.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise KilnError("KLN207", f"{name} changed while it was read", hint="run again when nothing writes to it")
    return Plain(
        stream=stream,
        size=before.st_size,
        packing=", ".join(filter(None, (packing, laid_out))) or "lines",
        elements=bool(laid_out) or packing == "parquet",
        sha256=sha256,
        had_bom=had_bom,
    )


def _laid_out(stream: BinaryIO, name: str) -> tuple[str, Iterable[bytes] | None]:
    """What text is where it is no JSON lines ("" where it is), and its blocks with a row a line."""
    if begins_array(stream):
        return "array", ArrayLines(name).convert(_blocks(stream))
    line = spread_object(stream, name)
    return ("", None) if line is None else ("object", [line])


def _packing(given: BinaryIO, name: str, size: int) -> tuple[str, Iterator[bytes] | None]:
    """What a file is packed with by its first bytes ("" for nothing), and the unpacked blocks."""
    head = given.read(4)
    given.seek(0)
    if head == b"PAR1":
        return "parquet", _bounded(_parquet(given, name), name, size)
    if head.startswith(b"\x1f\x8b"):
        return "gzip", _bounded(_gunzip(given, name), name, size)
    if head == b"\x28\xb5\x2f\xfd" or (head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):  # a frame, one to skip
        return "zstd", _bounded(_unzstd(given, name), name, size)
    return "", None


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(_BLOCK):
        yield block


@contextmanager
def spooled(blocks: Iterable[bytes], scratch: Path) -> Iterator[BinaryIO]:
    """A temporary file without a name that holds the blocks, at its start. Raises KilnError KLN402."""
    shown = scratch / "unpacked rows"
    with writing(shown):
        FS.make_directory(scratch)
        spool = cast(BinaryIO, tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115
    try:
        for block in blocks:
            with writing(shown):
                spool.write(block)
        with writing(shown):
            spool.flush()
        spool.seek(0)
        yield spool
    finally:
        with suppress(OSError):  # closing tries again what failed above, and that error is the one to report
            spool.close()


def _sha256(stream: BinaryIO) -> str:
    stream.seek(0)
    digest = hashlib.file_digest(cast(Any, stream), "sha256").hexdigest()
    stream.seek(0)
    return digest


def _bounded(blocks: Iterable[bytes], name: str, packed: int) -> Iterator[bytes]:
    size = 0
    for block in blocks:
        size += len(block)
        if size > RATIO_COUNTS_FROM and size > MAX_RATIO * packed:
            raise KilnError(
                "KLN206",
                f"{name} grows more than {MAX_RATIO} times when unpacked ({packed} bytes to {size} and more)",
                hint="unpack it yourself if this is meant",
            )
        yield block


def _gunzip(given: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        yield from _blocks(cast(BinaryIO, gzip.GzipFile(fileobj=given)))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _damaged(name, f"gzip: {error}") from None


def _unzstd(given: BinaryIO, name: str) -> Iterator[bytes]:
    """Frame by frame: only so is it seen that the last one has an end."""
    zstandard = _package("zstandard", f"{name} is packed with zstd, and unpacking it")
    unpacker = None
    try:
        for block in _blocks(given):
            for start in range(0, len(block), _ZSTD_BITE):
                packed = block[start : start + _ZSTD_BITE]
                while packed:
                    if unpacker is None or unpacker.eof:
                        unpacker = zstandard.ZstdDecompressor().decompressobj()
                    yield unpacker.decompress(packed)
                    packed = unpacker.unused_data if unpacker.eof else b""
    except zstandard.ZstdError as error:
        raise _damaged(name, f"zstd: {error}") from None
    if unpacker is None or not unpacker.eof:
        raise _damaged(name, "zstd: the last frame has no end")


def _parquet(given: BinaryIO, name: str) -> Iterator[bytes]:
    import polars as pl

    try:
        table = pl.scan_parquet(f"/dev/fd/{given.fileno()}", glob=False)
        for start in itertools.count(0, PARQUET_ROWS):
            rows = table.slice(start, PARQUET_ROWS).collect()
            if not rows.height:
                return
            yield from map(_row_line, rows.iter_rows(named=True))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise _damaged(name, f"parquet: {error}") from None


def _dataset_directory(path: Path) -> tuple[int, str, Iterator[bytes]]:
    """Size, digest and rows of a directory that ``Dataset.save_to_disk`` wrote.

    The digest is over the canonical JSON of [name, SHA-256, size] of its files, sorted by name.
    """
    if not (path / "state.json").exists():
        found = "holds several splits" if (path / "dataset_dict.json").exists() else "is no saved dataset"
        raise KilnError(
            "KLN204",
            f"{printable(path)} is a directory and {found}",
            hint="name a file, or one split that datasets' save_to_disk wrote",
        )
    datasets = _package("datasets", f"{printable(path)} is a saved dataset, and reading it")
    names = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
    files = [(name, *hash_file(path / name)) for name in names]
    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the package makes of a damaged directory
        raise _damaged(printable(path), f"datasets: {error}") from None
    size = sum(size for _, _, size in files)
    return size, hashlib.sha256(canonical_json(files)).hexdigest(), map(_row_line, rows)


def _row_line(row: Any) -> bytes:
    """A row as a line. What has no JSON form (NaN, say) stays in it, so that the row gets its own fault later."""
    try:
        return canonical_json(row) + b"\n"
    except (ValueError, OverflowError, TypeError):
        return json.dumps(row, sort_keys=True, default=str).encode("ascii") + b"\n"


def _record_lines(source: Source, lines: LineReader, places: Places) -> Iterator[bytes]:
    try:
        if source.read is None:
            raise TypeError("the source has no reader of its own")
        for count, record in enumerate(source.read(lines), start=1):
            if record.row_index != count:
                raise ValueError(f"row_index is {record.row_index}, expected {count}")
            for column, value in zip(places, (record.line, record.offset, record.length), strict=True):
                column.append(value)
            yield _record_line(record)
    except (KilnError, OSError):
        raise
    except Exception as error:
        raise KilnError(
            "KLN210",
            f"source {printable(source.name)!r} fails to read: {printable(f'{type(error).__name__}: {error}')}",
            hint="mend or uninstall the plugin, or name another source",
        ) from error


def _record_line(record: Record) -> bytes:
    if record.text is None:
        too_long = record.value is None  # stays what it is: a line above the cap
        return b"." * (LINE_CAP + 1) + b"\n" if too_long else _row_line(record.value)
    if b"\n" not in record.text:
        return record.text + b"\n"
    try:
        return _row_line(strict_json.parse(record.text))
    except strict_json.JsonFault:
        return record.text.replace(b"\n", b"\v") + b"\n"  # still no JSON, and one line


def _package(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        detail = f"{purpose} needs the package {name}: {printable(error)}"
        raise KilnError("KLN301", detail, hint=f"pip install {name}") from None


def _damaged(name: str, detail: str) -> KilnError:
    return KilnError("KLN206", f"{name} is damaged: {printable(detail)}", hint="fetch or pack it again")
