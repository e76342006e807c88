"""Members changed in the text of an object: the value is the expected one, and every other byte is as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kiln_stages.correcting.json_members import members, values, with_member, without_member

from kiln_cli import strict_json

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text('ab"\\{}[],: é', max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
SPACE = st.text(" \t\r", max_size=2)


@st.composite
def objects(draw: st.DrawFn) -> str:
    """The text of an object as anyone may have written it: white space, escapes, order."""
    pairs = draw(st.dictionaries(st.sampled_from(["k", "a", "é", '"', "", "b:c"]), VALUES, max_size=5))
    ascii_only = draw(st.booleans())
    parts = [
        f"{draw(SPACE)}{json.dumps(key, ensure_ascii=ascii_only)}{draw(SPACE)}:{draw(SPACE)}"
        f"{json.dumps(value, ensure_ascii=ascii_only)}{draw(SPACE)}"
        for key, value in pairs.items()
    ]
    return "{" + (",".join(parts) or draw(SPACE)) + "}"


@given(objects(), st.sampled_from(["k", "a", "é", '"', "new"]), st.sampled_from(["1", '"x"', "[{}]", "null"]))
def test_a_member_is_set_and_the_rest_stays(text: str, key: str, value: str) -> None:
    before, after = values(text), with_member(text, key, value)
    assert values(after) == before | {key: value}
    assert list(values(after)) == list(before | {key: value}), "the order stays"
    if key in before:
        (place,) = [member for member in members(text) if member.key == key]
        assert after == text[: place.value] + value + text[place.end :]
    else:
        behind = members(text)[-1].end if before else text.index("{") + 1
        assert after.startswith(text[:behind]) and after.endswith(text[behind:])
    assert strict_json.parse_object(after.encode()) == strict_json.parse_object(text.encode()) | {
        key: strict_json.parse(value.encode())
    }


@given(objects(), st.sampled_from(["k", "a", "é", '"', "absent"]))
def test_a_member_is_taken_out_and_the_rest_stays(text: str, key: str) -> None:
    before, after = values(text), without_member(text, key)
    assert values(after) == {name: value for name, value in before.items() if name != key}
    assert strict_json.parse_object(after.encode()).keys() == before.keys() - {key}
    assert (after == text) == (key not in before)


@given(objects(), st.sampled_from(["1.50", '"x"']))
def test_what_was_set_can_be_taken_back(text: str, value: str) -> None:
    assert without_member(with_member(text, "new", value), "new") == text


@pytest.mark.parametrize(
    "text",
    ['{"a":1.50,"b":1E5}', '{ "a" : "\\u0061" , "a b":{"k":[1, 2]} }', '{"a":1.0000000000000000000000000001,"b":-0}'],
)
def test_numbers_and_escapes_stay_as_they_are_written(text: str) -> None:
    assert with_member(text, "k", "null").startswith(text[:-1].rstrip())
