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
from typing import Any

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, open_input
from kiln_cli.identity import Domain, canonical_json, domain_hasher, length_prefixed
from kiln_cli.text import printable

CORPUS_SCHEMA = "kiln.admitted-corpus.v1"
COLUMNS = ("row_index", "line", "example_id", "row_sha256", "input_ids", "label_spans", "labels")
CONTEXT_LABEL = -100  # what torch's cross entropy leaves out unless told otherwise, and so Transformers and TRL


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


def admitted_sha256(rows: Iterable[AdmittedRow]) -> str:
    """Digest of what is trained on: hash, ids and spans of each row in order."""
    digest = domain_hasher(Domain.ADMITTED_CORPUS)
    for row in rows:
        digest.update(length_prefixed(canonical_json([row.row_sha256, row.input_ids, row.label_spans])))
    return "sha256:" + digest.hexdigest()


def write_corpus(path: Path, rows: Sequence[AdmittedRow]) -> AtomicFile:
    import polars as pl

    columns = {
        "row_index": [row.row_index for row in rows],
        "line": [row.line for row in rows],
        "example_id": [row.example_id for row in rows],
        "row_sha256": [row.row_sha256 for row in rows],
        "input_ids": [row.input_ids for row in rows],
        "label_spans": [[edge for span in row.label_spans for edge in span] for row in rows],
        "labels": [row.labels() for row in rows],
    }
    buffer = io.BytesIO()
    pl.DataFrame(columns, schema=_schema()).write_parquet(buffer, compression="zstd", statistics=False)
    with AtomicFile(path) as out:
        out.write(buffer.getvalue())
    return out


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


def _no_corpus(path: Path, why: str) -> KilnError:
    message = f"{printable(path)} is no admitted corpus: {printable(why)}"
    return KilnError("KLN206", message, hint="run `kiln admit` again")
