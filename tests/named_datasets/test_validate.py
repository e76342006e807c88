"""``kiln validate`` of a data set: its directory and files against the rows, a split.json against itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import A, B, C, chat, kiln, write_rows

from kiln_cli.identity import canonical_json


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [A, B, C, *(chat(f"q{number}", "x") for number in range(5))])
    assert kiln("dataset", "add", "d", rows, "--registry", tmp_path / ".kiln").code == 0
    return tmp_path / ".kiln" / "datasets" / "d"


def validate(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = kiln("validate", *arguments, "--json")
    return done.code, json.loads(done.out)["files"][0]


@pytest.mark.parametrize("name", ["", "split.json", "identity.json", "manifest.json"])
def test_each_form_is_recognised_and_sound(directory: Path, name: str) -> None:
    code, report = validate(directory / name)
    assert (code, report["kind"], report["rows"], report["faults"]) == (0, "dataset", 8, 0)
    assert validate(directory / name, "--kind", "dataset")[0] == 0


def test_a_split_is_held_against_its_own_rows(directory: Path, tmp_path: Path) -> None:
    """With nothing around it: who moves a row must change its hash, or the settings."""
    alone = Path(shutil.copy(directory / "split.json", tmp_path / "any-name.json"))
    assert validate(alone)[0] == 0
    value = json.loads(alone.read_bytes())
    value["rows"][4]["split"] = "validation" if value["rows"][4]["split"] != "validation" else "train"
    alone.write_bytes(canonical_json(value))
    code, report = validate(alone)
    assert code == 1
    assert [each["detail"][:12] for each in report["findings"]] == ["row 5: split"]
    value["config"]["seed"] = "18446744073709551616"
    alone.write_bytes(canonical_json(value))
    assert "config: seed is 18446744073709551616" in validate(alone)[1]["findings"][0]["detail"]
    value["config"]["seed"], value["rows"][0]["content_sha256"] = "0", "sha256:x"
    alone.write_bytes(canonical_json(value))
    assert "sha256:x is no hash" in validate(alone)[1]["findings"][0]["detail"]
    alone.write_bytes(json.dumps(value).encode())
    assert validate(alone, "--kind", "dataset")[1]["findings"][0]["reason"] == "KLN206"


def test_a_directory_is_held_against_its_rows(directory: Path) -> None:
    (directory / "train.jsonl").write_bytes(b"{}\n")
    code, report = validate(directory)
    assert code == 1
    assert {Path(each["file"]).name for each in report["findings"]} == {"train.jsonl", "identity.json"}


@pytest.mark.parametrize(
    "name, rows", [("split.json", 8), ("identity.json", 8), ("data.jsonl", 0), ("manifest.json", 0)]
)
def test_the_rows_are_those_that_were_looked_at(directory: Path, name: str, rows: int) -> None:
    """Not those that a file beside them claims: without it, none would be told of though all were compared."""
    (directory / name).unlink()
    code, report = validate(directory, "--kind", "dataset")
    assert (code, report["rows"], [Path(each["file"]).name for each in report["findings"]]) == (1, rows, [name])


def test_rows_of_a_data_set_are_chat_rows(directory: Path) -> None:
    code, report = validate(directory / "data.jsonl")
    assert (code, report["kind"]) == (0, "sft")
