"""``kiln validate`` of receipts and checkpoints: form and self-consistency, with no run around them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import RUN, Kiln

from kiln_cli.manifests import document

CHECKPOINT = "tiny-checkpoint-step-00000005.kiln-checkpoint"


@pytest.fixture
def alone(finished: Path, tmp_path: Path) -> Path:
    """A train receipt, an ingestion receipt and a checkpoint, and nothing else."""
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(finished / RUN / "train_receipt.json", folder)
    shutil.copy(finished / RUN / "admit" / "sft_ingestion.json", folder)
    shutil.copytree(finished / RUN / "train" / CHECKPOINT, folder / CHECKPOINT)
    return folder


def validate(kiln: Kiln, *paths: Path | str) -> tuple[int, list[dict[str, Any]]]:
    done = kiln("validate", *paths, "--json")
    return done.code, json.loads(done.out)["files"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train_receipt.json", "receipt"),
        ("sft_ingestion.json", "ingestion"),
        (CHECKPOINT, "checkpoint"),
        (f"{CHECKPOINT}/checkpoint_manifest.json", "checkpoint"),
    ],
)
def test_each_kind_is_recognised_and_sound(alone: Path, kiln: Kiln, name: str, kind: str) -> None:
    code, (report,) = validate(kiln, alone / name)
    assert (code, report["kind"], report["faults"], report["notes"]) == (0, kind, 0, 0)
    assert report["rows"] >= 1
    assert validate(kiln, alone / name, "--kind", kind)[0] == 0


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.chmod(0o644)
    path.write_bytes(document(value))


def test_every_contradiction_of_a_receipt_is_listed(alone: Path, kiln: Kiln) -> None:
    path = alone / "train_receipt.json"
    _change(path, lambda receipt: receipt.update(steps=receipt["steps"] + 1, status="failed"))
    code, (report,) = validate(kiln, path)
    assert code == 1
    reasons = [finding["reason"] for finding in report["findings"]]
    assert "receipt_sha256 covers the receipt" in reasons
    assert "name, time and failure fields agree with the status" in reasons


def test_every_contradiction_of_an_ingestion_receipt_is_listed(alone: Path, kiln: Kiln) -> None:
    path = alone / "sft_ingestion.json"
    _change(path, lambda receipt: receipt.update(rows_read=99, kept_corpus_sha256="none"))
    code, (report,) = validate(kiln, path)
    details = " ".join(finding["detail"] for finding in report["findings"])
    assert (code, report["faults"]) == (1, 3)  # the aggregate differs, too
    assert "rows_read is 99" in details and "kept_corpus_sha256 is no hash" in details


@pytest.mark.parametrize("name", ["adapter.safetensors", "sft_loop_state.json", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_found(alone: Path, kiln: Kiln, name: str) -> None:
    path = alone / CHECKPOINT / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    code, (report,) = validate(kiln, alone / CHECKPOINT)
    assert (code, report["kind"], report["faults"]) == (1, "checkpoint", 1)
    assert report["findings"][0]["reason"] == "KLN215"


def test_damage_of_a_run_reaches_its_report(finished: Path, copy_of: Callable[..., Path], kiln: Kiln) -> None:
    run = copy_of(finished, own_model=True) / RUN
    assert validate(kiln, run)[0] == 0
    path = run / "train" / CHECKPOINT / "optimizer.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    _change(run / "train_receipt.json", lambda receipt: receipt.update(adapter_name="other"))
    code, (report,) = validate(kiln, run)
    assert code == 1
    assert {"KLN215", "adapter and model are named as in the config"} <= {f["reason"] for f in report["findings"]}
