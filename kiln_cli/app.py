"""The command line: names every command, loads one, and turns errors into one line, a hint and an exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kiln_cli.errors import Exit, KilnError, not_built
from kiln_cli.plugins import version
from kiln_cli.terminal import terminal
from kiln_cli.text import block, printable

# What the system says of a path that was given, where nothing was opened yet.
_OF_THE_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
# The only place that names stage modules. A module is imported when its command is asked for.
COMMANDS = {
    "validate": "kiln_stages.validate",
    "prepare": "kiln_stages.prepare",
    "admit": "kiln_stages.admit",
    "corrections": "kiln_stages.corrections",
    "teacher": "kiln_stages.teacher",
    "train": "kiln_stages.train",
    "resume": "kiln_stages.resume",
    "recipe": "kiln_stages.recipe",
    "status": "kiln_stages.status",
    "verify-receipt": "kiln_stages.verify_receipt",
    "sign": "kiln_stages.sign",
    "generate": "kiln_stages.generate",
    "report": "kiln_stages.report",
    "diff": "kiln_stages.diff",
    "leak": "kiln_stages.leak",
    "inspect": "kiln_stages.inspect",
    "why": "kiln_stages.why",
    "export": "kiln_stages.export",
    "plugins": "kiln_stages.plugins",
    "dataset": "kiln_stages.dataset",
    "explain": "kiln_stages.explain",
}
# One line a command for `kiln --help`, which must not import them; a test holds each equal to its docstring's.
SUMMARIES = {
    "validate": "Check files against the contract of their kind.",
    "prepare": "Turn raw function-calling rows into split, typed examples; count every drop.",
    "admit": "Tokenize rows, prove their labels, and write the corpus with its ingestion receipt.",
    "corrections": "Keep corrected answers, admit those that were not trained on yet, and see which were.",
    "teacher": "Register teachers, show and check who they are, and have one score rows for a distillation.",
    "train": "Train a LoRA adapter on the admitted rows, one row a step.",
    "resume": "Continue a training from an exact checkpoint; any difference is an error.",
    "recipe": "Run trainings that build on one another, from a recipe: check it, show its plan, carry it out.",
    "status": "Show how far a training is: step, loss, latest checkpoint, and what to do next.",
    "verify-receipt": "Check every claim of a train receipt; offline, without a GPU.",
    "sign": "Sign a train receipt with an SSH key, through ssh-keygen.",
    "generate": "Write an answer with the base model and with the adapter, one below the other.",
    "report": "Show a finished run: rows, tokens, held-out loss, speed, verdict, and how to load the adapter.",
    "diff": "Compare two runs: rows, labels, settings, versions, and whether resume is legal.",
    "leak": "Tell which rows, groups or near duplicates stand in two sets that must be apart.",
    "inspect": "Show a row as it is trained on: its text, which of it is trained, and its token ids.",
    "why": "Tell where a row went and why, from the raw file through every stage.",
    "export": "Write the admitted rows as a data set, or the trained model, with a card made of the receipts.",
    "plugins": "List what the loaded plugins provide: sources, templates, losses and drop reasons.",
    "dataset": "Keep data sets by name, each split so that no group is in two splits.",
    "explain": "Explain an error code: its cause and the remedy.",
}
# Commands that the design names and this version does not have.
NOT_BUILT = (
    "init", "schema", "evaluate",
)  # fmt: skip
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Commands(TyperGroup):
    """Commands by name, imported on demand: ``kiln --help`` loads no torch, no transformers and no polars.

    A module has ``command``. One with several verbs (``kiln dataset add``) has ``VERBS`` too, their functions by name;
    its ``command`` then holds what they share.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in NOT_BUILT:
            raise not_built(f"`kiln {cmd_name}`", "`kiln --help` lists what there is")
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean `kiln {near[0]}`?" if near else "`kiln --help` lists the commands"
            raise KilnError("KLN201", f"no such command: {printable(cmd_name)!r}", hint=hint)
        module = importlib.import_module(COMMANDS[cmd_name])
        single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
        verbs: dict[str, Any] = getattr(module, "VERBS", {})
        if verbs:
            single.callback()(module.command)
        for verb, command in verbs.items() or [(cmd_name, module.command)]:
            single.command(verb)(command)
        return get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
    epilog="Each stage reads files and writes files; `kiln COMMAND --help` shows its forms.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        terminal.data(f"kiln {version()}")
        raise typer.Exit()


@app.callback()
def options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Untrusted fine-tuning data in, a trained adapter out, with evidence that anyone can check."""
    terminal.quiet, terminal.verbose, terminal.debug = quiet, verbose, debug


def main() -> None:
    """Entry point of the ``kiln`` script."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _closed_pipe()
    except OSError as error:
        _park_stdout()
        if code != Exit.RESOURCE:  # else the command met the same fault and it is told
            code = _show(_as_kiln_error(error))
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code. Never raises.

    Not through typer's ``main``: it has codes of its own for a closed pipe and an interrupt.
    """
    terminal.json = "--json" in arguments
    command = get_command(app)
    try:
        with command.make_context("kiln", list(arguments) or ["--help"]) as context:
            result = command.invoke(context)
        return int(result) if isinstance(result, int) else Exit.DONE
    except typer.Exit as stop:
        return stop.exit_code
    except KilnError as error:
        return _show(error)
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:
        sys.stderr.write("kiln: interrupted\n")
        return 128 + signal.SIGINT
    except Exception as error:
        return _show(_as_kiln_error(error))


def _as_kiln_error(error: Exception) -> KilnError:
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors, whatever their class
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "kiln"
        return KilnError("KLN201", printable(error.format_message()), hint=f"`{command} --help` shows the forms")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return KilnError("KLN402", f"cannot write the output: {error.strerror}", hint="free space, then run it again")
    if isinstance(error, OSError) and error.errno in _OF_THE_PATH:
        where = "the path" if error.filename is None else printable(error.filename)
        return KilnError("KLN204", f"cannot reach {where}: {error.strerror}", hint="check the path and its permissions")
    if isinstance(error, MemoryError):
        return KilnError("KLN403", "out of memory", hint="lower [admit] max_tokens or use a larger machine")
    wrapped = KilnError(
        "KLN501",
        f"unexpected {type(error).__name__}: {printable(error)}",
        hint="this is a bug: run again with --debug and report what it prints",
    )
    wrapped.__cause__ = error
    return wrapped


def _show(error: KilnError) -> int:
    if terminal.json:
        try:
            terminal.json_data(error.as_json())
        except OSError:
            _park_stdout()  # the fault may be of stdout itself; stderr has it below
    sys.stderr.write(block(f"kiln: {error.code}: {error.message}") + "\n")
    if error.hint:
        sys.stderr.write(block(f"hint: {error.hint}") + "\n")
    if terminal.debug:
        traceback.print_exception(error)
    return error.exit_code


def _closed_pipe() -> int:
    """The reader went away: end quietly, as other tools do."""
    _park_stdout()
    return 128 + signal.SIGPIPE


def _park_stdout() -> None:
    """What stdout still holds goes nowhere, so that Python's last flush neither speaks nor changes the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
