"""What verify finds: any byte of any file that is not what the rows give, and which row it is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import A, B, C, chat, kiln, write_rows
from kiln_stages.datasets.checking import verify
from kiln_stages.datasets.entry import VOUCHED, Entry, read_entry

from kiln_cli.errors import KilnError
from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.manifests import document

FILES = (
    "data.jsonl",
    "manifest.json",
    "split.json",
    "train.jsonl",
    "validation.jsonl",
    "holdout.jsonl",
    "identity.json",
)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    rows = write_rows(tmp_path / "rows.jsonl", [A, B, C, *(chat(f"q{number}", "x") for number in range(9)), b"broken"])
    assert kiln("dataset", "add", "d", rows, "--registry", tmp_path / ".kiln").code == 0
    return read_entry(tmp_path / ".kiln", "d")


def found(entry: Entry) -> list[tuple[str, str]]:
    return [(each.file, each.detail) for each in verify(entry.directory.parent.parent, "d")]


def rewrite(entry: Entry, name: str, **changes: Any) -> None:
    """Writes a document with other values, in the form that it has."""
    path = entry.directory / name
    value = json.loads(path.read_bytes()) | changes
    path.write_bytes(canonical_json(value) if name == "split.json" else document(value))


def vouch_again(entry: Entry) -> None:
    """Makes identity.json vouch for the files as they are: a forgery that agrees with itself."""
    digests = {name: (entry.directory / name).read_bytes() for name in VOUCHED}
    rewrite(
        entry,
        "identity.json",
        files={name: {"bytes": len(data), "sha256": sha256_hex(data)} for name, data in digests.items()},
        split_manifest_sha256="sha256:" + sha256_hex(digests["split.json"]),
    )


def test_a_sound_data_set(entry: Entry, tmp_path: Path) -> None:
    assert found(entry) == []
    done = kiln("dataset", "verify", "d", "--registry", tmp_path / ".kiln")
    assert (done.code, done.out) == (0, "")
    assert "every file is what data.jsonl and manifest.json give" in done.err


@pytest.mark.parametrize("name", FILES)
def test_any_byte_of_any_file(entry: Entry, name: str) -> None:
    path = entry.directory / name
    whole = path.read_bytes()
    step = max(1, len(whole) // 40)
    for place in range(0, len(whole), step):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert found(entry), f"byte {place} of {name}"
    for cut in (b"", whole[:-1], whole + b" "):
        path.write_bytes(cut)
        assert found(entry)
    path.unlink()
    assert found(entry)
    path.write_bytes(whole)
    assert found(entry) == []


def test_the_row_that_differs_is_named_with_both_values(entry: Entry) -> None:
    rows = json.loads((entry.directory / "split.json").read_bytes())["rows"]
    assert rows[1]["split"] == "validation"
    rows[1]["split"] = "train"
    rewrite(entry, "split.json", rows=rows)
    assert ("split.json", "row 2: split is train, the rows give validation") in found(entry)
    assert [file for file, _ in found(entry)] == ["split.json", "identity.json"]


def test_a_forgery_that_agrees_with_itself_differs_from_the_rows(entry: Entry, tmp_path: Path) -> None:
    rows = json.loads((entry.directory / "split.json").read_bytes())["rows"]
    for row in rows:
        row["split"] = "holdout"
    rewrite(entry, "split.json", rows=rows, counts=entry.split.counts | {"holdout": 13, "train": 0, "validation": 0})
    vouch_again(entry)
    rewrite(entry, "identity.json", split_rows={"holdout": 13, "train": 0, "validation": 0})
    read_entry(tmp_path / ".kiln", "d")  # every digest fits
    details = [detail for file, detail in found(entry) if file == "split.json"]
    assert any(detail.startswith("counts is ") for detail in details)
    assert details[-1].startswith("and ")  # the first few rows are named, and the rest counted
    done = kiln("dataset", "verify", "d", "--registry", tmp_path / ".kiln")
    assert done.code == 1
    assert "KLN103" in done.err
    assert "kiln dataset split d" in done.err
    assert kiln("dataset", "split", "d", "--registry", tmp_path / ".kiln").code == 0
    assert found(entry) == []


def test_verify_as_json(entry: Entry, tmp_path: Path) -> None:
    done = kiln("dataset", "verify", "d", "--registry", tmp_path / ".kiln", "--json")
    assert json.loads(done.out) == {"schema": "kiln-cli.dataset-verdict.v1", "dataset": "d", "differences": []}
    (entry.directory / "train.jsonl").write_bytes(b"")
    done = kiln("dataset", "verify", "d", "--registry", tmp_path / ".kiln", "--json")
    assert done.code == 1
    assert {each["file"] for each in json.loads(done.out)["differences"]} == {"train.jsonl", "identity.json"}


def test_an_identity_that_does_not_fit_is_refused_by_readers(entry: Entry) -> None:
    for name, value in (("rows", 12), ("split_rows", {}), ("corpus_sha256", "sha256:" + "0" * 64)):
        rewrite(entry, "identity.json", **{name: value})
        with pytest.raises(KilnError, match=f"{name} is ") as refused:
            read_entry(entry.directory.parent.parent, "d")
        assert (refused.value.code, "kiln dataset split d" in refused.value.hint) == ("KLN206", True)
        rewrite(entry, "identity.json", **{name: getattr(entry.identity, name)})
    read_entry(entry.directory.parent.parent, "d")


@pytest.mark.parametrize(
    "name, damage, hint",
    [
        ("data.jsonl", None, "`kiln dataset add` the rows again"),
        ("manifest.json", None, "restore manifest.json, or `kiln dataset remove` the data set"),
        ("manifest.json", b"{", "restore manifest.json, or `kiln dataset remove` the data set"),
        ("split.json", b"{", "`kiln dataset split d --registry '{registry}'` makes it anew"),
        ("identity.json", b"{", "`kiln dataset split d --registry '{registry}'` makes it anew"),
        ("train.jsonl", None, "`kiln dataset split d --registry '{registry}'` makes it anew"),
    ],
)
def test_the_way_out_that_is_named_leads_out(entry: Entry, name: str, damage: bytes | None, hint: str) -> None:
    registry = entry.directory.parent.parent
    spaced = registry.rename(registry.with_name("a registry"))
    file = spaced / "datasets" / "d" / name
    file.unlink()
    if damage is not None:
        file.write_bytes(damage)
    told = f"hint: {hint.format(registry=spaced)}"
    verified = kiln("dataset", "verify", "d", "--registry", spaced)
    assert (verified.code, told in verified.err) == (1, True), verified.err
    split = kiln("dataset", "split", "d", "--registry", spaced)
    assert (split.code == 0) == ("dataset split" in hint)
    assert split.code == 0 or told in split.err, split.err
