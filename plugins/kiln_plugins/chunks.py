"""Sums over positions in chunks, in float32: memory grows with a chunk and never with all positions x vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 128  # positions; at V = 150,000 one chunk of float32 logits is 77 MB


def chunked_sum(function: Callable[..., Tensor], *rows: Tensor, chunk: int = CHUNK) -> Tensor:
    """``function(*parts)``, a tensor of any one shape, summed over parts of at most ``chunk`` of the first axis.

    Where there are more rows than ``chunk``, each part is computed again in the backward pass instead of keeping what
    it made. All of ``rows`` have the same first size, above zero.
    """
    count = len(rows[0])
    if count <= chunk:  # what it makes is within the bound already: nothing to gain from computing it twice
        return function(*rows)
    parts = []
    for begin in range(0, count, chunk):
        part = [tensor[begin : begin + chunk] for tensor in rows]
        again = checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
        parts.append(cast(Tensor, again))
    return torch.stack(parts).sum(dim=0)


def widened(tensor: Tensor) -> Tensor:
    """The same numbers in float32; float64 stays as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
