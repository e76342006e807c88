"""Rows and helpers for the tests of named data sets: the vector of the contract, conversations, kiln in process."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kiln_stages.datasets.partition import RowKeys
from kiln_stages.datasets.rows import row_keys

from kiln_cli import app


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def kiln(*arguments: object) -> Outcome:
    """One command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run([str(argument) for argument in arguments])
    return Outcome(int(code), out.getvalue(), err.getvalue())


def chat(asked: str, answered: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}], **more}


A = chat("a", "b")
B = chat("Hello  World", "OK", group_id="g1")
C = chat("hello world", "ok", metadata={"session_id": "s1"})


def line(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines; bytes stand as they are."""
    path.write_bytes(b"".join(line(row) + b"\n" for row in rows))
    return path


def keys_of(rows: Iterable[Any], group_by: str | None = None) -> list[RowKeys]:
    return [row_keys(line(row), group_by)[0] for row in rows]


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file that are not blank."""
    return [text for text in path.read_bytes().split(b"\n") if text]
