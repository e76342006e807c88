"""What the texts of a batch begin with alike (a system prompt, the tools) is encoded once, not once a row.

A tokenizer cuts a text at its control tokens before it does anything else, so the ids on either side of one do not
depend on the other side. That is shown for the batch, by its first text, and not assumed: see :meth:`SharedHead.of`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import tokenizers

from kiln_stages.labelling.strings import shared_prefix


class SharedHead:
    """Finds the head of a batch under one tokenizer. ``control``: a pattern for the texts of its control tokens.

    ``added``: the texts of all added tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: re.Pattern[str], added: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._added = list(added)
        self._cuts = functools.cache(self._is_cut)

    def of(self, texts: Sequence[str]) -> tuple[str, list[int]]:
        """What all of ``texts`` begin with, up to a control token, and its ids; ``""`` where nothing is won.

        The ids of any of the texts are these, followed by the ids of its rest.
        """
        if len(texts) < 2:
            return "", []
        shared = shared_prefix(texts)
        cuts = [match for match in self._control.finditer(shared) if match.start()]
        if not cuts or not self._cuts(cuts[-1].group()):
            return "", []
        head = shared[: cuts[-1].start()]
        whole, start, rest = (self._ids(text) for text in (texts[0], head, texts[0][len(head) :]))
        return (head, start) if start + rest == whole else ("", [])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _is_cut(self, token: str) -> bool:
        """Whether no other added token can begin before ``token`` and reach into it: the longest match would win."""
        for other in self._added:
            ends_in_it = any(other.endswith(token[:size]) for size in range(1, min(len(token), len(other) - 1) + 1))
            if token in other[1:] or ends_in_it:
                return False
        return True
