"""The loss against log-softmax written out, its gradients, its chunks and its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kiln_plugins.cross_entropy import cross_entropy
from kiln_plugins.losses import kiln_losses
from torch import Tensor, nn

from kiln_cli import LossBatch

H, V = 16, 101


def batch_of(count: int, weights: Tensor | None = None) -> LossBatch:
    generator = torch.Generator().manual_seed(3)
    return LossBatch(
        targets=torch.randint(0, V, (count,), generator=generator),
        weights=torch.ones(count) if weights is None else weights,
        row_ids=torch.zeros(count, dtype=torch.int64),
    )


def parts(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(5)
    head = nn.Linear(H, V, bias=False).to(dtype)
    return torch.randn(count, H).to(dtype).requires_grad_(), head


@pytest.mark.parametrize("count", [1, 7, 20])
def test_it_is_the_mean_negative_log_softmax(count: int) -> None:
    hidden, head = parts(count)
    batch = batch_of(count)
    log_p = torch.log_softmax(head(hidden).double(), dim=-1)
    expected = -log_p[torch.arange(count), batch.targets].mean()
    out = cross_entropy(hidden, head, batch)
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (out.metrics, out.counts) == ({}, {})


def test_weights_weigh_and_are_divided_out() -> None:
    hidden, head = parts(4)
    single = [cross_entropy(hidden[i : i + 1], head, _only(batch_of(4), i)).loss.item() for i in range(4)]
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    out = cross_entropy(hidden, head, batch_of(4, weights))
    assert out.loss.item() == pytest.approx((single[0] + 2 * single[2] + single[3]) / 4, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_neither_value_nor_gradient(dtype: torch.dtype) -> None:
    results = []
    for chunk in (20, 6, 1):
        hidden, head = parts(20, dtype)
        out = cross_entropy(hidden, head, batch_of(20), chunk=chunk)
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and head.weight.grad is not None
        results.append((out.loss.detach(), hidden.grad, head.weight.grad))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for loss, hidden_grad, head_grad in results[1:]:
        assert torch.allclose(loss, results[0][0], rtol=1e-6)
        assert torch.allclose(hidden_grad, results[0][1], atol=tolerance)
        assert torch.allclose(head_grad, results[0][2], atol=tolerance)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, head = parts(5)
    wide = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double()

    def loss(x: Tensor) -> Tensor:
        # float32 sums within; hence the loose step and tolerance
        return cross_entropy(x, lambda rows: rows @ weight.T, batch_of(5), chunk=2).loss.double()

    assert torch.autograd.gradcheck(loss, (wide,), eps=1e-2, atol=1e-3)


def test_no_more_than_a_chunk_is_projected_or_kept() -> None:
    hidden, head = parts(256)
    sizes: list[int] = []
    kept = 0

    def project(rows: Tensor) -> Tensor:
        sizes.append(rows.shape[0])
        logits: Tensor = head(rows)
        return logits

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = cross_entropy(hidden, project, batch_of(256), chunk=16)
    assert max(sizes) == 16
    assert kept < 256 * V * 4 / 4  # far below one [N, V] of float32
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert len(sizes) == 2 * 256 / 16


def test_it_repeats_bit_for_bit() -> None:
    def once() -> tuple[Tensor, Tensor]:
        hidden, head = parts(40)
        out = cross_entropy(hidden, head, batch_of(40), chunk=16)
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        return out.loss.detach(), hidden.grad

    first, second = once(), once()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    "broken",
    [
        lambda h, b: (h[:0], batch_of(0)),
        lambda h, b: (h[:-1], b),
        lambda h, b: (h, LossBatch(targets=b.targets, weights=b.weights[:2], row_ids=b.row_ids)),
    ],
)
def test_shapes_that_disagree_are_refused(
    broken: Callable[[Tensor, LossBatch], tuple[Tensor, LossBatch]],
) -> None:
    hidden, head = parts(4)
    with pytest.raises(ValueError, match="expected"):
        cross_entropy(*_swap(broken(hidden, batch_of(4)), head))


def test_the_hook_names_it() -> None:
    loss = next(loss for loss in kiln_losses() if loss.name == "cross_entropy")
    assert loss.load() is cross_entropy


def _only(batch: LossBatch, index: int) -> LossBatch:
    part = slice(index, index + 1)
    return LossBatch(targets=batch.targets[part], weights=batch.weights[part], row_ids=batch.row_ids[part])


def _swap(pair: tuple[Tensor, LossBatch], head: nn.Linear) -> tuple[Tensor, nn.Linear, LossBatch]:
    return pair[0], head, pair[1]
