"""Rows of matrix products in whole tiles, for bfloat16 on a CPU.

A processor's bfloat16 unit (AMX) takes 16 rows at a time, so that a last tile takes no less time for being part empty.
But oneDNN makes code for each number of rows that it has not seen, and keeps it: for a conversation of a new length
that is some 25 products. In whole tiles there are few numbers of rows. ``docs/training.md`` has what that saves.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16


def spare_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows are wanted behind so many to make tiles whole: 0 to 15."""
    return -rows % TILE if dtype == torch.bfloat16 and device.type == "cpu" else 0


def in_tiles(rows: Tensor) -> Tensor:
    """rows [n, I] with rows of zeros behind them up to whole tiles; as they are where tiles do not matter."""
    spare = spare_rows(len(rows), rows.dtype, rows.device)
    return torch.nn.functional.pad(rows, (0, 0, 0, spare)) if spare else rows
