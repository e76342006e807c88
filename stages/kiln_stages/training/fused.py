"""Parts of a decoder as single autograd functions: fewer passes over memory, and fewer tensors kept for the backward.

Each computes what the module that it stands in for computes, and its gradients by the formulas below. The base weights
are frozen: no gradient of theirs is made. Sums over tokens and features are those of one matrix product each, so
results are as repeatable as torch's own.

Axes: T rows (tokens), I and O features in and out, r the rank of LoRA, F features inside a feed-forward block, H heads
of queries, K of keys and values, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Activation = Callable[[Tensor], Tensor]  # elementwise


class LoraWeights(NamedTuple):
    """A linear layer with LoRA: y = x W' + bias + scale x (x A') B', where ' is the transpose."""

    weight: Tensor  # [O, I], frozen
    bias: Tensor | None  # [O], frozen
    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    scale: float


class LoraLinear(torch.autograd.Function):
    """:class:`LoraWeights` applied to x [..., I] -> y [..., O]. Keeps x and x A' for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [T, I]
        y, low = _apply(rows, LoraWeights(weight, bias, a, b, scale))
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale = scale
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, a, b = ctx.saved_tensors
        lora = LoraWeights(weight, None, a, b, ctx.scale)
        grad_y = grad.reshape(-1, grad.shape[-1])  # [T, O]
        grad_low, grad_a, grad_b = _leaf_gradients(grad_y, rows, low, lora)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(grad_y, grad_low, lora).view(*grad.shape[:-1], rows.shape[-1])
        return grad_x, None, None, grad_a, grad_b, None


class GatedMlp(torch.autograd.Function):
    """down(act(gate(x)) * up(x)), each of the three a linear layer with LoRA; x [..., I] -> [..., I].

    Keeps x and the outputs of gate and up; the activation and its product with up are computed again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Activation, scales: tuple[float, float, float], *tensors: Tensor) -> Tensor:
        gate, up, down = _three(tensors, scales)
        rows = x.reshape(-1, x.shape[-1])  # [T, I]
        g, low_g = _apply(rows, gate)  # [T, F], [T, r]
        u, low_u = _apply(rows, up)
        y, low_d = _apply(act(g) * u, down)
        ctx.save_for_backward(rows, g, u, low_g, low_u, low_d, *tensors)
        ctx.act, ctx.scales = act, scales
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, g, u, low_g, low_u, low_d, *tensors = ctx.saved_tensors
        gate, up, down = _three(tensors, ctx.scales)
        grad_y = grad.reshape(-1, grad.shape[-1])  # [T, I]
        with torch.enable_grad():
            g = g.detach().requires_grad_()
            active = ctx.act(g)  # [T, F]
        product = active.detach() * u  # the input of down
        grad_low, grad_a_d, grad_b_d = _leaf_gradients(grad_y, product, low_d, down)
        del product
        grad_product = _input_gradient(grad_y, grad_low, down)  # [T, F]
        grad_u = grad_product * active.detach()
        (grad_g,) = torch.autograd.grad(active, g, grad_product.mul_(u))
        grad_low_g, grad_a_g, grad_b_g = _leaf_gradients(grad_g, rows, low_g, gate)
        grad_low_u, grad_a_u, grad_b_u = _leaf_gradients(grad_u, rows, low_u, up)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(grad_g, grad_low_g, gate)
            grad_x = grad_x.add_(_input_gradient(grad_u, grad_low_u, up)).view(*grad.shape[:-1], rows.shape[-1])
        leaves = (grad_a_g, grad_b_g, grad_a_u, grad_b_u, grad_a_d, grad_b_d)
        return grad_x, None, None, None, *leaves[:2], None, *leaves[2:4], None, *leaves[4:]


class RmsNorm(torch.autograd.Function):
    """x [..., I] -> w * n with n = x / rms and rms = sqrt(mean(x^2) + eps), in float32 inside. Keeps x and 1 / rms.

    ``w`` is the float32 factor of the module that this stands in for. With h = grad * w, the gradient of x is
    (h - n * mean(h * n)) / rms (Zhang and Sennrich 2019, section 4, for a frozen weight).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, narrow: Tensor | None, eps: float) -> Tensor:
        """``narrow``: w in the dtype of x, where n is rounded to it before it is multiplied, as in Llama. Gemma, None
        here, multiplies in float32."""
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, inverse, w)
        normal = wide * inverse
        if narrow is not None:
            return normal.to(x.dtype) * narrow
        return normal.mul_(w).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, w = ctx.saved_tensors
        normal = x.float() * inverse  # both float32: a product of two dtypes takes a slow path
        h = grad.float() * w
        along = (h * normal).mean(-1, keepdim=True)
        return h.addcmul_(normal, along, value=-1).mul_(inverse).to(x.dtype), None, None, None


class CausalAttention(torch.autograd.Function):
    """softmax(scale q k' + causal mask) v by torch's flash attention for CPUs, with the backward in float32.

    q [1, H, T, D], k and v [1, K, T, D]; head h of the H attends with k and v of h // (H / K). Keeps q, k, v, the
    result and, of each row of scores, the logarithm of its sum of exponentials, from which the backward makes
    probabilities again (Dao et al. 2022, algorithm 4). For bfloat16 that takes less time than torch's own backward in
    bfloat16, and rounds once.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """``scale`` is 1 / sqrt(D) if None."""
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.scale = scale
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = (tensor.float() for tensor in (grad, q, k, v, out))
        gradients = backward(*wide, log_sums, 0.0, True, scale=ctx.scale)
        return *(gradient.to(q.dtype) for gradient in gradients), None


def _apply(rows: Tensor, lora: LoraWeights) -> tuple[Tensor, Tensor]:
    """rows [T, I] -> y [T, O], and x A' [T, r] for the backward."""
    y = torch.nn.functional.linear(rows, lora.weight, lora.bias)
    low = rows @ lora.a.t()
    return y.addmm_(low, lora.b.t(), alpha=lora.scale), low


def _leaf_gradients(grad_y: Tensor, rows: Tensor, low: Tensor, lora: LoraWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x A' [T, r], of A [r, I] and of B [O, r], from that of y [T, O]."""
    grad_low = (grad_y @ lora.b).mul_(lora.scale)
    return grad_low, grad_low.t() @ rows, (grad_y.t() @ low).mul_(lora.scale)


def _input_gradient(grad_y: Tensor, grad_low: Tensor, lora: LoraWeights) -> Tensor:
    """Gradient of x [T, I]: through the base weights, and through A."""
    return (grad_y @ lora.weight).addmm_(grad_low, lora.a)


def _three(tensors: Any, scales: tuple[float, float, float]) -> list[LoraWeights]:
    """gate, up and down from their weights, A and B in this order, nine tensors."""
    return [
        LoraWeights(*_without_bias(*tensors[3 * place : 3 * place + 3]), scale) for place, scale in enumerate(scales)
    ]


def _without_bias(weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
    return weight, None, a, b
