"""Cross-entropy at supervised positions, in chunks, so that memory grows with a chunk and never with N x V."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kiln_cli import LossBatch, LossOut
from kiln_plugins.chunks import CHUNK, chunked_sum, widened


def cross_entropy(hidden: Tensor, project: Callable[[Tensor], Tensor], batch: LossBatch, chunk: int = CHUNK) -> LossOut:
    """Weighted mean of -log p(target) over the N supervised positions: the plain mean where every weight is 1.

    Args:
        hidden: [N, H] in the model's dtype, gathered before the output projection.
        project: rows [n, H] -> logits [n, V], the model's own head. Parameters of the head get their gradients too.
        batch: ``targets`` [N] int64 in 0..V-1; ``weights`` [N] float32. There is no ignore index: positions that are
            not supervised are not here.
        chunk: positions projected at a time. Where N is above it, each chunk is computed again in the backward pass
            instead of keeping its logits.

    Returns:
        LossOut with ``loss``, a float32 scalar in nats a token; log-softmax and sums are float32 in every dtype.

    Raises:
        ValueError: N is 0, or the shapes of hidden, targets and weights disagree.
    """
    count = hidden.shape[0]
    if not count or batch.targets.shape != (count,) or batch.weights.shape != (count,):
        shapes = tuple(hidden.shape), tuple(batch.targets.shape), tuple(batch.weights.shape)
        raise ValueError(f"hidden, targets and weights have shapes {shapes}; expected [N, H], [N] and [N] with N > 0")
    total = chunked_sum(partial(weighted_nll, project), hidden, batch.targets, batch.weights, chunk=chunk)
    return LossOut(loss=total / batch.weights.sum())


def weighted_nll(project: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """hidden [n, H], targets [n], weights [n] -> scalar float32: the sum of weight x -log p(target)."""
    logits = widened(project(hidden))  # [n, V]
    nll = F.cross_entropy(logits, targets, reduction="none")  # [n]
    return (nll * weights).sum()
