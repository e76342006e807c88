"""``admit/corpus.parquet``: what is written is read, and a file whose two accounts of the labels differ is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from kiln_stages.admitting.corpus import AdmittedRow, read_corpus, write_corpus

from kiln_cli.errors import KilnError

ROWS = [
    AdmittedRow(
        row_index=1,
        line=1,
        example_id=None,
        row_sha256="sha256:" + "a" * 64,
        input_ids=[5, 6, 7, 8, 9, 10],
        label_spans=[(1, 3), (5, 6)],
    ),
    AdmittedRow(
        row_index=3,
        line=4,
        example_id="raw:3",
        row_sha256="sha256:" + "b" * 64,
        input_ids=[11, 12],
        label_spans=[(0, 2)],
    ),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.parquet", ROWS)
    return tmp_path / "corpus.parquet"


def test_what_is_written_is_read(corpus: Path) -> None:
    assert read_corpus(corpus) == ROWS


def test_labels_are_the_ids_inside_of_the_spans_and_minus_100_elsewhere(corpus: Path) -> None:
    frame = pl.read_parquet(corpus)
    assert frame["labels"].to_list() == [[-100, 6, 7, -100, -100, 10], [11, 12]]
    assert frame["label_spans"].to_list() == [[1, 3, 5, 6], [0, 2]]
    assert frame["input_ids"].dtype == frame["labels"].dtype == pl.List(pl.Int32)


def changed(column: str, values: list[Any]) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return lambda frame: frame.with_columns(pl.Series(column, values, dtype=frame.schema[column]))


DAMAGES: dict[str, tuple[Callable[[pl.DataFrame], pl.DataFrame], str]] = {
    "one label too many": (
        changed("labels", [[-100, 6, 7, 8, -100, 10], [11, 12]]),
        "row 1 (sha256:" + "a" * 64 + "): label 8 at token 3, where label_spans say -100",
    ),
    "one label too few": (
        changed("labels", [[-100, 6, 7, -100, -100, 10], [-100, 12]]),
        "row 3 (sha256:" + "b" * 64 + "): label -100 at token 0, where label_spans say 11",
    ),
    "the label of another token": (changed("labels", [[-100, 6, 6, -100, -100, 10], [11, 12]]), "label 6 at token 2"),
    "labels that end early": (changed("labels", [[-100, 6, 7], [11, 12]]), "3 labels for 6 tokens"),
    "a span moved": (changed("label_spans", [[1, 3, 4, 6], [0, 2]]), "label -100 at token 4, where label_spans say 9"),
    "a span without an end": (changed("label_spans", [[1, 3, 5], [0, 2]]), "are no spans of its tokens"),
    "a span beyond the row": (changed("label_spans", [[1, 3, 5, 6], [0, 3]]), "are no spans of its tokens"),
    "a span before the row": (changed("label_spans", [[-5, -3, 5, 6], [0, 2]]), "are no spans of its tokens"),
    "a null among the labels": (changed("labels", [[-100, 6, 7, None, -100, 10], [11, 12]]), "labels has a null"),
    "no ids": (changed("input_ids", [[], [11, 12]]), "are no spans of its tokens"),
    "a null for labels": (changed("labels", [None, [11, 12]]), "labels has a null"),
    "no labels at all": (lambda frame: frame.drop("labels"), "labels"),
    "labels of another type": (lambda frame: frame.cast({"labels": pl.List(pl.Int64)}), "its columns are"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_labels_and_label_spans_that_differ_are_refused(corpus: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(pl.read_parquet(corpus)).write_parquet(corpus)
    with pytest.raises(KilnError) as caught:
        read_corpus(corpus)
    assert caught.value.code == "KLN206"
    assert words in caught.value.message
    assert "corpus.parquet" in caught.value.message
