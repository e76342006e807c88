"""Rows in the shapes that people have become the conversations that they say, and lose nothing in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_plugins.chat_sources import CONTENT_PARTS, MESSAGES, OASST, SHAREGPT
from kiln_plugins.instruction_sources import ALPACA, PREPARED, QUESTION_ANSWER, SELF_INSTRUCT
from kiln_stages.admitting.prepared_rows import to_chat_row
from kiln_stages.reading.sources import sample_objects
from kiln_stages.reading.transports import open_plain
from tests_support import shared_path

from kiln_cli import ChatRow, RowFault, Source, strict_json
from kiln_cli.chat import MISFITS, normalise, require_structure
from kiln_cli.plugins import Plugins
from kiln_cli.records import PREPARED_SCHEMA, Call, PreparedExample, Tool

CHAT = (MESSAGES, CONTENT_PARTS, OASST, SHAREGPT, ALPACA, QUESTION_ANSWER, SELF_INSTRUCT, PREPARED)
CALL = {"name": "f", "arguments": {"x": 1}}
WRAPPED = {"type": "function", "function": CALL}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


def row(source: Source, record: dict[str, Any]) -> ChatRow:
    converted = source.convert(record)
    assert isinstance(converted, ChatRow)
    # What a source gives is in normal form: its own canonical text says it again.
    assert normalise(strict_json.parse(converted.canonical())).canonical() == converted.canonical()
    return converted


def fault(source: Source, record: dict[str, Any]) -> RowFault:
    with pytest.raises(RowFault) as caught:
        source.convert(record)
    assert caught.value.reason == "invalid_json"
    assert caught.value.detail.partition(": ")[0] in MISFITS
    return caught.value


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def turn(speaker: str, value: Any = "text", **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def conversation(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"conversations": list(turns), **more}


def parts(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content), **more}


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "value": value}


def example(**changes: Any) -> PreparedExample:
    """Row r01 of vector B of the contract of prepare, as it is after prepare."""
    fields: dict[str, Any] = {
        "example_id": "r01",
        "source_id": "r01",
        "language": "en",
        "source_example_id": None,
        "query": "Root query number 01 please",
        "tools": [Tool(name="f", description="d", parameters={})],
        "gold_calls": [Call(name="f", arguments={"x": 1})],
        "split": "test",
        "query_sha256": "0" * 64,
        "source_revision": "v",
    }
    return PreparedExample(**fields | changes)


def as_object(prepared: PreparedExample) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.to_builtins(prepared)
    return value


# --- what each shape says

SAID: list[tuple[Source, dict[str, Any], list[dict[str, Any]]]] = [
    (QUESTION_ANSWER, {"question": "q", "answer": "a"}, [user("q"), assistant("a")]),
    (QUESTION_ANSWER, {"question": "", "answer": " \n"}, [user(""), assistant(" \n")]),
    (ALPACA, {"instruction": "do", "input": "", "output": "o"}, [user("do"), assistant("o")]),
    (ALPACA, {"instruction": "do", "output": "o"}, [user("do"), assistant("o")]),
    (ALPACA, {"instruction": "do", "input": None, "output": "o"}, [user("do"), assistant("o")]),
    (ALPACA, {"instruction": "do", "input": "this", "output": "o"}, [user("do\nthis"), assistant("o")]),
    (ALPACA, {"instruction": "do\n", "input": " this", "output": "o"}, [user("do\n\n this"), assistant("o")]),
    (ALPACA, {"instruction": "do", "context": "this", "response": "o"}, [user("do\nthis"), assistant("o")]),
    (ALPACA, {"instruction": "do", "output": "", "response": "o"}, [user("do"), assistant("o")]),
    (ALPACA, {"instruction": "do", "output": "o", "response": "o"}, [user("do"), assistant("o")]),
    (ALPACA, {"instruction": "do", "output": "", "response": None}, [user("do"), assistant("")]),
    (
        ALPACA,
        {"system": "s", "history": [["q1", "a1"], ["q2", "a2"]], "instruction": "q3", "input": "", "output": "a3"},
        [
            {"role": "system", "content": "s"},
            *(message for n in "123" for message in (user(f"q{n}"), assistant(f"a{n}"))),
        ],
    ),
    (ALPACA, {"system": "", "history": [], "instruction": "do", "output": "o"}, [user("do"), assistant("o")]),
    (
        SELF_INSTRUCT,
        {"instruction": "do", "instances": [{"input": "this", "output": "o"}]},
        [user("do\nthis"), assistant("o")],
    ),
    (SELF_INSTRUCT, {"instruction": "do", "instances": [{"output": "o"}]}, [user("do"), assistant("o")]),
    (
        OASST,
        {"messages": [{"role": "prompter", "content": "q"}, {"role": "assistant", "content": "a"}]},
        [user("q"), assistant("a")],
    ),
    (
        OASST,
        {"messages": [{"role": "prompter", "text": "q"}, assistant("a"), user("b")]},
        [user("q"), assistant("a"), user("b")],
    ),
    (
        SHAREGPT,
        conversation(turn("human", "q"), turn("gpt", "a"), turn("user", "r"), turn("assistant", "b")),
        [user("q"), assistant("a"), user("r"), assistant("b")],
    ),
    (
        SHAREGPT,
        conversation(turn("system", "s"), turn("human", "q"), turn("gpt", "a")),
        [{"role": "system", "content": "s"}, user("q"), assistant("a")],
    ),
    (
        SHAREGPT,
        conversation(turn("human", "q"), turn("gpt", "a"), system="s"),
        [{"role": "system", "content": "s"}, user("q"), assistant("a")],
    ),
    (
        SHAREGPT,
        conversation(
            turn("human", "q"), turn("function_call", json.dumps(CALL)), turn("observation", "[1]"), turn("gpt", "a")
        ),
        [user("q"), assistant(tool_calls=[WRAPPED]), {"role": "tool", "content": "[1]"}, assistant("a")],
    ),
    (
        SHAREGPT,
        conversation(
            turn("human", "q"),
            turn("function_call", json.dumps([CALL, {"name": "g", "arguments": "{}"}])),
            turn("tool", "x"),
        ),
        [
            user("q"),
            assistant(tool_calls=[WRAPPED, {"type": "function", "function": {"name": "g", "arguments": "{}"}}]),
            {"role": "tool", "content": "x"},
        ],
    ),
    (
        SHAREGPT,
        conversation(turn("human", "q"), turn("function_call", {"id": "c1", **CALL, "more": [1]})),
        [
            user("q"),
            assistant(tool_calls=[{"type": "function", "id": "c1", "function": {**CALL, "more": [1]}}]),
        ],
    ),
    (
        SHAREGPT,
        conversation(turn("human", "q", weight=None), turn("gpt", "a", weight=0), turn("gpt", "b", weight=1)),
        [user("q"), assistant("a", weight=0), assistant("b")],
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("user", part("text", "a"), part("text", "b")), parts("assistant", part("text", "c"))]},
        [user("ab"), assistant("c")],
    ),
    (
        CONTENT_PARTS,
        {
            "messages": [
                parts("user", part("text", "q"), loss_weight=0.0),
                parts("assistant", part("text", "a"), loss_weight=0.0),
                {"role": "user", "content": "plain"},
                parts("assistant", "b", part("text", "c"), loss_weight=1.0),
            ]
        },
        [user("q"), assistant("a", weight=0), user("plain"), assistant("bc")],
    ),
    (
        CONTENT_PARTS,
        {
            "messages": [
                parts("user", part("text", "q")),
                parts(
                    "assistant",
                    part("reasoning", "r"),
                    part("text", "t"),
                    part("tool_call", json.dumps(CALL)),
                    part("tool_call", CALL),
                ),
                parts("tool", part("text", "[1]"), tool_call_id="c1"),
            ]
        },
        [
            user("q"),
            assistant("t", reasoning_content="r", tool_calls=[WRAPPED, WRAPPED]),
            {"role": "tool", "content": "[1]", "tool_call_id": "c1"},
        ],
    ),
    (PREPARED, as_object(example()), [user("Root query number 01 please"), assistant(tool_calls=[WRAPPED])]),
]


@pytest.mark.parametrize("source, record, messages", SAID, ids=[f"{item[0].name}-{n}" for n, item in enumerate(SAID)])
def test_what_a_row_says(source: Source, record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    found = row(source, record)
    assert found.messages == messages
    assert found.ignored == ()
    require_structure(found)
    # The shape leaves no trace: the same words as plain messages are the same row.
    same = {"messages": messages} | ({"tools": found.tools} if found.tools else {})
    assert found.sha256() == normalise(same).sha256()


@pytest.mark.parametrize(
    "tools, expected",
    [
        (json.dumps([TOOL]), [{"type": "function", "function": TOOL}]),
        ([TOOL], [{"type": "function", "function": TOOL}]),
        ([{"type": "function", "function": TOOL}], [{"type": "function", "function": TOOL}]),
        (json.dumps([{**TOOL, "type": "retrieval"}, "x"]), [{**TOOL, "type": "retrieval"}, "x"]),
        ("[]", None),
        ("", None),
        (" ", None),
        ([], None),
        (None, None),
    ],
)
@pytest.mark.parametrize("source", [SHAREGPT, CONTENT_PARTS], ids=["sharegpt", "content_parts"])
def test_tools(source: Source, tools: object, expected: object) -> None:
    record = {"conversations": [turn("human"), turn("gpt")], "messages": [parts("user", part("text", "q"))]}
    del record["messages" if source is SHAREGPT else "conversations"]
    assert row(source, {**record, "tools": tools}).tools == expected


def test_the_vector_of_prepared_examples() -> None:
    """P1 of the row contract, section 11: 271 canonical bytes."""
    found = row(PREPARED, as_object(example()))
    assert len(found.canonical()) == 271
    assert found.sha256() == "sha256:980dac7a0ec00a1be1d75ee6c46a6d2d6f72b54d0fc7e0b4a4f66411cb892454"
    assert found.sha256() == to_chat_row(example(), "native").sha256()


def test_a_wide_number_where_a_prepared_example_has_text_is_called_a_float() -> None:
    record = strict_json.parse(msgspec.json.encode(as_object(example()) | {"query": 1e30}))
    assert "Expected `str`, got `float` - at `$.query`" in str(fault(PREPARED, record).detail)


# --- what is refused, and how it is named

REFUSED: list[tuple[Source, dict[str, Any], str, str]] = [
    (ALPACA, {"instruction": "do", "input": "x"}, "missing_field", "/output"),
    (ALPACA, {"input": "x", "output": "o"}, "missing_field", "/instruction"),
    (ALPACA, {"instruction": "do", "input": {"a": 1}, "output": "o"}, "content_not_string", "/input"),
    (ALPACA, {"instruction": "do", "input": 0, "output": "o"}, "content_not_string", "/input"),
    (ALPACA, {"instruction": "do", "context": False, "output": "o"}, "content_not_string", "/context"),
    (ALPACA, {"instruction": "do", "output": None}, "content_not_string", "/output"),
    (ALPACA, {"instruction": "do", "response": ["o"]}, "content_not_string", "/response"),
    (ALPACA, {"instruction": "do", "output": "o", "response": "p"}, "conflicting_fields", "/response"),
    (ALPACA, {"instruction": "do", "input": "x", "context": "y", "output": "o"}, "conflicting_fields", "/context"),
    (ALPACA, {"instruction": "do", "system": 0, "output": "o"}, "content_not_string", "/system"),
    (ALPACA, {"instruction": "do", "history": "x", "output": "o"}, "wrong_type", "/history"),
    (ALPACA, {"instruction": "do", "history": [["q"]], "output": "o"}, "wrong_type", "/history/0"),
    (ALPACA, {"instruction": "do", "history": [["q", None]], "output": "o"}, "content_not_string", "/history/0/1"),
    (QUESTION_ANSWER, {"question": "q"}, "missing_field", "/answer"),
    (QUESTION_ANSWER, {"question": "q", "answer": 3}, "content_not_string", "/answer"),
    (SELF_INSTRUCT, {"instruction": "do"}, "missing_field", "/instances"),
    (SELF_INSTRUCT, {"instruction": "do", "instances": []}, "several_instances", "/instances"),
    (SELF_INSTRUCT, {"instruction": "do", "instances": [{"output": "a"}] * 2}, "several_instances", "/instances"),
    (SELF_INSTRUCT, {"instruction": "do", "instances": ["x"]}, "wrong_type", "/instances/0"),
    (SELF_INSTRUCT, {"instruction": "do", "instances": [{"input": "x"}]}, "missing_field", "/instances/0/output"),
    (OASST, {"messages": {}}, "wrong_type", "/messages"),
    (OASST, {"messages": ["x"]}, "wrong_type", "/messages/0"),
    (
        OASST,
        {"messages": [{"role": "prompter", "text": "a", "content": "b"}]},
        "conflicting_fields",
        "/messages/0/text",
    ),
    (OASST, {"messages": [{"role": "prompter", "text": None}]}, "content_not_string", "/messages/0/text"),
    (SHAREGPT, {}, "missing_field", "/conversations"),
    (SHAREGPT, conversation(7), "wrong_type", "/conversations/0"),
    (SHAREGPT, conversation({"value": "x"}), "missing_field", "/conversations/0/from"),
    (SHAREGPT, conversation(turn("human"), {"from": "gpt"}), "missing_field", "/conversations/1/value"),
    (SHAREGPT, conversation(turn("human", None)), "content_not_string", "/conversations/0/value"),
    (SHAREGPT, conversation(turn("observation", {"a": 1})), "content_not_string", "/conversations/0/value"),
    (SHAREGPT, conversation({"from": "function_call"}), "missing_field", "/conversations/0/value"),
    (SHAREGPT, conversation(turn("function_call", "f(1)")), "text_not_json", "/conversations/0/value"),
    (SHAREGPT, conversation(turn("function_call", "7")), "wrong_type", "/conversations/0/value"),
    (SHAREGPT, conversation(turn("function_call", '{"name":"f"}')), "missing_field", "/conversations/0/value"),
    (
        SHAREGPT,
        conversation(turn("function_call", '[{"name":1,"arguments":{}}]')),
        "wrong_type",
        "/conversations/0/value/0",
    ),
    (
        SHAREGPT,
        conversation(turn("function_call", '{"name":"f","arguments":[]}')),
        "wrong_type",
        "/conversations/0/value",
    ),
    (SHAREGPT, conversation(turn("function_call", "[]")), "missing_field", "/conversations/0/value"),
    (SHAREGPT, conversation(turn("human"), tools="{"), "text_not_json", "/tools"),
    (SHAREGPT, conversation(turn("human"), tools="{}"), "wrong_type", "/tools"),
    (SHAREGPT, conversation(turn("human"), tools=0), "wrong_type", "/tools"),
    (SHAREGPT, conversation(turn("system"), turn("human"), system="x"), "conflicting_fields", "/system"),
    (CONTENT_PARTS, {"messages": None}, "wrong_type", "/messages"),
    (
        CONTENT_PARTS,
        {"messages": [parts("user", part("image_url", "x"))]},
        "unsupported_content_part",
        "/messages/0/content/0",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("user", {"type": "text"})]},
        "unsupported_content_part",
        "/messages/0/content/0",
    ),
    (CONTENT_PARTS, {"messages": [parts("user", 7)]}, "unsupported_content_part", "/messages/0/content/0"),
    (
        CONTENT_PARTS,
        {"messages": [parts("user", part("text", ["x"]))]},
        "content_not_string",
        "/messages/0/content/0/value",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("user", part("reasoning", "x"))]},
        "unsupported_content_part",
        "/messages/0/content/0",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("tool", part("tool_call", CALL))]},
        "unsupported_content_part",
        "/messages/0/content/0",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("assistant", part("text", "x"), part("reasoning", "y"))]},
        "unsupported_content_part",
        "/messages/0/content/1",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("assistant", part("tool_call", "{"))]},
        "text_not_json",
        "/messages/0/content/0/value",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("assistant", part("reasoning", "x"), reasoning_content="y")]},
        "conflicting_fields",
        "/messages/0/reasoning_content",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("assistant", part("tool_call", CALL), tool_calls=[WRAPPED])]},
        "conflicting_fields",
        "/messages/0/tool_calls",
    ),
    (
        CONTENT_PARTS,
        {"messages": [parts("assistant", part("text", "x"), loss_weight=0, weight=1)]},
        "conflicting_fields",
        "/messages/0/loss_weight",
    ),
    (PREPARED, {"schema_version": "sommelier.prepared_example.v1"}, "wrong_type", "/schema_version"),
    (PREPARED, as_object(example()) | {"query": 7}, "wrong_type", ""),
    (PREPARED, as_object(example()) | {"extra": 7}, "wrong_type", ""),
]


@pytest.mark.parametrize(
    "source, record, word, pointer", REFUSED, ids=[f"{item[0].name}-{item[2]}-{n}" for n, item in enumerate(REFUSED)]
)
def test_what_is_refused(source: Source, record: dict[str, Any], word: str, pointer: str) -> None:
    found = fault(source, record)
    assert (found.detail.partition(": ")[0], found.pointer) == (word, pointer)


def test_t10_an_answer_that_is_an_object() -> None:
    record = {"instruction": "Extract", "input": "x", "output": {"a": 1, "b": None}}
    assert ALPACA.recognise(record) is not None
    assert fault(ALPACA, record).detail == "content_not_string: /output is an object; expected text"


@pytest.mark.parametrize("speaker", ["bot", "Human", "prompter", "function", ""])
def test_unknown_speakers_are_unknown_roles(speaker: str) -> None:
    """The row parses, so it has the hash of a parsed row and the receipt's reason ``invalid_role``."""
    found = row(SHAREGPT, conversation(turn("human"), turn(speaker)))
    with pytest.raises(RowFault) as caught:
        require_structure(found)
    assert (caught.value.reason, caught.value.pointer) == ("invalid_role", "/messages/1/role")
    assert repr(speaker) in caught.value.detail


