"""What the commands print, for people and as JSON."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import chat, kiln, line, lines_of, write_rows
from kiln_stages.datasets.entry import read_entry


def add(tmp_path: Path, rows: list[Any], *more: object) -> Any:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    return kiln("dataset", "add", "d", file, "--registry", tmp_path / ".kiln", *more)


def test_report_l2_split_by_document_and_not_by_chunk(tmp_path: Path) -> None:
    """herniqeu/extract0#1: no document in two splits, sizes as asked and as got, a rule for rows without the field."""
    rows = [chat(f"chunk {number} of d{doc}", "x", doc=f"d{doc}") for doc in range(1, 5) for number in range(3)]
    options = ("--group-by", "/doc", "--train-percent", "50", "--validation-percent", "25")
    done = add(tmp_path, rows, *options)
    assert done.code == 0, done.err
    found = splits_by_doc(tmp_path, rows)
    assert len(found) == 4
    assert all(len(splits) == 1 for splits in found.values())
    assert set.union(*found.values()) == {"train", "validation", "holdout"}
    table = [
        line.split() for line in done.err.split("\n") if line.strip().startswith(("train ", "validation ", "holdout "))
    ]
    assert [line[:3] for line in table] == [["train", "50", "6"], ["validation", "25", "3"], ["holdout", "25", "3"]]
    got = {line[0]: int(line[3]) for line in table}
    assert sum(got.values()) == 12
    assert all(size % 3 == 0 for size in got.values())
    assert "grouped by /doc" in done.err
    # A row without the field is grouped with none by it, and counted.
    bare = [chat("one more", "x"), chat("another", "x", doc=None), chat("a third", "x", doc=" ")]
    done = add(tmp_path, bare, "--append")
    assert "without a value at /doc, which groups them with none: 3\n" in done.err
    assert read_entry(tmp_path / ".kiln", "d").split.counts["components"] == 7
    # Chunks that come later go where their document is.
    late = chat("a late chunk", "x", doc="d2")
    assert add(tmp_path, [late], "--append").code == 0
    assert all(len(splits) == 1 for splits in splits_by_doc(tmp_path, [*rows, *bare, late]).values())


