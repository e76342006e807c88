"""How far LoRA moved: L2 norms of an adapter's tensors and gradients, gathered by module name. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kiln_cli.receipts import DeltaNorms, LoraGradNorms
from kiln_stages.training.loop_state import GradNorms
from kiln_stages.training.tensors import StoredTensor

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


def delta_norms(tensors: Iterable[StoredTensor], scale: float) -> list[DeltaNorms]:
    """Per module name, sorted: mean and largest L2 norm of A, of B, and the bound ``scale`` |A| |B| on their product.

    ``scale`` is alpha / rank. The Frobenius norm is submultiplicative, so a layer's weights moved by at most the bound.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for name in sorted(stored):
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            pair = l2_norm(stored[name]), l2_norm(stored[layer + LORA_B])
            pairs.setdefault(layer.rpartition(".")[2], []).append(pair)
    return [_of_module(module, found, scale) for module, found in sorted(pairs.items())]


def grad_norms(samples: Iterable[GradNorms]) -> list[LoraGradNorms]:
    """The loop's account of gradient norms (a sample a leaf and step), sorted by module name, sums made means."""
    return [
        LoraGradNorms(
            module=entry.module,
            sample_count=entry.sample_count,
            min=entry.min,
            mean=entry.sum / entry.sample_count,
            max=entry.max,
        )
        for entry in sorted(samples, key=lambda entry: entry.module)
    ]


def l2_norm(tensor: StoredTensor) -> float:
    """The L2 norm over all elements, squares summed in float64."""
    import polars as pl

    data = tensor.data
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = _widened(data)
    count = len(data) // 4
    if count == 0:
        return 0.0
    block = pl.Series([data]).bin.reinterpret(dtype=pl.Array(pl.Float32, count), endianness="little")
    values = block.explode().cast(pl.Float64)
    return math.sqrt(float((values * values).sum()))


def _widened(data: bytes) -> bytes:
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return bytes(wide)


def _of_module(module: str, pairs: list[tuple[float, float]], scale: float) -> DeltaNorms:
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    bounds = [scale * left * right for left, right in pairs]
    return DeltaNorms(
        module=module,
        pair_count=len(pairs),
        a_l2_mean=_mean(a),
        a_l2_max=max(a),
        b_l2_mean=_mean(b),
        b_l2_max=max(b),
        delta_l2_upper_bound_mean=_mean(bounds),
        delta_l2_upper_bound_max=max(bounds),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
