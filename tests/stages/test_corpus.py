"""``admit/corpus.parquet``: what is written is read, and a file whose two accounts of the labels differ is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kiln_stages.admitting import corpus as corpus_module
from kiln_stages.admitting.corpus import (
    CONTEXT_LABEL,
    AdmittedRow,
    CorpusWriter,
    _admitted_row,
    packed,
    read_corpus,
    row_whose_labels_differ,
    write_corpus,
)
from kiln_stages.verify_receipt import _read_rows

from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.receipts import FileRef

LIST = pl.List(pl.Int32)
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


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
def test_any_number_of_rows_is_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Parts on disk hold four rows here: none, a part, and whole parts without a rest."""
    monkeypatch.setattr(corpus_module, "PART_ROWS", 4)
    rows = (ROWS * 4)[:count]
    write_corpus(tmp_path / "corpus.parquet", rows)
    assert read_corpus(tmp_path / "corpus.parquet") == rows


@pytest.mark.parametrize("file", ["00000000.arrow", "joined.parquet"])
def test_a_full_disk_is_told_as_one_and_leaves_what_was_there(tmp_path: Path, corpus: Path, file: str) -> None:
    before = corpus.read_bytes()
    with pytest.raises(KilnError, match="No space left on device") as caught, CorpusWriter(corpus) as writer:
        next(tmp_path.glob(".kiln-tmp-*")).joinpath(file).symlink_to("/dev/full")
        writer.write(packed(ROWS[0]))
    assert caught.value.code == "KLN402"
    assert corpus.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [corpus.name]


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


# Those that leave the columns whole: the check that asks many rows at once must see them too.
OF_ONE_ROW = [name for name in DAMAGES if not name.startswith(("a null", "no labels", "labels of", "a span without"))]


@pytest.mark.parametrize("damage", OF_ONE_ROW)
def test_many_rows_at_once_are_asked_the_same(corpus: Path, damage: str) -> None:
    frame = pl.read_parquet(corpus)
    assert row_whose_labels_differ(frame) is None
    place = row_whose_labels_differ(DAMAGES[damage][0](frame))
    assert place == (1 if damage in ("one label too few", "a span beyond the row") else 0)


def test_verify_receipt_refuses_them_too_where_all_digests_agree(corpus: Path) -> None:
    """As a forger would leave it: the file is the one that the manifest names."""

    def read() -> object:
        digest, size = hash_file(corpus)
        ref = FileRef(path=corpus.name, base="run", kind="corpus", sha256=digest, bytes=size, rows=2)
        return _read_rows(corpus.parent, ref, hash_file)

    assert read() == ([row.row_sha256 for row in ROWS], [6, 2], [3, 1])
    DAMAGES["one label too few"][0](pl.read_parquet(corpus)).write_parquet(corpus)
    with pytest.raises(KilnError, match=r"labels of row 2 \(sha256:bbb.* are not those of label_spans") as caught:
        read()
    assert caught.value.code == "KLN206"


@example([1, 2, 3, 1], [0, 2, 1, 3], [1, 2, 3, 1], False)  # spans that overlap, and as many labels as they have tokens
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(-1, 7), min_size=2, max_size=4).filter(lambda edges: len(edges) % 2 == 0),
    st.lists(st.integers(0, 3) | st.just(CONTEXT_LABEL), min_size=1, max_size=6),
    st.booleans(),
)
def test_both_checks_agree_on_any_row(ids: list[int], edges: list[int], labels: list[int], sound: bool) -> None:
    if sound:
        edges, labels = sorted(edges), [CONTEXT_LABEL] * len(ids)
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            labels[max(start, 0) : end] = ids[max(start, 0) : end]
    columns = {"input_ids": ids, "label_spans": edges, "labels": labels}
    try:
        _admitted_row(Path("a"), {"row_index": 1, "line": 1, "example_id": None, "row_sha256": "", **columns})
        expected = None
    except KilnError:
        expected = 0
    frame = pl.DataFrame({name: [value] for name, value in columns.items()}, schema=dict.fromkeys(columns, LIST))
    assert row_whose_labels_differ(frame) == expected


@pytest.mark.parametrize("damage", DAMAGES)
def test_labels_and_label_spans_that_differ_are_refused(corpus: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(pl.read_parquet(corpus)).write_parquet(corpus)
    with pytest.raises(KilnError) as caught:
        read_corpus(corpus)
    assert caught.value.code == "KLN206"
    assert words in caught.value.message
    assert "corpus.parquet" in caught.value.message
