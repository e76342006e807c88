"""Parts of a model as single functions: equal to what peft's and transformers' own modules give, or not used at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kiln_plugins.cross_entropy import cross_entropy
from kiln_stages.training import fast_paths
from kiln_stages.training.fast_paths import relative_difference
from kiln_stages.training.fused import CausalAttention
from kiln_stages.training.loop import row_loss
from kiln_stages.training.model import LanguageModel
from torch import Tensor, nn
from training.tiny_models import make_rows, tiny_causal

KINDS = ("llama", "qwen3", "gemma3", "phi3", "gpt2")
TARGETS = {"gpt2": ["c_attn", "c_proj"], "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
LOSS_BOUND = 1e-5  # relative, in float32
GRADIENT_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def model_of(kind: str, dtype: torch.dtype = torch.float32, change: Callable[[Any], None] | None = None) -> Any:
    """A tiny model with LoRA whose B are not zero, as in the middle of a training; norms have weights of their own."""
    causal = tiny_causal(kind)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    if change is not None:
        change(causal)
    model = LanguageModel(causal.to(dtype))
    model.add_lora(4, 8.0, 42, TARGETS.get(kind))
    with torch.no_grad():
        for leaf in model.parameters.values():
            leaf.copy_(0.1 * torch.randn_like(leaf))
    return model


def losses_and_gradients(model: LanguageModel) -> tuple[list[float], list[Tensor]]:
    losses = []
    for row in make_rows(3):
        out, _ = row_loss(model, cross_entropy, row)
        out.loss.backward()  # type: ignore[no-untyped-call]
        losses.append(out.loss.item())
    gradients = [leaf.grad.clone() for leaf in model.parameters.values() if leaf.grad is not None]
    for leaf in model.parameters.values():
        leaf.grad = None
    assert len(gradients) == len(model.parameters)
    return losses, gradients


def replaced(model: LanguageModel) -> int:
    return sum("forward" in vars(module) for module in model.causal.modules())


def attention_with(causal: Any, then: Callable[[bool, Any], Any]) -> None:
    """Gives the first attention's output to ``then``, with whether its q_proj is replaced."""
    attention = causal.model.layers[0].self_attn
    plain = type(attention).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return then("forward" in vars(self.q_proj), plain(self, *args, **kwargs))

    attention.__class__ = type("Changed", (type(attention),), {"forward": forward})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_the_modules_own(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype)
    losses, gradients = losses_and_gradients(model)
    assert losses_and_gradients(model)[0] == losses
    assert all(map(torch.equal, losses_and_gradients(model)[1], gradients)), "a step is not repeatable"
    assert replaced(model) == sum(model.fast_paths.parts.values())
    with model.modules_own():
        assert replaced(model) == 0
        own_losses, own_gradients = losses_and_gradients(model)
    assert losses_and_gradients(model)[0] == losses
    if dtype == torch.float32:
        assert losses == pytest.approx(own_losses, rel=LOSS_BOUND)
    whole, own = (torch.cat([g.flatten() for g in each]) for each in (gradients, own_gradients))
    assert relative_difference(whole, own) < GRADIENT_BOUNDS[dtype]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("llama", {"gated_mlp": 1, "gated_mlp_at_rows": 1, "lora_linear": 8, "rms_norm": 5}),
        ("qwen3", {"gated_mlp": 1, "gated_mlp_at_rows": 1, "lora_linear": 8, "rms_norm": 9}),
        ("gemma3", {"gated_mlp": 1, "gated_mlp_at_rows": 1, "lora_linear": 8, "rms_norm": 13}),
        ("phi3", {"lora_linear": 8, "rms_norm": 5}),
        ("gpt2", {}),
    ],
)
def test_what_is_known_is_replaced_and_nothing_else(kind: str, parts: dict[str, int]) -> None:
    assert model_of(kind).fast_paths.parts == parts
    assert model_of(kind).fast_paths.identity() == {"parts": parts}
    assert model_of(kind).fast_paths.reason is None


