"""``kiln explain``: what an error code means and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from kiln_cli.errors import CATALOGUE, KilnError
from kiln_cli.terminal import table, terminal
from kiln_cli.text import printable


def command(
    code: Annotated[str | None, typer.Argument(help="A code such as KLN207; all of them if left out.")] = None,
) -> None:
    """Explain an error code: its cause and the remedy."""
    if code is None:
        terminal.data(
            table([[name, int(entry.exit_code), entry.title] for name, entry in CATALOGUE.items()], indent="")
        )
        return
    terminal.data(run(code))


def run(code: str) -> str:
    """The page of one code. Raises KilnError KLN212 for an unknown one."""
    name = code.upper()
    if name not in CATALOGUE:
        raise KilnError("KLN212", f"no error has the code {printable(code)!r}", hint="`kiln explain` lists all codes")
    entry = CATALOGUE[name]
    return f"{name}: {entry.title} (exit code {int(entry.exit_code)})\n\n{entry.cause}\n{entry.remedy}"
