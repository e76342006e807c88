"""Rows, projects and what a run left behind, for the tests of prepare and validate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln_cli.config import LoadedConfig, load_config

SCHEMA = "sommelier.raw_tool_call_row.v1"
T = '[{"name":"f","description":"d","parameters":{}}]'
A = '[{"name":"f","arguments":{}}]'
SPLITS = ("train", "validation", "test")
ROOT_REASONS = (
    "missing_query",
    "missing_tools",
    "missing_answers",
    "query_too_short",
    "query_too_long",
    "invalid_tools_json",
    "invalid_tool_shape",
    "invalid_answers_json",
    "invalid_answer_shape",
    "multi_call_answer",
    "duplicate_query",
)
LINE_REASONS = (
    "line_too_long",
    "invalid_utf8",
    "invalid_row_json",
    "row_not_object",
    "unknown_schema",
    "missing_field",
    "invalid_example_id",
    "duplicate_example_id",
)
ABSENT = object()


def raw(number: object, **changes: object) -> dict[str, Any]:
    """A sound row; a change to ABSENT takes the field away."""
    row: dict[str, Any] = {
        "schema_version": SCHEMA,
        "source_id": f"s{number}",
        "query": f"Valid query for row {number}",
        "tools": T,
        "answers": A,
        "source_revision": "v",
    }
    row.update(changes)
    return {key: value for key, value in row.items() if value is not ABSENT}


def paired(number: object, root: object, **changes: object) -> dict[str, Any]:
    """A row of a paired source."""
    query = f"Requête appariée numéro {number}"
    return raw(number, **{"source_id": f"f{number}", "query": query, "source_example_id": root, **changes})


def jsonl(*rows: Mapping[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def project(
    root: Path,
    datasets: Sequence[Mapping[str, object]],
    sizes: tuple[int, int, int] = (1, 1, 1),
    *,
    files: Mapping[str, bytes] | None = None,
    seed: int = 42,
    limits: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Writes ``kiln.toml`` and the files below ``root`` and loads the config."""
    lines = ['schema = "kiln.config.v1"', f"[project]\nseed = {seed}", "[data]"]
    lines += [f"n_{split} = {size}" for split, size in zip(SPLITS, sizes, strict=True)]
    lines += [f"{key} = {json.dumps(value)}" for key, value in (limits or {}).items()]
    for dataset in datasets:
        lines += ["[[datasets]]", *(f"{key} = {json.dumps(value)}" for key, value in dataset.items())]
    root.mkdir(parents=True, exist_ok=True)
    (root / "kiln.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, data in (files or {}).items():
        (root / name).write_bytes(data)
    return load_config(root / "kiln.toml")


def rejected(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "data" / "rejected.jsonl").read_bytes().splitlines()]


def reasons(run: Path, language: str = "en") -> dict[str, str]:
    """The reason of each dropped row of a language, by example id."""
    return {row["example_id"]: row["reason"] for row in rejected(run) if row["language"] == language}


def examples(run: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "data" / f"{split}.jsonl").read_bytes().split(b"\n")[:-1]]


def ids(run: Path, split: str) -> list[str]:
    return [example["example_id"] for example in examples(run, split)]


def tree(run: Path) -> dict[str, bytes]:
    """Every file below a run directory but its lock."""
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".kiln.lock"
    }


def data_files(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(run).items() if name.startswith("data/")}
