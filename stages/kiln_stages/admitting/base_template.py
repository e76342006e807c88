"""The template of an admission beside the one that ``[train] base_adapter`` was trained under.

A second training under another template than the first is legal, and seldom meant: it is told, with the difference.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from kiln_cli.config import LoadedConfig
from kiln_cli.files import read_bounded
from kiln_cli.identity import sha256_hex
from kiln_cli.text import printable
from kiln_stages.admitting.model_files import FILE_LIMIT, TemplateChoice

NAME = "chat_template.jinja"
LINES = 40  # of the difference


class Comparison(NamedTuple):
    """``same``: None where the base adapter's folder holds no template."""

    same: bool | None
    text: str


def compare_with_base(config: LoadedConfig, choice: TemplateChoice) -> Comparison | None:
    """None where the config names no base adapter."""
    base = config.run.train.base_adapter
    if base is None:
        return None
    path = config.resolve(base) / NAME
    if not path.is_file():
        return Comparison(None, f"base adapter {printable(base)} holds no {NAME}: its template is not known")
    theirs = read_bounded(path, FILE_LIMIT)
    sha256 = "sha256:" + sha256_hex(theirs)
    if sha256 == choice.sha256:
        return Comparison(True, f"the chat template is the one of base adapter {printable(base)}: {sha256}")
    head = (
        f"the chat template is {choice.sha256}, base adapter {printable(base)} was trained under {sha256}; "
        "what differs:"
    )
    return Comparison(False, "\n".join([head, *_difference(theirs.decode("utf-8", "replace"), choice.source, path)]))


def _difference(theirs: str, ours: str, path: Path) -> list[str]:
    lines = [
        printable(line)
        for line in difflib.unified_diff(
            theirs.splitlines(), ours.splitlines(), f"base adapter's {path.name}", "this template", n=1, lineterm=""
        )
    ]
    more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return lines[:LINES] + more or ["line ends alone"]
