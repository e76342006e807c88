"""The whole chain on made rows: every row is followed by its hashes, and two runs of it are compared byte for byte."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tiny_model import LONG_ROWS, RUN, Kiln, RawRow, raw_rows, write_project

SPLITS = ("train", "validation", "test")
EPOCHS = 2
# Where two equal runs may differ: keys of documents, all of them times or digests over such.
INFORMATION = {
    "data_manifest.json": ("produced",),
    "admit_manifest.json": ("produced",),
    "train_receipt.json": ("produced", "receipt_sha256", "manifest_sha256"),
    "checkpoint_manifest.json": ("created_at",),
}
PROMPT = (
    'Answer by calling the functions below: reply with one JSON object {"name": ..., "arguments": ...}, '
    "or with an array of such objects for several calls, and nothing else."
)


class Journey:
    """What the artifacts of a finished run say about rows."""

    def __init__(self, run: Path) -> None:
        self.splits = {name: _lines(run / "data" / f"{name}.jsonl") for name in SPLITS}
        self.dropped = _lines(run / "data" / "rejected.jsonl")
        self.summary = json.loads((run / "data" / "drop_summary.json").read_bytes())
        self.refused = _lines(run / "admit" / "rejected.jsonl")
        self.ingestion = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
        self.corpus = pl.read_parquet(run / "admit" / "corpus.parquet")
        self.held_out = pl.read_parquet(run / "admit" / "heldout.parquet")
        self.metrics = _lines(run / "train" / "metrics.jsonl")
        self.receipt = json.loads((run / "train_receipt.json").read_bytes())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def _sha256(domain: str, data: bytes) -> str:
    return "sha256:" + hashlib.sha256(domain.encode() + b"\x00" + data).hexdigest()


def _chat_row_sha256(example: dict[str, Any]) -> str:
    """The hash of a prepared example as a chat row, from the contract alone: tools in a system turn, five fields."""
    (call,) = example["gold_calls"]
    answer = '{"name":' + _canonical(call["name"]).decode() + ',"arguments":' + _canonical(call["arguments"]).decode()
    messages = [
        {"role": "system", "content": PROMPT + "\n" + _canonical(example["tools"]).decode()},
        {"role": "user", "content": example["query"]},
        {"role": "assistant", "content": answer + "}"},
    ]
    return _sha256("kiln.sft-parsed-row.v1", _canonical({"messages": messages}))


@pytest.fixture(scope="module")
def journey(finished: Path) -> Journey:
    return Journey(finished / RUN)


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln_process: Kiln) -> Path:
    """The same project in another directory, each stage in a process of its own."""
    config = write_project(tmp_path_factory.mktemp("second") / "elsewhere" / "project", tiny_model)
    for stage in ("prepare", "admit", "train"):
        done = kiln_process(stage, config, "--out", config.parent / RUN)
        assert done.code == 0, done.err
    return config.parent


@pytest.mark.parametrize("row_index", range(1, len(raw_rows()) + 1))
def test_a_row_is_dropped_once_for_its_reason_or_prepared_once_or_unused(journey: Journey, row_index: int) -> None:
    row = raw_rows()[row_index - 1]
    drops = [drop for drop in journey.dropped if drop["row_index"] == row_index]
    found = [example for split in SPLITS for example in journey.splits[split] if _is(example, row)]
    if row.reason is None:
        assert drops == []
        assert len(found) <= 1, "an unused row is nowhere, a used one in one split"
        return
    (drop,) = drops
    assert drop["reason"] == row.reason
    assert drop["row_sha256"] == _sha256("kiln-cli.raw-tool-call-row.v1", row.line)
    assert drop["example_id"] in (row.example_id, None)
    assert found == []


def _is(example: dict[str, Any], row: RawRow) -> bool:
    return bool(example["example_id"] == row.example_id and example["query"] == row.query)


def test_the_counts_are_those_of_the_rows(journey: Journey) -> None:
    expected = Counter(row.reason for row in raw_rows() if row.reason)
    sixteen, others = journey.summary["languages"]["en"]["counts"], journey.summary["kiln"]["en"]["counts"]
    assert len(sixteen) == 16 and not sixteen.keys() & others.keys()
    assert {name: count for name, count in (sixteen | others).items() if count} == dict(expected)
    drops = journey.summary["kiln"]["en"]
    used = sum(len(journey.splits[split]) for split in SPLITS)
    assert drops["rows_read"] == len(raw_rows())
    assert drops["dropped"] == expected.total() == len(journey.dropped)
    assert drops["kept"] == used
    assert drops["unused"] == len(raw_rows()) - expected.total() - used


def test_a_dropped_or_unused_row_is_in_no_later_file(journey: Journey, finished: Path) -> None:
    prepared = {example["query"] for split in SPLITS for example in journey.splits[split]}
    gone = [row for row in raw_rows() if row.query and row.query not in prepared]
    assert len(gone) > 10
    run = finished / RUN
    later = [run / "train_receipt.json", run / "train" / "metrics.jsonl", run / "admit" / "rejected.jsonl"]
    later += [run / "data" / f"{split}.jsonl" for split in SPLITS]
    texts = {path: path.read_text(encoding="utf-8") for path in later}
    ids = [*journey.corpus["example_id"].to_list(), *journey.held_out["example_id"].to_list()]
    for row in gone:
        for path, text in texts.items():
            assert json.dumps(row.query)[1:-1] not in text, f"row {row.example_id} is in {path.name}"
        assert row.reason == "duplicate_example_id" or row.example_id not in ids


def test_a_training_row_is_trained_once_an_epoch_or_refused_once(journey: Journey) -> None:
    examples = journey.splits["train"]
    kept = journey.corpus["row_sha256"].to_list()
    refused = [row for row in journey.refused if row["split"] == "corpus"]
    trained = Counter(step["row_sha256"] for step in journey.metrics)
    in_receipt = journey.receipt["data"]["sft_ingestion"]
    for place, example in enumerate(examples, start=1):
        digest = _chat_row_sha256(example)
        refusals = [row for row in refused if row["row_sha256"] == digest]
        named = [row for row in in_receipt["rejected_rows"] if row["row_sha256"] == digest]
        if refusals:
            assert [(row["row_index"], row["code"]) for row in refusals] == [(place, "over_length")]
            assert named == [{"reason": "tokenization_error", "row_index": place, "row_sha256": digest}]
            counted = 0
        else:
            assert named == []
            (line,) = journey.corpus.filter(pl.col("row_sha256") == digest).to_dicts()
            assert (line["row_index"], line["example_id"]) == (place, example["example_id"])
            counted = 1
        assert kept.count(digest) == counted
        assert in_receipt["kept_row_hashes"].count(digest) == counted
        assert trained[digest] == counted * EPOCHS
    assert len(kept) + len(refused) == len(examples)
    assert len(journey.metrics) == EPOCHS * len(kept) == journey.receipt["steps"]


def test_each_epoch_trains_each_row_once(journey: Journey) -> None:
    kept = sorted(journey.corpus["row_sha256"].to_list())
    for epoch in range(EPOCHS):
        assert sorted(step["row_sha256"] for step in journey.metrics if step["epoch"] == epoch) == kept


def test_held_out_rows_are_in_the_held_out_file_alone(journey: Journey, finished: Path) -> None:
    refused = {row["row_sha256"] for row in journey.refused if row["split"] == "heldout"}
    digests = [_chat_row_sha256(example) for example in journey.splits["validation"]]
    assert [digest for digest in digests if digest not in refused] == journey.held_out["row_sha256"].to_list()
    tests = [_chat_row_sha256(example) for example in journey.splits["test"]]
    assert not set(digests + tests) & set(journey.corpus["row_sha256"].to_list())
    assert not set(digests + tests) & {step["row_sha256"] for step in journey.metrics}
    everything = b"".join(path.read_bytes() for path in (finished / RUN / "admit").iterdir())
    for digest, example in zip(tests, journey.splits["test"], strict=True):
        assert digest.encode() not in everything
        assert example["example_id"] not in journey.held_out["example_id"].to_list()


def test_all_long_rows_are_accounted_for(journey: Journey) -> None:
    """No truncation: a row above the cap is refused by name, in whichever split it came to lie."""
    long = {row.example_id for row in raw_rows() if row.query and len(row.query) > 300 and row.reason is None}
    assert len(long) == LONG_ROWS
    admitted_splits = [*journey.splits["train"], *journey.splits["validation"]]
    expected = {example["example_id"] for example in admitted_splits} & long
    assert {row["example_id"] for row in journey.refused} == expected
    assert expected, "the seed puts at least one long row where it is admitted"


def test_the_ingestion_is_the_same_in_file_and_receipt(journey: Journey) -> None:
    assert journey.receipt["data"]["sft_ingestion"] == journey.ingestion


def test_the_finished_run_verifies(finished: Path, kiln: Kiln) -> None:
    done = kiln("verify-receipt", finished / RUN, "--require-all")
    assert done.code == 0, done.out + done.err


def test_two_runs_have_the_same_files(finished: Path, again: Path) -> None:
    assert _names(finished / RUN) == _names(again / RUN)


def _names(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} - {".kiln.lock"}


def test_two_runs_have_equal_bytes_but_for_named_information(finished: Path, again: Path) -> None:
    different = []
    for name in sorted(_names(finished / RUN)):
        first, second = ((project / RUN / name).read_bytes() for project in (finished, again))
        keys = INFORMATION.get(Path(name).name)
        if (
            (first != second)
            if keys is None
            else (_without(json.loads(first), keys) != _without(json.loads(second), keys))
        ):
            different.append(name)
    assert different == []


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    """The value without these keys, at any depth."""
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["data_manifest.json", "admit_manifest.json", "train_receipt.json"])
def test_two_runs_have_equal_content_digests(finished: Path, again: Path, name: str) -> None:
    first, second = (json.loads((project / RUN / name).read_bytes()) for project in (finished, again))
    assert first["content_sha256"] == second["content_sha256"]


def test_no_file_names_a_directory_of_the_machine(again: Path) -> None:
    place = str(again.parent).encode()
    for name in _names(again / RUN):
        assert place not in (again / RUN / name).read_bytes(), name


def test_receipts_and_manifests_hold_no_content_of_rows(again: Path) -> None:
    names = ("data_manifest.json", "admit_manifest.json", "train_receipt.json", "admit/sft_ingestion.json")
    for name in names:
        assert b"weather in" not in (again / RUN / name).read_bytes().lower(), name


def test_each_stage_again_leaves_everything_as_it_is(finished: Path, copy_of: Callable[..., Path], kiln: Kiln) -> None:
    project = copy_of(finished)
    before = _state(project / RUN)
    for stage in ("prepare", "admit", "train"):
        done = kiln(stage, project / "kiln.toml", "--out", project / RUN)
        assert done.code == 0, done.err
        assert "unchanged: " in done.err
    assert _state(project / RUN) == before


def _state(run: Path) -> dict[str, tuple[int, bytes]]:
    return {name: ((run / name).stat().st_mtime_ns, (run / name).read_bytes()) for name in _names(run)}
