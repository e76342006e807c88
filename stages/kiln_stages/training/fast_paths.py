"""Which parts of a model run as the functions of :mod:`kiln_stages.training.fused`, and the proof that they may.

A part is replaced only where its module is one that is known and gives, on a probe, what the fused function gives:
results, and gradients of its input and of its LoRA leaves. Everything else stays what peft and transformers made it. At
last the whole model is run both ways; where it differs by more than a bound, nothing is replaced. Names and parameters
of the model are not touched: only the ``forward`` of single modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kiln_cli.text import printable
from kiln_stages.training.fused import CausalAttention, GatedMlp, LoraLinear, LoraWeights, RmsNorm
from kiln_stages.training.tiles import in_tiles

# How far a part may lie from the module itself, by L2 norms. bfloat16 has 8 bits, and each pass over memory rounds.
PART_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# The same of the whole model: of hidden states, and in float32 of the gradient of each leaf. In bfloat16 the gradients
# of a deep model say nothing: two correct ways to run it differ in them by more than half.
WHOLE_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-1}
PROBE_ROWS = 5
PROBE_READS = (2, 3, 11, 23)  # of the model's own probe: rows whose hidden states are read


class FastPaths(NamedTuple):
    """How many modules run as which function; ``relative`` is the largest difference that the probe of the whole saw.

    ``parts`` is empty where nothing is replaced; ``reason`` says why something is not that could have been.
    """

    parts: dict[str, int]
    relative: float
    bound: float
    reason: str | None = None

    def identity(self) -> dict[str, Any]:
        """What a checkpoint is bound to: the arithmetic, not how close it came."""
        return {"parts": self.parts}


NONE = FastPaths(parts={}, relative=0.0, bound=0.0)


Forwards = dict[nn.Module, Callable[..., Tensor]]
Replaced = dict[nn.Module, tuple[str, Callable[..., Tensor]]]  # with the names of the functions
# Makes the hidden states of some fixed ids, [1, T, H], or those of some rows of them, [n, H].
Run = Callable[[Tensor | None], Tensor]


class ReadRows:
    """Which rows of the last hidden states the pass under way is made for, [n] int64; None for all."""

    rows: Tensor | None = None

    @contextmanager
    def only(self, rows: Tensor | None) -> Iterator[None]:
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before


def install(
    model: nn.Module, leaves: Mapping[str, nn.Parameter], run: Run, read: ReadRows
) -> tuple[FastPaths, Forwards]:
    """Replaces what can be replaced, and returns the new forwards by module. ``run`` runs ``model`` and tells ``read``
    what it was given."""
    bound = WHOLE_BOUNDS[next(iter(leaves.values())).dtype]
    whole, at_rows = partial(run, None), partial(run, torch.tensor(PROBE_READS))
    with _nonzero(leaves):
        replaced = dict(_replacements(model))
        forwards = _forwards(replaced)
        plain = _run(whole, leaves)
        put_in(forwards)
        relative, fault = _compare(whole, leaves, plain, bound)
        if fault is not None:
            take_out(forwards)
            return FastPaths({}, 0.0, bound, f"with them the model {fault}"), {}
        limited = _last_mlp_at_rows(replaced, read)
        plain = _run(at_rows, leaves)
        put_in(_forwards(limited))
        _, fault = _compare(at_rows, leaves, plain, bound)
        if fault is None:
            replaced |= limited
        put_in(_forwards(replaced))
    parts = Counter(kind for kind, _ in replaced.values())
    reason = None if fault is None else f"with its last feed-forward block at the rows that are read the model {fault}"
    return FastPaths(dict(sorted(parts.items())), relative, bound, reason), _forwards(replaced)


def _forwards(replaced: Replaced) -> Forwards:
    return {module: forward for module, (_, forward) in replaced.items()}


def put_in(forwards: Forwards) -> None:
    for module, forward in forwards.items():
        cast(Any, module).forward = forward


def take_out(forwards: Forwards) -> None:
    """Every module has the forward of its class again."""
    for module in forwards:
        del cast(Any, module).forward


def _compare(
    run: Callable[[], Tensor], leaves: Mapping[str, nn.Parameter], plain: list[Tensor], bound: float
) -> tuple[float, str | None]:
    """How far the model is from ``plain`` now, and why it must not be so: it may ask more of a part than a result."""
    try:
        found = _run(run, leaves)
    except (RuntimeError, TypeError, ValueError) as error:
        return float("inf"), f"does not run: {printable(error)}"
    if plain[0].dtype != torch.float32:
        found, plain = found[:1], plain[:1]
    relative = max(relative_difference(*pair) for pair in zip(found, plain, strict=True))
    return relative, None if relative <= bound else f"differs by {relative:.3g} from what it gives without"


def _replacements(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, Callable[..., Tensor]]]]:
    """Modules that may be replaced, with the name of the function and the new ``forward``."""
    within: set[nn.Module] = set()
    for module in model.modules():  # a block before the layers inside of it
        found = _gated_mlp(module) or _lora_linear(module) or _rms_norm(module)
        if found is not None and module not in within:
            yield module, found
            within.update(module.modules())
        attention = _attention(module)  # its own layers are replaced as well
        if attention is not None:
            yield module, attention


def _lora_linear(module: nn.Module) -> tuple[str, Callable[..., Tensor]] | None:
    lora = _lora_weights(module)
    if lora is None:
        return None

    def forward(x: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, LoraLinear).apply(x, *lora))

    return ("lora_linear", forward) if _same(module, forward, lora.weight.shape[1], lora.a.dtype) else None


def _gated_mlp(module: nn.Module) -> tuple[str, Callable[..., Tensor]] | None:
    """down(act(gate(x)) * up(x)), whatever the class is called: what it computes is probed."""
    parts = [_lora_weights(getattr(module, name, None)) for name in ("gate_proj", "up_proj", "down_proj")]
    weights = [part for part in parts if part is not None and part.bias is None]
    if len(weights) != 3 or not callable(getattr(module, "act_fn", None)):
        return None
    scales = tuple(part.scale for part in weights)
    tensors = [tensor for part in weights for tensor in (part.weight, part.a, part.b)]

    def forward(x: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, GatedMlp).apply(x, module.act_fn, scales, *tensors))

    return ("gated_mlp", forward) if _same(module, forward, tensors[0].shape[1], tensors[0].dtype) else None


def _last_mlp_at_rows(replaced: Replaced, read: ReadRows) -> Replaced:
    """The last feed-forward block, computed at the rows that are read and zero elsewhere: behind it a decoder works on
    each row alone, or the probe refuses it."""
    blocks = [(module, forward) for module, (kind, forward) in replaced.items() if kind == "gated_mlp"]
    return {module: ("gated_mlp_at_rows", partial(_at_rows, forward, read)) for module, forward in blocks[-1:]}


def _at_rows(forward: Callable[[Tensor], Tensor], read: ReadRows, x: Tensor) -> Tensor:
    """x [1, T, I] -> [1, T, I]."""
    if read.rows is None:
        return forward(x)
    rows = in_tiles(x[0].index_select(0, read.rows))
    out = forward(rows.unsqueeze(0))[:, : len(read.rows)]
    return torch.zeros_like(x).index_copy_(1, read.rows, out)


def _rms_norm(module: nn.Module) -> tuple[str, Callable[..., Tensor]] | None:
    """The norms of Llama (the factor is the weight, on rounded values) and of Gemma (1 + weight, in float32)."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or weight.requires_grad:
        return None
    if not isinstance(eps, float) or list(module.parameters()) != [weight]:
        return None
    for factor, narrow in ((weight.float(), weight), (1.0 + weight.float(), None)):
        forward = partial(_norm, factor, narrow, eps)
        if _same(module, forward, weight.shape[0], weight.dtype):
            return "rms_norm", forward
    return None


