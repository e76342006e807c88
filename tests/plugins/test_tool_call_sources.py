"""Chat-shaped rows with tools become function-calling rows; what is more than one question and its calls is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from kiln_plugins import sources
from kiln_plugins.row_quality import LINE_REASONS, ROW_REASONS
from kiln_plugins.tool_call_sources import NOT_SINGLE_TURN, OPENAI_TOOLS, SHAREGPT_TOOLS
from tests_support import shared_path

from kiln_cli import Candidate, Source, ToolCallRow
from kiln_cli.config import DataConfig

LIMITS = DataConfig(max_calls=64)
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CALL = {"name": "f", "arguments": {"x": 1}}
QUERY = "What is f of one, please?"


def user(content: Any = QUERY) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def function(name: Any = "f", arguments: Any = '{"x": 1}') -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def openai(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": [{"type": "function", "function": TOOL}], **more}


def turn(speaker: str, value: Any = "text") -> dict[str, Any]:
    return {"from": speaker, "value": value}


def sharegpt(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"conversations": list(turns), "tools": json.dumps([TOOL]), **more}


def outcome(source: Source, record: dict[str, Any]) -> tuple[str, str]:
    """The reason that drops a row and its detail, or "kept"."""
    row = source.convert(record)
    assert isinstance(row, ToolCallRow)
    if row.fault is not None:
        return row.fault[:2]
    candidate = Candidate(row)
    for reason in ROW_REASONS:
        assert reason.check is not None
        if (detail := reason.check(candidate, LIMITS)) is not None:
            return reason.name, detail
    return "kept", ""


def example(source: Source, record: dict[str, Any]) -> tuple[Any, Any, Any]:
    assert outcome(source, record) == ("kept", "")
    candidate = Candidate(source.convert(record))  # type: ignore[arg-type]
    return candidate.query, candidate.tools.value, candidate.answers.value


@pytest.mark.parametrize(
    "record",
    [
        openai(user(), assistant(function())),
        openai(user(), assistant(function(arguments={"x": 1}))),
        openai({"role": "system", "content": "Be brief."}, user(), assistant(function(), content="Let me see.")),
        openai({"role": "developer"}, {"role": "system"}, user(), assistant(function())),
        openai(user([{"type": "text", "text": QUERY[:5]}, QUERY[5:]]), assistant(function())),
        openai(user(), assistant(CALL)),
        openai(user(), assistant(function()), tools=[TOOL]),
        openai(user(), assistant(function()), tools=json.dumps([{"type": "function", "function": TOOL}])),
        openai(user(), assistant(function()), parallel_tool_calls=False),
    ],
)
def test_openai_rows(record: dict[str, Any]) -> None:
    assert example(OPENAI_TOOLS, record) == (QUERY, [TOOL], [CALL])


@pytest.mark.parametrize(
    "record",
    [
        sharegpt(turn("human", QUERY), turn("function_call", json.dumps(CALL))),
        sharegpt(turn("human", QUERY), turn("function_call", json.dumps([CALL]))),
        sharegpt(turn("human", QUERY), turn("function_call", CALL)),
        sharegpt(turn("human", QUERY), turn("function_call", '{"name": "f", "arguments": "{\\"x\\": 1}"}')),
        sharegpt(turn("system"), turn("human", QUERY), turn("function_call", json.dumps(CALL))),
        sharegpt(turn("human", QUERY), turn("function_call", json.dumps(CALL)), turn("observation"), turn("gpt")),
        sharegpt(turn("human", QUERY), turn("function_call", json.dumps(CALL)), tools=[TOOL]),
    ],
)
def test_sharegpt_rows(record: dict[str, Any]) -> None:
    assert example(SHAREGPT_TOOLS, record) == (QUERY, [TOOL], [CALL])


def test_several_calls_keep_their_order() -> None:
    names = ["b", "a", "c"]
    row = openai(user(), assistant(*(function(name) for name in names)))
    assert [call["name"] for call in example(OPENAI_TOOLS, row)[2]] == names
    calls = json.dumps([{"name": name, "arguments": {}} for name in names])
    row = sharegpt(turn("human", QUERY), turn("function_call", calls))
    assert [call["name"] for call in example(SHAREGPT_TOOLS, row)[2]] == names


@pytest.mark.parametrize("left_out", [{}, {"description": None, "parameters": None, "strict": None}])
def test_what_openai_lets_out_is_filled_in(left_out: dict[str, Any]) -> None:
    row = openai(user(), assistant(function()), tools=[{"type": "function", "function": {"name": "f", **left_out}}])
    filled = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert example(OPENAI_TOOLS, row)[1] == [filled]
    bare = openai(user(), assistant(function()), tools=[{"name": "f", **left_out}])
    assert outcome(OPENAI_TOOLS, bare)[0] == "invalid_tool_shape"


@pytest.mark.parametrize("source", [OPENAI_TOOLS, SHAREGPT_TOOLS], ids=lambda source: str(source.name))
def test_the_rows_own_id(source: Source) -> None:
    rows = {
        "openai_tools": openai(user(), assistant(function())),
        "sharegpt_tools": sharegpt(turn("human"), turn("function_call", "{}")),
    }
    for record in (rows[source.name], {"tools": None}):  # a faulty row has its id too
        for more, expected in (({"id": 7}, 7), ({}, msgspec.UNSET)):
            row = source.convert({**record, **more})
            assert isinstance(row, ToolCallRow)
            assert row.row_id == expected


FAULTS: list[tuple[Source, dict[str, Any], str, str]] = [
    (OPENAI_TOOLS, {"tools": []}, "missing_field", "the row has no messages"),
    (OPENAI_TOOLS, {"messages": None, "tools": []}, "missing_field", "the row has no messages"),
    (OPENAI_TOOLS, {"messages": "hi", "tools": []}, "missing_field", "messages is no array but a string"),
    (OPENAI_TOOLS, openai(user(), 5), "missing_field", "entry 2 of messages is no object but a number"),
    (OPENAI_TOOLS, openai(user(), assistant()), "missing_field", "the assistant message has no tool_calls"),
    (OPENAI_TOOLS, openai(user(), {"role": "assistant", "content": "No."}), "missing_field", "has no tool_calls"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), tools=None), "missing_field", "the row has no tools"),
    (OPENAI_TOOLS, {"messages": [user(), assistant(function())]}, "missing_field", "the row has no tools"),
    (OPENAI_TOOLS, openai(), "not_single_turn", "the turns are none; expected [system], user, assistant"),
    (OPENAI_TOOLS, openai(user()), "not_single_turn", "the turns are user;"),
    (OPENAI_TOOLS, openai(assistant(function())), "not_single_turn", "the turns are assistant;"),
    (OPENAI_TOOLS, openai({"role": "system"}), "not_single_turn", "the turns are system;"),
    (OPENAI_TOOLS, openai(user(), user(), assistant(function())), "not_single_turn", "user, user, assistant"),
    (OPENAI_TOOLS, openai(user(), {"role": "system"}, assistant(function())), "not_single_turn", "user, system"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), {"role": "tool"}), "not_single_turn", "assistant, tool"),
    (OPENAI_TOOLS, openai(user(), {"role": ["x"]}), "not_single_turn", "user, ['x']"),
    (OPENAI_TOOLS, openai(*[user()] * 9), "not_single_turn", "user, user, … (9)"),
    (OPENAI_TOOLS, openai(user(None), assistant(function())), "missing_query", "found null"),
    (OPENAI_TOOLS, openai(user([{"type": "image_url"}]), assistant(function())), "missing_query", "found an array"),
    (OPENAI_TOOLS, openai(user("short"), assistant(function())), "query_too_short", "5 characters"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), tools=" "), "missing_tools", "empty or white space"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), tools="[{]"), "invalid_tools_json", "column 3"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), tools={"f": 1}), "invalid_tool_shape", "found an object"),
    (OPENAI_TOOLS, openai(user(), assistant(function()), tools=[{"type": "x"}]), "invalid_tool_shape", "tool 1"),
    (OPENAI_TOOLS, openai(user(), assistant(function(arguments='{"x": NaN}'))), "invalid_answers_json", "NaN"),
    (OPENAI_TOOLS, openai(user(), assistant(function(arguments='{"x":1,"x":2}'))), "invalid_answers_json", "twice"),
    (OPENAI_TOOLS, openai(user(), assistant(function(arguments=""))), "invalid_answer_shape", "found a string"),
    (OPENAI_TOOLS, openai(user(), assistant(function(arguments="[1]"))), "invalid_answer_shape", "found an array"),
    (OPENAI_TOOLS, openai(user(), assistant(function(arguments='"{}"'))), "invalid_answer_shape", "found a string"),
    (OPENAI_TOOLS, openai(user(), assistant(function(name=""))), "invalid_answer_shape", "name is empty"),
    (OPENAI_TOOLS, openai(user(), assistant(7)), "invalid_answer_shape", "call 1: expected an object"),
    (OPENAI_TOOLS, openai(user(), assistant(tool_calls="f")), "invalid_answer_shape", "found a string"),
    (SHAREGPT_TOOLS, {"tools": "[]"}, "missing_field", "the row has no conversations"),
    (SHAREGPT_TOOLS, sharegpt(turn("human"), {"from": "function_call"}), "missing_field", "has no value"),
    (SHAREGPT_TOOLS, sharegpt(turn("human"), turn("function_call", "{}"), tools=None), "missing_field", "no tools"),
    (SHAREGPT_TOOLS, sharegpt(turn("human"), turn("gpt")), "not_single_turn", "the turns are human, gpt;"),
    (SHAREGPT_TOOLS, sharegpt(turn("gpt"), turn("human"), turn("function_call")), "not_single_turn", "gpt, human"),
    (
        SHAREGPT_TOOLS,
        sharegpt(turn("human"), turn("function_call"), turn("observation"), turn("human")),
        "not_single_turn",
        "observation, human; expected [system], human, function_call, [observation, gpt]",
    ),
    (SHAREGPT_TOOLS, sharegpt(turn("human"), turn("function_call"), turn("function_call")), "not_single_turn", ""),
    (SHAREGPT_TOOLS, sharegpt(turn("human", 5), turn("function_call", "{}")), "missing_query", "found a number"),
    (SHAREGPT_TOOLS, sharegpt({"from": "human"}, turn("function_call", "{}")), "missing_query", "absent"),
    (SHAREGPT_TOOLS, sharegpt(turn("human", QUERY), turn("function_call", "f(1)")), "invalid_answers_json", ""),
    (SHAREGPT_TOOLS, sharegpt(turn("human", QUERY), turn("function_call", " ")), "missing_answers", ""),
    (SHAREGPT_TOOLS, sharegpt(turn("human", QUERY), turn("function_call", "[]")), "invalid_answer_shape", "is empty"),
    (SHAREGPT_TOOLS, sharegpt(turn("human", QUERY), turn("function_call", "5")), "invalid_answer_shape", "a number"),
]


@pytest.mark.parametrize(("source", "record", "reason", "detail"), FAULTS)
def test_faults(source: Source, record: dict[str, Any], reason: str, detail: str) -> None:
    found = outcome(source, record)
    assert found[0] == reason
    assert detail in found[1]


def test_arguments_cannot_forge_a_second_call() -> None:
    forged = '{}}, {"name": "g", "arguments": {}'
    assert outcome(OPENAI_TOOLS, openai(user(), assistant(function(arguments=forged))))[0] == "invalid_answers_json"


def test_its_reason_is_declared_among_the_reasons_of_lines() -> None:
    orders = {reason.name: reason.order for reason in LINE_REASONS}
    assert orders["unknown_schema"] < NOT_SINGLE_TURN.order < orders["missing_field"]
    assert (NOT_SINGLE_TURN.scope, NOT_SINGLE_TURN.check) == ("line", None)


RECORDS: dict[str | None, dict[str, Any]] = {
    "xlam": {"id": 1, "query": "q", "tools": "[]", "answers": "[]"},
    "sommelier": {"schema_version": "sommelier.raw_tool_call_row.v1", "query": "", "tools": "", "answers": ""},
    "openai_tools": openai(user(), assistant(function())),
    "sharegpt_tools": sharegpt(turn("human"), turn("gpt")),
    None: {"messages": [], "conversations": [], "tools": []},
}


@pytest.mark.parametrize("name", RECORDS, ids=str)
def test_no_row_fits_two_sources(name: str | None) -> None:
    of_calls = [sources.XLAM, sources.SOMMELIER, OPENAI_TOOLS, SHAREGPT_TOOLS]
    fitting = [source.name for source in of_calls if source.recognise(RECORDS[name]) is not None]
    assert fitting == ([] if name is None else [name])
    if name in ("xlam", "sommelier"):  # even where chat fields stand beside its own
        mixed = {**RECORDS[name], "messages": [], "conversations": []}
        assert [source.name for source in of_calls if source.recognise(mixed) is not None] == [name]


@pytest.mark.parametrize(
    "record", [{"messages": []}, {"conversations": []}, {"tools": "[]"}, {"messages": "", "tools": 1}]
)
def test_chat_without_tools_is_not_recognised(record: dict[str, Any]) -> None:
    assert OPENAI_TOOLS.recognise(record) is None
    assert SHAREGPT_TOOLS.recognise(record) is None


def test_glaive_conversations() -> None:
    """The expected rows are found here by looking at the turns as text, with none of the plugin's code."""
    rows = json.loads(shared_path("data/chat/glaive_toolcall_en_sharegpt.json").read_text(encoding="utf-8"))
    single = []
    for row in rows:
        who = " ".join(turn["from"] for turn in row["conversations"])
        if who.startswith("human function_call") and who.count("human") == 1 and who.count("function_call") == 1:
            single.append(row)
    assert len(single) == 36
    assert Counter(outcome(SHAREGPT_TOOLS, row)[0] for row in rows) == {"kept": 36, "not_single_turn": 264}
    for row in single:
        call = json.loads(row["conversations"][1]["value"])
        expected = row["conversations"][0]["value"].strip(), json.loads(row["tools"]), [call]
        assert example(SHAREGPT_TOOLS, row) == expected


def test_drone_commands() -> None:
    lines = shared_path("data/chat/openai_drone_tools.jsonl").read_text(encoding="utf-8").splitlines()
    without_description = 0
    for line in lines:
        row = json.loads(line)
        query, tools, calls = example(OPENAI_TOOLS, row)
        message = row["messages"][2]
        assert query == row["messages"][1]["content"].strip()
        assert [tool["name"] for tool in tools] == [tool["function"]["name"] for tool in row["tools"]]
        assert calls == [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            for call in message["tool_calls"]
        ]
        without_description += sum("description" not in tool["function"] for tool in row["tools"])
        assert sum(tool["description"] == "" for tool in tools) == sum(
            "description" not in tool["function"] for tool in row["tools"]
        )
    assert len(lines) == 103
    assert without_description > 0