@pytest.mark.parametrize(
    ("kind", "attentions"), [("llama", 2), ("qwen3", 2), ("gemma3", 2), ("phi3", 2), ("gpt2", None)]
)
def test_attention_is_replaced_in_bfloat16_alone(kind: str, attentions: int | None) -> None:
    assert model_of(kind, torch.bfloat16).fast_paths.parts.get("causal_attention") == attentions
    assert "causal_attention" not in model_of(kind).fast_paths.parts


def qkv_of(rows: int, dtype: torch.dtype, heads: int = 6, groups: int = 2, width: int = 16) -> list[Tensor]:
    """As projections give them: heads behind rows in memory."""
    torch.manual_seed(5)
    shapes = [(1, rows, count, width) for count in (heads, groups, groups)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k' + causal mask) v, word for word."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scale * q @ k.mT).masked_fill(future, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("rows", [2, 7, 33, 150])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_attention_and_its_gradients_are_those_of_the_formula(rows: int, dtype: torch.dtype, bound: float) -> None:
    scale = 0.3
    qkv = qkv_of(rows, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]
    wanted = exact_attention(*exact, scale)
    found = CausalAttention.apply(*qkv, scale)
    assert relative_difference(found.detach().double(), wanted.detach()) < bound
    grad = torch.randn(wanted.shape).to(dtype)
    gradients = torch.autograd.grad(found, qkv, grad)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    for found_gradient, gradient in zip(gradients, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert relative_difference(found_gradient.double(), gradient) < bound


def test_attention_gives_the_bits_of_torchs_forward() -> None:
    qkv = qkv_of(45, torch.bfloat16)
    torchs = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    assert torch.equal(CausalAttention.apply(*qkv, None), torchs)


def test_attention_that_asks_for_more_is_left_to_torch() -> None:
    q, k, v = qkv_of(9, torch.bfloat16, groups=6)
    attend = nn.functional.scaled_dot_product_attention
    window = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    with fast_paths._CausalAttentionCalls():
        assert "CausalAttention" in attend(q, k, v, is_causal=True).grad_fn.name()
        for out in (
            attend(q, k, v),
            attend(q, k, v, attn_mask=window),
            attend(q, k, v, window),
            attend(q, k, v, dropout_p=0.5, is_causal=True),
            attend(q[:, :, :1], k, v, is_causal=True),
        ):
            assert "CausalAttention" not in out.grad_fn.name()


def test_attention_keeps_its_forward_where_torch_has_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise AttributeError("no such kernel")

    monkeypatch.setattr(CausalAttention, "forward", absent)
    assert model_of("llama", torch.bfloat16).fast_paths.parts == {
        "gated_mlp": 1,
        "gated_mlp_at_rows": 1,
        "lora_linear": 8,
        "rms_norm": 5,
    }


def test_leaves_begin_as_they_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe gives B some values; they must be gone."""
    model = LanguageModel(tiny_causal("llama"))
    model.add_lora(4, 8.0, 42)
    assert model.fast_paths.parts
    assert not any(leaf.any() for name, leaf in model.parameters.items() if name.endswith("lora_B.weight"))
    assert all(leaf.grad is None for leaf in model.parameters.values())
    monkeypatch.setattr(fast_paths, "_replacements", lambda model: iter(()))
    other = LanguageModel(tiny_causal("llama"))
    other.add_lora(4, 8.0, 42)
    assert all(torch.equal(leaf, other.parameters[name]) for name, leaf in model.parameters.items())


def test_an_mlp_of_another_formula_keeps_its_forward() -> None:
    def change(causal: Any) -> None:
        for layer in causal.model.layers:
            plain = type(layer.mlp).forward
            scaled = {"forward": lambda self, x, plain=plain: 1.5 * plain(self, x)}
            layer.mlp.__class__ = type("Scaled", (type(layer.mlp),), scaled)

    model = model_of("llama", change=change)
    assert model.fast_paths.parts == {"lora_linear": 14, "rms_norm": 5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0], [3, 7], [7, 2, 5], [9]])
def test_states_at_rows_are_those_of_the_whole_pass(kind: str, dtype: torch.dtype, rows: list[int]) -> None:
    model = model_of(kind, dtype)
    ids, places = torch.arange(3, 13), torch.tensor(rows)

    def with_gradients(states: Tensor) -> list[Tensor]:
        weights = torch.arange(states.numel()).mul(0.3).cos().view(states.shape)
        leaves = list(model.parameters.values())
        gradients = torch.autograd.grad((states.float() * weights).sum(), leaves)
        return [states.detach(), torch.cat([gradient.flatten() for gradient in gradients])]

    found = with_gradients(model.states_at(ids, places))
    wanted = with_gradients(model.hidden(ids.unsqueeze(0))[0, places])
    bound = GRADIENT_BOUNDS[dtype]
    assert found[0].shape == wanted[0].shape
    assert all(relative_difference(*pair) < bound for pair in zip(found, wanted, strict=True))


def test_a_decoder_that_mixes_rows_at_its_end_has_its_last_mlp_everywhere() -> None:
    def change(causal: Any) -> None:
        class RunningMean(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)

        causal.model.norm = RunningMean()

    found = model_of("llama", change=change).fast_paths
    assert found.parts == {"gated_mlp": 2, "lora_linear": 8, "rms_norm": 4}
    assert "with its last feed-forward block at the rows that are read the model differs by" in found.reason
    assert found.relative <= found.bound  # of the parts that are replaced


def test_a_model_that_does_not_run_with_its_last_mlp_at_rows_has_it_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(forward: Any, read: Any, x: Tensor) -> Tensor:
        if read.rows is not None:
            raise RuntimeError("no kernel for these rows")
        return forward(x)

    monkeypatch.setattr(fast_paths, "_at_rows", refuse)
    found = model_of("llama").fast_paths
    assert found.parts == {"gated_mlp": 2, "lora_linear": 8, "rms_norm": 5}
    assert found.reason is not None
    assert "at the rows that are read the model does not run: no kernel for these rows" in found.reason


def test_a_norm_of_another_formula_keeps_its_forward() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(weight), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)

    def change(causal: Any) -> None:
        causal.model.norm = OddRMSNorm(causal.model.norm.weight.detach())

    assert model_of("llama", change=change).fast_paths.parts["rms_norm"] == 4


def test_a_linear_layer_of_another_class_keeps_its_forward() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1.0

    def change(causal: Any) -> None:
        causal.model.layers[0].self_attn.q_proj.__class__ = Shifted

    model = model_of("llama", change=change)
    assert model.fast_paths.parts["lora_linear"] == 7
    losses = losses_and_gradients(model)[0]
    with model.modules_own():
        assert losses == pytest.approx(losses_and_gradients(model)[0], rel=LOSS_BOUND)


def test_a_model_that_differs_as_a_whole_keeps_every_forward() -> None:
    """Each part is right on its own, and yet the attention gives something else with them."""

    def change(causal: Any) -> None:
        attention_with(causal, lambda replaced, out: (out[0] * 2.0 if replaced else out[0], *out[1:]))

    model = model_of("llama", change=change)
    assert model.fast_paths.parts == {}
    assert "with them the model differs by" in model.fast_paths.reason
    assert replaced(model) == 0


def test_a_model_that_does_not_run_with_them_keeps_every_forward() -> None:
    def refuse(replaced: bool, out: Any) -> Any:
        if replaced:
            raise TypeError("q_proj takes no such argument")
        return out

    model = model_of("llama", change=lambda causal: attention_with(causal, refuse))
    assert model.fast_paths.parts == {}
    assert "q_proj takes no such argument" in model.fast_paths.reason


def test_less_is_kept_for_the_backward() -> None:
    def kept(model: LanguageModel) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            row_loss(model, cross_entropy, make_rows(1)[0])
        weights = {p.untyped_storage().data_ptr() for p in model.causal.parameters()}
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    model = model_of("llama")
    fast = kept(model)
    with model.modules_own():
        own = kept(model)
    assert fast < 0.85 * own  # of so small a model; the embeddings and the attention are kept by both
