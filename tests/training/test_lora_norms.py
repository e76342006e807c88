"""Norms of adapters and gradients by module name, from numbers that are worked out by hand."""

from __future__ import annotations

import math
import random
import struct

import pytest
from kiln_stages.training.loop_state import GradNorms
from kiln_stages.training.lora_norms import delta_norms, grad_norms, l2_norm
from kiln_stages.training.tensors import StoredTensor

AT = "base_model.model.model.layers."


def tensor(name: str, values: list[float], dtype: str = "F32") -> StoredTensor:
    whole = struct.pack(f"<{len(values)}f", *values)
    if dtype == "BF16":  # the upper two bytes of each float32
        whole = b"".join(whole[at + 2 : at + 4] for at in range(0, len(whole), 4))
    return StoredTensor(name, dtype, (1, len(values)), whole)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_norm_of_a_tensor(dtype: str) -> None:
    assert l2_norm(tensor("x", [3.0, -4.0, 12.0], dtype)) == 13.0
    assert l2_norm(tensor("x", [0.0], dtype)) == 0.0
    assert l2_norm(tensor("x", [], dtype)) == 0.0


def test_squares_are_summed_in_float64() -> None:
    chance = random.Random(3)
    values = [struct.unpack("<f", struct.pack("<f", chance.gauss(0, 1e-3)))[0] for _ in range(5000)]
    assert math.isclose(l2_norm(tensor("x", [1e19, *values])), 1e19, rel_tol=1e-7), "float32 squares overflow at 1.8e19"
    assert math.isclose(l2_norm(tensor("x", values)), math.hypot(*values), rel_tol=1e-13)


def test_the_bound_on_the_delta_is_scale_times_both_norms() -> None:
    pairs = [
        tensor(f"{AT}0.self_attn.q_proj.lora_A.weight", [3.0, 4.0]),
        tensor(f"{AT}0.self_attn.q_proj.lora_B.weight", [0.0, 2.0]),
        tensor(f"{AT}1.self_attn.q_proj.lora_A.weight", [0.0, 1.0]),
        tensor(f"{AT}1.self_attn.q_proj.lora_B.weight", [6.0, 8.0]),
        tensor(f"{AT}0.mlp.up_proj.lora_A.weight", [1.0]),
        tensor(f"{AT}0.mlp.up_proj.lora_B.weight", [0.0]),
    ]
    q, up = delta_norms(reversed(pairs), 2.0)
    assert (q.module, q.pair_count, up.module, up.pair_count) == ("q_proj", 2, "up_proj", 1)
    assert (q.a_l2_mean, q.a_l2_max, q.b_l2_mean, q.b_l2_max) == (3.0, 5.0, 6.0, 10.0)
    assert (q.delta_l2_upper_bound_mean, q.delta_l2_upper_bound_max) == (20.0, 20.0)
    assert up.delta_l2_upper_bound_max == 0.0


def test_sums_of_gradient_norms_become_means() -> None:
    samples = [
        GradNorms(module="v_proj", sample_count=4, min=1.0, max=3.0, sum=8.0),
        GradNorms(module="k_proj", sample_count=2, min=0.0, max=0.0, sum=0.0),
    ]
    assert [(each.module, each.min, each.mean, each.max) for each in grad_norms(samples)] == [
        ("k_proj", 0.0, 0.0, 0.0),
        ("v_proj", 1.0, 2.0, 3.0),
    ]
