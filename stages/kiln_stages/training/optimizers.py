"""Torch's optimizers under the profile's hyper-parameters, and their state as named float32 tensors.

The profile's Muon scales an orthogonalised update by rate x sqrt(max(rows, columns)); torch's, under
``match_rms_adamw``, by 0.2 x rate x sqrt(max(rows, columns)). So torch is handed rate / 0.2, and weight decay x 0.2,
since it shrinks parameters by rate x decay. What torch was handed is what :func:`effective` reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

RMS_FACTOR = 0.2
# State tensors of each kind, all of the parameter's shape. SGD without momentum has none.
STATE_KEYS = {"muon": ("momentum_buffer",), "adam_w": ("exp_avg", "exp_avg_sq"), "sgd": ()}


class StackedMuon(torch.optim.Muon):
    """torch's Muon with the matrices of one shape orthogonalised together: the same arithmetic, in batched products.

    LoRA has hundreds of small matrices of a few shapes; one by one, their Newton-Schulz products cost more than the
    rest of the update by far. Hyper-parameters, state and results (to bfloat16 rounding) are those of torch's class.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter, each of which must have a gradient. Closures are not supported."""
        (group,) = self.param_groups
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for parameters in by_shape.values():
            self._step_stack(group, parameters)

    def _step_stack(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        momentum, rate = group["momentum"], group["lr"]
        rows, columns = parameters[0].shape
        gradient = torch.stack([cast(Tensor, parameter.grad) for parameter in parameters])  # [K, rows, columns]
        buffers = [self._buffer(parameter) for parameter in parameters]
        for buffer, parameter in zip(buffers, parameters, strict=True):
            buffer.lerp_(cast(Tensor, parameter.grad), 1 - momentum)
        average = torch.stack(buffers)  # [K, rows, columns]
        update = gradient.lerp(average, momentum) if group["nesterov"] else average
        update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = RMS_FACTOR * math.sqrt(max(rows, columns))  # what adjust_lr_fn="match_rms_adamw" means
        for parameter, change in zip(parameters, update.unbind(), strict=True):
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(change, alpha=-rate * scale)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """matrices [K, rows, columns] -> each near its closest orthogonal one; ``steps`` of Newton-Schulz in bfloat16."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x  # [K, short, long]
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)  # spectral norms of at most 1
    for _ in range(steps):
        gram = x @ x.mT  # [K, short, short]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build_optimizer(
    kind: str, parameters: Mapping[str, Tensor], learning_rate: float, hyperparameters: Mapping[str, Any]
) -> Optimizer:
    """An optimizer over ``parameters`` in the order of the mapping. ``hyperparameters``: the profile's, all of them.

    Raises ValueError for an unknown kind, KeyError for a hyper-parameter that is missing.
    """
    leaves = list(parameters.values())
    if kind == "muon":
        return StackedMuon(
            leaves,
            lr=learning_rate / RMS_FACTOR,
            weight_decay=hyperparameters["weight_decay"] * RMS_FACTOR,
            momentum=hyperparameters["momentum"],
            nesterov=hyperparameters["nesterov"],
            ns_steps=hyperparameters["ns_iters"],
            adjust_lr_fn="match_rms_adamw",
        )
    if kind == "adam_w":
        return torch.optim.AdamW(
            leaves,
            lr=learning_rate,
            betas=(hyperparameters["beta1"], hyperparameters["beta2"]),
            eps=hyperparameters["eps"],
            weight_decay=hyperparameters["weight_decay"],
            fused=True,  # hundreds of small leaves: one kernel a leaf instead of a dozen
        )
    if kind == "sgd":
        return torch.optim.SGD(leaves, lr=learning_rate, foreach=False)
    raise ValueError(f"optimizer kind {kind!r} is unknown; expected one of {', '.join(STATE_KEYS)}")


def effective(optimizer: Optimizer) -> dict[str, Any]:
    """What torch computes with: its class and every hyper-parameter it was handed, as JSON values."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(group.items())}
    kind = type(optimizer)
    return {"implementation": f"{kind.__module__}.{kind.__qualname__}", **plain}


def export_state(kind: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state as ``{parameter name}.{state key}`` -> float32 tensor of the parameter's shape. Widening is exact.

    The step count is not among them: it is the run's global step. Raises ValueError where a parameter has no state,
    which means that no step was taken yet.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for key in STATE_KEYS[kind]:
            if key not in state:
                raise ValueError(f"{name} has no {key}: the optimizer took no step yet")
            tensors[f"{name}.{key}"] = state[key].detach().float()
    return tensors


def restore_state(
    kind: str, optimizer: Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], step: int
) -> None:
    """Puts exported state back, in each parameter's own dtype and device, as after ``step`` steps.

    Raises ValueError where names or shapes are not exactly those of the parameters.
    """
    expected = {f"{name}.{key}" for name in parameters for key in STATE_KEYS[kind]}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise ValueError(f"optimizer state has {len(odd)} missing or unexpected tensors, the first is {odd[0]!r}")
    for name, parameter in parameters.items():
        state: dict[str, Tensor] = {}
        for key in STATE_KEYS[kind]:
            stored = tensors[f"{name}.{key}"]
            if stored.shape != parameter.shape:
                raise ValueError(f"{name}.{key} has shape {tuple(stored.shape)}, expected {tuple(parameter.shape)}")
            state[key] = stored.to(device=parameter.device, dtype=parameter.dtype, copy=True)
        if kind == "adam_w":
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
        if state:
            optimizer.state[parameter] = state
