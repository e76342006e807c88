"""Rows for a teacher to score, one of each form, and the files that they are read from and written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ACTION = {"role": "assistant", "content": "get_weather(city)", "kind": "action"}
ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "café 😀"}]},
    {"messages": [{"role": "user", "content": "Hi"}], "teacher_response": "yes", "metadata": {"b": 1e20, "a": [2]}},
    {
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "Two"},
        ],
        "teacher_response": "second",
    },
    {
        "messages": [{"role": "user", "content": "Go"}],
        "trajectory": [
            ACTION,
            {"role": "tool", "content": "sunny", "kind": "observation"},
            {**ACTION, "content": "ok"},
        ],
    },
]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
