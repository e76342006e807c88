"""``kiln train --dry-run``: what a training would come to, from its rows and three steps that leave nothing behind.

The steps are real ones, on a model and an optimizer of this process alone: nothing is read from ``train/``, nothing is
written into the run. The first one takes the longest row, so it shows the most memory, and warms up; the other two take
rows of usual length and give the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from kiln_cli.terminal import duration, table
from kiln_stages.training.determinism import peak_memory_mib
from kiln_stages.training.loop import TrainRow, supervised_positions
from kiln_stages.training.tensors import encode_tensors
from kiln_stages.training.trainer import Plan, Trainer, or_out_of_memory

BYTES_A_LOSS, BYTES_A_ROW = 24, 9  # of a checkpoint's loop state and its manifest's order, as their JSON has them
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class ProbeStep(msgspec.Struct, frozen=True, kw_only=True):
    row_index: int
    tokens: int
    seconds: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. ``activations``: what the longest row's step took beyond the rest at its peak; None where the system does
    not tell. ``peak``: of the process, with its libraries; on a CUDA device, what torch held there."""

    base_weights: int
    adapter: int
    gradients: int
    optimizer_state: int
    activations: int | None
    peak: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` and ``supervised_tokens`` are over all epochs; ``*_seconds`` leave out loading and admitting again."""

    schema: str = "kiln.dry-run.v1"
    adapter: str
    rows: int
    held_out_rows: int
    epochs: int
    steps: int
    tokens: int
    supervised_tokens: int
    longest_row: int
    checkpoints: int
    checkpoint_bytes: int
    adapter_bytes: int
    probe: list[ProbeStep]
    tokens_a_second: float
    training_seconds: float
    held_out_losses: int
    held_out_seconds: float
    memory: Memory

    def account(self) -> str:
        """All of it for people."""
        memory = self.memory
        rows: list[list[object]] = [
            ["rows", self.rows],
            ["held-out rows", self.held_out_rows],
            ["epochs", self.epochs],
            ["steps", self.steps],
            ["tokens, all epochs", self.tokens],
            ["supervised tokens", self.supervised_tokens],
            ["longest row, tokens", self.longest_row],
            ["checkpoints", f"{self.checkpoints:,} of {_mib(self.checkpoint_bytes)}"],
            ["adapter", _mib(self.adapter_bytes)],
            ["memory: base weights", _mib(memory.base_weights)],
            ["memory: adapter, gradients", f"{_mib(memory.adapter)}, {_mib(memory.gradients)}"],
            ["memory: optimizer state", _mib(memory.optimizer_state)],
            ["memory: activations", "not known" if memory.activations is None else _mib(memory.activations)],
            ["memory: peak of the process", _mib(memory.peak)],
            ["tokens a second", f"{self.tokens_a_second:,.0f}"],
            ["time to train", duration(self.training_seconds)],
            [f"time of {self.held_out_losses:,} held-out losses", duration(self.held_out_seconds)],
        ]
        return f"dry run: adapter {self.adapter}; three steps were tried and nothing was written\n{table(rows)}"


def dry_run(plan: Plan, held_out: Sequence[TrainRow]) -> DryRun:
    """Raises KilnError as making a :class:`Trainer` and training do; KLN403 where the longest row needs more memory
    than there is."""
    config, interval = plan.config, plan.config.checkpoint_interval
    trainer = Trainer(_probe_plan(plan))
    steps, memory = _probe(trainer)
    speed = sum(step.tokens for step in steps[1:]) / sum(step.seconds for step in steps[1:])
    tokens = config.epochs * sum(len(row.input_ids) for row in plan.rows)
    losses = held_out_losses(plan.total_steps, config.heldout_interval) if held_out else 0
    adapter_bytes = len(encode_tensors(trainer.adapter_tensors()))
    optimizer = trainer.optimizer_tensors()  # none of SGD, whose checkpoints have no such file
    optimizer_bytes = len(encode_tensors(optimizer)) if optimizer else 0
    return DryRun(
        adapter=config.adapter,
        rows=len(plan.rows),
        held_out_rows=len(held_out),
        epochs=config.epochs,
        steps=plan.total_steps,
        tokens=tokens,
        supervised_tokens=config.epochs * sum(len(supervised_positions(row)) for row in plan.rows),
        longest_row=steps[0].tokens,
        checkpoints=(plan.total_steps - 1) // interval if interval else 0,
        checkpoint_bytes=adapter_bytes
        + optimizer_bytes
        + BYTES_A_LOSS * plan.total_steps
        + BYTES_A_ROW * len(plan.rows),
        adapter_bytes=adapter_bytes,
        probe=steps,
        tokens_a_second=speed,
        training_seconds=tokens / speed,
        held_out_losses=losses,
        held_out_seconds=losses * _held_out_seconds(trainer, held_out) if losses else 0.0,
        memory=memory,
    )


def held_out_losses(steps: int, interval: int | None) -> int:
    """How often the held-out rows are gone over: before, after, and every ``interval`` steps but the last."""
    return 2 + ((steps - 1) // interval if interval else 0)


def _probe_plan(plan: Plan) -> Plan:
    """The same training over three rows: the longest, then those a third and two thirds up the ladder of lengths."""
    lengths = [len(row.input_ids) for row in plan.rows]
    ordered = sorted(range(len(lengths)), key=lambda place: lengths[place])
    chosen = [plan.rows[place] for place in (ordered[-1], ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3])]
    rows: list[TrainRow] = list(chosen)
    for row, place in zip(chosen, plan.kind.order(plan.seed, 0, len(chosen)), strict=True):
        rows[place] = row
    return msgspec.structs.replace(plan, rows=rows, config=msgspec.structs.replace(plan.config, epochs=1))


def _probe(trainer: Trainer) -> tuple[list[ProbeStep], Memory]:
    """Three steps and what they took."""
    adapter = sum(leaf.nbytes for leaf in trainer.model.parameters.values())
    held, peak = _forget_peak(trainer), None
    steps: list[ProbeStep] = []
    began = time.perf_counter()
    for record in or_out_of_memory(trainer.steps()):
        _finish_kernels(trainer)
        steps.append(ProbeStep(row_index=record.row_index, tokens=record.tokens, seconds=time.perf_counter() - began))
        peak = _peak(trainer) if peak is None else peak  # of the longest row's step
        began = time.perf_counter()
    assert peak is not None, "a corpus has at least one row"
    slots = [value for slot in trainer.optimizer.state.values() for value in slot.values()]
    state = sum(value.nbytes for value in slots if isinstance(value, torch.Tensor))
    return steps, Memory(
        base_weights=sum(weight.nbytes for weight in trainer.model.causal.parameters()) - adapter,
        adapter=adapter,
        gradients=adapter,  # one for each leaf, of its shape and dtype
        optimizer_state=state,
        activations=None if held is None else max(0, peak - held - adapter - state),
        peak=max(peak, _peak(trainer)),
    )


def _held_out_seconds(trainer: Trainer, held_out: Sequence[TrainRow]) -> float:
    """Seconds to go over all held-out rows, from the one of middle length."""
    middle = sorted(held_out, key=lambda row: len(row.input_ids))[len(held_out) // 2]
    began = time.perf_counter()
    trainer.held_out([middle])
    seconds = time.perf_counter() - began
    return seconds / len(middle.input_ids) * sum(len(row.input_ids) for row in held_out)


def _forget_peak(trainer: Trainer) -> int | None:
    """Begins a new peak. Returns the bytes held now, or None where the system cannot forget the old one."""
    if trainer.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        CLEAR_REFS.write_text("5")  # Linux: the peak of the resident memory counts from now on
        return _status("VmRSS")
    except OSError:
        return None


def _peak(trainer: Trainer) -> int:
    if trainer.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        return _status("VmHWM")
    except OSError:
        return int((peak_memory_mib()["peak_memory_mib"] or 0) * (1 << 20))


def _status(field: str) -> int:
    """Bytes of a field of this process's status. Raises OSError where there is none."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _finish_kernels(trainer: Trainer) -> None:
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
