"""``kiln train``: the admitted rows of a run in, a LoRA adapter and its receipt out."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import run_lock, write_file
from kiln_cli.manifests import document
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import SILENT, Progress, terminal
from kiln_cli.text import printable
from kiln_stages.training.packages import require_train_extra

if TYPE_CHECKING:  # torch is imported when a training begins, not when `kiln --help` looks at this module
    from kiln_stages.training.dry_run import DryRun
    from kiln_stages.training.inputs import Inputs
    from kiln_stages.training.run_training import TrainResult


def command(
    config: Annotated[Path, typer.Argument(help="The run config (TOML or JSON).")],
    out: Annotated[Path, typer.Option("--out", help="The run directory, with what `kiln admit` wrote.")],
    adapter: Annotated[str | None, typer.Option("--adapter", metavar="NAME", help="What it is called.")] = None,
    model: Annotated[Path | None, typer.Option("--model", metavar="DIR", help="The model directory.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move another training of the run aside.")] = False,
    base_adapter: Annotated[
        Path | None, typer.Option("--base-adapter", metavar="DIR", help="Begin with this adapter's values.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Try 3 steps, tell time and memory, write nothing.")] = False,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Remove all checkpoints but the newest N.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train a LoRA adapter on the admitted rows, one row a step."""
    loaded = load_config(config, assignments or (), {"train": {} if adapter is None else {"adapter": adapter}})
    if model is not None:
        loaded = loaded.replace("model", path=loaded.counted_from_base(model))
    if base_adapter is not None:
        loaded = loaded.replace("train", base_adapter=loaded.counted_from_base(base_adapter))
    for text in (*loaded.run.train.warnings(), *loaded.run.distill.warnings()):
        terminal.warn(text)
    if dry:
        estimate = preview(loaded, out, load_plugins(), progress=terminal)
        if json:
            terminal.json_data(estimate)
        else:
            terminal.data(estimate.account())
        settings = "".join(f" --set {shlex.quote(text)}" for text in assignments or ())
        for name, given in (("adapter", adapter), ("model", model), ("base-adapter", base_adapter)):
            settings += f" --{name} {shlex.quote(str(given))}" if given is not None else ""
        terminal.say(f"next: kiln train {shlex.quote(str(config))} --out {shlex.quote(str(out))}{settings}")
        return
    result = run(loaded, out, load_plugins(), fresh=fresh, keep_last=keep_last, progress=terminal)
    if json and result.receipt is not None:
        terminal.json_data(result.receipt)
    terminal.say(result.account(out))
    if result.marking is not None and result.marking.fault:
        terminal.warn(result.marking.fault)
    if result.signal is not None:
        terminal.say(f"next: kiln resume {printable(out)}")
        raise typer.Exit(128 + result.signal)
    terminal.say(f"next: kiln verify-receipt {printable(out)}")


def run(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    fresh: bool = False,
    keep_last: int | None = None,
    progress: Progress = SILENT,
) -> TrainResult:
    """Writes ``train/`` and, last, ``train_receipt.json``. A finished training of the same inputs is left as it is.

    A training that fails, or is stopped, leaves a receipt with status "failed" and its reason, never over a successful
    one. ``fresh`` moves another or an unfinished training to ``train.<digest8>``. ``keep_last``: after each new
    checkpoint, remove those before the newest so many; None keeps all. Where the rows are corrections, those that were
    kept are marked behind the receipt. Raises KilnError: KLN206/207 where
    admit's files are missing or changed, KLN208 where the run holds another training, KLN302/214 for the model, KLN104
    for a loss that is not finite or diverges, KLN401/402/403 for locks, disks and memory.
    """
    started = time.monotonic()
    require_train_extra("kiln train")
    from kiln_stages.correcting.marking import mark_trained
    from kiln_stages.training.failures import recorded
    from kiln_stages.training.inputs import read_inputs
    from kiln_stages.training.run_training import (
        TrainResult,
        finish,
        finished,
        held_out_loss,
        move_aside,
        run_steps,
    )
    from kiln_stages.training.trainer import Trainer
    from kiln_stages.training.training_file import TRAINING_NAME

    with run_lock(out, "kiln train"):
        inputs = read_inputs(config, out, plugins, progress)
        if (receipt := finished(inputs)) is not None:
            marking = mark_trained(config, out, inputs.admit, receipt)
            return TrainResult(receipt=receipt, outcome=None, unchanged=True, marking=marking)
        if fresh:
            move_aside(out)
        _require_room(inputs)
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        with recorded(inputs, started) as attempt:
            trainer = attempt.trainer = Trainer(inputs.plan())
            training = inputs.training(held_out_loss(trainer, inputs, progress, "before"))
            write_file(inputs.directory / TRAINING_NAME, document(training))
            outcome, signal = run_steps(trainer, inputs, progress, keep_last)
            if outcome.stopped:
                attempt.cancelled(outcome, signal)
                return TrainResult(receipt=None, outcome=outcome, checkpoint=outcome.checkpoint, signal=signal)
            receipt = finish(trainer, inputs, training, started, outcome, progress)
        marking = mark_trained(config, out, inputs.admit, receipt)
        return TrainResult(receipt=receipt, outcome=outcome, late_signal=signal, marking=marking)


def preview(config: LoadedConfig, out: Path, plugins: Plugins, *, progress: Progress = SILENT) -> DryRun:
    """What the training would come to. Writes nothing and takes no lock. Raises KilnError as :func:`run` does for
    inputs, model, loss and memory."""
    require_train_extra("kiln train --dry-run")
    from kiln_stages.training.dry_run import dry_run
    from kiln_stages.training.inputs import read_inputs

    inputs = read_inputs(config, out, plugins, progress)
    return dry_run(inputs.plan(), inputs.held_out)


def _require_room(inputs: Inputs) -> None:
    """A run directory holds one training. Raises KilnError KLN208 with both digests, or for one that can be resumed."""
    from kiln_stages.training.checkpoint import list_checkpoints
    from kiln_stages.training.training_file import read_training

    found, wanted = read_training(inputs.directory), inputs.training()
    where = printable(inputs.directory)
    if found is None:
        return
    for what, old, new in (
        ("adapter", found.adapter, wanted.adapter),
        ("config", found.config_sha256, wanted.config_sha256),
        ("corpus", found.corpus_sha256, wanted.corpus_sha256),
        ("base adapter", found.base_adapter_sha256, wanted.base_adapter_sha256),
        ("base model", found.base_model_sha256, wanted.base_model_sha256),
        ("model config.json", found.model_config_sha256, wanted.model_config_sha256),
    ):
        if old != new:
            raise KilnError(
                "KLN208",
                f"{where} holds a training of another {what}: {printable(old)}, now {printable(new)}",
                hint="use another --out, or --fresh, which moves the old training aside",
            )
    if checkpoints := list_checkpoints(inputs.directory):
        raise KilnError(
            "KLN208",
            f"{where} holds this training, unfinished, with checkpoints up to step {checkpoints[-1][0]}",
            hint=f"`kiln resume {printable(inputs.out)}` goes on with it; --fresh moves it aside",
        )
