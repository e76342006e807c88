"""Scored rows on disk: what is written is read, by number and in order, and damage is named."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import msgspec
import polars as pl
import pytest
from kiln_stages.distilling.rows import (
    COLUMNS,
    ScoredCorpusDigest,
    ScoredRow,
    ScoredRows,
    ScoredWriter,
    pack,
    row_identity,
    write_scored,
)

from kiln_cli.errors import KilnError


def scored(index: int, targets: int = 3, top_k: int = 16) -> ScoredRow:
    ids = [[(number * 7 + at + index) % 50 for at in range(top_k)] for number in range(targets)]
    scores = [[-0.1 * (at + 1) - number for at in range(top_k)] for number in range(targets)]
    bare = ScoredRow(
        row_index=index,
        line=index + 1,
        row_sha256="",
        input_ids=list(range(index, index + targets + 4)),
        action_targets=list(range(2, targets + 2)),
        teacher_token_ids=ids,
        teacher_logprobs=pack_scores(scores),
        observation_targets=[1],
        observation_tokens=2,
    )
    return msgspec.structs.replace(bare, row_sha256=row_identity(pack(bare)))


def pack_scores(scores: list[list[float]]) -> list[list[float]]:
    """The nearest float32 of each."""
    return [[struct.unpack("<f", struct.pack("<f", score))[0] for score in line] for line in scores]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [scored(index, targets=1 + index % 5) for index in range(1, 101)]
    path = tmp_path / "corpus.parquet"
    write_scored(path, rows)
    found = ScoredRows(path)
    assert len(found) == 100
    assert list(found) == rows
    assert [found[99], found[0], found[-1], found[40]] == [rows[99], rows[0], rows[99], rows[40]]
    assert found[30:35] == rows[30:35]
    with pytest.raises(IndexError):
        found[100]
    assert pl.read_parquet(path).columns == list(COLUMNS)


def test_the_bytes_do_not_depend_on_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [scored(index) for index in range(1, 80)]
    whole = write_scored(tmp_path / "whole.parquet", rows)
    monkeypatch.setattr(ScoredWriter, "part_bytes", 1000)
    cut = write_scored(tmp_path / "cut.parquet", rows)
    assert whole.sha256 == cut.sha256


def test_identity_is_what_the_page_says() -> None:
    row = scored(5, targets=2)
    numbers = [
        struct.pack(f"<{len(row.input_ids)}i", *row.input_ids),
        struct.pack("<2i", *row.action_targets),
        struct.pack("<32i", *(number for ids in row.teacher_token_ids for number in ids)),
        struct.pack("<32f", *(number for scores in row.teacher_logprobs for number in scores)),
        struct.pack("<1i", *row.observation_targets),
    ]
    data = b"kiln-cli.scored-row.v1\0" + b"".join(len(part).to_bytes(8, "big") + part for part in numbers)
    expected = "sha256:" + hashlib.sha256(data + (2).to_bytes(8, "big")).hexdigest()
    assert row.row_sha256 == expected
    digest = ScoredCorpusDigest()
    digest.update(expected)
    whole = b"kiln-cli.scored-corpus.v1\0" + (71).to_bytes(8, "big") + expected.encode()
    assert digest.text() == "sha256:" + hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("observation_tokens", 3, "its numbers give"),
        ("action_targets", [2, 4, 3], "ascending"),
        ("action_targets", [0, 2, 3], "ascending"),
        ("action_targets", [2, 3, 7], "ascending"),
        ("action_targets", [2, 3], "2 targets, 3 lists"),
        ("observation_targets", [9], "ascending"),
        ("teacher_token_ids", [[1], [2, 3], [4]], "candidates"),
    ],
)
def test_a_row_that_contradicts_itself_is_no_row(tmp_path: Path, field: str, value: object, told: str) -> None:
    path = tmp_path / "corpus.parquet"
    write_scored(path, [scored(1)])
    columns = pl.read_parquet(path)
    changed = pl.DataFrame({**columns.to_dict(as_series=False), field: [value]}, schema=columns.schema)
    changed.write_parquet(path)
    with pytest.raises(KilnError) as caught:
        list(ScoredRows(path))
    assert caught.value.code == "KLN206"
    assert told in caught.value.message


def test_another_file_is_no_scored_corpus(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    pl.DataFrame({"row_index": [1]}).write_parquet(path)
    with pytest.raises(KilnError, match="is no scored corpus"):
        ScoredRows(path)
    path.write_bytes(b"nothing")
    with pytest.raises(KilnError, match="is no scored corpus"):
        ScoredRows(path)
    with pytest.raises(KilnError) as caught:
        ScoredRows(tmp_path / "missing.parquet")
    assert caught.value.code == "KLN204"


def test_no_targets_are_kept_as_no_targets(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(scored(1), action_targets=[], teacher_token_ids=[], teacher_logprobs=[])
    row = msgspec.structs.replace(bare, row_sha256=row_identity(pack(bare)))
    path = tmp_path / "corpus.parquet"
    write_scored(path, [row])
    assert list(ScoredRows(path)) == [row]
