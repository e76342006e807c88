"""Identities of rows as they were given: the vector of the contract, and what white space is."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

import pytest
from kiln_stages.row_identities import content_sha256, group_id, normal_text, normalized_sha256, session_id


def chat(asked: str, answered: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}], **more}


A = chat("a", "b")
B = chat("Hello  World", "OK", group_id="g1")
C = chat("hello world", "ok", metadata={"session_id": "s1"})
CONTENT_A = "sha256:c84092777d884dc1d39d594a8f2147450651b9b50b96758c66eef144b426a162"
CONTENT_B = "sha256:788debd93256349cb1f3529bb3379c52f69daec4491b043d3fefb2179e150d3e"
NORMAL_B = "sha256:0e7a7ad9d2653b445d27daaf879e2416e9e6e7cf7e120c191c003336780d0834"
CONTENT_C = "sha256:1e668c312c90bdea2c04024ffa6d19cc67c587f43cdec22355e0a01ad8f336ed"


def test_the_vector() -> None:
    assert [content_sha256(row) for row in (A, B, C)] == [CONTENT_A, CONTENT_B, CONTENT_C]
    assert [normalized_sha256(row) for row in (A, B, C)] == [CONTENT_A, NORMAL_B, CONTENT_C]
    assert [group_id(row) for row in (A, B, C)] == [None, "g1", None]
    assert [session_id(row) for row in (A, B, C)] == [None, None, "s1"]


def test_keys_are_left_as_they_are_and_their_order_does_not_count() -> None:
    assert normalized_sha256({"Key  A": "X  y"}) == content_sha256({"Key  A": "x y"})
    assert content_sha256({"b": 1, "a": [1.0, None]}) == content_sha256({"a": [1.0, None], "b": 1})
    assert normalized_sha256({"a": [" X", {"b": "Y\n"}], "n": 1}) == content_sha256({"a": ["x", {"b": "y"}], "n": 1})


def test_white_space_is_that_of_unicode() -> None:
    # The property White_Space: what Python calls a space, without the four separators that it alone counts.
    spaces = [chr(point) for point in range(sys.maxunicode + 1) if chr(point).isspace()]
    white = [char for char in spaces if char not in "\x1c\x1d\x1e\x1f"]
    assert len(white) == 25
    for space in white:
        assert normal_text(f"{space}A{space}{space}B{space}") == "a b", unicodedata.name(space, hex(ord(space)))
        assert normal_text(f"\x1c{space}{space}B{space}") == "\x1c b", "beside what is none"
        assert group_id({"group_id": f"{space}g\x1f{space}"}) == "g\x1f"
    for other in "\x1c\x1d\x1e\x1f\u200b\ufeff":
        assert normal_text(f"{other}A{other}") == f"{other}a{other}"
        assert group_id({"group_id": other}) == other


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"group_id": "  g "}, "g"),
        ({"group_id": " ", "metadata": {"group_id": "m"}, "provenance": {"group_id": "p"}}, "m"),
        ({"group_id": 7, "metadata": {"group_id": None}, "provenance": {"group_id": "p"}}, "p"),
        ({"metadata": "no object", "extra": {"group_id": "x"}}, "x"),
        ({"extra": {"group_id": "x"}, "provenance": {"group_id": "p"}}, "p"),
        ({"other": {"group_id": "x"}}, None),
        ({"session_id": "s"}, None),
        (["group_id"], None),
    ],
)
def test_where_a_group_is_named(row: object, expected: str | None) -> None:
    assert group_id(row) == expected
    assert session_id(json.loads(json.dumps(row).replace("session_id", "none").replace("group", "session"))) == expected


def test_composed_and_decomposed_letters_stay_apart() -> None:
    assert normal_text("CAF\u00c9") == "caf\u00e9" != normal_text("CAFE\u0301")
