"""The same data policy with the standard library alone, in one process: what `kiln prepare` is measured against.

    python bench/plain_prepare.py ROWS.jsonl OUT

Every check of kiln's policy is here, the strict JSON contract included: duplicate keys, NaN and infinities, lone
surrogates, integers beyond 64 bits, depth. It writes the same split files, rejected rows and drop counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

SIZES = {"train": 15_000, "validation": 1_000, "test": 1_000}
SEED, MIN_CHARS, MAX_CHARS = 42, 10, 2_000
DEPTH = 127
SURROGATE = re.compile("[\ud800-\udfff]")
STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def integer(text: str) -> int:
    value = int(text) if len(text) < 22 else 2**70
    if not -(2**63) <= value < 2**64:
        raise ValueError("integer out of range")
    return value


def double(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("infinite")
    return value


def refuse(name: str) -> float:
    raise ValueError(name)


def parse(text: str) -> Any:
    if text.count("[") + text.count("{") > DEPTH:
        depth = 0
        for match in STRUCTURE.finditer(text):
            depth += (match[0] in "[{") - (match[0] in "]}")
            if depth > DEPTH:
                raise ValueError("too deep")
    value = json.loads(text, object_pairs_hook=unique, parse_int=integer, parse_float=double, parse_constant=refuse)
    escaped = "\\ud" in text or "\\uD" in text
    if escaped and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("lone surrogate")
    return value


def named(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] != ""


def screen(row: dict[str, Any]) -> tuple[str | None, Any, Any, str]:
    """The reason that drops a row, or None; then tools, calls and the stripped query."""
    query = row.get("query")
    for field in ("query", "tools", "answers"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            return f"missing_{field}", None, None, ""
    query = row["query"].strip()
    if len(query) < MIN_CHARS:
        return "query_too_short", None, None, query
    if len(query) > MAX_CHARS:
        return "query_too_long", None, None, query
    try:
        tools = parse(row["tools"])
    except (ValueError, RecursionError):
        return "invalid_tools_json", None, None, query
    if not isinstance(tools, list) or not all(
        named(tool) and isinstance(tool.get("description"), str) and isinstance(tool.get("parameters"), dict)
        for tool in tools
    ):
        return "invalid_tool_shape", None, None, query
    try:
        calls = parse(row["answers"])
    except (ValueError, RecursionError):
        return "invalid_answers_json", None, None, query
    if not isinstance(calls, list) or not calls:
        return "invalid_answer_shape", None, None, query
    if not all(named(call) and isinstance(call.get("arguments"), dict) for call in calls):
        return "invalid_answer_shape", None, None, query
    if len(calls) > 1:
        return "multi_call_answer", None, None, query
    return None, tools, calls, query


def prepare(path: Path, out: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    pool: list[dict[str, Any]] = []
    ids: set[str] = set()
    queries: set[str] = set()
    digest = hashlib.sha256()
    rejected = []
    offset = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            digest.update(raw)
            place, offset = offset, offset + len(raw)
            text = raw.strip(b" \t\n\x0c\r")
            if not text:
                continue
            tools: Any = None
            calls: Any = None
            reason, query, name = None, "", None
            try:
                row = parse(text.decode("utf-8"))
            except UnicodeDecodeError:
                reason = "invalid_utf8"
            except (ValueError, RecursionError):
                reason = "invalid_row_json"
            else:
                if not isinstance(row, dict):
                    reason = "row_not_object"
                else:
                    name = f"rows:{row.get('id', number)}"
                    if name in ids:
                        reason = "duplicate_example_id"
                    else:
                        ids.add(name)
                        reason, tools, calls, query = screen(row)
            key = ""
            if reason is None:
                key = hashlib.sha256(" ".join(query.casefold().split()).encode()).hexdigest()
                if key in queries:
                    reason = "duplicate_query"
                queries.add(key)
            if reason is not None:
                counts[reason] = counts.get(reason, 0) + 1
                sha = hashlib.sha256(b"kiln-cli.raw-tool-call-row.v1\0" + text).hexdigest()
                rejected.append(
                    {"example_id": name, "length": len(raw), "line": number, "offset": place, "reason": reason,
                     "row_sha256": sha}
                )  # fmt: skip
                continue
            pool.append(
                {
                    "schema_version": "sommelier.prepared_example.v2",
                    "example_id": name,
                    "source_id": name,
                    "language": "en",
                    "source_example_id": None,
                    "query": query,
                    "tools": [{k: tool[k] for k in ("name", "description", "parameters")} for tool in tools],
                    "gold_calls": [{k: call[k] for k in ("name", "arguments")} for call in calls],
                    "query_sha256": key,
                    "source_revision": "",
                }
            )
    random.Random(SEED).shuffle(pool)
    out.mkdir(parents=True, exist_ok=True)
    start = 0
    for split, size in SIZES.items():
        with (out / f"{split}.jsonl").open("w", encoding="utf-8") as stream:
            for example in pool[start : start + size]:
                example |= {"split": split, "source_revision": digest.hexdigest()}
                stream.write(json.dumps(example, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n")
        start += size
    with (out / "rejected.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(entry, sort_keys=True, separators=(",", ":")) + "\n" for entry in rejected)
    return counts


if __name__ == "__main__":
    print(json.dumps(prepare(Path(sys.argv[1]), Path(sys.argv[2])), sort_keys=True))
