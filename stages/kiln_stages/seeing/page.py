"""A row on a terminal: where it came from, its text with the trained part marked, its tokens as a table.

With colours, trained text is green and control tokens stand out. Without, trained text stands between ⟦ and ⟧; a
bracket of that kind in the row itself is written as an escape, so that each one seen is a mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kiln_cli.terminal import table
from kiln_cli.text import block, printable
from kiln_stages.seeing.shown_rows import TRAINED, Token

OPEN, CLOSE = "⟦", "⟧"
NEWLINE = "↵"  # shown before a line feed that is trained on; it has no other look in colours
Piece = tuple[str, str]  # a text, and the SGR numbers of its style

PLAIN = ""
# By (trained, control token).
STYLES = {(True, False): "1;32", (True, True): "1;4;32", (False, False): PLAIN, (False, True): "36"}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a row before its text: name and value, in order."""

    title: str
    facts: list[tuple[str, str]]

    def lines(self) -> list[str]:
        return [printable(self.title), *table([[name, value] for name, value in self.facts]).split("\n")]


def row_page(header: Header, tokens: Sequence[Token], *, colours: bool, ids: bool) -> Iterator[Piece]:
    """All of a row, ready for ``terminal.styled``."""
    yield "\n".join(header.lines()), PLAIN
    if not tokens:
        return
    yield "\n\n", PLAIN
    yield from legend(colours)
    yield "\n\n", PLAIN
    yield from marked(tokens, colours=colours)
    if ids:
        yield "\n\n", PLAIN
        yield from token_table(tokens)


def legend(colours: bool) -> Iterator[Piece]:
    if not colours:
        yield f"trained text stands between {OPEN} and {CLOSE}", PLAIN
        return
    yield "trained", STYLES[True, False]
    yield " (", PLAIN
    yield "control token", STYLES[True, True]
    yield "), context (", PLAIN
    yield "control token", STYLES[False, True]
    yield ")", PLAIN


def marked(tokens: Iterable[Token], *, colours: bool) -> Iterator[Piece]:
    """The text of tokens that follow each other, trained ones marked; the text ends without a line feed."""
    pieces = list(_coloured(tokens) if colours else _bracketed(tokens))
    if pieces and pieces[-1][0].endswith("\n"):
        text, style = pieces[-1]
        pieces[-1] = text[:-1], style
    yield from pieces


def _coloured(tokens: Iterable[Token]) -> Iterator[Piece]:
    for token in tokens:
        trained = token.label == TRAINED
        text = token.text.replace("\n", f"{NEWLINE}\n") if trained else token.text
        yield text, STYLES[trained, token.control]


def _bracketed(tokens: Iterable[Token]) -> Iterator[Piece]:
    inside = False
    for token in tokens:
        trained = token.label == TRAINED
        if trained != inside:
            yield OPEN if trained else CLOSE, PLAIN
            inside = trained
        yield _unbracketed(token.text), PLAIN
    if inside:
        yield CLOSE, PLAIN


def _unbracketed(text: str) -> str:
    return text.replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")


def token_table(tokens: Sequence[Token]) -> Iterator[Piece]:
    """A line a token: its place from 0, id, label, whether it is a control token, and its text in quotes."""
    width = max(5, len(str(len(tokens))))
    ids = max(5, *(len(str(token.id)) for token in tokens))
    yield f"{'token':>{width}}  {'id':>{ids}}  label    text\n", PLAIN
    for place, token in enumerate(tokens):
        trained = token.label == TRAINED
        line = f"{place:>{width}}  {token.id:>{ids}}  {token.label:<7}  {quoted(token.text)}"
        yield line + ("  control" if token.control else ""), STYLES[trained, token.control]
        if place + 1 < len(tokens):
            yield "\n", PLAIN


def quoted(text: str) -> str:
    """A text on one line in double quotes, as in JSON, but for characters that no terminal should act on."""
    return block(json.dumps(text, ensure_ascii=False))
