"""The request of the seed page through the commands: admitted, trained and verified, with the receipt that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests_support import shared_path
from tiny_model import Kiln

GOOD = '{"messages":[{"role":"user","content":"What is the weather?"},{"role":"assistant","content":"%s"}]}'
ROWS = "\n".join([GOOD % "city 17", '{"messages":[]}', GOOD % "city number 17"]) + "\n"


def seed_page() -> tuple[dict[str, Any], dict[str, Any]]:
    """The request and the receipt of the page, in its own bytes."""
    text = shared_path("seeds/sft-ingestion.txt").read_text()
    request = re.search(r"The API form is:\n\n(\{.*?\n\})\n", text, re.DOTALL)
    receipt = re.search(r"data\.sft_ingestion:\n\n(\{.*?\n\})\n", text, re.DOTALL)
    assert request is not None
    assert receipt is not None
    return json.loads(request[1]), json.loads(receipt[1])


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    """The page's request as it stands, but for the place of the rows."""
    request, _ = seed_page()
    assert request["dataset_path"] == "/data/corrections.jsonl"
    rows = tmp_path / "data" / "corrections.jsonl"
    rows.parent.mkdir()
    rows.write_text(ROWS)
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**request, "dataset_path": str(rows)}, indent=2))
    return path


def test_the_request_gives_the_receipt_of_the_page(
    request_file: Path, tmp_path: Path, tiny_model: Path, kiln: Kiln
) -> None:
    done = kiln("admit", request_file, "--model", tiny_model, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    _, shown = seed_page()
    found = json.loads((tmp_path / "run" / "admit" / "sft_ingestion.json").read_bytes())
    assert found.keys() == shown.keys()
    assert found["source_locator"] == str(tmp_path / "data" / "corrections.jsonl")
    for name in ("schema", "source", "invalid_row_policy", "rows_read", "rows_kept", "rows_rejected"):
        assert found[name] == shown[name], name
    assert len(found["kept_row_hashes"]) == len(shown["kept_row_hashes"])
    (rejected,), (expected,) = found["rejected_rows"], shown["rejected_rows"]
    assert rejected.keys() == expected.keys()
    assert (rejected["row_index"], rejected["reason"]) == (expected["row_index"], expected["reason"])


def test_the_request_is_trained_and_verified(request_file: Path, tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    run = tmp_path / "run"
    settings = ["--set", f"model.path={tiny_model}", "--set", "train.epochs=2"]
    for stage in ("admit", "train"):
        done = kiln(stage, request_file, "--out", run, *settings)
        assert done.code == 0, done.err
    receipt = json.loads((run / "train_receipt.json").read_bytes())
    assert receipt["adapter_name"] == "support-bot"
    data, ingestion = receipt["data"], receipt["data"]["sft_ingestion"]
    assert data["examples_read"] == ingestion["rows_read"] == 3
    assert data["examples_filtered"] == ingestion["rows_rejected"] == 1
    assert data["examples_trained"] == ingestion["rows_kept"] * 2 == 4
    assert kiln("verify-receipt", run).code == 0
    # The copy in the run stands for the request and all that was set.
    again = kiln("train", run / "config.resolved.toml", "--out", run)
    assert again.code == 0, again.err
    assert "unchanged" in again.err


def test_a_request_names_no_model(request_file: Path, tmp_path: Path, kiln: Kiln) -> None:
    done = kiln("admit", request_file, "--out", tmp_path / "run")
    assert done.code == 2
    assert "[model] path is missing" in done.err


def test_a_supplied_ingestion_changes_nothing(request_file: Path, tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    """Nothing that a caller supplies can stand for evidence: in the request, its settings or its rows."""
    request = json.loads(request_file.read_text())
    _, forged = seed_page()
    request_file.write_text(
        json.dumps({**request, "ingestion": forged, "config": {**request["config"], "ingestion": 1}})
    )
    rows = Path(request["dataset_path"])
    rows.write_text(ROWS.replace('{"messages"', '{"ingestion":{"rows_kept":9},"messages"'))
    first = kiln("admit", request_file, "--model", tiny_model, "--out", tmp_path / "forged")
    assert first.code == 0, first.err
    assert "config.ingestion is ignored" in first.err
    assert "ignored field ingestion: 3 rows" in first.err
    request_file.write_text(json.dumps(request))
    rows.write_text(ROWS)
    kiln("admit", request_file, "--model", tiny_model, "--out", tmp_path / "plain")
    receipts = [(tmp_path / run / "admit" / "sft_ingestion.json").read_bytes() for run in ("forged", "plain")]
    assert receipts[0] == receipts[1]


def test_rows_of_a_request_are_kept_in_the_run(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    """``examples`` cannot be read again, so that the run holds them; train and verify read them there."""
    request, run = tmp_path / "request.json", tmp_path / "run"
    rows = [json.loads(line) for line in ROWS.splitlines()]
    config = {"output_name": "inline-bot", "invalid_row_policy": "skip", "epochs": 1}
    request.write_text(json.dumps({"examples": rows, "config": config}))
    for stage in ("admit", "train"):
        done = kiln(stage, request, "--set", f"model.path={tiny_model}", "--out", run)
        assert done.code == 0, done.err
    assert [json.loads(line) for line in (run / "admit" / "rows.jsonl").read_text().splitlines()] == rows
    receipt = json.loads((run / "train_receipt.json").read_bytes())
    assert receipt["data"]["sft_ingestion"]["source"] == "inline"
    assert "source_locator" not in receipt["data"]["sft_ingestion"]
    assert kiln("verify-receipt", run).code == 0
    assert kiln("train", run / "config.resolved.toml", "--out", run).code == 0


def test_validate_knows_a_request(request_file: Path, kiln: Kiln) -> None:
    done = kiln("validate", request_file)
    assert done.code == 0, done.err
    assert "config" in done.out + done.err
    request_file.write_text(request_file.read_text().replace('"skip"', '"Skip"'))
    done = kiln("validate", request_file)
    assert done.code == 1
    assert "config.invalid_row_policy = 'Skip': expected one of: fail, skip" in done.out + done.err
