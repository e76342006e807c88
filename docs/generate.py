"""Writes docs/commands.md and docs/errors.md from the program itself, so that they cannot say anything else.

``python docs/generate.py`` writes them; with ``--check`` it writes nothing, and exits 1 where a page differs.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from kiln_cli.app import COMMANDS, NOT_BUILT
from kiln_cli.errors import CATALOGUE, Exit

HERE = Path(__file__).resolve().parent
WIDTH = "100"
DO_NOT_EDIT = "<!-- Made by docs/generate.py: change the program, then run it again. -->"
# Variables by which a terminal, or a CI job, changes how help is drawn.
DRAWING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "CLICOLOR_FORCE", "TERM", "COLUMNS", "LINES")
EXITS = {
    Exit.DONE: "done",
    Exit.FAULTS_FOUND: "the check found faults: rows refused, a claim that does not hold, a training that stopped",
    Exit.USER_INPUT: "usage, config or input that you must mend",
    Exit.ENVIRONMENT: "something is missing in the environment: a package, a device, model files",
    Exit.RESOURCE: "a resource or a lock: disk, memory, another run; the same command may succeed later",
    Exit.BUG: "a bug in kiln or in a plugin",
}


def commands_page() -> str:
    """Every command: what its module says of itself, and its ``--help`` at a fixed width."""
    parts = [
        "# Commands",
        DO_NOT_EDIT,
        "Results go to stdout; accounts, progress and errors to stderr. With `--json`, stdout holds one JSON object. "
        "[errors.md](errors.md) lists exit codes and error codes.",
        "## kiln",
        _fenced(_help()),
    ]
    for name, module in COMMANDS.items():
        parts += [f"## kiln {name}", _docstring(module), _fenced(_help(name))]
        for verb in _verbs(module):
            parts += [f"### kiln {name} {verb}", _fenced(_help(name, verb))]
    parts += [
        "## Not built in this version",
        "These names are taken and refused with KLN211: " + ", ".join(f"`{name}`" for name in NOT_BUILT) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def errors_page() -> str:
    """Exit codes, then every code of the catalogue with its cause and its remedy."""
    parts = [
        "# Errors",
        DO_NOT_EDIT,
        "An error is one line, `kiln: CODE: message`, often with a second line, `hint: what to do next`. "
        "`kiln explain CODE` prints an entry of this page. `--debug` adds a traceback.",
        "## Exit codes",
        "\n".join(["| exit code | meaning |", "|---|---|", *(f"| {int(code)} | {EXITS[code]} |" for code in Exit)]),
        "130 and 143 follow SIGINT and SIGTERM, 141 a reader that closes the pipe.",
    ]
    for code, entry in CATALOGUE.items():
        parts += [f"## {code}: {entry.title}", f"Exit code {int(entry.exit_code)}.", entry.cause, entry.remedy]
    return "\n\n".join(parts) + "\n"


PAGES = {"commands.md": commands_page, "errors.md": errors_page}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/commands.md and docs/errors.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page differs")
    check = parser.parse_args(argv).check
    stale = []
    for name, page in PAGES.items():
        text = page()
        path = HERE / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"{'differs' if check else 'written'}: {', '.join(stale)}\n")
    return int(check and bool(stale))


def _help(*command: str) -> str:
    """The help of a command in a process of its own: typer reads the width when it is imported."""
    environment = {key: value for key, value in os.environ.items() if key not in DRAWING}
    environment |= {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "kiln_cli.app", *command, "--help"],
        check=True,
        capture_output=True,
        encoding="utf-8",
        env=environment,
    )
    return "\n".join(line.rstrip() for line in done.stdout.split("\n")).strip("\n")


def _docstring(module: str) -> str:
    """A module's docstring as Markdown, read without running the module."""
    return (ast.get_docstring(_tree(module)) or "").replace("``", "`")


def _verbs(module: str) -> list[str]:
    """The verbs of a command that has several, as its ``VERBS`` names them."""
    for node in _tree(module).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "VERBS"
            and isinstance(node.value, ast.Dict)
        ):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    return []


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


if __name__ == "__main__":
    sys.exit(main())