def _norm(factor: Tensor, narrow: Tensor | None, eps: float, x: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, RmsNorm).apply(x, factor, narrow, eps))


def _attention(module: nn.Module) -> tuple[str, Callable[..., Tensor]] | None:
    """An attention of transformers in bfloat16 on a CPU that calls torch's: that call alone is replaced, so that its
    projections, norms and rotations stay as they are."""
    config = getattr(module, "config", None)
    if not type(module).__name__.endswith("Attention") or getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    names = ((config, "num_attention_heads"), (config, "num_key_value_heads"), (module, "head_dim"))
    sizes = [getattr(holder, name, None) for holder, name in names]
    first = next(module.parameters(), torch.empty(0))
    if first.dtype != torch.bfloat16 or first.device.type != "cpu" or not all(isinstance(size, int) for size in sizes):
        return None
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with _CausalAttentionCalls():
            return cast(Tensor, plain(*args, **kwargs))

    return ("causal_attention", forward) if _same_attention(*cast(list[int], sizes)) else None


class _CausalAttentionCalls(TorchFunctionMode):
    """Within, torch's attention is :class:`CausalAttention` wherever it is asked for that and nothing more."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention and _is_causal_alone(*args, **kwargs):
            return cast(Any, CausalAttention).apply(*args, kwargs.get("scale"))
        return function(*args, **kwargs)


def _is_causal_alone(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of torch's attention has q, k and v of the same rows and width, the causal mask and no other."""
    if len(args) != 3 or not kwargs.get("is_causal") or kwargs.get("attn_mask") is not None or kwargs.get("dropout_p"):
        return False
    q, k, v = args
    return cast(bool, q.shape[2:] == k.shape[2:] == v.shape[2:]) and (
        bool(kwargs.get("enable_gqa")) or q.shape[1] == k.shape[1]
    )


