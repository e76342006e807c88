"""The admitted corpus on disk: one Parquet row a conversation, token ids beside the spans that are trained on.

Hugging Face ``datasets`` opens the file, and TRL and Transformers train on it as it is: they read ``input_ids`` and
``labels``. Columns: row_index, line (int64), example_id (string or null), row_sha256, input_ids (list of int32),
label_spans (list of int32: start, end, start, end, ...; tokens, ends excluded), labels (list of int32: a trained
token's id, else -100). The last two say the same in two ways; who reads the file checks that they do.
"""

from __future__ import annotations

import io
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import FS, TEMP_PREFIX, AtomicFile, open_input, writing
from kiln_cli.identity import Domain, domain_hasher, length_prefixed
from kiln_cli.text import printable
from kiln_stages.frames import import_polars

if TYPE_CHECKING:
    import polars as pl

PART_ROWS = 1024
GROUP_ROWS = 4096  # rows in a row group: what a reader must hold at once
CORPUS_SCHEMA = "kiln.admitted-corpus.v1"
COLUMNS = ("row_index", "line", "example_id", "row_sha256", "input_ids", "label_spans", "labels")
_INT32 = 4
CONTEXT_LABEL = -100  # what torch's cross entropy leaves out unless told otherwise, and so Transformers and TRL
_CONTEXT = CONTEXT_LABEL.to_bytes(_INT32, "little", signed=True)


class AdmittedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation ready to train: every token is context but those in ``label_spans`` (token indices)."""

    row_index: int
    line: int
    example_id: str | None
    row_sha256: str
    input_ids: list[int]
    label_spans: list[tuple[int, int]]

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.label_spans)

    def labels(self) -> list[int]:
        """One label a token: its own id where it is trained on, else ``CONTEXT_LABEL``. Not shifted."""
        labels = [CONTEXT_LABEL] * len(self.input_ids)
        for start, end in self.label_spans:
            labels[start:end] = self.input_ids[start:end]
        return labels


class PackedRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An admitted row on its way to disk: ``input_ids`` and ``label_spans`` are int32 numbers, little-endian; the
    latter start, end, start, end, ... A row goes through several hands, and a list of numbers is slow to hand on."""

    row_index: int
    line: int
    example_id: str | None
    row_sha256: str
    input_ids: bytes
    label_spans: bytes

    @property
    def tokens(self) -> int:
        return len(self.input_ids) // _INT32

    def edges(self) -> list[int]:
        return _numbers(self.label_spans)

    @property
    def supervised(self) -> int:
        edges = self.edges()
        return sum(edges[1::2]) - sum(edges[::2])

    def labels(self) -> bytes:
        """As :meth:`AdmittedRow.labels`, packed."""
        labels = bytearray(_CONTEXT * self.tokens)
        edges = self.edges()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            labels[start * _INT32 : end * _INT32] = self.input_ids[start * _INT32 : end * _INT32]
        return bytes(labels)

    def unpacked(self) -> AdmittedRow:
        edges = self.edges()
        return AdmittedRow(
            row_index=self.row_index,
            line=self.line,
            example_id=self.example_id,
            row_sha256=self.row_sha256,
            input_ids=_numbers(self.input_ids),
            label_spans=list(zip(edges[::2], edges[1::2], strict=True)),
        )


def packed(row: AdmittedRow) -> PackedRow:
    return PackedRow(
        row_index=row.row_index,
        line=row.line,
        example_id=row.example_id,
        row_sha256=row.row_sha256,
        input_ids=_int32(row.input_ids),
        label_spans=_int32([edge for span in row.label_spans for edge in span]),
    )


