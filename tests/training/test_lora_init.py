"""First values of LoRA against the vectors of ``kiln-cli.lora-init.v1``."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from kiln_stages.training.lora import LoraShape, add_lora, init_values
from training.tiny_models import tiny_causal

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_values_are_those_of_the_contract() -> None:
    small = init_values(42, NAME, 8, 0.5)
    assert small[:2].tolist() == [-0.37072309851646423, 0.05132588744163513]
    digest = hashlib.sha256(small.astype("<f4").tobytes()).hexdigest()
    assert digest == "a393de467d8f17765ff66e9c0273ca450b9b5744d1c0a78216742903b81c464d"
    large = init_values(42, NAME, 16 * 576, math.sqrt(1 / 576))
    digest = hashlib.sha256(large.astype("<f4").tobytes()).hexdigest()
    assert digest == "f36595612f0f41b452bdf209610730b3ac62bbabc4fa3b695dc8561da8fea2d2"


def test_values_stay_inside_the_bound_and_fill_it() -> None:
    values = init_values(1, NAME, 20_000, 0.25)
    assert abs(values).max() < 0.25
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.25 / math.sqrt(3)) < 0.005
    assert (init_values(2, NAME, 20_000, 0.25) != values).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaves_begin_by_name_and_not_by_order_of_creation(dtype: torch.dtype) -> None:
    torch.manual_seed(123)  # torch's own random state must not reach the values
    parameters = add_lora(tiny_causal("llama").to(dtype), LoraShape(4, 8.0, ("down_proj", "o_proj", "q_proj")), 42)
    for name, parameter in parameters.items():
        assert parameter.dtype == dtype
        if "lora_B" in name:
            assert not parameter.any()
            continue
        bound = math.sqrt(1 / (48 if "down_proj" in name else 32))
        expected = torch.from_numpy(init_values(42, name, parameter.numel(), bound)).view(parameter.shape)
        assert torch.equal(parameter.detach(), expected.to(dtype))


def test_o_proj_is_bounded_by_the_hidden_size_even_where_its_input_is_wider() -> None:
    parameters = add_lora(tiny_causal("qwen3"), LoraShape(4, 8.0, ("o_proj",)), 42)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    assert parameters[name].shape == (4, 64)
    expected = torch.from_numpy(init_values(42, name, 256, math.sqrt(1 / 32))).view(4, 64)
    assert torch.equal(parameters[name].detach(), expected)
