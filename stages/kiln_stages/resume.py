"""``kiln resume``: an exact checkpoint and the same inputs in, the same run out, as if it had never been cut."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import run_lock
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import SILENT, Progress, terminal
from kiln_cli.text import printable
from kiln_stages.training.packages import require_train_extra

if TYPE_CHECKING:  # torch is imported when a training goes on, not when `kiln --help` looks at this module
    from kiln_stages.training.checkpoint import Checkpoint
    from kiln_stages.training.replay import Replay
    from kiln_stages.training.run_training import TrainResult


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a training.")],
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="latest, or a checkpoint's name.")] = "latest",
    prove: Annotated[
        int | None, typer.Option("--prove", metavar="K", min=1, help="Only train K steps again and compare.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Remove all checkpoints but the newest N.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Continue a training from an exact checkpoint; any difference is an error."""
    loaded = load_config(run_directory / "config.resolved.toml")
    if prove is not None:
        proven = run_proof(loaded, run_directory, load_plugins(), steps=prove, checkpoint=checkpoint, progress=terminal)
        if json:
            terminal.json_data(proven)
        terminal.say(proven.account())
        return
    result = run(loaded, run_directory, load_plugins(), checkpoint=checkpoint, keep_last=keep_last, progress=terminal)
    if json and result.receipt is not None:
        terminal.json_data(result.receipt)
    if result.resumed_from is not None:
        terminal.say(f"resume: went on after step {result.resumed_from}")
    terminal.say(result.account(run_directory))
    if result.marking is not None and result.marking.fault:
        terminal.warn(result.marking.fault)
    if result.signal is not None:
        terminal.say(f"next: kiln resume {printable(run_directory)}")
        raise typer.Exit(128 + result.signal)
    terminal.say(f"next: kiln verify-receipt {printable(run_directory)}")


def run(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    checkpoint: str = "latest",
    keep_last: int | None = None,
    progress: Progress = SILENT,
) -> TrainResult:
    """Goes on from a checkpoint of ``out`` to the end and writes the receipt. A finished run is left as it is.

    ``config`` is the run's own, ``out/config.resolved.toml``; ``keep_last`` as with ``kiln train``. Raises KilnError:
    KLN215 for a checkpoint that is not there, cannot be loaded or has later ones beside it, KLN209 with every
    difference from what it is bound to, KLN207 where the loss log is not the checkpoint's; and as ``kiln train`` does.
    """
    started = time.monotonic()
    require_train_extra("kiln resume")
    from kiln_stages.correcting.marking import mark_trained
    from kiln_stages.training.checkpoint import list_checkpoints
    from kiln_stages.training.failures import recorded
    from kiln_stages.training.inputs import read_inputs
    from kiln_stages.training.run_training import TrainResult, finish, finished, run_steps
    from kiln_stages.training.trainer import Trainer, require_no_later
    from kiln_stages.training.training_file import read_training

    with run_lock(out, "kiln resume"):
        try:
            inputs = read_inputs(config, out, plugins, progress)
        except KilnError as error:
            _list_what_else_differs(error, config, out, plugins, checkpoint)
            raise
        if checkpoint == "latest" and (receipt := finished(inputs)) is not None:
            marking = mark_trained(config, out, inputs.admit, receipt)
            return TrainResult(receipt=receipt, outcome=None, unchanged=True, marking=marking)
        training = read_training(inputs.directory)
        if training is None:
            raise _no_checkpoint(out, "there is no training")
        loaded = _choose(inputs.directory, checkpoint, out)
        require_no_later(inputs.directory, loaded, list_checkpoints(inputs.directory))
        with recorded(inputs, started) as attempt:
            trainer = attempt.trainer = Trainer(inputs.plan())
            trainer.restore(loaded)
            step = loaded.loop.global_step
            outcome, signal = run_steps(trainer, inputs, progress, keep_last)
            if outcome.stopped:
                attempt.cancelled(outcome, signal)
                return TrainResult(
                    receipt=None, outcome=outcome, checkpoint=outcome.checkpoint, signal=signal, resumed_from=step
                )
            receipt = finish(trainer, inputs, training, started, outcome, progress)
        marking = mark_trained(config, out, inputs.admit, receipt)
        return TrainResult(receipt=receipt, outcome=outcome, late_signal=signal, resumed_from=step, marking=marking)


def run_proof(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    steps: int,
    checkpoint: str = "latest",
    progress: Progress = SILENT,
) -> Replay:
    """Trains the last ``steps`` steps before a checkpoint again and compares all of it; the run is only read.

    It takes no lock: what it reads never changes. Raises KilnError KLN108 with the first difference; KLN201, KLN209 and
    KLN215 as :func:`kiln_stages.training.replay.replay` and :func:`run` do.
    """
    require_train_extra("kiln resume")
    from kiln_stages.training.inputs import read_inputs
    from kiln_stages.training.replay import replay

    inputs = read_inputs(config, out, plugins, progress)
    return replay(inputs.plan(), inputs.directory, _choose(inputs.directory, checkpoint, out), steps, progress)


def _list_what_else_differs(
    changed: KilnError, config: LoadedConfig, out: Path, plugins: Plugins, checkpoint: str
) -> None:
    """Raises KilnError KLN209 where inputs that changed after admit are not all that differs from the checkpoint."""
    from kiln_stages.training.moved_inputs import refuse_with_all_differences

    if changed.code not in ("KLN207", "KLN112"):  # 112: a scored corpus that is refused now
        return
    try:
        loaded = _choose(out / "train", checkpoint, out)
    except KilnError:
        return
    refuse_with_all_differences(changed, config, out, plugins, loaded)


def _choose(directory: Path, wanted: str, out: Path) -> Checkpoint:
    """The checkpoint of that name, loaded. Names are names of directories directly under ``train/``, never paths."""
    from kiln_stages.training.checkpoint import NAME, list_checkpoints, load_checkpoint

    found = list_checkpoints(directory)
    if wanted == "latest":
        if not found:
            raise _no_checkpoint(out, "the training was cut before its first checkpoint")
        return load_checkpoint(found[-1][1])
    if NAME.match(wanted) is None:
        raise KilnError(
            "KLN201",
            f"--checkpoint {printable(wanted)!r} is no name of a checkpoint",
            hint=f"`ls {printable(directory)}` lists them, or leave the option out for the latest",
        )
    return load_checkpoint(directory / wanted)


def _no_checkpoint(out: Path, why: str) -> KilnError:
    return KilnError(
        "KLN215",
        f"{printable(out)} has no checkpoint to resume from: {why}",
        hint=f"`kiln train {printable(out)}/config.resolved.toml --out {printable(out)}` begins it again",
    )