def _int32(numbers: Sequence[int]) -> bytes:
    values = array("i", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _numbers(data: bytes) -> list[int]:
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


class AdmittedDigest:
    """Digest of what is trained on, row by row in order: the hash's text, the ids, and the edges of the label spans,
    each behind its length; numbers as int32, little-endian."""

    def __init__(self) -> None:
        self._hasher = domain_hasher(Domain.ADMITTED_CORPUS)

    def update(self, row: PackedRow) -> None:
        for part in (row.row_sha256.encode("ascii"), row.input_ids, row.label_spans):
            self._hasher.update(length_prefixed(part))

    def text(self) -> str:
        return "sha256:" + self._hasher.hexdigest()


def admitted_sha256(rows: Iterable[AdmittedRow]) -> str:
    """The digest of rows that are all at hand."""
    digest = AdmittedDigest()
    for row in rows:
        digest.update(packed(row))
    return digest.text()


class CorpusWriter:
    """Writes a corpus row by row in bounded memory. Use as a context manager; afterwards ``file`` describes it.

    Every ``PART_ROWS`` rows become a part on disk; at the end the parts are joined. So the bytes depend on the rows
    alone, and a failure leaves what was there before. Raises KilnError KLN402 where the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[PackedRow] = []
        self._parts: list[Path] = []
        self._scratch = path.parent / f"{TEMP_PREFIX}{path.stem}"  # swept, if this process is killed, by the next one
        self.file: AtomicFile | None = None

    def __enter__(self) -> CorpusWriter:
        import_polars()
        with writing(self._path):
            FS.make_directory(self._scratch)
        return self

    def write(self, row: PackedRow) -> None:
        self._rows.append(row)
        if len(self._rows) == PART_ROWS:
            self._write_part()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._rows or not self._parts:
                    self._write_part()
                self.file = self._join()
        finally:
            with writing(self._path):
                FS.remove_tree(self._scratch)

    def _write_part(self) -> None:
        part = self._scratch / f"{len(self._parts):08d}.arrow"
        with writing(part):
            _frame(self._rows).write_ipc(part)
        self._parts.append(part)
        self._rows = []

    def _join(self) -> AtomicFile:
        import polars as pl

        joined = self._scratch / "joined.parquet"
        with writing(joined):
            try:
                pl.scan_ipc(self._parts).sink_parquet(
                    joined, compression="zstd", statistics=False, row_group_size=GROUP_ROWS, maintain_order=True
                )
            except pl.exceptions.PolarsError as error:  # here polars tells of a full disk in terms of its own
                raise OSError(str(error)) from error
        with AtomicFile(self._path) as out, open_input(joined) as stream:
            while block := stream.read(1024 * 1024):
                out.write(block)
        return out


def write_corpus(path: Path, rows: Iterable[AdmittedRow]) -> AtomicFile:
    """Writes rows that are all at hand."""
    with CorpusWriter(path) as writer:
        for row in rows:
            writer.write(packed(row))
    assert writer.file is not None
    return writer.file


def _frame(rows: Sequence[PackedRow]) -> pl.DataFrame:
    import polars as pl

    columns = {
        "row_index": [row.row_index for row in rows],
        "line": [row.line for row in rows],
        "example_id": [row.example_id for row in rows],
        "row_sha256": [row.row_sha256 for row in rows],
        "input_ids": _lists([row.input_ids for row in rows]),
        "label_spans": _lists([row.label_spans for row in rows]),
        "labels": _lists([row.labels() for row in rows]),
    }
    return pl.DataFrame(columns, schema=_schema())


def _lists(parts: list[bytes]) -> pl.Series:
    """A column of lists of int32 from their bytes: one long list, cut. Far cheaper than list by list."""
    import polars as pl

    if not any(parts):
        return pl.Series([[] for _ in parts], dtype=pl.List(pl.Int32))
    lengths = pl.Series("length", [len(part) // _INT32 for part in parts], dtype=pl.Int64)
    whole = pl.Series([b"".join(parts)]).bin.reinterpret(
        dtype=pl.Array(pl.Int32, int(lengths.sum())), endianness="little"
    )
    places = pl.DataFrame([(lengths.cum_sum() - lengths).alias("start"), lengths])
    return places.select(pl.lit(whole.arr.to_list()).list.slice("start", "length").alias("values")).to_series()


def _schema() -> dict[str, Any]:
    import polars as pl

    numbers, tokens = pl.Int64(), pl.List(pl.Int32())
    types = (numbers, numbers, pl.String(), pl.String(), tokens, tokens, tokens)
    return dict(zip(COLUMNS, types, strict=True))


def read_corpus(path: Path) -> list[AdmittedRow]:
    """Raises KilnError KLN206 where the file is no admitted corpus, or its labels and its label spans differ."""
    import polars as pl

    with open_input(path) as stream:
        data = stream.read()
    try:
        frame = pl.read_parquet(io.BytesIO(data), columns=list(COLUMNS))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _no_corpus(path, str(error)) from None
    if dict(frame.schema) != _schema():
        raise _no_corpus(path, f"its columns are {dict(frame.schema)}")
    for name in ("input_ids", "label_spans", "labels"):
        if frame[name].null_count() or frame[name].list.eval(pl.element().is_null()).list.any().any():
            raise _no_corpus(path, f"{name} has a null")
    return [_admitted_row(path, row) for row in frame.iter_rows(named=True)]


def _admitted_row(path: Path, columns: dict[str, Any]) -> AdmittedRow:
    edges: list[int] = columns["label_spans"]
    if len(edges) % 2 or edges != sorted(edges) or (edges and (edges[0] < 0 or edges[-1] > len(columns["input_ids"]))):
        raise _no_corpus(path, f"row {columns['row_index']}: label_spans {edges} are no spans of its tokens")
    row = AdmittedRow(
        row_index=columns["row_index"],
        line=columns["line"],
        example_id=columns["example_id"],
        row_sha256=columns["row_sha256"],
        input_ids=columns["input_ids"],
        label_spans=list(zip(edges[::2], edges[1::2], strict=True)),
    )
    expected, found = row.labels(), columns["labels"]
    if found != expected:
        place = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        said = (
            f"{len(found)} labels for {len(expected)} tokens"
            if place is None
            else f"label {found[place]} at token {place}, where label_spans say {expected[place]}"
        )
        raise _no_corpus(path, f"row {row.row_index} ({printable(row.row_sha256)}): {said}")
    return row


def row_whose_labels_differ(frame: pl.DataFrame) -> int | None:
    """The first row (from 0) of input_ids, label_spans and labels in which the last does not follow from the others.

    The columns hold no null. What :func:`read_corpus` asks of each row in Python, asked of many at once.
    """
    import polars as pl

    places = frame.select("input_ids", "label_spans", "labels").with_row_index("row")
    edges = pl.col("label_spans").list
    length, labelled = pl.col("input_ids").list.len(), pl.col("labels").list.eval(pl.element() != CONTEXT_LABEL).list
    spans = (
        places.select("row", "labels", tokens=length, start=edges.gather_every(2), end=edges.gather_every(2, 1))
        .explode("start", "end")
        .with_columns(pl.col("start", "end").cast(pl.Int64))
    )
    size = pl.col("end") - pl.col("start")
    gap = pl.col("labels").list.slice(pl.col("start"), size).list.contains(CONTEXT_LABEL)
    disorder = edges.diff().list.drop_nulls().list.min() < 0
    totals = places.join(spans.group_by("row").agg(total=size.sum()), on="row", how="left")
    # The spans follow one another within the row; they have as many tokens as there are labels, and none without one.
    faults = [
        spans.filter(gap | (pl.col("start") < 0) | (pl.col("end") > pl.col("tokens"))),
        totals.filter(disorder | (length != pl.col("labels").list.len()) | (labelled.sum() != pl.col("total"))),
    ]
    if not (found := [row for fault in faults for row in fault["row"].head(1)]):
        tokens = places.select("row", "input_ids", "labels").explode("input_ids", "labels")
        wrong = (pl.col("labels") != CONTEXT_LABEL) & (pl.col("labels") != pl.col("input_ids"))
        found = tokens.filter(wrong)["row"].head(1).to_list()
    return min(found, default=None)


def _no_corpus(path: Path, why: str) -> KilnError:
    message = f"{printable(path)} is no admitted corpus: {printable(why)}"
    return KilnError("KLN206", message, hint="run `kiln admit` again")
