"""The admitted corpus on disk: one Parquet row a conversation, token ids beside the spans that are trained on.

Hugging Face ``datasets`` opens the file, and TRL and Transformers train on it as it is: they read ``input_ids`` and
``labels``. Columns: row_index, line (int64), example_id (string or null), row_sha256, input_ids (list of int32),
label_spans (list of int32: start, end, start, end, ...; tokens, ends excluded), labels (list of int32: a trained
token's id, else -100). The last two say the same in two ways; who reads the file checks that they do.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, open_input
from kiln_cli.identity import Domain, domain_hasher, length_prefixed
from kiln_cli.text import printable
from kiln_stages.admitting.packed_numbers import INT32_BYTES, int32_lists, pack_int32, unpack_int32
from kiln_stages.admitting.parts_writer import PartsWriter

if TYPE_CHECKING:
    import polars as pl

PART_ROWS = 1024
GROUP_ROWS = 4096  # rows in a row group: what a reader must hold at once
CORPUS_SCHEMA = "kiln.admitted-corpus.v1"
COLUMNS = ("row_index", "line", "example_id", "row_sha256", "input_ids", "label_spans", "labels")
CONTEXT_LABEL = -100  # what torch's cross entropy leaves out unless told otherwise, and so Transformers and TRL
_CONTEXT = CONTEXT_LABEL.to_bytes(INT32_BYTES, "little", signed=True)


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
        return len(self.input_ids) // INT32_BYTES

    def edges(self) -> list[int]:
        return unpack_int32(self.label_spans)

    @property
    def supervised(self) -> int:
        edges = self.edges()
        return sum(edges[1::2]) - sum(edges[::2])

    def labels(self) -> bytes:
        """As :meth:`AdmittedRow.labels`, packed."""
        labels = bytearray(_CONTEXT * self.tokens)
        edges = self.edges()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            labels[start * INT32_BYTES : end * INT32_BYTES] = self.input_ids[start * INT32_BYTES : end * INT32_BYTES]
        return bytes(labels)

    def unpacked(self) -> AdmittedRow:
        edges = self.edges()
        return AdmittedRow(
            row_index=self.row_index,
            line=self.line,
            example_id=self.example_id,
            row_sha256=self.row_sha256,
            input_ids=unpack_int32(self.input_ids),
            label_spans=list(zip(edges[::2], edges[1::2], strict=True)),
        )


def packed(row: AdmittedRow) -> PackedRow:
    return PackedRow(
        row_index=row.row_index,
        line=row.line,
        example_id=row.example_id,
        row_sha256=row.row_sha256,
        input_ids=pack_int32(row.input_ids),
        label_spans=pack_int32([edge for span in row.label_spans for edge in span]),
    )


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


class CorpusWriter(PartsWriter[PackedRow]):
    """Writes a corpus row by row in bounded memory. Use as a context manager; afterwards ``file`` describes it."""

    part_rows = PART_ROWS
    group_rows = GROUP_ROWS

    def frame(self, rows: Sequence[PackedRow]) -> pl.DataFrame:
        return _frame(rows)


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
        "input_ids": int32_lists([row.input_ids for row in rows]),
        "label_spans": int32_lists([row.label_spans for row in rows]),
        "labels": int32_lists([row.labels() for row in rows]),
    }
    return pl.DataFrame(columns, schema=_schema())


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
            f"{counted(len(found), 'label', 'labels')} for {counted(len(expected), 'token', 'tokens')}"
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
