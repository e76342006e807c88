"""What ``kiln train`` and ``kiln resume`` share: the steps that are left, and from the last one to a receipt.

A run directory holds one training. ``train/training.json`` says which: it is written before the first step, so that a
training that was cut short can be told from another one. ``train_receipt.json`` is written last of all.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import FS, hash_file, write_file, writing
from kiln_cli.manifests import (
    RECEIPT_NAME,
    document,
    manifest_files,
    read_document,
    read_receipt,
    reference,
    relative_base,
)
from kiln_cli.receipts import EchoBlock, Held, OpdBlock, TrainReceipt
from kiln_cli.terminal import Progress, Speed, table, terminal
from kiln_cli.text import printable
from kiln_stages.correcting.marking import Marking
from kiln_stages.evidence.model_card import adapter_card
from kiln_stages.evidence.receipt_claims import LOSS_CURVE, LOSS_LOG, receipt_claims
from kiln_stages.evidence.signature import signature_path
from kiln_stages.training.base_adapter import BaseAdapter
from kiln_stages.training.determinism import peak_memory_mib
from kiln_stages.training.inputs import Inputs
from kiln_stages.training.interrupts import settle_on_signals
from kiln_stages.training.loop import StepRecord
from kiln_stages.training.loss_curve import write_loss_curve
from kiln_stages.training.metrics import kept_lines, read_steps
from kiln_stages.training.smoke_test import smoke_test
from kiln_stages.training.tokenizer_copy import write_tokenizer
from kiln_stages.training.train_receipt import Failure, describe, describe_failure
from kiln_stages.training.trainer import Outcome, Trainer, train_adapter
from kiln_stages.training.training_file import TRAINING_NAME, TRAINING_SCHEMA, HeldOutLoss, Training

REMOVALS_SHOWN = 8  # steps of removed checkpoints that a line names
DAMAGED_RECEIPT = "train_receipt.damaged.json"


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """``receipt`` is None where a signal stopped the run; ``checkpoint`` then holds what is left of it.
    ``late_signal``: one that asked to stop when no step was left, for whoever has more to do. ``marking`` is None where
    the rows are no corrections."""

    receipt: TrainReceipt | None
    outcome: Outcome | None
    checkpoint: Path | None = None
    signal: int | None = None
    late_signal: int | None = None
    unchanged: bool = False
    resumed_from: int | None = None
    marking: Marking | None = None  # of the corrections that were trained on

    def account(self, out: Path) -> str:
        """What was trained, for people."""
        receipt = self.receipt
        if receipt is None:
            assert self.outcome is not None and self.checkpoint is not None, "a stopped run has both"
            return (
                f"train: stopped after step {self.outcome.state.global_step}; what is left is in "
                f"{printable(self.checkpoint)}{self._removals()}"
            )
        rows: list[list[object]] = [
            ["steps", receipt.steps],
            ["supervised tokens", receipt.token_counts["action_tokens"]],
            ["context tokens", receipt.token_counts["context_tokens"]],
            *_distillation_rows(receipt),
        ]
        if self.outcome is not None:
            history, count = self.outcome.state.loss_history, receipt.data.examples_kept
            rows += [["mean loss, first epoch", sum(history[:count]) / count]]
            rows += [["mean loss, last epoch", sum(history[-count:]) / count]]
            rows += [["tokens a second", round(receipt.produced["training_tokens_per_second"] or 0)]]
        if receipt.held_out is not None:
            rows += [[f"{receipt.held_out_loss()} before", receipt.held_out.loss_before]]
            rows += [[f"{receipt.held_out_loss()} after", receipt.held_out.loss_after]]
        state = "unchanged" if self.unchanged else "written"
        where = f"{printable(out)}/{receipt.adapters['output']['path']}, {printable(out)}/{RECEIPT_NAME}"
        written = f"{state}: {where}\nloss curve: {printable(out)}/{LOSS_CURVE}{self._removals()}"
        marked = self.marking.lines() if self.marking is not None else []
        return "\n".join([f"train: adapter {printable(receipt.adapter_name)}", table(rows), written, *marked])

    def _removals(self) -> str:
        """A line on the checkpoints that --keep-last removed, if it did."""
        steps = self.outcome.removed if self.outcome is not None else []
        if not steps:
            return ""
        shown = ", ".join(map(str, steps[:REMOVALS_SHOWN]))
        more = f" and {len(steps) - REMOVALS_SHOWN} more up to {steps[-1]}" if len(steps) > REMOVALS_SHOWN else ""
        removed = counted(len(steps), "older checkpoint", "older checkpoints")
        return f"\nremoved by --keep-last: {removed}, of steps {shown}{more}"


def _distillation_rows(receipt: TrainReceipt) -> list[list[object]]:
    """What of a distillation an account tells; nothing of another training."""
    opd, echo = receipt.opd, receipt.echo
    if not isinstance(opd, OpdBlock) or not isinstance(echo, EchoBlock):
        return []
    return [
        ["observation tokens trained by ECHO", opd.env_tokens],
        ["reverse KL, first step", opd.initial_opd_loss],
        ["reverse KL, last step", opd.final_opd_loss],
        ["ECHO", f"lambda {echo.lambda_:g}" if echo.enabled else f"not enabled: {echo.dropped_reason}"],
    ]


def finished(inputs: Inputs) -> TrainReceipt | None:
    """The receipt of this very training, if it is there and its outputs are still what it says.

    One that is damaged is told, and taken for none: a training that goes on or begins again writes it anew.
    """
    path = inputs.out / RECEIPT_NAME
    if not path.exists():
        return None
    try:
        receipt = read_receipt(path)
    except KilnError as error:
        terminal.warn(f"{error.message}; it is taken for none")
        return None
    if receipt.status != "success" or not _is_of(receipt, inputs):
        return None
    for ref in receipt.outputs:
        output = inputs.out / ref.path
        if not output.is_file() or hash_file(output) != (ref.sha256, ref.bytes):
            return None
    files = manifest_files(inputs.out, inputs.admit)
    if receipt.produced.get("manifest_files") != files:
        # A stage before was run again to the same content: only the times in its manifest are others.
        receipt.produced["manifest_files"] = files
        receipt.seal()
        write_file(path, document(receipt))
    return receipt


def _is_of(receipt: TrainReceipt, inputs: Inputs) -> bool:
    """Whether a receipt is of the training that these inputs are for."""
    wanted, model = inputs.training(), receipt.model
    return _same_base(receipt.adapters["base"], inputs.base_adapter) and (
        wanted.config_sha256,
        wanted.corpus_sha256,
        wanted.base_model_sha256,
        wanted.model_config_sha256,
    ) == (
        receipt.config_sha256,
        receipt.previous.content_sha256,
        model["base_weight_shards"]["sha256"],
        model["config_sha256"],
    )


def _same_base(told: dict[str, Any] | None, base: BaseAdapter | None) -> bool:
    """The same adapter, and not another receipt behind it; one that is gone meanwhile is no other one."""
    if told is None or base is None:
        return told is None and base is None
    here = base.in_receipt()
    return told == (here if base.receipt is not None else here | {"receipt": told["receipt"]})


def _read_if_readable(path: Path) -> TrainReceipt | None:
    try:
        return read_receipt(path) if path.exists() else None
    except KilnError:
        return None  # damaged: no receipt of anything


def make_way_for_receipt(out: Path) -> None:
    """Before steps are made: the receipt of a failed attempt goes, since it speaks of a loss log that is about to
    change. One that is damaged is kept under another name; `kiln status` could not tell how far the training is."""
    path = out / RECEIPT_NAME
    receipt = _read_if_readable(path)
    if not path.exists() or (receipt is not None and receipt.status != "failed"):
        return
    with writing(path):
        if receipt is None:
            terminal.warn(f"{printable(path)} is damaged and kept as {DAMAGED_RECEIPT}")
            FS.replace(path, out / DAMAGED_RECEIPT)
        else:
            FS.unlink(path)
        FS.sync_directory(out)


def move_aside(out: Path) -> Path | None:
    """Moves ``train/`` and its receipt to ``train.<digest8>``. None where there is nothing to move."""
    directory, receipt = out / "train", out / RECEIPT_NAME
    if not directory.exists():
        make_way_for_receipt(out)  # of a training that left nothing else
    if not directory.exists() and not receipt.exists():
        return None
    path = directory / TRAINING_NAME
    name = f"train.{_digest8(path)}"
    taken = {entry.name for entry in out.iterdir()}
    number = 2
    target = name
    while target in taken:
        target, number = f"{name}-{number}", number + 1
    with writing(directory):
        FS.make_directory(directory)
        if receipt.exists():  # first: a receipt must not outlive the files that it speaks of
            FS.replace(receipt, directory / RECEIPT_NAME)
        if (signature := signature_path(receipt)).exists():
            FS.replace(signature, directory / signature.name)
        FS.rename_directory(directory, out / target)
        FS.sync_directory(out)
    return out / target


def run_steps(
    trainer: Trainer, inputs: Inputs, progress: Progress, keep_last: int | None
) -> tuple[Outcome, int | None]:
    """Trains what is left; a signal settles the step and publishes a checkpoint. The number is that signal's."""
    total, done = trainer.plan.total_steps, trainer.state.global_step
    kept_lines(inputs.out / LOSS_LOG, trainer.state.loss_history)  # or nothing begins, and nothing goes
    make_way_for_receipt(inputs.out)
    with settle_on_signals() as stop, progress.task("train", total, "steps", done) as task:
        speed = Speed()

        def show(record: StepRecord) -> None:
            speed.add(record.tokens)
            task.advance(note=f"epoch {record.epoch + 1}  loss {record.loss:.4f}  {speed.a_second():,.0f} tokens/s")

        try:
            outcome = train_adapter(
                trainer, inputs.directory, stop=stop, on_step=show, held_out=inputs.held_out, keep_last=keep_last
            )
        except KilnError as error:
            if error.code == "KLN104":  # a loss that went wrong is worth a look
                write_loss_curve(inputs.directory, len(inputs.rows))
            raise
    if outcome.stopped:
        write_loss_curve(inputs.directory, len(inputs.rows))
    return outcome, stop.signal


