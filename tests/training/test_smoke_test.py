"""``adapter_smoke_test``: the adapter from disk, through peft, beside the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kiln_stages import train, verify_receipt
from kiln_stages.training import run_training
from kiln_stages.training.smoke_test import smoke_test
from kiln_stages.training.trainer import Trainer
from tiny_model import write_tiny_model
from training.admitted_run import admitted_run
from training.tiny_models import make_plan

from kiln_cli import KilnError
from kiln_cli.config import load_config
from kiln_cli.manifests import read_receipt
from kiln_cli.plugins import Plugins


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("smoke") / "model")


def trained(model: Path, adapter: Path, **settings: Any) -> Trainer:
    trainer = Trainer(make_plan(model, **{"epochs": 2, "learning_rate": 0.05, **settings}))
    list(trainer.steps())
    trainer.write_adapter(adapter)
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trained_tokens_are_written_again(dtype: str, model: Path, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path, dtype=dtype)
    result = smoke_test(trainer.model, tmp_path, model, ["What is the weather", "city"])
    assert result["tensors"] == len(trainer.model.parameters)
    assert [entry["prompt"] for entry in result["prompts"]] == ["What is the weather", "city"]
    for entry in result["prompts"]:
        assert len(entry["new_token_ids"]) == result["new_tokens"] == 4
    assert result["largest_logit_difference"] <= (1e-5 if dtype == "float32" else 2e-2)
    again = smoke_test(trainer.model, tmp_path, model, ["What is the weather", "city"])
    assert again == result


def test_another_adapter_on_disk_fails(model: Path, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path)
    next(iter(trainer.model.parameters.values())).data[0, 0] += 1
    with pytest.raises(KilnError, match=r"loads another adapter than was trained: base_model\S+ is F32") as caught:
        smoke_test(trainer.model, tmp_path, model, ["a"])
    assert caught.value.code == "KLN104"


@pytest.mark.parametrize("change", [{"lora_alpha": 8.0}, {"target_modules": ["q_proj"]}, {"use_rslora": True}])
def test_a_config_that_means_another_function_fails(change: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """The tensors may be the trained ones and the adapter another all the same."""
    trainer = trained(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(KilnError, match="the adapter smoke test failed"):
        smoke_test(trainer.model, tmp_path, model, ["What is the weather"])


def test_an_adapter_that_cannot_be_loaded_fails(model: Path, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(KilnError, match="peft cannot load the adapter"):
        smoke_test(trainer.model, tmp_path, model, ["a"])


def test_the_result_is_in_the_receipt_and_verified(tmp_path: Path, plugins: Plugins) -> None:
    _, out = admitted_run(tmp_path)
    settings = ["train.adapter_smoke_test=true", "train.adapter_smoke_prompts=['Weather?','city 3']"]
    train.run(load_config(tmp_path / "kiln.toml", settings), out, plugins)
    receipt = read_receipt(out / "train_receipt.json")
    assert receipt.adapter_smoke_test is not None
    assert [entry["prompt"] for entry in receipt.adapter_smoke_test["prompts"]] == ["Weather?", "city 3"]
    assert verify_receipt.run(out).named("fails") == []
    receipt.adapter_smoke_test["prompts"][0]["new_token_ids"].pop()
    receipt.seal()
    run_training.write_file(out / "train_receipt.json", run_training.document(receipt))
    failing = [claim.name for claim in verify_receipt.run(out).claims if claim.status == "fails"]
    assert "the smoke test is the one that the config asks for" in failing


def test_a_failing_smoke_test_leaves_adapter_and_failure_receipt(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = admitted_run(tmp_path, rows=2)
    config = load_config(tmp_path / "kiln.toml", ["train.adapter_smoke_test=true"])
    monkeypatch.setattr(
        "kiln_stages.training.smoke_test._logit_difference", lambda *args: float(torch.tensor(float("nan")))
    )
    with pytest.raises(KilnError, match="the logits are nan of the largest"):
        train.run(config, out, plugins)
    assert (out / "train" / "adapter" / "adapter_model.safetensors").exists()
    receipt = read_receipt(out / "train_receipt.json")
    assert (receipt.status, receipt.failure_reason) == ("failed", "adapter_load_failed")
