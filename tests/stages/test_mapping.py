"""Rows of any shape by a map: what it finds, what it refuses, what it says of the rest."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.reading.mapping import TARGETS, mapped_source, parse_map

from kiln_cli import ChatRow, KilnError, RowFault
from kiln_cli.chat import normalise

TURN = {"user": "/prompt", "assistant": "/completion/text"}
ROW = {"prompt": "q", "completion": {"text": "a"}}
QA = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TOOL = {"name": "f", "description": "d", "parameters": {}}


def row(pairs: dict[str, str], record: dict[str, Any]) -> ChatRow:
    converted = mapped_source(pairs).convert(record)
    assert isinstance(converted, ChatRow)
    return converted


def refusal(pairs: dict[str, str]) -> KilnError:
    with pytest.raises(KilnError) as caught:
        mapped_source(pairs)
    assert (caught.value.code, caught.value.exit_code) == ("KLN201", 2)
    for target in TARGETS:
        assert target in caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "pairs, record",
    [
        (TURN, ROW),
        ({"user": "prompt", "assistant": "completion.text"}, ROW),
        ({"assistant": "completion.text", "user": "prompt"}, ROW),
        ({"user": "/turns/0", "assistant": "/turns/1/0"}, {"turns": ["q", ["a"]]}),
        ({"user": "turns.0", "assistant": "turns.1.0"}, {"turns": ["q", ["a"]]}),
        ({"user": "/a~1b", "assistant": "/m~0n"}, {"a/b": "q", "m~n": "a"}),
        ({"user": "/a.b", "assistant": "/"}, {"a.b": "q", "": "a"}),
        ({"user": "x~y.0", "assistant": "z"}, {"x~y": {"0": "q"}, "z": "a"}),
        ({"messages": "/data/chat"}, {"data": {"chat": QA}}),
        ({"messages": "chat", "tools": "functions"}, {"chat": QA, "functions": None}),
        ({**TURN, "system": "sys"}, {**ROW, "sys": None}),
    ],
)
def test_a_map_finds_the_conversation(pairs: dict[str, str], record: dict[str, Any]) -> None:
    found = row(pairs, record)
    assert found.messages == QA
    assert (found.tools, found.ignored) == (None, ())
    assert found.sha256() == normalise({"messages": QA}).sha256()


def test_system_and_tools() -> None:
    found = row({**TURN, "system": "sys", "tools": "/functions"}, {**ROW, "sys": "s", "functions": [TOOL]})
    assert found.messages == [{"role": "system", "content": "s"}, *QA]
    assert found.tools == [{"type": "function", "function": TOOL}]
    text = '[{"type":"function","function":{"name":"f"}}]'
    assert row({"messages": "m", "tools": "t"}, {"m": QA, "t": text}).tools == [
        {"type": "function", "function": {"name": "f"}}
    ]


@pytest.mark.parametrize(
    "pairs, part",
    [
        ({}, "nothing is mapped"),
        ({"user": "/a"}, "assistant not"),
        ({"assistant": "/a"}, "user not"),
        ({"tools": "/a", "system": "/b"}, "user and assistant not"),
        ({"prompt": "/a", "assistant": "/b"}, "'prompt' is no field"),
        ({"messages": "/a", "system": "/b"}, "system is mapped beside it"),
        ({"user": "/a", "assistant": "a"}, "two fields are mapped to one path"),
        ({"user": "", "assistant": "/b"}, "neither a JSON pointer"),
        ({"user": "a..b", "assistant": "/b"}, "neither a JSON pointer"),
        ({"user": ".a", "assistant": "/b"}, "neither a JSON pointer"),
        ({"user": "/a~2", "assistant": "/b"}, "neither a JSON pointer"),
        ({"user\x1b[2J": "/a"}, "user\\\\x1b[2J"),
    ],
)
def test_what_is_no_map(pairs: dict[str, str], part: str) -> None:
    assert part in refusal(pairs).message


def test_pairs_of_a_command_line() -> None:
    assert parse_map(["user=/prompt", "assistant=a=b"]) == {"user": "/prompt", "assistant": "a=b"}
    for items, part in (
        (["user"], "'user' is no field=path"),
        (["user="], "'user=' is no field=path"),
        (["=a"], "'=a' is no field=path"),
        (["user=a", "user=b"], "mapped twice, to 'a' and 'b'"),
    ):
        with pytest.raises(KilnError) as caught:
            parse_map(items)
        assert caught.value.code == "KLN201"
        assert part in caught.value.message


@pytest.mark.parametrize(
    "pairs, record, word, pointer",
    [
        (TURN, {"prompt": "q"}, "missing_field", "/completion/text"),
        (TURN, {"prompt": "q", "completion": {}}, "missing_field", "/completion/text"),
        (TURN, {"prompt": "q", "completion": "text"}, "missing_field", "/completion/text"),
        ({**TURN, "system": "s/t"}, ROW, "missing_field", "/s~1t"),
        ({"user": "t.0", "assistant": "t.2"}, {"t": ["q", "a"]}, "missing_field", "/t/2"),
        ({"user": "t.00", "assistant": "t.1"}, {"t": ["q", "a"]}, "missing_field", "/t/00"),
        ({"user": "t.-1", "assistant": "t.1"}, {"t": ["q", "a"]}, "missing_field", "/t/-1"),
        (TURN, {"prompt": None, "completion": {"text": "a"}}, "content_not_string", "/prompt"),
        (TURN, {"prompt": "q", "completion": {"text": {"a": 1}}}, "content_not_string", "/completion/text"),
        ({"messages": "m"}, {"m": "x"}, "wrong_type", "/m"),
        ({"messages": "m"}, {"m": [{"content": "x"}]}, "missing_field", "/messages/0/role"),
        ({"messages": "m", "tools": "t"}, {"m": QA, "t": "{"}, "text_not_json", "/t"),
        ({"messages": "m", "tools": "t"}, {"m": QA, "t": {}}, "wrong_type", "/t"),
    ],
)
def test_rows_that_have_not_the_shape(pairs: dict[str, str], record: dict[str, Any], word: str, pointer: str) -> None:
    with pytest.raises(RowFault) as caught:
        mapped_source(pairs).convert(record)
    assert caught.value.reason == "invalid_json"
    assert caught.value.detail.startswith(f"{word}: ")
    assert caught.value.pointer == pointer


def test_what_no_path_leads_to_is_named() -> None:
    record = {"id": 1, "prompt": "q", "completion": {"text": "a", "stop": True, "more": {"x": 1}}, "turns": ["u", "v"]}
    assert row(TURN, record).ignored == ("completion.more", "completion.stop", "id", "turns")
    through = {"user": "t.0.say", "assistant": "t.1.say"}
    spoken = [{"say": "q", "by": 1}, {"say": "a"}, {"say": "more"}, {"say": "still more"}]
    assert row(through, {"t": spoken}).ignored == ("t[]", "t[].by")


def test_a_mapped_source_is_chat_never_recognised_and_travels() -> None:
    source = mapped_source(TURN)
    assert (source.name, source.yields, source.recognise(ROW)) == ("map", "chat", None)
    assert "user=/prompt" in source.doc
    again = pickle.loads(pickle.dumps(source))
    assert again.convert(ROW) == source.convert(ROW)


KEYS = st.text("a/~.0", min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=4), st.text(max_size=5), st.dictionaries(KEYS, st.integers(), max_size=3))
def test_any_key_can_be_reached_by_a_pointer(keys: list[str], value: str, others: dict[str, int]) -> None:
    record: Any = value
    for key in reversed(keys):
        record = {**others, key: record}
    record = {"q": record, "a": "answer"}
    pointer = "/q/" + "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)
    found = row({"user": pointer, "assistant": "a"}, record)
    assert found.messages[0]["content"] == value
    left_out = {key for key in others if key != keys[0]}
    assert {f"q.{key}" for key in left_out} <= set(found.ignored)
