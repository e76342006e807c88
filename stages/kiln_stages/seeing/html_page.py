"""A row as one HTML file that needs nothing else: no script, no network, light and dark, readable without colours.

Whatever comes from the row is escaped for HTML, and what is invisible (controls, bidi marks) is written as an escape.
The marks around trained text are not selected with it, so what is copied from the page is the row's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kiln_cli.text import block
from kiln_stages.seeing.page import CLOSE, NEWLINE, OPEN, Header, quoted
from kiln_stages.seeing.shown_rows import TRAINED, Token

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2430; --soft: #5b6575; --line: #d5dae1; --box: #f6f7f9;
  --trained: #0b5d2c; --tint: #d9f2e1; --control: #7a4bb3; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #dfe4ec; --soft: #98a2b3; --line: #333b47;
  --box: #1b2027; --trained: #8fe3ad; --tint: #143524; --control: #c7a6f5; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre, table { font: .875rem/1.6 ui-monospace, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: .4rem; padding: 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.trained { background: var(--tint); color: var(--trained); font-weight: 600; text-decoration: underline;
  text-underline-offset: .2em; }
.control { color: var(--control); font-style: italic; }
.trained.control { color: var(--trained); }
.mark { color: var(--soft); user-select: none; }
.row span[title]:hover { outline: 1px solid var(--soft); }
table { border-collapse: collapse; } th { text-align: left; color: var(--soft); }
td, th { border-bottom: 1px solid var(--line); padding: .1rem .9rem .1rem 0; vertical-align: top; }
td:nth-child(-n+2) { text-align: right; } td:last-child { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def html_page(header: Header, tokens: Sequence[Token], *, ids: bool) -> bytes:
    """The page as UTF-8. ``ids`` adds a table of all tokens; each token tells its id under the pointer anyhow."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{_text(header.title)}</title>\n<style>{STYLE}</style>\n",
        f"<h1>{_text(header.title)}</h1>\n<dl>\n",
        *(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in header.facts),
        "</dl>\n",
    ]
    if tokens:
        parts += [_LEGEND, '<pre class="row">', *_marked(tokens), "</pre>\n"]
    if tokens and ids:
        parts += ["<table>\n<tr><th>token</th><th>id</th><th>label</th><th>text</th></tr>\n", *_table(tokens)]
        parts.append("</table>\n")
    return "".join(parts).encode("utf-8")


_LEGEND = (
    f'<p><span class="trained">Trained text</span> stands between {OPEN} and {CLOSE}; '
    '<span class="control">control tokens</span> are in italics. Point at a token for its place and id.</p>\n'
)


def _marked(tokens: Sequence[Token]) -> Iterator[str]:
    inside = False
    for place, token in enumerate(tokens):
        trained = token.label == TRAINED
        if trained != inside:
            yield _mark(OPEN if trained else CLOSE)
            inside = trained
        if token.text:
            yield _token(place, token)
    if inside:
        yield _mark(CLOSE)


def _token(place: int, token: Token) -> str:
    trained = token.label == TRAINED
    classes = " ".join(["trained"] * trained + ["control"] * token.control)
    shown = _text(token.text)
    if trained:
        shown = shown.replace("\n", _mark(NEWLINE) + "\n")
    named = f' class="{classes}"' if classes else ""
    return f'<span{named} title="token {place}, id {token.id}, {token.label}">{shown}</span>'


def _table(tokens: Sequence[Token]) -> Iterator[str]:
    for place, token in enumerate(tokens):
        label = token.label + (", control" if token.control else "")
        named = ' class="trained"' if token.label == TRAINED else ""
        text = _text(quoted(token.text))
        yield f"<tr><td>{place}</td><td>{token.id}</td><td>{label}</td><td{named}>{text}</td></tr>\n"


def _mark(text: str) -> str:
    return f'<span class="mark">{text}</span>'


def _text(text: str) -> str:
    return escape(block(text), quote=True)
