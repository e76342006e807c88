"""The loss log: ``train/metrics.jsonl``, one line of canonical JSON a committed step, and its digest.

``step`` (from 1) and ``loss`` (nats, the exact double) are evidence; every other key informs people. The log never
holds times: a run that was cut and resumed has the same bytes in it as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kiln_cli import strict_json
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import AppendLog, open_input, read_bounded, write_file
from kiln_cli.identity import Domain, canonical_json, domain_hasher, length_prefixed
from kiln_cli.text import printable

METRICS_LIMIT = 1 << 34

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True):
    """What of a line is evidence."""

    step: int
    loss: float


def read_steps(path: Path) -> list[Step]:
    """The steps of a metrics file in order. Raises KilnError KLN206 for a line that is none."""
    return [_line(path, line, Step) for line in read_bounded(path, METRICS_LIMIT).splitlines()]


class Measured(msgspec.Struct, frozen=True):
    """What a loss measured at a step, beside the loss itself."""

    metrics: dict[str, float] = {}


def read_measured(path: Path) -> list[Measured]:
    """What the steps of a metrics file measured, in order. Raises KilnError KLN206 for a line that is none."""
    return [_line(path, line, Measured) for line in read_bounded(path, METRICS_LIMIT).splitlines()]


class LoggedStep(msgspec.Struct, frozen=True):
    """What people want to know of a line. ``held_out`` has the loss on held-out rows where one was measured."""

    step: int
    epoch: int  # from 0
    loss: float
    held_out: dict[str, float] | None = None


def steps_from_end(path: Path, block: int = 1 << 20) -> Iterator[LoggedStep]:
    """The steps of a log that may be growing, the last whole one first. A missing log has none.

    Raises KilnError KLN206 for a line that is none.
    """
    if not path.exists():
        return
    with open_input(path) as stream:
        end, head = stream.seek(0, 2), b""  # head: what was read of a line whose beginning lies before `end`
        torn = True  # what follows the last line feed is no line yet
        while end > 0:
            begin = max(0, end - block)
            stream.seek(begin)
            head, *lines = (stream.read(end - begin) + head).split(b"\n")
            if begin == 0:
                lines.insert(0, head)
            if torn and lines:
                lines.pop()
                torn = False
            yield from (_line(path, line, LoggedStep) for line in reversed(lines))
            end = begin


def _line(path: Path, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise KilnError(
            "KLN206", f"{printable(path)}: {printable(error)}", hint="restore the file, or train again"
        ) from None


def loss_log_sha256(steps: Iterable[Step]) -> str:
    """``sha256:`` over [step, loss] of each step in order, each behind its length."""
    digest = domain_hasher(Domain.LOSS_LOG)
    for step in steps:
        digest.update(length_prefixed(canonical_json([step.step, step.loss])))
    return "sha256:" + digest.hexdigest()


def begin_log(path: Path, losses: Sequence[float] = ()) -> AppendLog:
    """Opens the log with just the lines of the first ``len(losses)`` steps; those must be there, with these losses.

    Later lines, whole or torn, go: they are about to be written again. Raises KilnError KLN207 as :func:`kept_lines`.
    """
    kept = kept_lines(path, losses)
    write_file(path, b"".join(line + b"\n" for line in kept))
    return AppendLog(path)


def kept_lines(path: Path, losses: Sequence[float]) -> list[bytes]:
    """The lines of the first ``len(losses)`` steps. Raises KilnError KLN207 where the log and the losses disagree."""
    kept = _whole_lines(path)[: len(losses)] if losses else []
    logged = [_loss_of(line, step) for step, line in enumerate(kept, start=1)]
    if logged != list(losses):
        unequal = (step for step, pair in enumerate(zip(logged, losses, strict=False)) if pair[0] != pair[1])
        raise KilnError(
            "KLN207",
            f"{printable(path)} does not hold the losses of the checkpoint: "
            f"they agree for {next(unequal, len(logged))} of {counted(len(losses), 'step', 'steps')}",
            hint="restore the file, resume from an older checkpoint, or train again with --fresh",
        )
    return kept


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a log, without their line feeds; a torn last line is none. A missing log is empty."""
    if not path.exists():
        return []
    with open_input(path) as stream:
        return stream.read().split(b"\n")[:-1]


def _loss_of(line: bytes, step: int) -> float | None:
    """The loss of a line, or None where it is no record of that step."""
    try:
        record = strict_json.parse_object(line)
    except strict_json.JsonFault:
        return None
    loss = record.get("loss")
    return loss if record.get("step") == step and isinstance(loss, float) else None
