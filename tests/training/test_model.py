"""Loading, the model's own head on gathered rows, LoRA targets, and the adapter as PEFT sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kiln_stages.training import model as model_module
from kiln_stages.training.fast_paths import relative_difference
from kiln_stages.training.lora import LoraShape, adapter_config, choose_targets, load_adapter, restore, store
from kiln_stages.training.model import LanguageModel, load_language_model
from kiln_stages.training.tensors import encode_tensors, read_tensors
from torch import nn
from training.tiny_models import VOCABULARY, tiny_causal

from kiln_cli import KilnError

KINDS = ("llama", "qwen3", "gemma3", "phi3", "gpt2")
IDS = torch.tensor([[5, 17, 3, 88, 41, 60, 2, 9, 33, 71]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_logits_are_the_models_own(kind: str, dtype: torch.dtype) -> None:
    causal = tiny_causal(kind).to(dtype)
    model = LanguageModel(causal)
    with torch.no_grad():
        full = causal(input_ids=IDS).logits[0]  # [T, V]
        rows = model.hidden(IDS)[0]  # [T, H]
        picked = torch.tensor([1, 4, 8])
        gathered = model.project(rows[picked])  # [3, V]
    assert gathered.shape == (3, VOCABULARY)
    bound = model.probe.bound * full.abs().max().item()
    assert (gathered - full[picked]).abs().max().item() <= bound
    assert model.probe.relative <= model.probe.bound


def test_the_soft_cap_of_the_head_is_in_force() -> None:
    model = LanguageModel(tiny_causal("gemma3"))
    with torch.no_grad():
        capped = model.project(model.hidden(IDS)[0])
        bare = nn.functional.linear(model.hidden(IDS)[0], model.causal.get_parameter("lm_head.weight"))
    assert capped.abs().max() <= 0.1 < bare.abs().max()


def test_a_head_that_differs_on_gathered_rows_is_refused() -> None:
    causal = tiny_causal("llama")
    plain = causal.forward

    def uneven(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = out.logits - out.logits.mean(dim=1, keepdim=True)  # depends on the other rows
        return out

    causal.forward = uneven
    with pytest.raises(KilnError, match="differ from full logits") as caught:
        LanguageModel(causal)
    assert caught.value.code == "KLN214"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "rows", "passed"),
    [
        (torch.float32, [3, 9], 10),  # nothing behind the last row
        (torch.float32, [19], 20),
        (torch.bfloat16, [3, 9], 16),  # whole tiles
        (torch.bfloat16, [15], 16),
        (torch.bfloat16, [16, 2], 32),
        (torch.bfloat16, [63], 64),
    ],
)
def test_a_pass_has_the_rows_that_are_needed(kind: str, dtype: torch.dtype, rows: list[int], passed: int) -> None:
    model = LanguageModel(tiny_causal(kind).to(dtype))
    ids, places = torch.arange(64) % VOCABULARY, torch.tensor(rows)
    seen: list[Any] = []
    model.causal.base_model.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        found = model.states_at(ids, places)
        assert seen == [(1, passed)]
        wanted = model.hidden(ids.unsqueeze(0))[0, places]
    assert relative_difference(found, wanted) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_never_longer_than_the_models_positions(kind: str) -> None:
    changes = {"n_positions": 26} if kind == "gpt2" else {"max_position_embeddings": 26}
    model = LanguageModel(tiny_causal(kind, **changes).bfloat16())
    with torch.no_grad():
        assert torch.isfinite(model.states_at(torch.arange(25), torch.tensor([24]))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_looks_ahead_is_refused(dtype: torch.dtype) -> None:
    """It would be shown the tokens that it learns to predict."""
    causal = tiny_causal("llama").to(dtype)
    with torch.no_grad():
        for layer in causal.model.layers:
            layer.self_attn.is_causal = False
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                projection.weight.mul_(20)
    with pytest.raises(KilnError, match="later tokens change hidden states before them by") as caught:
        LanguageModel(causal)
    assert caught.value.code == "KLN214"


def test_the_head_shares_parameters_and_leaves_the_model_whole() -> None:
    causal = tiny_causal("llama")
    before = dict(causal.named_modules())
    model = LanguageModel(causal)
    assert dict(causal.named_modules()) == before
    assert model.head.module.lm_head is causal.lm_head


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("qwen3", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("phi3", "down_proj o_proj"),
    ],
)
def test_targets_are_those_of_the_ten_that_the_model_has(kind: str, targets: str) -> None:
    assert " ".join(choose_targets(tiny_causal(kind))) == targets


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (None, "has none of the profile's ten target layers; its linear layers are: c_attn, c_fc, c_proj"),
        (["c_attn", "q_proj"], "has no linear layer named q_proj; its linear layers are: c_attn, c_fc, c_proj"),
        (["lm_head"], "has no linear layer named lm_head"),
    ],
)
def test_targets_that_are_not_there_are_refused_with_those_that_are(wanted: list[str] | None, message: str) -> None:
    with pytest.raises(KilnError, match=message) as caught:
        choose_targets(tiny_causal("gpt2"), wanted)
    assert caught.value.code == "KLN214"


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_gets_a_gradient_and_nothing_else_does(kind: str) -> None:
    model = LanguageModel(tiny_causal(kind))
    model.add_lora(4, 8.0, 42, ["c_attn", "c_proj"] if kind == "gpt2" else None)
    model.project(model.hidden(IDS)[0]).float().logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters.values())
    trainable = {id(p) for p in model.causal.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in model.parameters.values()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_adapter_loads_through_peft_and_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    import peft

    model = LanguageModel(tiny_causal(kind))
    model.add_lora(4, 8.0, 42, ["c_attn"] if kind == "gpt2" else None)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.05)
        expected = model.causal(input_ids=IDS).logits
    assert model.shape is not None
    (tmp_path / "adapter_model.safetensors").write_bytes(encode_tensors(store(model.parameters)))
    config = adapter_config(model.shape, "tiny/base")
    (tmp_path / "adapter_config.json").write_bytes(config)
    loaded = peft.PeftModel.from_pretrained(tiny_causal(kind), str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, expected)
        merged = loaded.merge_and_unload()(input_ids=IDS).logits
    assert torch.allclose(merged, expected, atol=1e-5)
    assert json.loads(config)["fan_in_fan_out"] is (kind == "gpt2")


def test_the_adapter_config_has_stable_bytes_and_no_path() -> None:
    shape = LoraShape(4, 8.0, ("k_proj", "q_proj"))
    config = adapter_config(shape, "sha256:" + "0" * 64)
    value = json.loads(config)
    assert config == adapter_config(shape, "sha256:" + "0" * 64)
    assert list(value) == sorted(value)
    assert value["base_model_name_or_path"] == "sha256:" + "0" * 64
    assert (value["r"], value["lora_alpha"], value["task_type"], value["bias"]) == (4, 8.0, "CAUSAL_LM", "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = {"b": torch.randn(3, 5).to(dtype), "a": torch.randn(2, 1).to(dtype).T}
    back = restore(read_tensors(encode_tensors(store(tensors))))
    assert all(torch.equal(back[name], tensor) and back[name].dtype == dtype for name, tensor in tensors.items())


def test_an_adapter_of_another_shape_is_refused() -> None:
    model, other = LanguageModel(tiny_causal("llama")), LanguageModel(tiny_causal("llama"))
    model.add_lora(4, 8.0, 42)
    other.add_lora(2, 4.0, 42)
    stored = store(model.parameters)
    with pytest.raises(ValueError, match="expected"):
        load_adapter(other.parameters, stored)
    with pytest.raises(ValueError, match="1 missing or unexpected"):
        load_adapter(model.parameters, stored[1:])


def test_a_saved_model_loads_offline_and_frozen(model_dir: Path) -> None:
    model = load_language_model(model_dir)
    assert not any(parameter.requires_grad for parameter in model.causal.parameters())
    assert not model.causal.training
    assert model.dtype == torch.float32
    assert load_language_model(model_dir, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "."])
def test_missing_files_are_named_with_the_way_to_get_them(missing: str, model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    if missing != ".":
        target.mkdir()
        for path in model_dir.iterdir():
            if path.name != missing:
                (target / path.name).write_bytes(path.read_bytes())
    with pytest.raises(KilnError) as caught:
        load_language_model(target)
    assert caught.value.code == "KLN302"
    assert ("no such directory" if missing == "." else f"{missing} is missing") in caught.value.message
    assert "fixtures/fetch_model.py" in caught.value.hint


def test_weights_that_no_file_brings_are_not_drawn_at_random(model_dir: Path, tmp_path: Path) -> None:
    stored = read_tensors((model_dir / "model.safetensors").read_bytes())
    kept = [tensor for tensor in stored if not tensor.name.endswith("layers.1.mlp.up_proj.weight")]
    (tmp_path / "model.safetensors").write_bytes(encode_tensors(kept))
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    with pytest.raises(KilnError, match=r"1 weight is missing .*layers\.1\.mlp\.up_proj") as caught:
        load_language_model(tmp_path)
    assert caught.value.code == "KLN302"


def test_an_index_that_names_an_absent_shard_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(KilnError, match=r"model-00001-of-00001\.safetensors is missing"):
        load_language_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(KilnError, match="cannot be read"):
        load_language_model(tmp_path)


def test_pickled_weights_are_never_opened(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(KilnError, match=r"model\.safetensors is missing"):
        load_language_model(tmp_path)


def test_code_in_the_directory_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}, "model_type": "evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    with pytest.raises(KilnError) as caught:
        load_language_model(tmp_path)
    assert caught.value.code == "KLN302"
    assert not (tmp_path / "canary").exists()


def test_the_bounds_cover_every_dtype_that_can_be_asked_for() -> None:
    assert set(model_module.PROBE_BOUNDS) == set(model_module.DTYPES.values())
