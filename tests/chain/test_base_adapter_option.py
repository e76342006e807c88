"""``kiln train --base-adapter DIR``: bound like the config's key into checkpoint and receipt."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import RUN, Kiln

ADAPTER = f"{RUN}/train/adapter"


@pytest.fixture
def second(finished: Path, admitted: Path, copy_of: Callable[..., Path]) -> Path:
    """A project with a finished run, and ``second``: the same rows, admitted and not trained."""
    project = copy_of(finished)
    shutil.copytree(admitted / RUN, project / "second")
    return project


def receipt_of(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "train_receipt.json").read_bytes())
    return value


def test_the_path_counts_from_the_working_directory(second: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    (second / "elsewhere").mkdir()
    monkeypatch.chdir(second / "elsewhere")
    done = kiln("train", "../kiln.toml", "--out", "../second", "--base-adapter", f"../{ADAPTER}")
    assert done.code == 0, done.err
    base = receipt_of(second / "second")["adapters"]["base"]
    first = receipt_of(second / RUN)
    assert base == {
        **first["adapters"]["output"],
        "path": ADAPTER,
        "receipt": {"path": f"{RUN}/train_receipt.json", "content_sha256": first["content_sha256"]},
    }
    resolved = tomllib.loads((second / "second" / "config.resolved.toml").read_text())
    assert resolved["train"]["base_adapter"] == ADAPTER
    assert kiln("verify-receipt", second / "second").code == 0


def test_the_option_stands_for_the_key(second: Path, kiln: Kiln) -> None:
    shutil.copytree(second / "second", second / "third")
    option = kiln("train", second / "kiln.toml", "--out", second / "second", "--base-adapter", second / ADAPTER)
    assert option.code == 0, option.err
    key = kiln("train", second / "kiln.toml", "--out", second / "third", "--set", f"train.base_adapter={ADAPTER}")
    assert key.code == 0, key.err
    outputs = [receipt_of(second / name)["adapters"]["output"]["content_sha256"] for name in ("second", "third")]
    assert outputs[0] == outputs[1] != receipt_of(second / RUN)["adapters"]["output"]["content_sha256"]


def test_another_base_adapter_does_not_resume(second: Path, kiln: Kiln) -> None:
    """The checkpoint is bound to the tensors that the training began with, under whatever path they lie."""
    out = second / "second"
    assert kiln("train", second / "kiln.toml", "--out", out, "--base-adapter", second / ADAPTER).code == 0
    whole = receipt_of(out)
    (out / "train_receipt.json").unlink()
    shutil.rmtree(out / "train" / "adapter")
    shutil.copytree(second / ADAPTER, second / "kept")
    # What the training itself wrote is another adapter of the same shapes.
    latest = sorted((out / "train").glob("*.kiln-checkpoint"))[-1]
    shutil.copy(latest / "adapter.safetensors", second / ADAPTER / "adapter_model.safetensors")
    (second / RUN / "train_receipt.json").unlink()
    done = kiln("resume", out)
    assert done.code == 2
    assert "KLN209" in done.err
    assert "bound.base_adapter_sha256" in done.err
    shutil.rmtree(second / ADAPTER)
    shutil.copytree(second / "kept", second / ADAPTER)
    assert kiln("resume", out).code == 0
    assert receipt_of(out)["adapters"]["output"] == whole["adapters"]["output"]


def test_another_training_on_top_is_refused(second: Path, kiln: Kiln) -> None:
    out = second / "second"
    assert kiln("train", second / "kiln.toml", "--out", out, "--base-adapter", second / ADAPTER).code == 0
    done = kiln("train", second / "kiln.toml", "--out", out)
    assert done.code == 2
    assert "KLN208" in done.err


def test_what_does_not_fit_is_named(second: Path, kiln: Kiln) -> None:
    options = ["--base-adapter", second / ADAPTER, "--set", "train.lora_rank=4"]
    done = kiln("train", second / "kiln.toml", "--out", second / "second", *options)
    assert done.code == 2
    assert "KLN217" in done.err
    missing = kiln("train", second / "kiln.toml", "--out", second / "second", "--base-adapter", second / "nothing")
    assert missing.code == 2
    assert "the base adapter is missing" in missing.err


def test_a_dry_run_names_the_option_again(second: Path, kiln: Kiln) -> None:
    done = kiln(
        "train", second / "kiln.toml", "--out", second / "second", "--base-adapter", second / ADAPTER, "--dry-run"
    )
    assert done.code == 0, done.err
    assert f"--base-adapter {second / ADAPTER}" in done.err.splitlines()[-1]
    assert not (second / "second" / "train").exists()
