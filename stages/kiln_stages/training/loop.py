"""The training step and the epoch, profile ``native_online_lora_v1``: one row, one step, a constant rate.

A run's place in its data is one integer, ``state.step``: epoch and cursor follow from it by division, and the row from
the epoch's order, which is a pure function of (seed, epoch, number of rows). No random number is drawn while training.

Axes: T tokens of a row, N supervised positions, M observed ones, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.extensions import LossBatch, LossFunction, LossOut, Observed
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.model import LanguageModel
from kiln_stages.training.order import place
from kiln_stages.training.phases import PhaseSeconds
from kiln_stages.training.training_file import HeldOutLoss

DIVERGED_RATIO, DIVERGED_GAP = 8.0, 5.0  # times the first epoch's mean; nats above the best epoch's


class ObservedTargets(NamedTuple):
    """Tokens that an environment wrote: places of those that are trained on, ascending, and how many there are."""

    positions: Sequence[int]  # [M], none of them 0
    total: int


class TrainRow(NamedTuple):
    """An admitted row. ``label_spans`` are half-open ranges of ``input_ids`` that the model must learn to produce.

    ``columns``: what a loss is told of each supervised position beside its token, as tensors [N, ...] by name.
    """

    row_index: int  # place in the source, from 1
    row_sha256: str
    input_ids: list[int]  # [T]
    label_spans: list[tuple[int, int]]
    columns: Mapping[str, Tensor] = MappingProxyType({})
    observed: ObservedTargets | None = None


class StepRecord(NamedTuple):
    """One committed step, as the metrics log has it. ``loss`` is the row's mean, in nats a supervised token."""

    step: int  # from 1: the number of steps committed with this one
    epoch: int  # from 0
    cursor: int  # from 0, within the epoch
    row_index: int
    row_sha256: str
    loss: float
    grad_norm: float  # L2 over all LoRA leaves, before the update
    tokens: int
    supervised_tokens: int
    metrics: dict[str, float]  # the loss function's own
    counts: dict[str, int]


def train(
    model: LanguageModel,
    optimizer: Optimizer,
    loss_function: LossFunction,
    rows: Sequence[TrainRow],
    *,
    order: Callable[[int], Sequence[int]],
    epochs: int,
    state: LoopState,
    phases: PhaseSeconds,
) -> Iterator[StepRecord]:
    """Trains from where ``state`` stands to the end, yielding a record after each committed step.

    ``order``: of an epoch, counted from 0, the places of the rows as it visits them.
    When a record is yielded, model, optimizer and ``state`` agree on it: that is the moment to save. A caller who stops
    iterating leaves them so. ``phases`` takes in the seconds of each part of a step. Raises KilnError KLN104 where a
    loss or gradient is not finite or the loss diverged.
    """
    total = epochs * len(rows)
    places: Sequence[int] = ()
    while state.global_step < total:
        epoch, cursor = place(state.global_step, len(rows))
        if cursor == 0:
            require_no_divergence(state, len(rows))
        if cursor == 0 or not places:
            places = order(epoch)
        row = rows[places[cursor]]

        with phases.timed("forward"):
            out, batch = row_loss(model, loss_function, row)
            loss = out.loss.item()
        require_finite_loss(loss, row)
        optimizer.zero_grad(set_to_none=True)
        with phases.timed("backward"):
            out.loss.backward()  # type: ignore[no-untyped-call]
            norms = gradient_norms(model.parameters, model.frozen, row)
        with phases.timed("optimizer"):
            optimizer.step()

        state.commit(loss, norms, len(rows))
        yield StepRecord(
            step=state.global_step,
            epoch=epoch,
            cursor=cursor,
            row_index=row.row_index,
            row_sha256=row.row_sha256,
            loss=loss,
            grad_norm=math.sqrt(math.fsum(norm * norm for norm in norms.values())),
            tokens=len(row.input_ids),
            supervised_tokens=len(batch.targets),
            metrics=out.metrics,
            counts=out.counts,
        )
    require_no_divergence(state, len(rows))


def row_loss(model: LanguageModel, loss_function: LossFunction, row: TrainRow) -> tuple[LossOut, LossBatch]:
    """Forward pass of one row: hidden states and logits only where the next token is trained on."""
    supervised = supervised_positions(row)
    observed = () if row.observed is None else row.observed.positions
    ids = torch.tensor(row.input_ids, dtype=torch.int64, device=model.device)  # [T]
    targets = torch.tensor([*supervised, *observed], dtype=torch.int64, device=model.device)  # [N + M]
    states = model.states_at(ids, targets - 1)  # [N + M, H]: the state at q - 1 predicts token q
    count = len(supervised)
    batch = LossBatch(
        targets=ids[targets[:count]],  # [N]
        weights=torch.ones(count, dtype=torch.float32, device=model.device),  # [N]
        row_ids=torch.zeros(count, dtype=torch.int64, device=model.device),  # [N]
        columns=_columns(row, count, model.device),
        observed=None
        if row.observed is None
        else Observed(hidden=states[count:], targets=ids[targets[count:]], total=row.observed.total),
    )
    return loss_function(states[:count], model.head, batch), batch


