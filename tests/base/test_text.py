"""The sanitizer between foreign text and a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln_cli.terminal import table
from kiln_cli.text import LIMIT, block, printable


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain text", "plain text"),
        ("é ß 漢字 😀 ñ", "é ß 漢字 😀 ñ"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("\x1b]8;;http://x\x07", "\\x1b]8;;http://x\\x07"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("a\u2028b\u2029c\x85d", "a\\u2028b\\u2029c\\x85d"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("a\u200bb\ufeffc\u200dd", "a\\u200bb\\ufeffc\\u200dd"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_other_values_are_shown_as_text() -> None:
    assert printable(5) == "5"
    assert printable(None) == "None"


def test_long_text_is_cut_and_says_so() -> None:
    assert printable("x" * LIMIT) == "x" * LIMIT
    assert printable("x" * (LIMIT + 1)) == "x" * LIMIT + f"… ({LIMIT + 1} characters)"
    assert printable("\x1b" * 10, 3) == "\\x1b" * 3 + "… (10 characters)"


def test_block_keeps_lines_and_cuts_nothing() -> None:
    assert block("a\x1b\n\nb" + "x" * 500) == "a\\x1b\n\nb" + "x" * 500


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    for shown in (printable(text), *block(text).split("\n")):
        assert all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for char in shown)


def test_tables_line_up_and_are_sanitized() -> None:
    assert table([["name", 1], ["long name", 1234567]]) == "  name               1\n  long name  1,234,567"
    assert table([["a\x1b\nb", 0.5]]) == "  a\\x1b\\nb  0.5000"
    assert table([]) == ""
