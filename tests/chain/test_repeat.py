"""A stage that is run again: to the same content it changes nothing behind it, and the evidence still fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import RUN, Kiln


@pytest.fixture
def mine(finished: Path, copy_of: Callable[..., Path]) -> Path:
    return copy_of(finished)


def test_manifests_made_again_at_another_time_keep_the_training(mine: Path, kiln: Kiln) -> None:
    run = mine / RUN
    before = json.loads((run / "train_receipt.json").read_bytes())
    for name in ("data_manifest.json", "admit_manifest.json"):
        document = json.loads((run / name).read_bytes())
        (run / name).unlink()
        assert kiln("prepare" if name.startswith("data") else "admit", mine / "kiln.toml", "--out", run).code == 0
        again = json.loads((run / name).read_bytes())
        assert again["content_sha256"] == document["content_sha256"]
    adapter = (run / "train" / "adapter" / "adapter_model.safetensors").stat()
    done = kiln("train", mine / "kiln.toml", "--out", run, "--fresh")
    assert done.code == 0 and "unchanged" in done.err
    assert (run / "train" / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == adapter.st_mtime_ns
    after = json.loads((run / "train_receipt.json").read_bytes())
    assert after["content_sha256"] == before["content_sha256"]
    assert kiln("verify-receipt", run, "--require-all").code == 0


def test_every_stage_again_leaves_every_file_as_it_is(mine: Path, kiln: Kiln) -> None:
    run = mine / RUN
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".kiln.lock"}
    for command in (["prepare"], ["admit"], ["train", "--fresh"]):
        assert kiln(command[0], mine / "kiln.toml", "--out", run, *command[1:]).code == 0
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".kiln.lock"}
    assert after == before
