"""Pieces of the cards: table rows and code spans, within which no text of others is markup."""

from __future__ import annotations

from collections.abc import Sequence

from kiln_cli.text import printable


def table_row(head: str, cells: Sequence[object]) -> str:
    """A row of a table; whole numbers get commas."""
    return " | ".join([f"| {head}", *(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)]) + " |"


def code_span(text: object) -> str:
    """A code span within a table: nothing in it is markup, and no bar ends the cell."""
    shown = printable(text).replace("`", "'").replace("|", "\\|")
    return f"`{shown or ' '}`"
