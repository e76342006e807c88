"""Texts and what they share: patterns for any of them, and common prefixes."""

from __future__ import annotations

import os
import re

from hypothesis import given
from hypothesis import strategies as st
from kiln_stages.labelling.strings import any_of, shared_length, shared_prefix

WORDS = st.text(alphabet="ab<|.", min_size=1, max_size=5)


@given(st.sets(WORDS, min_size=1, max_size=6), st.text(alphabet="ab<|.c", max_size=30))
def test_any_of_finds_the_longest_at_the_leftmost_place(texts: set[str], text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        longest = max((word for word in texts if text.startswith(word, at)), key=len, default="")
        if longest:
            expected.append((at, longest))
        at += len(longest) or 1
    assert [(match.start(), match.group(1)) for match in any_of(texts).finditer(text)] == expected


@given(st.text())
def test_any_of_nothing_is_found_nowhere(text: str) -> None:
    assert any_of([]).search(text) is None and any_of([]).split(text) == [text]


def test_a_split_keeps_what_was_found() -> None:
    assert any_of(["</think>", "<think>"]).split("a<think>b</think>") == ["a", "<think>", "b", "</think>", ""]
    assert any_of(["a.c"]).search("abc") is None  # texts, not patterns
    assert isinstance(any_of(["x"]), re.Pattern)


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=5))
def test_the_shared_prefix_is_that_of_all(texts: list[str]) -> None:
    expected = os.path.commonprefix(texts)  # noqa: RUF071 (texts, not paths)
    assert shared_prefix(texts) == expected
    if texts:
        assert shared_length(texts[0], texts[-1]) == len(os.path.commonprefix([texts[0], texts[-1]]))  # noqa: RUF071
