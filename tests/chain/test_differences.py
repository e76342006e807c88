"""Resume under anything that differs: one thing at a time and all at once, in one table, never a warning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
import torch
from cut_runs import RUN, admitted_project, cut_in_process
from kiln_stages.training import inputs
from safetensors.numpy import load_file, save_file
from tiny_model import Kiln

from kiln_cli.plugins import Plugins

Change = Callable[[Path, pytest.MonkeyPatch, Kiln], None]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training cut behind step 20, admitted under the policy skip."""
    root = tmp_path_factory.mktemp("differences")
    project = admitted_project(root / "admitted", "muon")
    return cut_in_process(project, root / "cut", 20)


@pytest.fixture
def project(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "copy"))


def setting(old: str, new: str) -> Change:
    """Edits the run's own config."""

    def change(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
        path = project / RUN / "config.resolved.toml"
        text = path.read_text()
        assert text.count(old) == 1, f"{old} in\n{text}"
        path.write_text(text.replace(old, new))

    return change


def targets(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    setting("[train]\n", '[train]\ntarget_modules = ["q_proj", "v_proj"]\n')(project, monkeypatch, kiln)


def again(project: Path, kiln: Kiln, *assignments: str) -> None:
    """Prepares and admits the run once more."""
    options = [word for text in assignments for word in ("--set", text)]
    for stage in ("prepare", "admit"):
        done = kiln(stage, project / "kiln.toml", "--out", project / RUN, *options)
        assert done.code == 0, done.err


def other_row(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    path = project / "raw.jsonl"
    path.write_text(path.read_text().replace("city number 3 ", "village number 3 "))
    again(project, kiln)


def row_refused(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    lengths = pl.read_parquet(project / RUN / "admit" / "corpus.parquet")["input_ids"].list.len()
    again(project, kiln, f"admit.max_tokens={max(lengths) - 1}", 'admit.invalid_row_policy="skip"')


def weights(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    path = project / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})


def model_config(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    path = project / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-6}))


def ended_with(name: str, text: str) -> Change:
    """Other bytes of a model's file that give equal tokens."""

    def change(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
        path = project / "model" / name
        path.write_text(path.read_text() + text)

    return change


def plugin(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    real = Plugins.loaded

    def loaded(self: Plugins) -> list[Any]:
        return [msgspec.structs.replace(each, version="9.9") for each in real(self)]

    monkeypatch.setattr(Plugins, "loaded", loaded)


def torch_version(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    monkeypatch.setattr(torch, "__version__", "0.0.1")


def kiln_version(project: Path, monkeypatch: pytest.MonkeyPatch, kiln: Kiln) -> None:
    monkeypatch.setattr(inputs, "version", lambda: "9.9")


# In this order they can all be made: those that run stages again come first, edits of the run's config behind them.
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "rejected rows": (
        row_refused,
        ["data.content_sha256", "bound.ingestion.rows_rejected", "bound.ingestion.rejected_rows_sha256"],
    ),
    "data": (other_row, ["data.content_sha256", "bound.ingestion_receipt_sha256"]),
    "policy": (
        setting('invalid_row_policy = "fail"', 'invalid_row_policy = "skip"'),
        ["admission", "bound.ingestion.invalid_row_policy", "bound.ingestion_receipt_sha256"],
    ),
    "model weights": (weights, ["bound.base_model_weights_sha256"]),
    "model config": (model_config, ["bound.model_config_sha256"]),
    "tokenizer": (ended_with("tokenizer.json", "\n"), ["admission", "bound.tokenizer.tokenizer.json"]),
    "template": (ended_with("chat_template.jinja", "{# more #}"), ["admission", "bound.template.sha256"]),
    "plugin": (plugin, ["bound.plugins.kiln-toolkit"]),
    "torch": (torch_version, ["bound.execution.torch"]),
    "kiln": (kiln_version, ["bound.kiln_train_version"]),
    "threads": (setting("threads = 1", "threads = 2"), ["config.threads", "bound.execution.threads_intra_op"]),
    "dtype": (
        setting('dtype = "float32"', 'dtype = "bfloat16"'),
        ["config.dtype", "precision.parameter_dtype", "bound.execution.dtype"],
    ),
    "seed": (setting("seed = 42", "seed = 43"), ["config.seed", "rng.epoch-order", "rng.lora-init"]),
    "epochs": (setting("epochs = 4", "epochs = 5"), ["config.epochs", "total_steps"]),
    "learning rate": (
        setting("learning_rate = 0.01", "learning_rate = 0.02"),
        ["config.learning_rate", "optimizer.lr", "scheduler.learning_rate"],
    ),
    "optimizer": (setting('kind = "muon"', 'kind = "adam_w"'), ["config.optimizer.kind", "optimizer.kind"]),
    "rank": (setting("lora_rank = 2", "lora_rank = 4"), ["config.lora_rank", "bound.lora.rank"]),
    "alpha": (setting("lora_alpha = 4.0", "lora_alpha = 3.0"), ["config.lora_alpha", "bound.lora.alpha"]),
    "targets": (targets, ["config.target_modules", "bound.lora.target_modules"]),
    "interval": (setting("checkpoint_interval = 15", "checkpoint_interval = 9"), ["config.checkpoint_interval"]),
}


def table_of(text: str) -> list[str]:
    """The first column of the one table of an error."""
    head = next(number for number, line in enumerate(text.splitlines()) if line.split() == ["checkpoint", "now"])
    rows = text.splitlines()[head + 1 :]
    return [line.split()[0] for line in rows if line.startswith("  ") and line.split()]


def refused(project: Path, kiln: Kiln) -> list[str]:
    log = project / RUN / "train" / "metrics.jsonl"
    before = log.read_bytes()
    done = kiln("resume", project / RUN)
    assert done.code == 2 and done.err.count("KLN209") == 1, done.err
    assert "warning" not in done.err
    assert log.read_bytes() == before and "hint: " in done.err
    return table_of(done.err)


@pytest.mark.parametrize("name", CHANGES)
def test_each_thing_alone_is_refused_by_name(
    name: str, project: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = CHANGES[name]
    change(project, monkeypatch, kiln)
    found = refused(project, kiln)
    assert set(expected) <= set(found), found


def test_all_things_at_once_are_in_one_table(project: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for data and policy apart: the admission that rejects a row, under skip, has changed both already."""
    expected = set()
    for name, (change, rows) in CHANGES.items():
        if name not in ("policy", "data"):
            change(project, monkeypatch, kiln)
        expected |= set(rows)
    found = refused(project, kiln)
    assert expected <= set(found), expected - set(found)
    assert len(found) == len(set(found))


def test_nothing_changed_goes_on(project: Path, kiln: Kiln) -> None:
    """The controls of this file: a copy that nothing was done to is resumed."""
    done = kiln("resume", project / RUN)
    assert done.code == 0, done.err
