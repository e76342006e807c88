"""White space as Unicode's property White_Space has it, and the public Kiln server: 25 characters.

Python's own ``strip`` and ``split`` also take U+001C to U+001F, which are not in it.
"""

from __future__ import annotations

import re

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_RUN = re.compile(f"[{WHITE_SPACE}]+")
_ONLY_PYTHONS = re.compile("[\x1c-\x1f]")


def trimmed(text: str) -> str:
    """The text without white space at its ends."""
    return text.strip(WHITE_SPACE)


def words(text: str) -> list[str]:
    """What stands between runs of white space."""
    if _ONLY_PYTHONS.search(text) is None:
        return text.split()  # the same, and several times faster
    return [word for word in _RUN.split(text) if word]