def held_out_loss(trainer: Trainer, inputs: Inputs, progress: Progress, when: str) -> HeldOutLoss | None:
    """The loss on the held-out rows as the model stands; None where there are no such rows."""
    if not inputs.held_out:
        return None
    with progress.task(f"held-out loss {when}", len(inputs.held_out), "rows") as task:
        return trainer.held_out(inputs.held_out, task.advance)


def finish(
    trainer: Trainer, inputs: Inputs, training: Training, started: float, outcome: Outcome, progress: Progress
) -> TrainReceipt:
    """Held-out loss after the last step, loss curve, adapter and tokenizer, smoke test, card, and the receipt."""
    before = training.held_out_before
    after = held_out_loss(trainer, inputs, progress, "after")
    last = None if after is None else (trainer.state.global_step, after.mean_per_token)
    curve = write_loss_curve(inputs.directory, len(inputs.rows), last)
    adapter = trainer.write_adapter(inputs.directory / "adapter")
    held = None
    if before is not None and after is not None:
        held = Held(
            rows=after.rows,
            supervised_tokens=after.supervised_tokens,
            loss_before=before.mean_per_token,
            loss_after=after.mean_per_token,
        )
    tokenizer = write_tokenizer(inputs.terms, inputs.admit.details.template, adapter.path, inputs.out)
    receipt = describe(trainer, inputs.evidence(), adapter, held)
    if prompts := inputs.config.run.train.smoke_prompts:
        receipt.adapter_smoke_test = smoke_test(trainer.model, adapter.path, inputs.config.model_dir(), prompts)
    card = adapter_card(receipt, read_steps(inputs.out / LOSS_LOG))
    receipt.outputs.append(reference(write_file(adapter.path / "README.md", card), inputs.out, "model_card"))
    if curve is not None:
        receipt.outputs.append(reference(curve, inputs.out, "loss_curve"))
    receipt.outputs += tokenizer
    receipt.produced = {
        **_produced(trainer, inputs, started),
        "steps_in_last_process": len(outcome.state.loss_history) - outcome.first_step,
        "training_seconds": round(outcome.seconds, 3),
        "training_tokens_per_second": round(outcome.tokens / outcome.seconds, 1) if outcome.seconds else None,
    }
    write_receipt(receipt, inputs.out)
    return receipt


