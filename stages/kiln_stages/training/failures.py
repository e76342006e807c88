"""What is left of a training that fails: a receipt with ``status: "failed"``, a reason of the closed set, and words.

What refuses to begin (another config, a checkpoint that does not fit, files that are missing) is no failed training and
leaves no receipt: nothing was trained, and the run is as it was.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.training.inputs import Inputs
from kiln_stages.training.run_training import write_failure
from kiln_stages.training.train_receipt import Failure
from kiln_stages.training.trainer import Outcome, Trainer

# Refusals: of a loss log or checkpoint that is not the run's (207, 209, 215), of a run or name (201, 208), of a value
# that is not built (211), of settings (203), of another process's lock (401).
REFUSALS = ("KLN201", "KLN203", "KLN207", "KLN208", "KLN209", "KLN211", "KLN215", "KLN401")
# Codes whose words must not decide: paths of files stand in them.
BY_CODE = {"KLN217": "shape_mismatch", "KLN301": "training_error", "KLN402": "training_error", "KLN403": "oom"}
# The reason by words of the message, as the public server has it; the first that fits.
BY_WORDS = (
    ("cancelled by user", "cancelled"),
    ("out of memory", "oom"),
    ("not finite", "nan_loss"),
    (" is nan", "nan_loss"),
    (" made a nan in ", "nan_loss"),
    (" made an inf in ", "nan_loss"),
    (" is inf", "nan_loss"),
    (" is -inf", "nan_loss"),
    ("shape", "shape_mismatch"),
    ("smoke test", "adapter_load_failed"),
    ("base adapter is missing", "base_adapter_missing"),
    ("base adapter", "adapter_load_failed"),
)
MESSAGE_LIMIT = 2000


class Attempt:
    """One attempt at a training. ``trainer`` is None until the model is loaded."""

    def __init__(self, inputs: Inputs, started: float) -> None:
        self._inputs = inputs
        self._started = started
        self.trainer: Trainer | None = None

    def cancelled(self, outcome: Outcome, number: int | None) -> None:
        """A signal settled the run; what is left of it lies in a checkpoint."""
        name = signal.Signals(number).name if number is not None else "a stop"
        step = outcome.state.global_step
        self.failed(Failure("cancelled", f"cancelled by user: {name} after step {step}"))

    def failed(self, failure: Failure) -> None:
        write_failure(self.trainer, self._inputs, failure, self._started)


@contextmanager
def recorded(inputs: Inputs, started: float) -> Iterator[Attempt]:
    """Within the block, an error that ends the training leaves a failure receipt and goes on its way."""
    attempt = Attempt(inputs, started)
    try:
        yield attempt
    except BaseException as error:
        if (failure := failure_of(error)) is not None:
            _record(attempt, failure, error)
        raise


def failure_of(error: BaseException) -> Failure | None:
    """How a receipt tells of an error; None for a refusal, and for what is no end of a training."""
    code = ""
    if isinstance(error, KilnError):
        code, message = error.code, error.message
        if code in REFUSALS:
            return None
    elif isinstance(error, KeyboardInterrupt):
        message = "cancelled by user: SIGINT before the first step was settled"
    elif isinstance(error, MemoryError):
        message = "out of memory"
    elif isinstance(error, Exception):
        message = f"{type(error).__name__}: {error}"
    else:
        return None
    return Failure(BY_CODE.get(code) or reason_of(message), _without_home(printable(message, MESSAGE_LIMIT)))


def reason_of(message: str) -> str:
    """The reason that fits an error's message: cancellation first, ``training_error`` where no other does."""
    lowered = message.lower()
    return next((reason for words, reason in BY_WORDS if words in lowered), "training_error")


def _record(attempt: Attempt, failure: Failure, error: BaseException) -> None:
    """The error that ended the training is the one to report; that it left no receipt is said behind it."""
    try:
        attempt.failed(failure)
    except (KilnError, OSError, ValueError) as second:
        text = f"no failure receipt was written: {printable(second)}"
        if isinstance(error, KilnError):
            error.message += f"\n{text}"
        else:
            error.add_note(text)


def _without_home(message: str) -> str:
    """Receipts are shown to others: the home directory becomes a tilde."""
    home = str(Path.home())
    return message.replace(home + "/", "~/") if len(home) > 1 else message
