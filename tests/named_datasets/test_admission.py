"""A named data set through admit and train: the receipt says which one, a changed or empty one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import chat, keys_of, kiln, lines_of, write_rows
from kiln_stages.datasets.partition import SplitConfig, partition


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def admit(registry: Path, model: Path, out: Path, *more: object, name: str = "trips") -> Any:
    return kiln("admit", "--dataset", name, "--registry", registry, "--model", model, "--out", out, *more)


def test_a_split_is_admitted_with_its_identities(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = admit(registry, tiny_model, tmp_path / "run")
    assert done.code == 0, done.err
    assert "rows: data set trips, split train, in the shape messages" in done.err
    entry = registry / "datasets" / "trips"
    identity = read(entry / "identity.json")
    ingestion = read(tmp_path / "run" / "admit" / "sft_ingestion.json")
    assert (ingestion["source"], ingestion["source_locator"]) == ("named_dataset", "trips:train")
    assert ingestion["rows_kept"] == identity["split_rows"]["train"] == len(lines_of(entry / "train.jsonl"))
    assert read(tmp_path / "run" / "admit_manifest.json")["details"]["rows"]["provenance"] == {
        "dataset": "trips",
        "split": "train",
        "dataset_corpus_sha256": identity["corpus_sha256"],
        "split_manifest_sha256": identity["split_manifest_sha256"],
    }
    # The rows are the run's own: what was admitted can be admitted again.
    assert (tmp_path / "run" / "admit" / "rows.jsonl").read_bytes() == (entry / "train.jsonl").read_bytes()


def test_the_splits_are_admitted_apart_and_hold_all_rows(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    hashes: list[str] = []
    for split in ("train", "validation", "holdout"):
        done = admit(registry, tiny_model, tmp_path / split, "--split", split)
        assert done.code == 0, done.err
        hashes += read(tmp_path / split / "admit" / "sft_ingestion.json")["kept_row_hashes"]
    assert len(hashes) == len(set(hashes)) == 12


def test_rows_by_name_and_rows_by_file_are_the_same(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    file = registry / "datasets" / "trips" / "train.jsonl"
    assert admit(registry, tiny_model, tmp_path / "named").code == 0
    assert kiln("admit", "--file", file, "--model", tiny_model, "--out", tmp_path / "file").code == 0
    named, by_file = (read(tmp_path / name / "admit" / "sft_ingestion.json") for name in ("named", "file"))
    for key in ("kept_row_hashes", "kept_corpus_sha256", "rows_read"):
        assert named[key] == by_file[key]
    details = [read(tmp_path / name / "admit_manifest.json")["details"] for name in ("named", "file")]
    assert details[0]["admitted_sha256"] == details[1]["admitted_sha256"]


def test_the_train_receipt_has_the_six_identities(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    """And nothing of it can be changed unseen."""
    run = tmp_path / "run"
    assert admit(registry, tiny_model, run).code == 0
    done = kiln("train", run / "config.resolved.toml", "--out", run, "--set", "train.epochs=1")
    assert done.code == 0, done.err
    data, ingestion = read(run / "train_receipt.json")["training_data"], read(run / "admit" / "sft_ingestion.json")
    identity = read(registry / "datasets" / "trips" / "identity.json")
    assert data == {
        "source": "named_dataset",
        "path": "trips:train",
        "sha256": ingestion["kept_corpus_sha256"],
        "dataset": "trips",
        "split": "train",
        "dataset_corpus_sha256": identity["corpus_sha256"],
        "split_manifest_sha256": identity["split_manifest_sha256"],
        "admitted_corpus_sha256": ingestion["kept_corpus_sha256"],
        "rows": ingestion["rows_kept"],
    }
    assert data["dataset_corpus_sha256"] != data["admitted_corpus_sha256"]
    card = (run / "train" / "adapter" / "README.md").read_text()
    assert f"| named data set | `trips`, split `train` |\n| its split | {identity['split_manifest_sha256']} |" in card
    checked = kiln("verify-receipt", run, "--deep")
    assert checked.code == 0, checked.out
    assert "ok    training_data is the data set of admit_manifest.json" in checked.out
    # What was trained stands by itself: the data set may grow or go.
    shutil.rmtree(registry)
    assert kiln("verify-receipt", run, "--deep").code == 0


@pytest.mark.parametrize(
    "key, value",
    [
        ("dataset", "other"),
        ("split", "holdout"),
        ("dataset_corpus_sha256", "sha256:" + "0" * 64),
        ("split_manifest_sha256", "sha256:" + "0" * 64),
        ("split_manifest_sha256", "none"),
        ("admitted_corpus_sha256", "sha256:" + "0" * 64),
        ("rows", 3),
        ("note", "more"),
    ],
)
def test_a_receipt_of_another_data_set_is_seen(trained: Path, tmp_path: Path, key: str, value: object) -> None:
    from kiln_cli.manifests import document, read_receipt

    run = Path(shutil.copytree(trained, tmp_path / "run"))
    receipt = read_receipt(run / "train_receipt.json")
    receipt.training_data[key] = value
    receipt.seal()
    (run / "train_receipt.json").write_bytes(document(receipt))
    done = kiln("verify-receipt", run)
    assert done.code == 1
    assert f"training_data.{key}" in done.out


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    rows = write_rows(folder / "rows.jsonl", [chat(f"city {number}", "ok") for number in range(4)])
    run, registry = folder / "run", folder / ".kiln"
    assert kiln("dataset", "add", "small", rows, "--registry", registry).code == 0
    assert admit(registry, tiny_model, run, name="small").code == 0
    done = kiln("train", run / "config.resolved.toml", "--out", run, "--set", "train.epochs=1")
    assert done.code == 0, done.err
    return run


# --- refusals


def test_an_empty_split_is_an_error_and_no_other_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b"), chat("c", "d")])
    assert kiln("dataset", "add", "two", rows, "--registry", tmp_path / ".kiln").code == 0
    done = admit(tmp_path / ".kiln", tiny_model, tmp_path / "run", "--split", "validation", name="two")
    assert done.code == 1
    assert "KLN110: split validation of data set 'two' is empty (rows: train 1, validation 0, holdout 1)" in done.err
    assert not (tmp_path / "run" / "admit_manifest.json").exists()


@pytest.mark.parametrize(
    "file", ["data.jsonl", "manifest.json", "train.jsonl", "validation.jsonl", "holdout.jsonl", "split.json"]
)
def test_a_data_set_that_changed_is_refused(registry: Path, tiny_model: Path, tmp_path: Path, file: str) -> None:
    path = registry / "datasets" / "trips" / file
    path.write_bytes(path.read_bytes() + b"\n")
    done = admit(registry, tiny_model, tmp_path / "run")
    assert done.code == 2
    assert "KLN207" in done.err
    assert file in done.err
    assert f"kiln dataset split trips --registry {registry}" in done.err
    path.unlink()
    assert "KLN206" in admit(registry, tiny_model, tmp_path / "run").err


def test_an_unknown_data_set_names_the_near_one(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = admit(registry, tiny_model, tmp_path / "run", name="tripz")
    assert done.code == 2
    assert "KLN212" in done.err
    assert "did you mean 'trips'?" in done.err


@pytest.mark.parametrize(
    "more, code",
    [
        (["--file", "rows.jsonl"], "KLN201"),
        (["--row", "{}"], "KLN201"),
        (["--source", "messages"], "KLN203"),
        (["--split", "test"], "KLN203"),
    ],
)
def test_options_that_exclude_each_other(
    registry: Path, tiny_model: Path, tmp_path: Path, more: list[str], code: str
) -> None:
    done = admit(registry, tiny_model, tmp_path / "run", *more)
    assert done.code == 2
    assert code in done.err


def test_a_split_without_a_data_set_is_no_option(tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    done = kiln("admit", "--file", rows, "--split", "train", "--model", tiny_model, "--out", tmp_path / "run")
    assert (done.code, "--split is for a named data set" in done.err) == (2, True)


# --- forms


def test_a_config_names_a_data_set_beside_it(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "kiln.toml"
    config.write_text(
        f'schema = "kiln.config.v1"\n[model]\npath = "{tiny_model}"\n'
        '[admit]\ndataset = "trips"\ndataset_split = "holdout"\n[train]\nepochs = 1\n'
    )
    run = tmp_path / "run"
    for stage in ("admit", "train"):
        done = kiln(stage, config, "--out", run)
        assert done.code == 0, done.err
    assert read(run / "train_receipt.json")["training_data"]["split"] == "holdout"
    assert kiln("verify-receipt", run).code == 0


def test_the_command_line_comes_before_the_file_of_a_config(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    config = tmp_path / "kiln.toml"
    config.write_text(f'schema = "kiln.config.v1"\n[model]\npath = "{tiny_model}"\n[admit]\nfile = "rows.jsonl"\n')
    done = kiln("admit", config, "--dataset", "trips", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert read(tmp_path / "run" / "admit" / "sft_ingestion.json")["source"] == "named_dataset"
    config.write_text(f'schema = "kiln.config.v1"\n[model]\npath = "{tiny_model}"\n[admit]\ndataset = "trips"\n')
    done = kiln("admit", config, "--file", rows, "--out", tmp_path / "file")
    assert done.code == 0, done.err
    assert read(tmp_path / "file" / "admit" / "sft_ingestion.json")["source"] == "dataset_path"


def test_a_request_names_a_data_set(registry: Path, tiny_model: Path, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({"dataset": "trips", "dataset_split": "holdout", "config": {"output_name": "a", "epochs": 1}})
    )
    run, settings = tmp_path / "run", ["--set", f"model.path={tiny_model}"]
    for stage in ("admit", "train"):
        done = kiln(stage, request, "--out", run, *settings)
        assert done.code == 0, done.err
    assert read(run / "train_receipt.json")["training_data"]["path"] == "trips:holdout"
    assert kiln("verify-receipt", run).code == 0


def test_rows_of_a_map_are_read_by_it_again(tiny_model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"ask": f"q {number}", "say": "x"} for number in range(4)])
    registry, run = tmp_path / ".kiln", tmp_path / "run"
    done = kiln("dataset", "add", "own", rows, "--map", "user=/ask", "--map", "assistant=/say", "--registry", registry)
    assert done.code == 0, done.err
    assert admit(registry, tiny_model, run, name="own").code == 0
    done = kiln("train", run / "config.resolved.toml", "--out", run, "--set", "train.epochs=1")
    assert done.code == 0, done.err
    assert kiln("verify-receipt", run, "--deep").code == 0


# --- rows that a file of another kind could begin with


@pytest.mark.parametrize("first", [b"[]", b'[{"messages":[]}]', b"\xef\xbb\xbf{}", b"{", b"\x1f\x8b"])
def test_malformed_rows_meet_the_parser_of_admission(tiny_model: Path, tmp_path: Path, first: bytes) -> None:
    """Wherever they stand: at the beginning of a file they would say how it is packed, or be stepped over."""
    rows = [*(chat(f"city {number}", "ok") for number in range(3)), chat("q", "x")]
    rows.insert(1, first)  # type: ignore[arg-type]
    registry, run = tmp_path / ".kiln", tmp_path / "run"
    file = write_rows(tmp_path / "rows.jsonl", rows)
    seed = next(str(seed) for seed in range(10_000) if begins_train(rows, str(seed)))
    assert kiln("dataset", "add", "odd", file, "--seed", seed, "--registry", registry).code == 0
    entry = registry / "datasets" / "odd"
    assert lines_of(entry / "data.jsonl")[1] == lines_of(entry / "train.jsonl")[0] == first
    skip = ("--invalid-row-policy", "skip")
    done = admit(registry, tiny_model, run, *skip, name="odd")
    assert done.code == 0, done.err
    assert kiln("admit", "--file", file, "--model", tiny_model, "--out", tmp_path / "file", *skip).code == 0
    (named,), (expected,) = (
        read(out / "admit" / "sft_ingestion.json")["rejected_rows"] for out in (run, tmp_path / "file")
    )
    assert (named["row_sha256"], named["reason"]) == (expected["row_sha256"], expected["reason"])
    done = kiln("train", run / "config.resolved.toml", "--out", run, "--set", "train.epochs=1")
    assert done.code == 0, done.err


def begins_train(rows: list[Any], seed: str) -> bool:
    """Whether the second row is the first one of train, and not alone there."""
    keys = keys_of(rows)
    found = {row: each.split for each in partition(keys, SplitConfig(seed=seed)) for row in each.rows}
    return found[0] != "train" and found[1] == "train" and found[2] == "train"