def write_failure(trainer: Trainer | None, inputs: Inputs, failure: Failure, started: float) -> TrainReceipt | None:
    """The receipt of a training that failed. None, and nothing written, where the run has a successful one of it."""
    written = _read_if_readable(inputs.out / RECEIPT_NAME)
    if written is not None and written.status == "success" and _is_of(written, inputs):
        return None
    receipt = describe_failure(trainer, inputs.evidence(), failure)
    receipt.produced = _produced(trainer, inputs, started)
    write_receipt(receipt, inputs.out)
    return receipt


def write_receipt(receipt: TrainReceipt, out: Path) -> None:
    """Seals and writes a receipt. Raises KilnError KLN501 where it contradicts itself: then it is no evidence."""
    receipt.seal()
    for found in receipt_claims(receipt):
        if found.status != "holds":
            raise KilnError("KLN501", f"the train receipt contradicts itself: {found.name}: {found.detail}")
    write_file(out / RECEIPT_NAME, document(receipt))


def _produced(trainer: Trainer | None, inputs: Inputs, started: float) -> dict[str, Any]:
    """Times, place and memory of this process: evidence, and nothing that two runs are compared by."""
    phases: dict[str, float] = {"tokenize_ms": inputs.admission_seconds}
    if trainer is not None:
        spent = trainer.phases
        phases |= {
            "policy_forward_ms": spent.forward,
            "backward_ms": spent.backward,
            "optimizer_ms": spent.optimizer,
        }
    training = inputs.directory / TRAINING_NAME
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "base_dir": relative_base(inputs.out, inputs.config.base_dir),
        "manifest_files": manifest_files(inputs.out, inputs.admit),
        "training_sha256": hash_file(training)[0] if training.exists() else None,
        "phase_timings": {name: round(1000 * seconds, 1) for name, seconds in phases.items()},
        "runtime": {"wall_clock_ms": round(1000 * (time.monotonic() - started)), **peak_memory_mib()},
    }


def _digest8(path: Path) -> str:
    try:
        return read_document(path, Training, TRAINING_SCHEMA).digest8()
    except KilnError:
        return "unknown"  # no training of ours, or damaged: it is only moved
