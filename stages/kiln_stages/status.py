"""``kiln status``: how far a run's training is, what is left of it, and the command to type next.

It reads and never writes, so it works beside a running training and after one that was killed. The lock, which dies
with the process that holds it, tells the one from the other. No torch.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import LockHolder, lock_holder
from kiln_cli.manifests import RECEIPT_NAME, Manifest, read_manifest, read_receipt
from kiln_cli.receipts import TrainReceipt
from kiln_cli.stage_manifests import MANIFEST_NAMES, AdmitManifest, PrepareManifest
from kiln_cli.terminal import duration, terminal
from kiln_cli.text import printable
from kiln_stages.correcting.marking import Marked, is_of_corrections, read_marked
from kiln_stages.training.checkpoint import list_checkpoints, read_checkpoint_manifest
from kiln_stages.training.metrics import LoggedStep, steps_from_end
from kiln_stages.training.training_file import read_training

TRAINS = ("kiln train", "kiln resume")
RECENT = 32  # steps whose mean loss is shown beside the last one
STATES = {
    "prepared": "prepared, not admitted",
    "admitted": "admitted, not trained",
    "running": "running",
    "unfinished": "unfinished, and no process works on it",
    "failed": "stopped",
    "finished": "finished",
}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float  # nats a supervised token


class LatestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    step: int
    fault: str | None = None  # why it cannot be loaded, as far as its manifest shows


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``held_out`` has the losses on held-out rows that are known: before the first step, the latest, after the last.
    ``quiet_seconds``: since the loss log last grew. ``next`` is None where there is nothing to do but wait."""

    schema: str = "kiln.status.v1"
    run: str
    state: str
    in_use_by: LockHolder | None
    adapter: str | None = None
    step: int = 0
    steps: int | None = None
    epoch: int | None = None  # of the last step, from 1
    epochs: int | None = None
    last_loss: float | None = None
    recent_loss: float | None = None
    recent_steps: int = 0
    held_out: list[Point] = []
    checkpoint: LatestCheckpoint | None = None
    quiet_seconds: int | None = None
    failure_reason: str | None = None
    failure_message: str | None = None
    corrections: Marked | None = None  # what was marked of those that were trained on
    notes: list[str] = []
    next: str | None


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show how far a training is: step, loss, latest checkpoint, and what to do next."""
    status = run(run_directory)
    if json:
        terminal.json_data(status)
    else:
        terminal.data(page(status))


def run(run_directory: Path) -> Status:
    """Raises KilnError KLN204 where there is no such directory, KLN206 where no stage has run in it or an artifact of
    it is damaged, KLN208 where ``train/`` was not made by kiln."""
    if not run_directory.is_dir():
        raise KilnError("KLN204", f"{printable(run_directory)} is no directory", hint="name the run directory (--out)")
    holder = lock_holder(run_directory)
    admit = _manifest(run_directory, AdmitManifest)
    if admit is None:
        if _manifest(run_directory, PrepareManifest) is None and holder is None:
            raise KilnError(
                "KLN206",
                f"{printable(run_directory)} holds no run: neither {' nor '.join(MANIFEST_NAMES.values())} is there",
                hint="`kiln prepare` or `kiln admit` begins one",
            )
        then = None if holder else f"kiln admit {_config(run_directory)} --out {_quoted(run_directory)}"
        return Status(run=str(run_directory), state="prepared", in_use_by=holder, next=then)
    return _Reading(run_directory, holder, admit).status()


def page(status: Status) -> str:
    """The status as text; what is not known has no line."""
    holder = status.in_use_by
    lines = [("run", printable(status.run)), ("state", _state_text(status))]
    if holder is not None:
        lines.append(("in use by", f"`{printable(holder.command)}`, pid {holder.pid}, since {printable(holder.since)}"))
    if status.adapter is not None:
        lines.append(("adapter", printable(status.adapter)))
    if status.steps is not None:
        share = f" ({100 * status.step // status.steps}%)" if status.steps else ""
        epoch = f", epoch {status.epoch:,} of {status.epochs:,}" if status.epoch is not None else ""
        lines.append(("step", f"{status.step:,} of {status.steps:,}{share}{epoch}"))
    if status.last_loss is not None:
        mean = f", mean of the last {status.recent_steps} steps: {status.recent_loss:.4f}"
        lines.append(("loss", f"{status.last_loss:.4f}{mean if status.recent_steps > 1 else ''}"))
    if status.held_out:
        lines.append(("held-out loss", ", ".join(map(_point_text, status.held_out))))
    if status.quiet_seconds is not None and status.state == "running":
        lines.append(("last step", f"{duration(status.quiet_seconds)} ago"))
    if (checkpoint := status.checkpoint) is not None:
        lines.append(("checkpoint", printable(checkpoint.name, 400)))
    if status.corrections is not None:
        lines.append(("corrections", status.corrections.account()))
    lines += [("note", note) for note in status.notes]
    lines.append(("next", status.next or "wait for it to end"))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines)


def _point_text(point: Point) -> str:
    return f"{point.loss:.4f} " + (f"after step {point.step:,}" if point.step else "before the first step")


def _state_text(status: Status) -> str:
    if status.state != "failed":
        return STATES[status.state]
    reason = printable(status.failure_reason)
    if not status.failure_message:
        return f"{STATES['failed']}: {reason}"
    return f"{STATES['failed']}: {printable(status.failure_message, 600)} ({reason})"


class _Reading:
    """An admitted run, looked at once: each file is read at most once, so that the parts agree."""

    def __init__(self, run: Path, holder: LockHolder | None, admit: AdmitManifest) -> None:
        self.run, self.holder, self.admit = run, holder, admit
        self.directory = run / "train"
        self.config = _load_config(run)
        self.training = None if self._begins() else read_training(self.directory)
        self.receipt = self._read_receipt()
        self.steps = self._logged()
        self.checkpoint = _latest_checkpoint(self.directory)
        self.marked = read_marked(run, self.receipt) if self.receipt is not None else None
        self.notes: list[str] = []

    def status(self) -> Status:
        receipt, state = self.receipt, self._state()
        last = self.steps[-1] if self.steps else None
        recent = [step.loss for step in self.steps]
        failed = receipt is not None and state == "failed"
        self._note_changes(state)
        self._note_corrections(state)
        return Status(
            run=str(self.run),
            state=state,
            in_use_by=self.holder,
            adapter=self._adapter(),
            step=last.step if last else 0,
            steps=self._total(),
            epoch=last.epoch + 1 if last else None,
            epochs=self.config.run.train.epochs if self.config else None,
            last_loss=last.loss if last else None,
            recent_loss=sum(recent) / len(recent) if recent else None,
            recent_steps=len(recent),
            held_out=self._held_out(),
            checkpoint=self.checkpoint,
            quiet_seconds=self._quiet_seconds(),
            failure_reason=receipt.failure_reason if receipt is not None and failed else None,
            failure_message=receipt.failure_message if receipt is not None and failed else None,
            corrections=self.marked,
            notes=self.notes,
            next=self._next(state),
        )

    def _state(self) -> str:
        if self.holder is not None and self.holder.command in TRAINS:
            return "running"
        if self.receipt is not None:
            return "finished" if self.receipt.status == "success" else "failed"
        return "admitted" if self.training is None else "unfinished"

    def _begins(self) -> bool:
        """A training that makes its directory just now may not have named itself yet."""
        return self.holder is not None and not (self.directory / "training.json").exists()

    def _read_receipt(self) -> TrainReceipt | None:
        path = self.run / RECEIPT_NAME
        return read_receipt(path) if path.exists() else None

    def _logged(self) -> list[LoggedStep]:
        """The last steps in order."""
        if self.training is None:
            return []
        found = []
        for step in steps_from_end(self.directory / "metrics.jsonl"):
            found.append(step)
            if len(found) == RECENT:
                break
        return found[::-1]

    def _adapter(self) -> str | None:
        if self.training is not None:
            return self.training.adapter
        return self.config.run.train.adapter if self.config is not None else None

    def _total(self) -> int | None:
        """Steps of the whole training; None where what it was begun on is not here any more."""
        if self.receipt is not None and self.receipt.status == "success":
            return self.receipt.steps
        if self.config is None or self._changed():
            return None
        return int(self.admit.counts["corpus"]["rows_kept"]) * self.config.run.train.epochs

    def _changed(self) -> list[str]:
        """What of the run is no longer what its training was begun on."""
        training, config = self.training, self.config
        if training is None:
            return []
        changed = ["admitted rows"] if training.corpus_sha256 != self.admit.content_sha256 else []
        same = config is not None and config.sha256(*TRAIN_SECTIONS) == training.config_sha256
        return changed if same else [*changed, "settings in config.resolved.toml"]

    def _note_changes(self, state: str) -> None:
        if (changed := self._changed()) and self.holder is None:
            refused = "" if state == "finished" else ": it cannot be resumed as it is"
            self.notes.append(f"the {' and the '.join(changed)} changed after this training began{refused}")
        if self.checkpoint is None:
            return
        if self.checkpoint.fault is not None:
            self.notes.append(f"the checkpoint cannot be loaded: {self.checkpoint.fault}")
        behind = (self.steps[-1].step if self.steps else 0) - self.checkpoint.step
        if behind > 0 and state in ("unfinished", "failed"):
            self.notes.append(
                f"the checkpoint is {counted(behind, 'step', 'steps')} behind the log: resuming goes on from there"
            )

    def _to_be_marked(self, state: str) -> bool:
        """Whether a training of corrections is finished and they are not marked."""
        return state == "finished" and is_of_corrections(self.admit) and self.marked is None

    def _note_corrections(self, state: str) -> None:
        if self._to_be_marked(state):
            self.notes.append("the training is complete and its corrections are not marked: training again marks them")

    def _held_out(self) -> list[Point]:
        points = {}
        if self.training is not None and self.training.held_out_before is not None:
            points[0] = self.training.held_out_before.mean_per_token
        if self.receipt is not None and self.receipt.status == "success" and self.receipt.held_out is not None:
            points[self.receipt.steps] = self.receipt.held_out.loss_after
        elif self.training is not None and self.config is not None and self.config.run.train.heldout_interval:
            logged = steps_from_end(self.directory / "metrics.jsonl")
            latest = next((step for step in logged if step.held_out is not None), None)
            if latest is not None and latest.held_out is not None:
                points[latest.step] = latest.held_out["mean_per_token"]
        return [Point(step=step, loss=loss) for step, loss in points.items()]

    def _quiet_seconds(self) -> int | None:
        try:
            return max(0, int(time.time() - (self.directory / "metrics.jsonl").stat().st_mtime))
        except OSError:
            return None

    def _next(self, state: str) -> str | None:
        run = _quoted(self.run)
        if self.holder is not None:
            return None
        again = f"kiln train {_config(self.run)} --out {run}"
        if state == "finished":
            return again if self._to_be_marked(state) else f"kiln verify-receipt {run}"
        if state == "admitted":
            return again
        if self._changed() or (self.receipt is not None and self.receipt.failure_reason == "nan_loss"):
            return f"kiln train CONFIG --out {run} --fresh"
        return f"kiln resume {run}" if self.checkpoint is not None else again


def _manifest(run: Path, kind: type[Manifest]) -> Manifest | None:
    return read_manifest(run, kind) if (run / MANIFEST_NAMES[kind.STAGE]).exists() else None


def _load_config(run: Path) -> LoadedConfig | None:
    path = run / "config.resolved.toml"
    return load_config(path) if path.exists() else None


def _latest_checkpoint(directory: Path) -> LatestCheckpoint | None:
    """The newest one. A running training may remove older ones meanwhile, never the newest."""
    found = list_checkpoints(directory)
    if not found:
        return None
    step, path = found[-1]
    try:
        read_checkpoint_manifest(path)
    except KilnError as error:
        return LatestCheckpoint(name=path.name, step=step, fault=error.message)
    return LatestCheckpoint(name=path.name, step=step)


def _config(run: Path) -> str:
    return _quoted(run / "config.resolved.toml")


def _quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))