def splits_by_doc(tmp_path: Path, rows: list[Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row, entry in zip(rows, read_entry(tmp_path / ".kiln", "d").split.rows, strict=True):
        if (row.get("doc") or "").strip():
            found.setdefault(row["doc"], set()).add(entry.split)
    return found


def test_grouping_is_part_of_the_identity_and_can_be_ended(tmp_path: Path) -> None:
    rows = [chat(f"q{number}", "x", doc=number % 2) for number in range(8)]
    assert add(tmp_path, rows).code == 0
    plain = read_entry(tmp_path / ".kiln", "d").identity
    registry = ("--registry", tmp_path / ".kiln")
    done = kiln("dataset", "split", "d", "--group-by", "/doc", *registry)
    assert "settings: group_by none -> /doc" in done.err
    grouped = read_entry(tmp_path / ".kiln", "d")
    assert grouped.split.counts["components"] == 2
    assert grouped.identity.corpus_sha256 == plain.corpus_sha256
    assert grouped.identity.split_manifest_sha256 != plain.split_manifest_sha256
    assert kiln("dataset", "split", "d", "--group-by", "", *registry).code == 0
    assert read_entry(tmp_path / ".kiln", "d").identity == plain


def test_a_change_as_json(tmp_path: Path) -> None:
    done = add(tmp_path, [chat("a", "b", group_id="g"), chat("c", "d"), b"broken"], "--json")
    change = json.loads(done.out)
    assert change["schema"] == "kiln-cli.dataset-change.v1"
    assert (change["added"], change["repeated"], change["taken_in"], change["moves"]) == (3, 0, 0, [])
    assert change["identity"]["malformed_rows"] == 1
    assert sum(size["rows"] for size in change["sizes"].values()) == 3
    assert change["settings"]["source"] == "messages"
    done = kiln("dataset", "split", "d", "--seed", "9", "--json", "--registry", tmp_path / ".kiln")
    assert {move["reason"] for move in json.loads(done.out)["moves"]} <= {"settings"}


def test_list_and_show(tmp_path: Path) -> None:
    registry = ("--registry", tmp_path / ".kiln")
    done = kiln("dataset", "list", *registry)
    assert (done.code, done.out) == (0, "")
    assert "holds no data set" in done.err
    assert add(tmp_path, [chat(f"q{number}", "x") for number in range(5)]).code == 0
    done = kiln("dataset", "list", *registry)
    assert done.out.split("\n")[1].split() == ["d", "5", "3", "1", "1", "whole"]
    assert json.loads(kiln("dataset", "list", "--json", *registry).out)["datasets"][0]["name"] == "d"
    shown = kiln("dataset", "show", "d", *registry).out
    identity = read_entry(tmp_path / ".kiln", "d").identity
    for text in (identity.corpus_sha256, identity.normalized_corpus_sha256, identity.split_manifest_sha256, "seed 0"):
        assert text in shown
    assert json.loads(kiln("dataset", "show", "d", "--json", *registry).out)["sizes"]["train"]["rows"] == 3
    (tmp_path / ".kiln" / "datasets" / "d" / "train.jsonl").write_bytes(b"")
    assert "changed" in kiln("dataset", "list", *registry).out
    assert kiln("dataset", "show", "d", *registry).code == 2


def test_a_data_set_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    for name in ("a", "b", "c"):
        assert kiln("dataset", "add", name, rows, "--registry", tmp_path / ".kiln").code == 0
    identity = tmp_path / ".kiln" / "datasets" / "b" / "identity.json"
    identity.unlink()
    identity.mkdir()

    whole = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent.name == "c":  # a directory without permissions, to anyone but root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    listed = kiln("dataset", "list", "--registry", tmp_path / ".kiln")
    assert [(*cells.split()[:2], cells.split()[-1]) for cells in listed.out.splitlines()[1:]] == [
        ("a", "1", "whole"),
        ("b", "0", "unreadable"),
        ("c", "0", "unreadable"),
    ]
    assert listed.code == 0


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_stored_is_said(tmp_path: Path, packed: bool) -> None:
    """Nobody who reads data.jsonl can count it any more."""
    text = b"\xef\xbb\xbf" + line(chat("a", "b")) + b"\r\n\r\n \n" + line(chat("c", "d")) + b"\n\n"
    file = tmp_path / "rows.jsonl"
    file.write_bytes(gzip.compress(text) if packed else text)
    done = kiln("dataset", "add", "d", file, "--registry", tmp_path / ".kiln")
    assert (
        "  a byte-order mark at the start of the file is stepped over\n  blank lines: 3, which are no rows\n"
        in done.err
    )
    registry = ("--registry", tmp_path / ".kiln", "--json")
    change = json.loads(kiln("dataset", "add", "e", file, *registry).out)
    assert (change["added"], change["blank_lines"], change["byte_order_mark"]) == (2, 3, True)
    assert lines_of(tmp_path / ".kiln" / "datasets" / "e" / "data.jsonl") == [
        line(chat("a", "b")),
        line(chat("c", "d")),
    ]
    change = json.loads(kiln("dataset", "split", "e", *registry).out)
    assert (change["added"], change["blank_lines"], change["byte_order_mark"]) == (0, 0, False)


def test_a_mark_before_an_array_is_said(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(b"\xef\xbb\xbf[" + line(chat("a", "b")) + b"]")
    done = kiln("dataset", "add", "d", file, "--registry", tmp_path / ".kiln")
    assert "byte-order mark" in done.err and "blank lines" not in done.err


def test_what_is_repeated_and_what_is_broken_is_said(tmp_path: Path) -> None:
    assert add(tmp_path, [chat("a", "b")]).code == 0
    done = add(tmp_path, [chat("a", "b"), b"broken"], "--append")
    assert "in the data set before, and kept beside it in the same split: 1\n" in done.err
    assert "no JSON, and kept as given for admission to refuse: 1\n" in done.err
