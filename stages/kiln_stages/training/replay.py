"""``kiln resume --prove K``: steps before a checkpoint are trained again from an earlier one, and compared bit for bit.

Nothing is written. What is proven is that the checkpoint follows from the one before it, on this machine, by the steps
that its loss history tells of: every loss, every number of the adapter and of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.training.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from kiln_stages.training.checkpoint_manifest import flatten, require_same
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.tensors import StoredTensor
from kiln_stages.training.trainer import Plan, Trainer

SCHEMA = "kiln.replay.v1"
BEGINNING = "the beginning"


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What was trained again and found equal. ``start`` is a checkpoint's name, or None for the untrained adapter."""

    schema: str = SCHEMA
    checkpoint: str
    start: str | None
    first_step: int  # of those trained again
    last_step: int
    losses: int
    adapter_tensors: int
    optimizer_tensors: int

    def account(self) -> str:
        """What was proven, for people."""
        start = BEGINNING if self.start is None else self.start
        return (
            f"proven: steps {self.first_step} to {self.last_step}, trained again from {start}, give "
            f"{self.checkpoint} bit for bit: {counted(self.losses, 'loss', 'losses')}, "
            f"{counted(self.adapter_tensors, 'adapter tensor', 'adapter tensors')}, "
            f"{counted(self.optimizer_tensors, 'optimizer tensor', 'optimizer tensors')}, "
            "and the rest of the loop state\nnothing was written"
        )


class _Start(NamedTuple):
    step: int
    path: Path | None  # None: before the first step


def replay(plan: Plan, directory: Path, checkpoint: Checkpoint, steps: int, progress: Progress) -> Replay:
    """Trains at least the last ``steps`` steps before ``checkpoint`` again, from the nearest earlier state there is.

    Raises KilnError: KLN201 where fewer steps lie before it, KLN209 where the machine or the run is another one, KLN215
    where a checkpoint cannot be loaded, KLN108 with the first thing that comes out differently.
    """
    start = _choose_start(directory, checkpoint, steps)
    trainer = Trainer(plan)
    require_same(trainer.binding, checkpoint.manifest, checkpoint.path.name)
    if start.path is not None:
        trainer.restore(load_checkpoint(start.path))
    last = checkpoint.loop.global_step
    with progress.task("replay", last - start.step, "steps") as task:
        for record in trainer.steps():
            task.advance(note=f"step {record.step}")
            _require_equal_loss(record.step, record.loss, checkpoint)
            if record.step == last:
                break
    optimizer = trainer.optimizer_tensors()
    difference = next(_state_differences(trainer, optimizer, checkpoint), None)
    if difference is not None:
        raise _differs(checkpoint, f"behind step {last}, {difference}")
    return Replay(
        checkpoint=checkpoint.path.name,
        start=None if start.path is None else start.path.name,
        first_step=start.step + 1,
        last_step=last,
        losses=last - start.step,
        adapter_tensors=len(checkpoint.adapter),
        optimizer_tensors=len(optimizer),
    )


def _choose_start(directory: Path, checkpoint: Checkpoint, steps: int) -> _Start:
    """The latest state at least ``steps`` steps before the checkpoint; the untrained adapter is one too."""
    last = checkpoint.loop.global_step
    if steps > last:
        before = [str(step) for step, _ in list_checkpoints(directory) if step < last]
        there = f"checkpoints of steps {', '.join(before)}" if before else "no other checkpoint"
        raise KilnError(
            "KLN201",
            f"--prove {steps}: {checkpoint.path.name} has {counted(last, 'step', 'steps')} behind it; "
            f"before it there are {there} and {BEGINNING}, step 0",
            hint=f"`--prove {last}` trains all of them again",
        )
    earlier = [_Start(step, path) for step, path in list_checkpoints(directory) if step <= last - steps]
    return max(earlier, default=_Start(0, None))


def _require_equal_loss(step: int, found: float, checkpoint: Checkpoint) -> None:
    expected = checkpoint.loop.loss_history[step - 1]
    if found.hex() != expected.hex():
        raise _differs(checkpoint, f"step {step} has loss {found!r}, the checkpoint says {expected!r}")


def _state_differences(trainer: Trainer, optimizer: list[StoredTensor], checkpoint: Checkpoint) -> Iterator[str]:
    yield from _tensor_differences("adapter", trainer.adapter_tensors(), checkpoint.adapter)
    yield from _tensor_differences("optimizer", optimizer, checkpoint.optimizer)
    yield from _loop_differences(trainer.state, checkpoint.loop)


def _tensor_differences(what: str, found: Sequence[StoredTensor], expected: Sequence[StoredTensor]) -> Iterator[str]:
    here, there = ({tensor.name: tensor for tensor in tensors} for tensors in (found, expected))
    for name in sorted(here.keys() ^ there.keys()):
        yield f"{what} tensor {printable(name)} is {'not in the checkpoint' if name in here else 'in it alone'}"
    for name in sorted(here.keys() & there.keys()):
        mine, other = here[name], there[name]
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            yield f"{what} tensor {name} is {mine.dtype} {mine.shape}, the checkpoint has {other.dtype} {other.shape}"
        elif mine.data != other.data:
            width = len(mine.data) // max(1, _elements(mine))
            pairs = zip(mine.data, other.data, strict=True)
            at = next(place for place, (a, b) in enumerate(pairs) if a != b) // width
            bits = [tensor.data[at * width : (at + 1) * width][::-1].hex() for tensor in (mine, other)]
            yield f"{what} tensor {name} has bits {bits[0]} at element {at}, the checkpoint has {bits[1]}"


def _elements(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _loop_differences(found: LoopState, expected: LoopState) -> Iterator[str]:
    here, there = dict(flatten("loop", found)), dict(flatten("loop", expected))
    for name, value in here.items():
        if value != there.get(name):
            yield f"{name} is {printable(value)}, the checkpoint has {printable(there.get(name))}"


def _differs(checkpoint: Checkpoint, what: str) -> KilnError:
    return KilnError(
        "KLN108",
        f"{checkpoint.path.name} does not follow from the steps before it: {what}",
        hint="do not build on it; resume from an older checkpoint, or train again with --fresh",
    )
