"""The admitted corpus on disk: one Parquet row a conversation, token ids beside the spans that are trained on.

Hugging Face ``datasets`` opens the file as it is. Columns: row_index, line (int64), example_id (string or null),
row_sha256, input_ids (list of int32), label_spans (list of int32: start, end, start, end, ...; tokens, ends excluded).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, open_input
from kiln_cli.identity import Domain, canonical_json, domain_hasher, length_prefixed
from kiln_cli.text import printable

CORPUS_SCHEMA = "kiln.admitted-corpus.v1"
COLUMNS = ("row_index", "line", "example_id", "row_sha256", "input_ids", "label_spans")


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


def admitted_sha256(rows: Iterable[AdmittedRow]) -> str:
    """Digest of what is trained on: hash, ids and spans of each row in order."""
    digest = domain_hasher(Domain.ADMITTED_CORPUS)
    for row in rows:
        digest.update(length_prefixed(canonical_json([row.row_sha256, row.input_ids, row.label_spans])))
    return "sha256:" + digest.hexdigest()


def write_corpus(path: Path, rows: Sequence[AdmittedRow]) -> AtomicFile:
    import polars as pl

    schema: dict[str, Any] = {
        "row_index": pl.Int64,
        "line": pl.Int64,
        "example_id": pl.String,
        "row_sha256": pl.String,
        "input_ids": pl.List(pl.Int32),
        "label_spans": pl.List(pl.Int32),
    }
    columns = {
        "row_index": [row.row_index for row in rows],
        "line": [row.line for row in rows],
        "example_id": [row.example_id for row in rows],
        "row_sha256": [row.row_sha256 for row in rows],
        "input_ids": [row.input_ids for row in rows],
        "label_spans": [[edge for span in row.label_spans for edge in span] for row in rows],
    }
    buffer = io.BytesIO()
    pl.DataFrame(columns, schema=schema).write_parquet(buffer, compression="zstd", statistics=False)
    with AtomicFile(path) as out:
        out.write(buffer.getvalue())
    return out


def read_corpus(path: Path) -> list[AdmittedRow]:
    """Raises KilnError KLN206 where the file is no admitted corpus."""
    import polars as pl

    with open_input(path) as stream:
        data = stream.read()
    try:
        frame = pl.read_parquet(io.BytesIO(data), columns=list(COLUMNS))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise KilnError(
            "KLN206", f"{printable(path)} is no admitted corpus: {printable(error)}", hint="run `kiln admit` again"
        ) from None
    return [
        AdmittedRow(
            row_index=row["row_index"],
            line=row["line"],
            example_id=row["example_id"],
            row_sha256=row["row_sha256"],
            input_ids=row["input_ids"],
            label_spans=list(zip(row["label_spans"][::2], row["label_spans"][1::2], strict=True)),
        )
        for row in frame.iter_rows(named=True)
    ]