def _same_attention(heads: int, groups: int, width: int) -> bool:
    """Whether both attentions give the same for q, k and v of some numbers: results, and gradients of the three."""
    shapes = [(1, count, PROBE_ROWS, width) for count in (heads, groups, groups)]
    qkv = [
        torch.arange(math.prod(shape)).mul(0.7 + place).sin().view(shape).bfloat16().requires_grad_()
        for place, shape in enumerate(shapes)
    ]
    attend = partial(cast(Any, nn.functional.scaled_dot_product_attention), is_causal=True, enable_gqa=True)
    try:
        wanted = _gradients(attend(*qkv), qkv)
        with _CausalAttentionCalls():
            found = _gradients(attend(*qkv), qkv)
    except (AttributeError, RuntimeError):  # another torch has no such kernel, or none for these shapes
        return False
    return _all_near(found, wanted, torch.bfloat16)


def _lora_weights(module: Any) -> LoraWeights | None:
    """The weights of peft's plain LoRA on a plain linear layer; None for anything else."""
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear or module.lora_variant:
        return None
    (name, *others) = module.active_adapters
    if others or module.merged or module.lora_bias.get(name) or not isinstance(module.lora_dropout[name], nn.Identity):
        return None
    base: nn.Linear = module.base_layer
    a, b = cast(Tensor, module.lora_A[name].weight), cast(Tensor, module.lora_B[name].weight)
    if base.weight.requires_grad or len({base.weight.dtype, a.dtype, b.dtype}) > 1:
        return None
    return LoraWeights(base.weight, base.bias, a, b, float(module.scaling[name]))


def _same(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> bool:
    """Whether both give the same for some rows [1, 5, width]: results, and gradients of the rows and all leaves."""
    device = next(module.parameters()).device
    rows = torch.arange(PROBE_ROWS * width, device=device).mul(0.7).sin().view(1, PROBE_ROWS, width).to(dtype)
    try:
        wanted = _with_gradients(module, module, rows)
    except (RuntimeError, TypeError, ValueError):  # it takes something else: not a part that is known
        return False
    found = _with_gradients(module, forward, rows)
    return _all_near(found, wanted, dtype)


def _with_gradients(module: nn.Module, forward: Callable[[Tensor], Tensor], rows: Tensor) -> list[Tensor]:
    rows = rows.requires_grad_()
    leaves = [leaf for leaf in module.parameters() if leaf.requires_grad]
    with torch.enable_grad():
        return _gradients(forward(rows), [rows, *leaves])


def _gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """A result, and the gradients of its inputs under a fixed weighting of it."""
    weights = torch.arange(out.numel(), device=out.device).mul(0.3).cos().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


def _all_near(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> bool:
    return all(relative_difference(*pair) <= PART_BOUNDS[dtype] for pair in zip(found, wanted, strict=True))


def _run(run: Callable[[], Tensor], leaves: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Hidden states, and the gradient of each leaf under a fixed weighting of them."""
    hidden = run()
    weights = torch.arange(hidden.numel(), device=hidden.device).mul(0.3).cos().view(hidden.shape)
    return [hidden.detach(), *torch.autograd.grad((hidden.float() * weights).sum(), list(leaves.values()))]


@contextmanager
def _nonzero(leaves: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """LoRA begins with B = 0, under which A has no gradient: gives each B some values for the time of a probe."""
    zeros = {name: leaf for name, leaf in leaves.items() if not leaf.any()}
    with torch.no_grad():
        for leaf in zeros.values():
            leaf.copy_(torch.arange(leaf.numel(), device=leaf.device).mul(1.3).sin().mul(0.002).view(leaf.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for leaf in zeros.values():
                leaf.zero_()


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """L2 norm of the difference, relative to that of ``wanted``; infinite where shapes differ or a NaN is there."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    norm = float(wanted.double().norm())
    relative = float((found.double() - wanted.double()).norm()) / max(norm, 1e-30)
    return relative if relative == relative else float("inf")
