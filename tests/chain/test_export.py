"""``kiln export --layout hf``: the admitted rows as a data set directory, from evidence that still holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tiny_model import RUN, Kiln

Copy = Callable[..., Path]
FILES = {
    "README.md": None,
    "data/train-00000-of-00001.parquet": "admit/corpus.parquet",
    "data/validation-00000-of-00001.parquet": "admit/heldout.parquet",
    "kiln/admit_manifest.json": "admit_manifest.json",
    "kiln/sft_ingestion.json": "admit/sft_ingestion.json",
    "kiln/heldout_ingestion.json": "admit/heldout_ingestion.json",
}


@pytest.fixture
def run(admitted: Path, copy_of: Copy) -> Path:
    return copy_of(admitted) / RUN


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if not path.is_dir()
    }


def export(kiln: Kiln, run: Path, out: Path, *options: str) -> str:
    done = kiln("export", run, "--layout", "hf", "--out", out, *options)
    assert done.code == 0, done.err
    return done.out + done.err


def test_the_directory_holds_the_card_the_rows_and_the_evidence(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    said = export(kiln, run, tmp_path / "out")
    found = files(tmp_path / "out")
    assert found.keys() == FILES.keys()
    for name, source in FILES.items():
        if source is not None:
            assert found[name] == (run / source).read_bytes(), name
    assert "rows: train 13, validation 4" in said and "written" in said
    assert not [path for path in tmp_path.glob(".*") if "incomplete" in path.name]


def test_the_card_names_the_files_and_tells_of_every_row(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    """The YAML is what ``datasets`` reads; the counts are those of the receipts, which know each row."""
    export(kiln, run, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    front = text.split("---\n")[1]
    for split, file in (("train", "train-00000-of-00001"), ("validation", "validation-00000-of-00001")):
        assert f"  - split: {split}\n    path: data/{file}.parquet\n" in front
    receipt = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    assert f"| rows read | {receipt['rows_read']} |" in text and f"| rows kept | {receipt['rows_kept']} |" in text
    assert "| refused: `over_length` | 3 | 1 |" in text
    manifest = json.loads((run / "admit_manifest.json").read_bytes())
    digests = [receipt["kept_corpus_sha256"], manifest["content_sha256"], manifest["details"]["template"]["sha256"]]
    digests += [*manifest["details"]["admitted_sha256"].values(), *manifest["details"]["tokenizer"].values()]
    digests += [ref["sha256"] for ref in manifest["outputs"] if ref["kind"] in ("corpus", "heldout")]
    assert [each for each in digests if each not in text] == []


def test_every_column_is_explained(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    export(kiln, run, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    schema = pl.read_parquet_schema(tmp_path / "out" / "data" / "train-00000-of-00001.parquet")
    assert [name for name in schema if f"| `{name}` |" not in text] == []


def test_two_exports_have_equal_bytes_and_no_path_of_the_machine(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(kiln, run, tmp_path / name)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert str(tmp_path).encode() not in b"".join(files(tmp_path / "one").values())


def test_a_second_export_into_the_same_directory_changes_nothing(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    export(kiln, run, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert "unchanged" in export(kiln, run, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_the_directory_is_in_the_run_unless_it_is_named(kiln: Kiln, run: Path) -> None:
    assert kiln("export", run, "--layout", "hf").code == 0
    assert files(run / "export-hf").keys() == FILES.keys()


def test_json_names_each_file_with_its_digest(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    done = kiln("export", run, "--layout", "hf", "--out", tmp_path / "out", "--json")
    told = json.loads(done.out)
    assert {file["path"] for file in told["files"]} == FILES.keys()
    assert told["rows"] == {"train": 13, "validation": 4} and told["unchanged"] is False


def test_rows_of_a_file_have_a_train_split_alone(kiln: Kiln, admitted: Path, tmp_path: Path) -> None:
    """An absolute locator stays in the receipt, byte for byte, which is said; the card shows its last part."""
    rows = tmp_path / "somewhere" / "chats.jsonl"
    rows.parent.mkdir()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    done = kiln("admit", "--file", rows, "--model", admitted / "model", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    said = export(kiln, tmp_path / "run", tmp_path / "out")
    assert files(tmp_path / "out").keys() == FILES.keys() - {
        "data/validation-00000-of-00001.parquet",
        "kiln/heldout_ingestion.json",
    }
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| source | `chats.jsonl` |" in text and "somewhere" not in text and "validation" not in text
    assert "somewhere/chats.jsonl" in said and "warning" in said


@pytest.mark.parametrize("name", ["corpus.parquet", "heldout.parquet", "sft_ingestion.json", "heldout_ingestion.json"])
def test_a_file_that_changed_since_admit_is_refused(kiln: Kiln, run: Path, tmp_path: Path, name: str) -> None:
    path = run / "admit" / name
    path.write_bytes(path.read_bytes() + b"\n")
    done = kiln("export", run, "--layout", "hf", "--out", tmp_path / "out")
    assert done.code == 2 and "KLN207" in done.err and name in done.err
    assert not (tmp_path / "out").exists()


def test_a_run_without_admitted_rows_is_refused(kiln: Kiln, project: Path) -> None:
    assert kiln("prepare", project / "kiln.toml", "--out", project / RUN).code == 0
    done = kiln("export", project / RUN, "--layout", "hf")
    assert done.code == 2 and "KLN206" in done.err and "kiln admit" in done.err


def surplus(out: Path) -> str:
    (out / "notes.txt").write_text("mine")
    return "notes.txt"


def lacking(out: Path) -> str:
    (out / "kiln" / "sft_ingestion.json").unlink()
    return "kiln/sft_ingestion.json"


def edited(out: Path) -> str:
    (out / "README.md").write_text("mine")
    return "README.md"


def linked(out: Path) -> str:
    (out / "data" / "more").symlink_to(out.parent, target_is_directory=True)
    return "data/more"


def another_file(out: Path) -> str:
    shutil.rmtree(out)
    out.write_text("mine")
    return "no directory"


@pytest.mark.parametrize("change", [surplus, lacking, edited, linked, another_file])
def test_a_directory_that_holds_anything_else_is_left_alone(
    kiln: Kiln, run: Path, tmp_path: Path, change: Callable[[Path], str]
) -> None:
    out = tmp_path / "out"
    export(kiln, run, out)
    named = change(out)
    before = files(out) if out.is_dir() else {}
    done = kiln("export", run, "--layout", "hf", "--out", out)
    assert done.code == 2 and "KLN216" in done.err and named in done.err
    assert (files(out) if out.is_dir() else {}) == before


def test_an_empty_directory_is_taken(kiln: Kiln, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(kiln, run, tmp_path / "out")
    assert files(tmp_path / "out").keys() == FILES.keys()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--layout", "trl"], "KLN201", "'trl'"),
        (["--layout", ""], "KLN201", "no such layout"),
        ([], "KLN201", "--layout"),
        (["--layout", "hf", "--merged", "x"], "KLN201", "--merged DIR alone"),
        (["--merged", "x", "--out", "y"], "KLN201", "--merged DIR alone"),
    ],
)
def test_what_there_is_not_is_refused_by_name(kiln: Kiln, run: Path, options: list[str], code: str, words: str) -> None:
    done = kiln("export", run, *options)
    assert done.code == 2 and code in done.err and words in done.err


def test_an_exported_run_still_verifies_and_validates(kiln: Kiln, finished: Path, copy_of: Copy) -> None:
    run = copy_of(finished) / RUN
    assert kiln("export", run, "--layout", "hf").code == 0
    assert kiln("verify-receipt", run).code == 0
    assert kiln("validate", run).code == 0
