"""LoRA on a base model: which layers get it, how it begins, and how it lies on disk (PEFT's layout).

Initial values are a pure function of (seed, tensor name), ``kiln-cli.lora-init.v1``: neither the order in which layers
are made nor a library's random state reaches them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from kiln_cli.errors import KilnError
from kiln_cli.identity import Domain
from kiln_cli.manifests import document
from kiln_stages.training.tensors import StoredTensor

# The profile's ten, by the last part of a layer's name: attention, linear attention, feed-forward.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "out_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
TARGETS = (*ATTENTION, *LINEAR_ATTENTION, *FEED_FORWARD)
# Targets whose bound is sqrt(1 / hidden size) even where their input is wider or narrower.
HIDDEN_BOUND = frozenset((*ATTENTION, "gate_proj", "up_proj"))

STORED_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
TORCH_TYPES = {name: dtype for dtype, name in STORED_NAMES.items()}


class LoraShape(NamedTuple):
    """What an adapter is, apart from its values: rank, alpha, and the last parts of its layers' names, sorted.

    ``transposed``: target layers keep their weights as [in, out] (GPT-2's Conv1D); PEFT must know it to merge.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    transposed: bool = False


def choose_targets(model: nn.Module, wanted: Iterable[str] | None = None) -> tuple[str, ...]:
    """The layers to train: ``wanted``, or those of the profile's ten that the model has. Sorted.

    Raises KilnError KLN214 where a wanted name fits no linear layer or none of the ten is there; the message lists the
    linear layers that the model has.
    """
    have = {name.rpartition(".")[2] for name, _ in linear_layers(model)}
    chosen = sorted(set(wanted) if wanted is not None else have & set(TARGETS))
    unknown = [name for name in chosen if name not in have]
    if unknown or not chosen:
        what = f"no linear layer named {', '.join(unknown)}" if unknown else "none of the profile's ten target layers"
        raise KilnError(
            "KLN214",
            f"the model has {what}; its linear layers are: {', '.join(sorted(have)) or 'none'}",
            hint="name layers of that list with `[train] target_modules`",
        )
    return tuple(chosen)


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linear layers by full name, the output projection aside (an adapter on it would be no part of the decoder)."""
    from transformers.pytorch_utils import Conv1D

    head = cast(Any, model).get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds) and layer is not head]


def are_transposed(model: nn.Module, targets: Iterable[str]) -> bool:
    """Whether any of the target layers keeps its weights as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    wanted = set(targets)
    return any(isinstance(layer, Conv1D) and name.rpartition(".")[2] in wanted for name, layer in linear_layers(model))


def add_lora(model: nn.Module, shape: LoraShape, seed: int) -> dict[str, nn.Parameter]:
    """Puts LoRA on ``model`` in place, by peft, and gives it its first values.

    Returns the trainable parameters by their names in the adapter file, sorted: the one order in which the optimizer,
    the checkpoint and the gradient check see them. They have the base model's dtype; no float32 copies are kept.
    """
    import peft

    config = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=cast(int, shape.alpha),
        target_modules=list(shape.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
        fan_in_fan_out=shape.transposed,
    )
    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name; nothing that a user could act on
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        wrapped = peft.get_peft_model(cast(Any, model), config, autocast_adapter_dtype=False)
    wrapped.eval()
    parameters = {
        name.replace(".default.", "."): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    initialise(dict(sorted(parameters.items())), hidden_size(model), seed)
    return dict(sorted(parameters.items()))


def hidden_size(model: nn.Module) -> int:
    return int(cast(Any, model).config.get_text_config().hidden_size)


@torch.no_grad()
def initialise(parameters: Mapping[str, nn.Parameter], hidden: int, seed: int) -> None:
    """First values: A by ``kiln-cli.lora-init.v1`` [r, in], B zeros [out, r]."""
    for name, parameter in parameters.items():
        if name.endswith(".lora_B.weight"):
            parameter.zero_()
            continue
        module = name.split(".")[-3]
        bound = math.sqrt(1.0 / (hidden if module in HIDDEN_BOUND else parameter.shape[1]))
        values = init_values(seed, name, parameter.numel(), bound)
        parameter.copy_(torch.from_numpy(values).view(parameter.shape))  # [r, in]


def init_values(seed: int, name: str, count: int, bound: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``count`` float32 values in (-bound, bound), row-major, for the tensor ``name`` as in the adapter file."""
    source = Domain.LORA_INIT.prefix() + seed.to_bytes(8, "big") + name.encode("utf-8")
    stream = hashlib.shake_256(source).digest(4 * count)
    whole = (np.frombuffer(stream, dtype=">u4") >> 8).astype(np.int64)  # 24 bits, so that no rounding favours a side
    return ((2 * whole + 1 - 2**24) / 2**24 * bound).astype(np.float32)


def store(tensors: Mapping[str, Tensor]) -> list[StoredTensor]:
    """Tensors as bytes, by name. Raises KeyError for dtypes other than float32 and bfloat16."""
    stored = []
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        stored.append(StoredTensor(name, STORED_NAMES[plain.dtype], tuple(plain.shape), data))
    return stored


def restore(stored: Iterable[StoredTensor]) -> dict[str, Tensor]:
    """The tensors that :func:`store` made bytes of, on the CPU."""
    return {
        tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=TORCH_TYPES[tensor.dtype]).reshape(tensor.shape)
        for tensor in stored
    }


@torch.no_grad()
def load_adapter(parameters: Mapping[str, nn.Parameter], stored: Iterable[StoredTensor]) -> None:
    """Puts stored values into the parameters. Raises ValueError unless names, dtypes and shapes are exactly theirs."""
    tensors = restore(stored)
    if set(tensors) != set(parameters):
        odd = sorted(set(tensors) ^ set(parameters))
        raise ValueError(f"the adapter has {len(odd)} missing or unexpected tensors, the first is {odd[0]!r}")
    for name, parameter in parameters.items():
        found = tensors[name]
        if (found.dtype, found.shape) != (parameter.dtype, parameter.shape):
            wanted = f"{parameter.dtype} {tuple(parameter.shape)}"
            raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}, expected {wanted}")
        parameter.copy_(found)


def adapter_config(shape: LoraShape, base_model_id: str) -> bytes:
    """``adapter_config.json`` as PEFT reads it: sorted keys, stable bytes, and no path of this machine.

    ``base_model_id`` is the name or the digest by which artifacts know the base model.
    """
    return document(
        {
            "base_model_name_or_path": base_model_id,
            "bias": "none",
            "fan_in_fan_out": shape.transposed,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": shape.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": shape.rank,
            "target_modules": list(shape.target_modules),
            "task_type": "CAUSAL_LM",
        }
    )