def test_arguments_as_text_are_proven_later() -> None:
    """Report T3: also where the call itself stood in a text."""
    call = json.dumps({"name": "f", "arguments": "{bad"})
    for found in (
        row(SHAREGPT, conversation(turn("human"), turn("function_call", call))),
        row(
            CONTENT_PARTS, {"messages": [parts("user", part("text", "q")), parts("assistant", part("tool_call", call))]}
        ),
    ):
        with pytest.raises(RowFault) as caught:
            require_structure(found)
        assert caught.value.reason == "tool_arguments_invalid_json"
        assert caught.value.pointer == "/messages/1/tool_calls/0/function/arguments"


# --- what is left out is named


@pytest.mark.parametrize(
    "source, record, ignored",
    [
        (ALPACA, {"instruction": "i", "output": "o", "text": "whole prompt", "id": None}, ("id", "text")),
        (QUESTION_ANSWER, {"question": "q", "answer": "a", "context": "c"}, ("context",)),
        (
            SELF_INSTRUCT,
            {
                "id": "seed_task_0",
                "instruction": "i",
                "instances": [{"output": "o", "note": "n"}],
                "is_classification": True,
            },
            ("id", "instances[].note", "is_classification"),
        ),
        (OASST, {"id": 1, "messages": [{"role": "prompter", "content": "q", "lang": "en"}]}, ("id", "messages[].lang")),
        (
            SHAREGPT,
            {"id": 1, **conversation(turn("human", markdown=None), turn("gpt", train=False), turn("tool", weight=0))},
            ("conversations[].markdown", "conversations[].train", "conversations[].weight", "id"),
        ),
        (
            SHAREGPT,
            conversation(turn("gpt", weight="0"), turn("gpt", weight=0.5)),
            ("conversations[].weight",),
        ),
        (CONTENT_PARTS, {"messages": [parts("user", part("text", "q"), loss_weight=1.0)]}, ("messages[].loss_weight",)),
        (
            CONTENT_PARTS,
            {"messages": [parts("assistant", part("text", "q"), loss_weight=0.5)]},
            ("messages[].loss_weight",),
        ),
        (
            CONTENT_PARTS,
            {"messages": [parts("assistant", part("text", "q"), loss_weight="0")]},
            ("messages[].loss_weight",),
        ),
        (CONTENT_PARTS, {"messages": [parts("user", part("text", "q"), x=1)], "y": 2}, ("messages[].x", "y")),
        (
            PREPARED,
            as_object(example()) | {"tools": [{**TOOL, "strict": True}], "gold_calls": [{**CALL, "id": "c"}]},
            ("gold_calls[].id", "tools[].strict"),
        ),
    ],
)
def test_fields_that_change_nothing_are_named(source: Source, record: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert row(source, record).ignored == ignored


# --- which source a file is for

FILES = {
    "axolotl_conversation.json": "sharegpt",
    "fastchat_dummy_sharegpt.json": "sharegpt",
    "glaive_toolcall_en_sharegpt.json": "sharegpt",
    "gsm8k_messages.jsonl": "messages",
    "gsm8k_question_answer.jsonl": "question_answer",
    "identity_alpaca.json": "alpaca",
    "identity_content_parts.jsonl": "content_parts",
    "llms_from_scratch_alpaca.json": "alpaca",
    "mgsm_multilingual.jsonl": "messages",
    "oasst_en_threads.jsonl": "oasst",
    "openai_drone_tools.jsonl": "messages",
    "openai_toy_chat.jsonl": "messages",
    "reason_tool_content_parts.jsonl": "content_parts",
    "self_instruct_seed_tasks.jsonl": "self_instruct",
}


def records(path: Path) -> list[dict[str, Any]]:
    """The rows of a shared file, read with none of kiln's code."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in content.split("\n") if line.strip()]
    value = json.loads(content)
    return value if isinstance(value, list) else [value]


def recognised(plugins: Plugins, record: dict[str, Any], yields: str = "chat") -> list[str]:
    return [source.name for source in plugins.sources if source.yields == yields and source.recognise(record)]


def test_every_shared_chat_file_has_a_line() -> None:
    assert {path.name for path in shared_path("data/chat").iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_a_file_is_for_one_source(name: str, plugins: Plugins) -> None:
    for record in records(shared_path(f"data/chat/{name}")):
        assert recognised(plugins, record) == [FILES[name]]


@pytest.mark.parametrize("name", FILES)
def test_no_row_of_a_file_is_refused_by_its_source(name: str, plugins: Plugins) -> None:
    source = plugins.sources.get(FILES[name])
    for record in records(shared_path(f"data/chat/{name}")):
        require_structure(row(source, record))


@pytest.mark.parametrize("source, record", [(item[0], item[1]) for item in SAID if item[0] is not CONTENT_PARTS])
def test_what_a_source_reads_no_other_does(source: Source, record: dict[str, Any], plugins: Plugins) -> None:
    assert recognised(plugins, record) == [source.name]


MIXED = [
    {
        "messages": [],
        "conversations": [turn("human")],
        "instruction": "i",
        "output": "o",
        "question": "q",
        "answer": "a",
    },
    {"conversations": [turn("human")], "instruction": "i", "output": "o", "instances": []},
    {"instruction": "i", "instances": [{}], "output": "o", "question": "q", "answer": "a"},
    {
        "schema_version": PREPARED_SCHEMA,
        "messages": [user("q")],
        "conversations": [turn("human")],
        "question": "",
        "answer": "",
    },
    {"messages": [{"role": "prompter", "content": [part("text", "q")]}]},
]


@pytest.mark.parametrize(
    "record, name", list(zip(MIXED, ["messages", "sharegpt", "alpaca", "prepared", "content_parts"], strict=True))
)
def test_rows_of_mixed_shapes_fit_one_source(record: dict[str, Any], name: str, plugins: Plugins) -> None:
    assert recognised(plugins, record) == [name]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "q", "choices": ["a", "b"], "answer": "a"},
        {"question": "q", "context": "c", "answer": "a"},
        {"prompt": "p", "completion": "c"},
        {"conversations": [{"role": "user", "content": "q"}]},
        {"conversations": "x"},
        {"messages": "x"},
        {"instruction": "i"},
    ],
)
def test_rows_that_no_source_is_sure_of(record: dict[str, Any], plugins: Plugins) -> None:
    assert recognised(plugins, record) == []


@pytest.mark.parametrize("folder, name", [("chat", None), ("function_calling", "xlam")])
def test_sources_of_prepare_are_as_before(folder: str, name: str | None, plugins: Plugins, tmp_path: Path) -> None:
    """Files of function calls are no chat files, and of the chat files those with tools are still read by prepare."""
    of_prepare = {"openai_drone_tools.jsonl": "openai_tools", "glaive_toolcall_en_sharegpt.json": "sharegpt_tools"}
    of_prepare["reason_tool_content_parts.jsonl"] = "openai_tools"
    for path in sorted(shared_path(f"data/{folder}").glob("*.json*")):
        with open_plain(path, tmp_path) as plain:
            sample, *_ = sample_objects(plain)
        expected = name or of_prepare.get(path.name)
        assert recognised(plugins, sample, "tool_calls") == ([expected] if expected else []), path.name
        assert bool(recognised(plugins, sample)) == (folder == "chat")


# --- nothing is lost in silence

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
EXTRA = st.dictionaries(st.sampled_from(["id", "meta", "lang"]), TEXT, max_size=2)
CALLS = st.fixed_dictionaries(
    {"name": TEXT, "arguments": st.dictionaries(TEXT, TEXT, max_size=2)}, optional={"id": TEXT}
)
TOOLS = st.lists(st.fixed_dictionaries({"name": TEXT, "description": TEXT}, optional={"x": TEXT}), max_size=2)


def with_extra(base: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(EXTRA, base).map(lambda pair: {**pair[0], **pair[1]})


TURNS = st.lists(
    st.one_of(
        with_extra(st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system", "tool"]), "value": TEXT})),
        st.fixed_dictionaries({"from": st.just("function_call"), "value": CALLS.map(json.dumps) | CALLS}),
    ),
    max_size=3,
)
SPEECH = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": st.tuples(
            st.lists(TEXT.map(lambda value: part("reasoning", value)), max_size=2),
            st.lists(TEXT.map(lambda value: part("text", value)), max_size=2),
            st.lists(CALLS.map(lambda value: part("tool_call", json.dumps(value))), max_size=2),
        ).map(lambda lists: [item for some in lists for item in some]),
    },
    optional={"loss_weight": st.sampled_from([0, 1, 0.0, 1.0])},
)
ASKED = st.fixed_dictionaries(
    {"role": st.just("user"), "content": st.lists(TEXT.map(lambda value: part("text", value)))}
)
ROWS: dict[str, tuple[Source, st.SearchStrategy[dict[str, Any]]]] = {
    "question_answer": (QUESTION_ANSWER, with_extra(st.fixed_dictionaries({"question": TEXT, "answer": TEXT}))),
    "alpaca": (
        ALPACA,
        with_extra(
            st.fixed_dictionaries(
                {"instruction": TEXT, "output": TEXT},
                optional={"input": TEXT, "system": TEXT, "history": st.lists(st.lists(TEXT, min_size=2, max_size=2))},
            )
        ),
    ),
    "self_instruct": (
        SELF_INSTRUCT,
        with_extra(
            st.fixed_dictionaries(
                {
                    "instruction": TEXT,
                    "instances": st.lists(
                        with_extra(st.fixed_dictionaries({"input": TEXT, "output": TEXT})), min_size=1, max_size=1
                    ),
                }
            )
        ),
    ),
    "oasst": (
        OASST,
        with_extra(
            st.fixed_dictionaries(
                {
                    "messages": st.lists(
                        with_extra(
                            st.fixed_dictionaries({"role": st.sampled_from(["prompter", "assistant"]), "content": TEXT})
                        ),
                        max_size=3,
                    )
                }
            )
        ),
    ),
    "sharegpt": (
        SHAREGPT,
        with_extra(st.fixed_dictionaries({"conversations": TURNS}, optional={"tools": TOOLS.map(json.dumps) | TOOLS})),
    ),
    "content_parts": (
        CONTENT_PARTS,
        with_extra(
            st.fixed_dictionaries({"messages": st.lists(SPEECH | ASKED, max_size=3)}, optional={"tools": TOOLS})
        ),
    ),
}
# Names that a shape has of its own for what a conversation calls otherwise.
VOCABULARY = {"prompter", "human", "gpt", "function_call", "reasoning", "text", "tool_call"}


def strings(value: object) -> Iterator[str]:
    """Every string of a value, its keys aside; a text that holds calls or tools is looked into."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        if isinstance(inner, (dict, list)):
            yield from strings(inner)
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def told(record: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    """The record without the fields that the row names as ignored (``id``, ``messages[].lang``)."""

    def without(value: Any, at: str) -> Any:
        if isinstance(value, list):
            return [without(item, f"{at}[]") for item in value]
        if isinstance(value, dict):
            named = {key: f"{at}.{key}" if at else key for key in value}
            return {key: without(item, named[key]) for key, item in value.items() if named[key] not in ignored}
        return value

    result: dict[str, Any] = without(record, "")
    return result


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_string_is_in_the_row_or_its_field_is_named(name: str, data: st.DataObject) -> None:
    source, rows = ROWS[name]
    record = data.draw(rows)
    before = json.dumps(record)
    found = row(source, record)
    assert json.dumps(record) == before, "the record is left as it was"
    # Texts that are laid together (an instruction and its input, parts of a content) stand in it as pieces.
    kept = list(strings([found.messages, found.tools]))
    for text in strings(told(record, found.ignored)):
        assert text in VOCABULARY or any(text in whole for whole in kept), text
    for name_of_field in found.ignored:
        assert name_of_field.rpartition(".")[2] in ("id", "meta", "lang", "weight", "loss_weight")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["human", "gpt"]), TEXT), min_size=1, max_size=4))
def test_the_same_words_in_four_shapes_are_one_row(turns: list[tuple[str, str]]) -> None:
    roles = {"human": "user", "gpt": "assistant"}
    plain = normalise({"messages": [{"role": roles[who], "content": said} for who, said in turns]})
    others = [
        (SHAREGPT, conversation(*(turn(who, said) for who, said in turns))),
        (
            OASST,
            {
                "messages": [
                    {"role": {"human": "prompter"}.get(who, "assistant"), "content": said} for who, said in turns
                ]
            },
        ),
        (CONTENT_PARTS, {"messages": [parts(roles[who], part("text", said)) for who, said in turns]}),
    ]
    assert {row(source, record).sha256() for source, record in others} == {plain.sha256()}
