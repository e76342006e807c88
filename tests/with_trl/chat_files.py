"""Conversations of the shared chat files as OpenAI messages, whatever their shape, for comparisons with TRL.

The conversion is the tests' own and a plain one: TRL takes messages and no other shape with tool calls.
"""

from __future__ import annotations

import json
from typing import Any

from tests_support import shared_path

Row = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "prompter": "user", "observation": "tool"}


def lines(name: str) -> list[Row]:
    return [json.loads(line) for line in shared_path(f"data/chat/{name}").read_text(encoding="utf-8").splitlines()]


def document(name: str) -> list[Row]:
    return list(json.loads(shared_path(f"data/chat/{name}").read_text(encoding="utf-8")))


def messages_rows(name: str) -> list[Row]:
    """Files of messages: fields that no template reads are left out, and OASST's prompter is a user."""
    return [
        {"messages": [{**message, "role": ROLES.get(message["role"], message["role"])} for message in row["messages"]]}
        | ({"tools": row["tools"]} if row.get("tools") else {})
        for row in lines(name)
    ]


def sharegpt_rows(name: str) -> list[Row]:
    rows = []
    for row in document(name):
        tools = json.loads(row["tools"]) if row.get("tools") else []
        messages = [_turn(turn) for turn in row["conversations"]]
        rows.append({"messages": messages} | ({"tools": tools} if tools else {}))
    return rows


def _turn(turn: Row) -> Row:
    if turn["from"] == "function_call":
        call = json.loads(turn["value"])
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def alpaca_rows(name: str) -> list[Row]:
    return [
        {
            "messages": [
                {"role": "user", "content": "\n".join(filter(None, (row["instruction"], row.get("input"))))},
                {"role": "assistant", "content": row["output"]},
            ]
        }
        for row in document(name)
    ]


def as_objects(messages: list[Row]) -> list[Row]:
    """The calls' arguments as objects where they are JSON texts: what kiln makes of them before it renders, and what
    TRL asks its users to do. (A template that prints them with ``tojson`` would else print a text inside of JSON.)"""
    out = json.loads(json.dumps(messages))
    for message in out:
        for call in message.get("tool_calls") or ():
            if isinstance(text := call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(text)
    return list(out)


def question_rows(name: str) -> list[Row]:
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in lines(name)
    ]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers & no more",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> Row:
    return {"role": "assistant", "content": text, **fields}


# Made rows: what the files do not hold. Each is a conversation that both sides ought to take.
MADE: dict[str, Row] = {
    "two equal turns": {"messages": [user("Again?"), assistant("Yes."), user("Again?"), assistant("Yes.")]},
    "an answer of one token": {"messages": [user("Yes or no?"), assistant("No")]},
    "white space at the edges": {"messages": [user(" hi \n"), assistant("  indented\n\n\ttext \n")]},
    "an answer that begins with line feeds": {"messages": [user("hi"), assistant("\n\nhello")]},
    "answers that end in emoji": {"messages": [user("👩‍👩‍👧"), assistant("ok 👩‍👩‍👧"), user("!"), assistant("🏳️‍🌈")]},
    "scripts of many bytes": {"messages": [user("নমস্কার, తెలుగు?"), assistant("多言語 ありがとう ខ្មែរ")]},
    "the words of the header": {"messages": [user("say assistant"), assistant("assistant\nuser\nassistant")]},
    "template text": {"messages": [user("{{ x }} {% if %}"), assistant("{{ name }} {% endgeneration %}")]},
    "thinking in the content": {"messages": [user("2+2?"), assistant("<think>\ntwo and two\n</think>\n\n4")]},
    "thinking in an earlier turn": {
        "messages": [user("a"), assistant("<think>b</think>c"), user("d"), assistant("<think>e</think>f")]
    },
    "reasoning in a field": {"messages": [user("2+2?"), assistant("4", reasoning_content="two and two")]},
    "a call and its result": {
        "messages": [
            user("1+2?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": "3"},
            assistant("It is 3."),
        ],
        "tools": [TOOL],
    },
    "text beside a call": {
        "messages": [user("1+2?"), assistant("Let me add.", tool_calls=[CALL, CALL])],
        "tools": [TOOL],
    },
    "a call whose content is null": {
        "messages": [user("1+2?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "tools": [TOOL],
    },
    "an assistant that speaks first": {"messages": [{"role": "system", "content": "s"}, assistant("Welcome.")]},
    "a user that speaks last": {"messages": [user("a"), assistant("b"), user("c")]},
    "a long answer": {"messages": [user("Count."), assistant(" ".join(map(str, range(900))))]},
}


def all_rows(of_each: int) -> list[Row]:
    """The made rows, then the first ``of_each`` of every file."""
    files = [
        *(messages_rows(f"{name}.jsonl") for name in ("openai_toy_chat", "openai_drone_tools", "gsm8k_messages")),
        # eleven languages of forty rows each
        messages_rows("mgsm_multilingual.jsonl")[:: max(1, 440 // of_each)],
        messages_rows("oasst_en_threads.jsonl"),
        sharegpt_rows("fastchat_dummy_sharegpt.json"),
        sharegpt_rows("glaive_toolcall_en_sharegpt.json"),
        alpaca_rows("identity_alpaca.json"),
        alpaca_rows("llms_from_scratch_alpaca.json"),
        question_rows("gsm8k_question_answer.jsonl"),
    ]
    return [*MADE.values(), *(row for rows in files for row in rows[:of_each])]