def _columns(row: TrainRow, count: int, device: torch.device) -> dict[str, Tensor]:
    """The row's columns on the device. Raises KilnError KLN206 for one that has not an entry a position."""
    for name, column in row.columns.items():
        if len(column) != count:
            raise KilnError(
                "KLN206",
                f"row {row.row_index}: {name} has {counted(len(column), 'entry', 'entries')} for "
                f"{counted(count, 'supervised token', 'supervised tokens')}",
                hint="run `kiln admit` again",
            )
    return {name: column.to(device) for name, column in row.columns.items()}


def supervised_positions(row: TrainRow) -> list[int]:
    """Places of the tokens to be predicted, ascending. A labelled first token has none before it and is left out."""
    length = len(row.input_ids)
    positions = [q for begin, end in row.label_spans for q in range(max(begin, 1), end)]
    ordered = all(before < after for before, after in pairwise(positions))
    if not positions or not ordered or positions[-1] >= length:
        raise KilnError(
            "KLN206",
            f"row {row.row_index}: label spans {row.label_spans[:4]} name no supervised token within {length} tokens,"
            " or overlap",
            hint="run `kiln admit` again",
        )
    return positions


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    loss_function: LossFunction,
    rows: Sequence[TrainRow],
    on_row: Callable[[], None] = lambda: None,
) -> HeldOutLoss:
    """Held-out loss, in the order of ``rows``; nothing is trained. Raises KilnError KLN104 where it is not finite."""
    means: list[float] = []
    sums: list[float] = []
    tokens = 0
    for row in rows:
        out, batch = row_loss(model, loss_function, row)
        loss = out.loss.item()
        require_finite_loss(loss, row)
        means.append(loss)
        sums.append(loss * len(batch.targets))
        tokens += len(batch.targets)
        on_row()
    if not means:
        return HeldOutLoss(0, 0, 0.0, 0.0)
    return HeldOutLoss(len(means), tokens, math.fsum(means) / len(means), math.fsum(sums) / tokens)


def require_finite_loss(loss: float, row: TrainRow) -> None:
    if not math.isfinite(loss):
        raise KilnError(
            "KLN104",
            f"the loss of row {row.row_index} ({row.row_sha256}) is {loss}",
            hint="lower `[train] learning_rate`, or look at that row of the corpus",
        )


def gradient_norms(
    parameters: dict[str, nn.Parameter], frozen: dict[str, nn.Parameter], row: TrainRow
) -> dict[str, float]:
    """L2 norm of each leaf's gradient. The set of gradients must be exactly the leaves': a zero gradient is legal; a
    missing, misshapen or non-finite one, or one of a ``frozen`` parameter, stops the run.

    Raises KilnError KLN104, naming the parameter and the row.
    """
    gradients: list[Tensor] = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            raise _bad_gradient(name, row, "missing")
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise _bad_gradient(
                name,
                row,
                f"{gradient.dtype} {tuple(gradient.shape)}, expected {parameter.dtype} {tuple(parameter.shape)},",
            )
        gradients.append(gradient)
    for name, parameter in frozen.items():
        if parameter.grad is not None:
            raise _bad_gradient(name, row, "there, though the parameter is not trained,")
    # One pass serves both: a norm is finite exactly where every element is (float64 sums cannot overflow).
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).tolist()
    for name, norm in zip(parameters, norms, strict=True):
        if not math.isfinite(norm):
            raise _bad_gradient(name, row, "not finite")
    return dict(zip(parameters, norms, strict=True))


def _bad_gradient(name: str, row: TrainRow, what: str) -> KilnError:
    return KilnError(
        "KLN104",
        f"the gradient of {name} is {what} at row {row.row_index} ({row.row_sha256})",
        hint="lower `[train] learning_rate`, or look at that row of the corpus",
    )


def require_no_divergence(state: LoopState, count: int) -> None:
    """At an epoch's end, from the second on: stops a loss far above where it began and where it has been.

    Everything it needs is in the saved state, so a resumed run comes to the same verdict. Raises KilnError KLN104.
    """
    if state.cursor_in_epoch != 0 or state.epoch_index < 2:
        return
    first, best = state.first_epoch_loss, state.best_epoch_loss
    mean = sum(state.loss_history[-count:]) / count
    if first is not None and best is not None and mean > DIVERGED_RATIO * first and mean - best > DIVERGED_GAP:
        raise KilnError(
            "KLN104",
            f"the loss diverged: epoch {state.epoch_index} of the run has mean {mean:.4f}, the first {first:.4f}, "
            f"the best {best:.4f} (limits: {DIVERGED_RATIO:g} times the first and {DIVERGED_GAP:g} above the best)",
            hint="lower `[train] learning_rate`",
        )
