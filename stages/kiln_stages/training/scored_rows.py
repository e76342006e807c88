"""Scored rows as a training takes them: action targets with the teacher's scores, and observed ones for ECHO.

They are read a group at a time, in the order of the file, so that a corpus larger than the memory can be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kiln_stages.distilling.rows import ScoredRow, ScoredRows, spans
from kiln_stages.training.loop import ObservedTargets, TrainRow

TOKEN_IDS, LOGPROBS = "teacher_token_ids", "teacher_logprobs"
COLUMNS = (TOKEN_IDS, LOGPROBS)


class ScoredTrainRows(Sequence[TrainRow]):
    """The rows of a scored corpus. ``observed``: with their observation tokens, or without them, so that a loss on them
    is the distillation's alone. Raises KilnError as :class:`kiln_stages.distilling.rows.ScoredRows` does."""

    def __init__(self, path: Path, *, observed: bool = True) -> None:
        self._rows = ScoredRows(path)
        self._observed = observed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        found = self._rows[at]
        return [self._train_row(row) for row in found] if isinstance(at, slice) else self._train_row(found)

    def _train_row(self, row: ScoredRow) -> TrainRow:
        return scored_train_row(row, observed=self._observed)


def scored_train_row(row: ScoredRow, *, observed: bool = True) -> TrainRow:
    """One row; columns [n, K] of its n action targets."""
    seen = ObservedTargets(row.observation_targets, row.observation_tokens)
    return TrainRow(
        row_index=row.row_index,
        row_sha256=row.row_sha256,
        input_ids=row.input_ids,
        label_spans=spans(row.action_targets),
        columns={
            TOKEN_IDS: torch.tensor(row.teacher_token_ids, dtype=torch.int64),
            LOGPROBS: torch.tensor(row.teacher_logprobs, dtype=torch.float32),
        },
        observed=seen if observed and seen.total else None,
    )
