"""White space is Unicode's White_Space: its 25 code points, and none of those that Python alone takes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_cli.white_space import WHITE_SPACE, trimmed, words

# PropList.txt, White_Space.
RANGES = (
    (0x0009, 0x000D),
    (0x0020, 0x0020),
    (0x0085, 0x0085),
    (0x00A0, 0x00A0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
SPACES = {chr(code) for first, last in RANGES for code in range(first, last + 1)}


def test_it_is_the_25_code_points_of_unicode() -> None:
    assert set(WHITE_SPACE) == SPACES
    assert len(WHITE_SPACE) == len(SPACES) == 25


@pytest.mark.parametrize("char", ["\x1c", "\x1d", "\x1e", "\x1f", "\u200b", "\ufeff"])
def test_what_python_or_people_take_for_white_space_stays(char: str) -> None:
    assert trimmed(f" {char}a{char}\n") == f"{char}a{char}"
    assert words(f"a{char}b c") == [f"a{char}b", "c"]


@given(st.text(st.sampled_from(sorted(SPACES | {"a", "\x1c", "\x1f", "é"}))))
def test_words_and_trimmed_agree_with_a_walk_over_the_characters(text: str) -> None:
    found, word = [], ""
    for char in [*text, " "]:
        if char not in SPACES:
            word += char
        elif word:
            found.append(word)
            word = ""
    assert words(text) == found
    first = next((place for place, char in enumerate(text) if char not in SPACES), len(text))
    last = max((place for place, char in enumerate(text) if char not in SPACES), default=first - 1)
    assert trimmed(text) == text[first : last + 1]
