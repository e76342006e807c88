"""The one sanitizer for foreign text: whatever comes from a row, a path or a plugin passes here before a terminal."""

from __future__ import annotations

import unicodedata

LIMIT = 200
_KEPT_CATEGORIES = frozenset("LMNPSZ")


def printable(text: object, limit: int = LIMIT) -> str:
    """``text`` on one line, with control, bidi and other invisible characters as escapes, cut to ``limit`` characters.

    Categories C* (controls, format characters such as bidi overrides and zero-width joiners, surrogates, unassigned)
    and the line separators are written as ``\\n``-style or ``\\u202e``-style escapes, so no terminal acts on them.
    """
    source = str(text)
    head = source if len(source) <= limit else source[:limit]
    out = head if head.isascii() and head.isprintable() else "".join(map(_escape, head))
    return out if len(source) <= limit else f"{out}… ({len(source)} characters)"


def block(text: str) -> str:
    """Like :func:`printable`, for text of several lines: line feeds stay, nothing is cut."""
    return "\n".join(printable(line, limit=max(len(line), 1)) for line in text.split("\n"))


def _escape(char: str) -> str:
    category = unicodedata.category(char)
    if category[0] in _KEPT_CATEGORIES and category not in ("Zl", "Zp"):
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
