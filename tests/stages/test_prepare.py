"""prepare: the conformance table, the split vectors, the account of every row, and what failures leave behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages import prepare
from kiln_stages.prepare import PrepareResult
from kiln_stages.preparing.split import split_pool
from prepare.conftest import ABSENT, ROOT_REASONS, SCHEMA, SPLITS, A, T, jsonl, raw
from tests_support import shared_path

from kiln_cli import files
from kiln_cli.config import DataConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import Filesystem
from kiln_cli.manifests import read_manifest
from kiln_cli.plugins import Plugins
from kiln_cli.records import Candidate, ToolCallRow
from kiln_cli.stage_manifests import PrepareManifest

PAIR_REASONS = (
    "missing_source_example",
    "duplicate_source_example",
    "pair_tools_mismatch",
    "pair_answers_mismatch",
    "cross_split_duplicate",
)

Prepare = Callable[..., PrepareResult]


@pytest.fixture
def run_prepare(make_run: Callable[..., Path], plugins: Plugins) -> Prepare:
    """``run_prepare(data, (n_train, n_validation, n_test))`` prepares ``project/rows.jsonl`` into ``project/run``."""

    def runs(
        data: bytes | Path, sizes: tuple[int, int, int] = (1, 1, 1), *, name: str = "project", **options: Any
    ) -> PrepareResult:
        path = data.as_posix() if isinstance(data, Path) else "rows.jsonl"
        lines = [
            'schema = "kiln.config.v1"',
            f"[project]\nseed = {options.pop('seed', 42)}",
            "[data]",
            *(f"n_{split} = {size}" for split, size in zip(SPLITS, sizes, strict=True)),
            *(f"{key} = {value}" for key, value in options.pop("limits", {}).items()),
            f'[[datasets]]\npath = "{path}"\nsource = "{options.pop("source", "auto")}"',
            *(f'{key} = "{value}"' for key, value in options.items()),
        ]
        made: dict[str, str | bytes] = {"kiln.toml": "\n".join(lines) + "\n"}
        if isinstance(data, bytes):
            made["rows.jsonl"] = data
        root = make_run(made, name)
        return prepare.run(load_config(root / "kiln.toml"), root / "run", plugins)

    return runs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "project" / "run"


def rejected(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "data" / "rejected.jsonl").read_bytes().splitlines()]


def examples(run: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "data" / f"{split}.jsonl").read_bytes().splitlines()]


def ids(run: Path, split: str) -> list[str]:
    return [example["example_id"] for example in examples(run, split)]


def tree(run: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".kiln.lock"
    }


# --- the conformance table (contract, 2.3), column *ours*

NBSP, ZWJ = "\u00a0", "\u200d"
DEEP = '[{"name":"f","description":"d","parameters":' + '{"a":' * 5000 + "1" + "}" * 5001 + "]"
KEEP = None
# Left out, for features that this version does not have: row 30 under format=openai and row 42's "string parsed under
# openai" (both are refused by the two sources there are), rows 21 and 32's optional reasons, 45 and 46's opt-in checks,
# and the notes that `kiln validate` makes of rows 7, 13 and 25.
TABLE: list[tuple[int, dict[str, object], str | None]] = [
    (1, {"query": ABSENT}, "missing_query"),
    (2, {"query": None}, "missing_query"),
    (3, {"query": True}, "missing_query"),
    (4, {"query": 12345678901}, "missing_query"),
    (5, {"query": ["What is the weather?"]}, "missing_query"),
    (6, {"query": ""}, "missing_query"),
    (6, {"query": " \t\n\r"}, "missing_query"),
    *[(6, {"query": char * 12}, "missing_query") for char in (NBSP, "\u3000", "\x1c", "\x85")],
    *[(7, {"query": char * 12}, KEEP) for char in ("\u200b", "\ufeff", "\u180e")],
    (8, {"query": "   123456789   "}, "query_too_short"),
    (9, {"query": "abcdefghij"}, KEEP),
    (9, {"query": "1234  5678"}, KEEP),
    (10, {"query": "e\u0301" * 5}, KEEP),
    (10, {"query": ZWJ.join("👨👩👧👦👨👩")}, KEEP),
    (11, {"query": "a" * 2000}, KEEP),
    (11, {"query": "  " + "b" * 2000 + "\n"}, KEEP),
    (11, {"query": "c" * 2001}, "query_too_long"),
    (12, {"query": "a lone surrogate \ud800"}, "invalid_row_json"),
    (13, {"query": "a zero \x00 in a query"}, KEEP),
    (14, {"tools": ABSENT}, "missing_tools"),
    (15, {"tools": None}, "missing_tools"),
    (16, {"tools": json.loads(T)}, "missing_tools"),
    (17, {"tools": []}, "missing_tools"),
    (18, {"tools": " \n"}, "missing_tools"),
    (18, {"tools": NBSP}, "missing_tools"),
    (19, {"tools": NBSP + T}, "invalid_tools_json"),
    (19, {"tools": "\ufeff" + T}, "invalid_tools_json"),
    (19, {"tools": T + " x"}, "invalid_tools_json"),
    (19, {"tools": T[:-1] + ",]"}, "invalid_tools_json"),
    (19, {"tools": T.replace('"', "'")}, "invalid_tools_json"),
    (19, {"tools": T.replace('"d"', '"d\t"')}, "invalid_tools_json"),
    (20, {"tools": f" \n{T}\r\n\t"}, KEEP),
    (21, {"tools": "[]"}, KEEP),
    (22, {"tools": "{}"}, "invalid_tool_shape"),
    (22, {"tools": "null"}, "invalid_tool_shape"),
    (22, {"tools": json.dumps(T)}, "invalid_tool_shape"),
    (22, {"tools": "NaN"}, "invalid_tools_json"),
    *[
        (23, {"tools": T.replace("{}", f'{{"d":{number}}}')}, "invalid_tools_json")
        for number in ("NaN", "-Infinity", "1e999")
    ],
    (24, {"tools": T.replace('"f"', '""')}, "invalid_tool_shape"),
    (24, {"tools": T.replace('"f"', "1")}, "invalid_tool_shape"),
    (25, {"tools": T.replace('"f"', '" "')}, KEEP),
    (26, {"tools": T.replace('"description":"d",', "")}, "invalid_tool_shape"),
    (26, {"tools": T.replace('"d"', "null")}, "invalid_tool_shape"),
    (27, {"tools": T.replace('"d"', '""')}, KEEP),
    (28, {"tools": T.replace(',"parameters":{}', "")}, "invalid_tool_shape"),
    *[(28, {"tools": T.replace("{}", text)}, "invalid_tool_shape") for text in ("null", "[]", '"{}"')],
    (29, {"tools": T.replace('"name"', '"required":["x"],"strict":true,"name"')}, KEEP),
    (30, {"tools": '[{"type":"function","function":' + T[1:-1] + "}]"}, "invalid_tool_shape"),
    (31, {"tools": T.replace('"name":"f"', '"name":"","name":"f"')}, "invalid_tools_json"),
    (32, {"tools": f"[{T[1:-1]},{T[1:-1]}]"}, KEEP),
    (33, {"tools": f"[{T[1:-1]},5]"}, "invalid_tool_shape"),
    (34, {"tools": DEEP}, "invalid_tools_json"),
    (34, {"tools": T.replace("{}", '{"a":' * 124 + "{}" + "}" * 124)}, KEEP),
    (34, {"tools": T.replace("{}", '{"a":' * 125 + "{}" + "}" * 125)}, "invalid_tools_json"),
    (35, {"tools": "[" * 100_000}, "invalid_tools_json"),
    (36, {"tools": T.replace("{}", '{"d":' + "9" * 5000 + "}")}, "invalid_tools_json"),
    (37, {"tools": T.replace('"f"', '"\\ud800"')}, "invalid_tools_json"),
    (38, {"answers": None}, "missing_answers"),
    (38, {"answers": ABSENT}, "missing_answers"),
    (38, {"answers": ""}, "missing_answers"),
    *[(39, {"answers": text}, "invalid_answer_shape") for text in ("[]", "{}", A[1:-1])],
    (40, {"answers": f"[{A[1:-1]},{A[1:-1]}]"}, "multi_call_answer"),
    (41, {"answers": f'[{A[1:-1]},{{"name":"f"}}]'}, "invalid_answer_shape"),
    *[(42, {"answers": A.replace("{}", text)}, "invalid_answer_shape") for text in ('"{}"', "null", "[]")],
    (42, {"answers": '[{"name":"f"}]'}, "invalid_answer_shape"),
    (43, {"answers": A.replace('"f"', '""')}, "invalid_answer_shape"),
    (43, {"answers": A.replace('"f"', "true")}, "invalid_answer_shape"),
    (44, {"answers": A.replace('"name"', '"id":"call_1","name"')}, KEEP),
    (45, {"answers": A.replace('"f"', '"other"')}, KEEP),
    (46, {"tools": T.replace("{}", '{"required":["x"]}')}, KEEP),
    (47, {"answers": A.replace("{}", '{"a":1,"a":2}')}, "invalid_answers_json"),
    (48, {"answers": A.replace("{}", '{"a":NaN}')}, "invalid_answers_json"),
    (49, {"answers": A.replace("{}", '{"a":[1.0,1,1e2,-0,0.1000]}')}, KEEP),
    (50, {"query": "short", "tools": "[", "answers": "["}, "query_too_short"),
    (51, {"query": "short", "tools": " "}, "missing_tools"),
    (52, {"tools": "[", "answers": "["}, "invalid_tools_json"),
    (53, {"tools": "{}", "answers": "["}, "invalid_tool_shape"),
    (54, {"schema_version": ABSENT}, "unknown_schema"),
    (54, {"schema_version": "sommelier.raw_tool_call_row.v9"}, "unknown_schema"),
    (54, {"schema_version": "sommelier.prepared_example.v2"}, "unknown_schema"),
    (55, {"schema_version": [SCHEMA]}, "unknown_schema"),
    (56, {"source_id": 7}, "invalid_example_id"),
    (56, {"source_id": None}, "invalid_example_id"),
    (56, {"source_id": " \u3000"}, "invalid_example_id"),
    (56, {"source_id": ABSENT}, "missing_field"),
    (56, {"source_revision": ABSENT}, "missing_field"),
]
LINES: list[tuple[int, bytes, str | None]] = [
    (54, b"[1]", "row_not_object"),
    (54, b"5", "row_not_object"),
    (54, b"null", "row_not_object"),
    (54, b"{", "invalid_row_json"),
    (54, json.dumps(raw("dup")).encode()[:-1] + b',"query":"Another query here"}', "invalid_row_json"),
    (54, b"\xef\xbb\xbf" + json.dumps(raw("bom")).encode(), "invalid_row_json"),
    (54, json.dumps(raw("two")).encode() * 2, "invalid_row_json"),
    (55, b"[" * 100_000, "invalid_row_json"),
    (55, json.dumps(raw("bytes")).encode().replace(b"Valid", b"V\xfflid"), "invalid_utf8"),
    (55, json.dumps(raw("nan")).encode().replace(b'"v"', b"NaN"), "invalid_row_json"),
    (57, json.dumps(raw("sep", query="a\u2028query with\u0085odd ends"), ensure_ascii=False).encode(), KEEP),
    (57, json.dumps(raw("cr")).encode() + b"\r", KEEP),
    (57, b" \t\x0c" + json.dumps(raw("ff")).encode() + b"\x0c", KEEP),
    (57, b"\xc2\xa0" + json.dumps(raw("nbsp")).encode(), "invalid_row_json"),
]


def table_lines() -> list[tuple[int, bytes, str | None]]:
    rows = [
        (number, json.dumps(raw(f"-{place}-{number}", **changes)).encode(), expected)
        for place, (number, changes, expected) in enumerate(TABLE)
    ]
    return rows + LINES


def test_every_row_of_the_table_is_there() -> None:
    assert {number for number, _, _ in table_lines()} == set(range(1, 58))


def test_conformance_table(run_prepare: Prepare, run_dir: Path) -> None:
    cases = table_lines()
    kept = sum(expected is KEEP for _, _, expected in cases)
    result = run_prepare(b"\n".join(line for _, line, _ in cases), (kept - 2, 1, 1), source="sommelier")
    found = {row["line"]: row["reason"] for row in rejected(run_dir)}
    wrong = [
        (number, line[:200], expected, found.get(place))
        for place, (number, line, expected) in enumerate(cases, start=1)
        if found.get(place) != expected
    ]
    assert wrong == []
    drops = result.summary.kiln["en"]
    assert (drops.rows_read, drops.kept, drops.unused) == (len(cases), kept, 0)


def test_pointers_and_details_tell_what_was_found(run_prepare: Prepare, run_dir: Path) -> None:
    changes: list[dict[str, object]] = [
        {"query": None},
        {"query": "short"},
        {"tools": T.replace('"f"', "1")},
        {"answers": A.replace("{}", '{"a":1,"a":2}')},
        {"source_id": 7},
    ]
    rows = [raw(number, **change) for number, change in enumerate(changes)]
    run_prepare(jsonl(*rows, *(raw(number) for number in range(10, 13))), source="sommelier")
    found = [(row["pointer"], row["detail"]) for row in rejected(run_dir)]
    assert [pointer for pointer, _ in found] == ["/query", "/query", "/tools", "/answers", "/source_id"]
    assert found[0][1] == "expected a string, found null"
    assert found[1][1] == "5 characters, at least 10"
    assert found[2][1] == "tool 1: name: expected a string, found a number"
    assert "'a'" in found[3][1]
    assert "found a number" in found[4][1]


def test_values_that_are_kept(run_prepare: Prepare, run_dir: Path) -> None:
    """Table rows 29, 44 and 49, and the fields of a record."""
    row = raw(
        1,
        query=" \u00a0Valid  query\twith spaces \n",
        tools='[{"strict":true,"parameters":{"b":1,"a":{"z":null}},"description":"","name":"f","returns":5}]',
        answers='[{"id":"x","arguments":{"a":[1.0,1,1e2,-0,0.1000],"é":"\\u00e9"},"name":"g"}]',
    )
    run_prepare(jsonl(row, raw(2), raw(3)))
    (example,) = [e for split in SPLITS for e in examples(run_dir, split) if e["example_id"] == "s1"]
    split = example.pop("split")
    assert example == {
        "schema_version": "sommelier.prepared_example.v2",
        "example_id": "s1",
        "source_id": "s1",
        "language": "en",
        "source_example_id": None,
        "query": "Valid  query\twith spaces",
        "tools": [{"name": "f", "description": "", "parameters": {"a": {"z": None}, "b": 1}}],
        "gold_calls": [{"name": "g", "arguments": {"a": [1.0, 1, 100.0, 0, 0.1], "é": "é"}}],
        "query_sha256": hashlib.sha256(b"valid query with spaces").hexdigest(),
        "source_revision": "v",
    }
    (line,) = [row for row in (run_dir / "data" / f"{split}.jsonl").read_bytes().split(b"\n") if b'"s1"' in row]
    assert b"[1.0,1,100.0,0,0.1]" in line
    assert line.decode().startswith('{"example_id":"s1","gold_calls":[{"arguments":')


@pytest.mark.parametrize("reason", ["query_too_short", "query_too_long"])
def test_limits_are_inclusive(run_prepare: Prepare, run_dir: Path, reason: str) -> None:
    """Queries of 21, 22 and 23 characters against a lower limit of 22 or an upper one of 22."""
    queries = ["q" * 21, "r" * 22, "s" * 23, *(f"{char}" * 22 for char in "tuv")]
    rows = [raw(number, query=query) for number, query in enumerate(queries)]
    run_prepare(jsonl(*rows), limits={"min_query_chars" if reason == "query_too_short" else "max_query_chars": 22})
    expected = "s0" if reason == "query_too_short" else "s2"
    assert [(row["example_id"], row["reason"]) for row in rejected(run_dir)] == [(expected, reason)]


def test_max_calls(run_prepare: Prepare, run_dir: Path) -> None:
    rows = [raw(count, answers="[" + ",".join([A[1:-1]] * count) + "]") for count in (1, 2, 3)]
    run_prepare(jsonl(*rows, raw(4), raw(5)), (2, 1, 1), limits={"max_calls": 2})
    assert [(row["example_id"], row["reason"]) for row in rejected(run_dir)] == [("s3", "multi_call_answer")]


# --- normalisation (contract, 2.2)


@pytest.mark.parametrize(
    "query, prefix",
    [
        ("Hello  World", "b94d27b9934d3e08"),
        ("  HELLO\tworld\n", "b94d27b9934d3e08"),
        ("ＨＥＬＬＯ ｗｏｒｌｄ", "dea0df8e89048302"),
        ("Straße", "16d96952087774fe"),
        ("STRASSE", "16d96952087774fe"),
        ("İstanbul", "4a4df120f7d1f3c2"),
        ("istanbul", "751c59fe1fa734e6"),
        ("ﬁle", "3b9c358f36f0a31b"),
        ("file", "3b9c358f36f0a31b"),
        ("e\u0301", "bf12767b0f2a56b2"),
        ("\u00e9", "4a99557e4033c353"),
        ("a\u00a0b", "c8687a08aa5d6ed2"),
        ("a\u2028b", "c8687a08aa5d6ed2"),
        ("a\u200bb", "8df62aef5f92e4c3"),
        ("\u017f", "043a718774c572bd"),
        ("s", "043a718774c572bd"),
        ("\u212a", "8254c329a92850f6"),
        ("\u03c2", "ff59ed1e562b056a"),
    ],
)
def test_query_digests(query: str, prefix: str) -> None:
    assert Candidate(ToolCallRow(query=query)).query_sha256.startswith(prefix)


# --- shuffle and split (contract, 3)


def test_shuffle_vectors() -> None:
    def order(count: int, seed: int) -> list[int]:
        return split_pool(range(count), {"train": count}, seed, DataConfig())["train"]

    assert order(10, 0) == [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]
    assert order(10, 7) == [8, 3, 1, 4, 7, 0, 9, 6, 2, 5]
    assert order(10, 42) == [7, 3, 2, 8, 5, 6, 9, 4, 0, 1]
    assert order(1000, 42)[:8] == [776, 507, 895, 922, 33, 483, 85, 750]
    assert order(1000, 42)[-3:] == [25, 114, 654]


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 60), st.integers(0, 2**64 - 1), st.data())
def test_sizes_move_borders_and_never_the_order(count: int, seed: int, data: st.DataObject) -> None:
    train = data.draw(st.integers(1, count - 2))
    validation = data.draw(st.integers(1, count - train - 1))
    test = data.draw(st.integers(1, count - train - validation))
    pool = range(count)
    splits = split_pool(pool, {"train": train, "validation": validation, "test": test}, seed, DataConfig())
    whole = list(range(count))
    random.Random(seed).shuffle(whole)
    assert splits["train"] + splits["validation"] + splits["test"] == whole[: train + validation + test]
    assert [len(splits[name]) for name in SPLITS] == [train, validation, test]


VECTOR_A = {
    ((20, 5, 5), 42): (
        "20 15 11 27 23 7 6 13 12 16 10 26 30 22 17 28 2 14 19 3",
        "18 29 5 25 8",
        "9 24 1 4 21",
    ),
    ((6, 2, 2), 42): ("20 15 11 27 23 7", "6 13", "12 16"),
    ((6, 2, 2), 7): ("22 6 16 30 8 29", "10 1", "14 9"),
}


@pytest.mark.parametrize("sizes, seed", VECTOR_A)
def test_vector_a(run_prepare: Prepare, run_dir: Path, sizes: tuple[int, int, int], seed: int) -> None:
    path = shared_path("data/function_calling/sommelier_fixture/preparation_rows.jsonl")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest.startswith("f0ed7eb6") and digest.endswith("40c8")
    result = run_prepare(path, sizes, seed=seed)
    for split, expected in zip(SPLITS, VECTOR_A[sizes, seed], strict=True):
        assert ids(run_dir, split) == [f"prep-{number}" for number in expected.split()]
    assert not any(result.summary.languages["en"].counts.values())
    assert result.summary.kiln["en"].unused == 30 - sum(sizes)
    assert rejected(run_dir) == []


def vector_b() -> bytes:
    answers = '[{"name":"f","arguments":{"x":1}}]'
    changes: dict[int, dict[str, str]] = {
        13: {"query": ""},
        14: {"tools": "  "},
        15: {"answers": ""},
        16: {"query": "too short"},
        17: {"query": "x" * 2001},
        18: {"tools": "["},
        19: {"tools": "{}"},
        20: {"answers": "nope"},
        21: {"answers": "[]"},
        22: {"answers": '[{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'},
        23: {"query": f"  ROOT   query\tnumber 01{NBSP}PLEASE "},
    }
    rows = []
    for number in range(1, 24):
        row = raw(number, source_id=f"r{number:02}", answers=answers)
        if number <= 12:
            row["query"] = f"Root query number {number:02} please"
        row.update(changes.get(number, {}))
        rows.append(row)
    return jsonl(*rows)


def test_vector_b_root(run_prepare: Prepare, run_dir: Path) -> None:
    data = vector_b()
    assert hashlib.sha256(data).hexdigest() == "f2f1630243e84018c00ef627d292739446cdb76dc570d457738e22b6095c9208"
    result = run_prepare(data, (6, 3, 2))
    assert ids(run_dir, "train") == ["r08", "r06", "r03", "r09", "r10", "r07"]
    assert ids(run_dir, "validation") == ["r12", "r04", "r05"]
    assert ids(run_dir, "test") == ["r01", "r02"]
    assert [(row["example_id"], row["reason"]) for row in rejected(run_dir)] == [
        (f"r{number}", reason) for number, reason in enumerate(ROOT_REASONS, start=13)
    ]
    language = result.summary.languages["en"]
    assert language.counts == {**dict.fromkeys(ROOT_REASONS, 1), **dict.fromkeys(PAIR_REASONS, 0)}
    assert list(language.counts) == [*ROOT_REASONS, *PAIR_REASONS]
    assert (language.valid_rows, language.deduplicated_rows) == (13, 12)
    assert language.split_sizes == {"train": 6, "validation": 3, "test": 2}
    drops = result.summary.kiln["en"]
    assert (drops.rows_read, drops.kept, drops.dropped, drops.unused) == (23, 11, 11, 1)


def test_the_drop_summary_on_disk(run_prepare: Prepare, run_dir: Path) -> None:
    run_prepare(b"\n" + vector_b() + b" \n", (6, 3, 2))
    summary = json.loads((run_dir / "data" / "drop_summary.json").read_bytes())
    assert summary["schema_version"] == "sommelier.drop_summary.v2"
    assert summary["requested"] == {"train": 6, "validation": 3, "test": 2}
    assert set(summary["languages"]["en"]) == {"counts", "valid_rows", "deduplicated_rows", "split_sizes"}
    assert set(summary["languages"]["en"]["counts"]) == {*ROOT_REASONS, *PAIR_REASONS}
    assert summary["kiln"]["en"]["blank_lines"] == 2
    assert summary["kiln"]["en"]["counts"] == dict.fromkeys(
        (
            "line_too_long",
            "invalid_utf8",
            "invalid_row_json",
            "row_not_object",
            "unknown_schema",
            "not_single_turn",
            "missing_field",
            "invalid_example_id",
            "duplicate_example_id",
        ),
        0,
    )


def test_splits_of_vector_b_are_canonical_lines(run_prepare: Prepare, run_dir: Path) -> None:
    run_prepare(vector_b(), (6, 3, 2))
    for split in SPLITS:
        data = (run_dir / "data" / f"{split}.jsonl").read_bytes()
        expected = [
            json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            for row in examples(run_dir, split)
        ]
        assert data.decode() == "".join(line + "\n" for line in expected)
        assert len(examples(run_dir, split)[0]) == 11
        assert {row["split"] for row in examples(run_dir, split)} == {split}


# --- the account


def test_the_rejected_can_be_found_again(run_prepare: Prepare, run_dir: Path, tmp_path: Path) -> None:
    """Offsets, lengths and digests, recomputed from the file by other means."""
    lines = [
        b"\xef\xbb\xbf" + json.dumps(raw(1, query="short")).encode() + b"\r",
        b"",
        b"  " + json.dumps(raw(2)).encode(),
        b"\t{broken \x0c",
        json.dumps(raw(3)).encode(),
        b"\xff",
        json.dumps(raw(4, query=raw(2)["query"].upper())).encode(),
        json.dumps(raw(5)).encode(),
        b"[]",
    ]
    result = run_prepare(b"\n".join(lines))
    data = (tmp_path / "project" / "rows.jsonl").read_bytes()
    found = rejected(run_dir)
    assert [(row["row_index"], row["line"], row["reason"]) for row in found] == [
        (1, 1, "query_too_short"),
        (3, 4, "invalid_row_json"),
        (5, 6, "invalid_utf8"),
        (6, 7, "duplicate_query"),
        (8, 9, "row_not_object"),
    ]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    for row in found:
        place = row["line"] - 1
        piece = data[row["offset"] : row["offset"] + row["length"]]
        assert (row["offset"], piece.rstrip(b"\n")) == (starts[place], lines[place])
        text = lines[place].removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n\x0c")
        expected = hashlib.sha256(b"kiln-cli.raw-tool-call-row.v1\x00" + text).hexdigest()
        assert row["row_sha256"] == f"sha256:{expected}"
    assert [row["example_id"] for row in found] == ["s1", None, None, "s4", None]
    drops = result.summary.kiln["en"]
    assert drops.rows_read == drops.kept + drops.dropped + drops.unused == 8
    assert (drops.blank_lines, drops.byte_order_marks) == (1, 1)


def test_a_mark_is_stripped_from_a_kept_row_too(run_prepare: Prepare, run_dir: Path) -> None:
    result = run_prepare(b"\xef\xbb\xbf" + jsonl(raw(1), raw(2), raw(3)))
    assert {i for split in SPLITS for i in ids(run_dir, split)} == {"s1", "s2", "s3"}
    assert result.summary.kiln["en"].byte_order_marks == 1


def test_a_line_longer_than_the_cap(run_prepare: Prepare, run_dir: Path) -> None:
    cap = 16 * 1024 * 1024
    long = json.dumps(raw(2)).encode().ljust(cap + 1)
    run_prepare(b"\n".join([json.dumps(raw(1)).encode(), long, json.dumps(raw(3)).encode().ljust(cap), jsonl(raw(4))]))
    (row,) = rejected(run_dir)
    assert (row["line"], row["reason"], row["length"], row["example_id"]) == (2, "line_too_long", cap + 2, None)
    assert row["row_sha256"] is None


LINE_KINDS = st.sampled_from(["good", "blank", "twin", "short", "broken", "utf8", "array", "no tools", "same id"])


@settings(max_examples=25, deadline=None)
@given(st.lists(LINE_KINDS, max_size=25), st.booleans())
def test_no_row_vanishes(plugins: Plugins, kinds: list[str], last_feed: bool) -> None:
    """rows_read = kept + dropped + unused for any mix of lines."""
    lines = [json.dumps(raw(f"x{number}")).encode() for number in range(3)]
    for number, kind in enumerate(kinds):
        row = {
            "twin": raw(number, query="the same query"),
            "short": raw(number, query="short"),
            "no tools": raw(number, tools="[5]"),
            "same id": raw(number, source_id="sx0"),
        }.get(kind, raw(number))
        special = {"blank": b" ", "broken": b"{", "utf8": b"\xff", "array": b"[]"}
        lines.append(special.get(kind, json.dumps(row).encode()))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n" * last_feed)
        (root / "kiln.toml").write_text(
            'schema = "kiln.config.v1"\n[data]\nn_train = 1\nn_validation = 1\nn_test = 1\n'
            '[[datasets]]\npath = "rows.jsonl"\n'
        )
        result = prepare.run(load_config(root / "kiln.toml"), root / "run", plugins)
        drops = result.summary.kiln["en"]
        assert drops.rows_read == 3 + len(kinds) - kinds.count("blank")
        assert drops.rows_read == drops.kept + drops.dropped + drops.unused
        counted = sum(result.summary.languages["en"].counts.values()) + sum(drops.counts.values())
        assert drops.dropped == counted == len(rejected(root / "run"))
        assert drops.blank_lines == kinds.count("blank")
        twins = kinds.count("twin")
        assert result.summary.languages["en"].counts["duplicate_query"] == max(twins - 1, 0)
        assert drops.counts["duplicate_example_id"] == kinds.count("same id")


# --- identity


def test_the_first_with_an_id_has_it_even_if_it_was_dropped(run_prepare: Prepare, run_dir: Path) -> None:
    rows = [raw(1, source_id="a", query="short"), raw(2, source_id="a"), raw(3, source_id="b"), raw(4, source_id="b")]
    result = run_prepare(jsonl(*rows, raw(5), raw(6)))
    assert [(row["line"], row["reason"]) for row in rejected(run_dir)] == [
        (1, "query_too_short"),
        (2, "duplicate_example_id"),
        (4, "duplicate_example_id"),
    ]
    assert result.summary.kiln["en"].counts["duplicate_example_id"] == 2
    assert result.summary.languages["en"].counts["query_too_short"] == 1


def test_a_duplicate_id_is_found_before_the_row_is_looked_at(run_prepare: Prepare, run_dir: Path) -> None:
    rows = [raw(1, source_id="a"), raw(2, source_id="a", query=""), raw(3), raw(4)]
    run_prepare(jsonl(*rows))
    assert [row["reason"] for row in rejected(run_dir)] == ["duplicate_example_id"]


def test_a_row_with_a_taken_id_does_not_take_its_query(run_prepare: Prepare, run_dir: Path) -> None:
    rows = [
        raw(1, source_id="a"),
        raw(2, source_id="a", query="a query of its own"),
        raw(3, query="a query of its own"),
    ]
    run_prepare(jsonl(*rows, raw(4)))
    assert [row["line"] for row in rejected(run_dir)] == [2]


def test_ids_of_rows_that_bring_none(run_prepare: Prepare, run_dir: Path) -> None:
    def xlam(number: int, **more: object) -> dict[str, Any]:
        return {"query": f"Valid query for row {number}", "tools": T, "answers": A, **more}

    rows = [xlam(1), xlam(2, id=7), xlam(3, id="x y"), xlam(4), xlam(5, id="7")]
    rows += [xlam(n, id=bad) for n, bad in enumerate([None, True, 1.5, " ", []], start=6)]
    run_prepare(b"\n\n" + jsonl(*rows), (2, 1, 1), id="set")
    found = {i for split in SPLITS for i in ids(run_dir, split)}
    assert found == {"set:1", "set:7", "set:x y", "set:4"}
    assert [row["reason"] for row in rejected(run_dir)] == ["duplicate_example_id"] + ["invalid_example_id"] * 5


def test_the_revision_is_the_dataset_s_or_the_file_s(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = [{"query": f"Valid query for row {n}", "tools": T, "answers": A} for n in range(3)]
    data = jsonl(*rows)
    run_prepare(data, name="one", revision="r9")
    run_prepare(data, name="two")
    assert examples(tmp_path / "one" / "run", "train")[0]["source_revision"] == "r9"
    assert examples(tmp_path / "two" / "run", "train")[0]["source_revision"] == hashlib.sha256(data).hexdigest()


# --- real rows

BFCL = {
    "bfcl_xlam_rows": (
        1848,
        {"query_too_short": 3, "query_too_long": 1, "multi_call_answer": 440, "duplicate_query": 110},
        1294,
    ),
    "bfcl_jsonschema_rows": (360, {"query_too_long": 1, "multi_call_answer": 120, "duplicate_query": 3}, 236),
    "bfcl_no_call_rows": (120, {"query_too_short": 2, "invalid_answer_shape": 118}, 0),
}


@pytest.mark.parametrize("name", BFCL)
def test_real_rows_too_few_for_the_splits(run_prepare: Prepare, run_dir: Path, name: str) -> None:
    rows, counts, pool = BFCL[name]
    path = shared_path(f"data/function_calling/{name}.jsonl")
    with pytest.raises(KilnError) as caught:
        run_prepare(path, (max(pool, 1), 1, 1))
    error = caught.value
    need = max(pool, 1) + 2
    assert (error.code, error.exit_code) == ("KLN205", 2)
    assert isinstance(error.details, dict)
    assert {reason: count for reason, count in error.details["counts"].items() if count} == counts
    assert (error.details["pool"], sum(error.details["requested"].values())) == (pool, need)
    assert f"need {need}, got {pool}" in error.message
    assert rows == pool + sum(counts.values())
    for reason, count in counts.items():
        assert any(line.split() == [reason, f"{count:,}"] for line in error.message.split("\n")), reason
    assert tree(run_dir) == {}


@pytest.mark.parametrize("name", ["bfcl_xlam_rows", "bfcl_jsonschema_rows"])
def test_real_rows(run_prepare: Prepare, run_dir: Path, name: str) -> None:
    _, counts, pool = BFCL[name]
    path = shared_path(f"data/function_calling/{name}.jsonl")
    result = run_prepare(path, (pool - 40, 20, 20), source="xlam")
    language = result.summary.languages["en"]
    assert {reason: count for reason, count in language.counts.items() if count} == counts
    assert (language.deduplicated_rows, language.valid_rows) == (pool, pool + counts["duplicate_query"])
    assert not any(result.summary.kiln["en"].counts.values())
    everything = [example for split in SPLITS for example in examples(run_dir, split)]
    assert len({example["query_sha256"] for example in everything}) == pool
    source = {f"{name}:{row['id']}": row for row in map(json.loads, path.read_text().split("\n")[:-1])}
    for example in everything:
        row = source[example["example_id"]]
        assert example["query"] == row["query"].strip()
        assert example["gold_calls"][0]["arguments"] == json.loads(row["answers"])[0]["arguments"]
        assert [tool["name"] for tool in example["tools"]] == [tool["name"] for tool in json.loads(row["tools"])]


# --- evidence


def test_two_runs_in_two_places_are_equal(run_prepare: Prepare, tmp_path: Path) -> None:
    one = run_prepare(vector_b(), (6, 3, 2), name="one")
    other = run_prepare(vector_b(), (6, 3, 2), name="deep/er/two")
    files_of = [tree(tmp_path / name / "run") for name in ("one", "deep/er/two")]
    for name in files_of[0]:
        if name.startswith("data/"):
            assert files_of[0][name] == files_of[1][name], name
    assert {"data/train.jsonl", "data/rejected.jsonl", "data/drop_summary.json"} < set(files_of[0])
    assert one.manifest.content_sha256 == other.manifest.content_sha256
    assert str(tmp_path).encode() not in b"".join(files_of[0].values())


def test_the_manifest_names_every_file(run_prepare: Prepare, run_dir: Path, tmp_path: Path) -> None:
    run_prepare(vector_b(), (6, 3, 2))
    manifest = read_manifest(run_dir, PrepareManifest)
    assert {ref.path for ref in manifest.outputs} == {name for name in tree(run_dir) if name.startswith("data/")}
    for ref in manifest.outputs:
        data = (run_dir / ref.path).read_bytes()
        assert (ref.sha256, ref.bytes) == (hashlib.sha256(data).hexdigest(), len(data))
        if ref.rows is not None:
            assert ref.rows == data.count(b"\n")
    (source,) = manifest.inputs
    data = (tmp_path / "project" / "rows.jsonl").read_bytes()
    assert (source.path, source.sha256, source.rows) == ("rows.jsonl", hashlib.sha256(data).hexdigest(), 23)
    assert manifest.details.drop_reasons[-1] == "cross_split_duplicate"


def test_a_second_run_changes_nothing(run_prepare: Prepare, run_dir: Path) -> None:
    assert not run_prepare(vector_b(), (6, 3, 2)).unchanged
    before = tree(run_dir)
    for name in before:
        os.utime(run_dir / name, ns=(1, 1))
    assert run_prepare(vector_b(), (6, 3, 2)).unchanged
    assert tree(run_dir) == before
    assert {name: (run_dir / name).stat().st_mtime_ns for name in before} == dict.fromkeys(before, 1)


@pytest.mark.parametrize("change", ["seed", "limit", "input"])
def test_any_change_shows_in_the_manifest(run_prepare: Prepare, change: str) -> None:
    before = run_prepare(vector_b(), (6, 3, 2)).manifest.content_sha256
    data = vector_b() + (b"\n" if change == "input" else b"")
    options: dict[str, Any] = {"seed": {"seed": 43}, "limit": {"limits": {"min_query_chars": 9}}}.get(change, {})
    after = run_prepare(data, (6, 3, 2), **options)
    assert not after.unchanged
    assert after.manifest.content_sha256 != before


# --- what goes wrong


def test_inputs_that_cannot_be_read(run_prepare: Prepare, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "absent", tmp_path / "fifo", tmp_path):
        with pytest.raises(KilnError) as caught:
            run_prepare(path)
        assert caught.value.code == "KLN204"


def test_files_of_no_known_shape(run_prepare: Prepare) -> None:
    for data in (b'{"prompt":"x","completion":"y"}\n', b"nonsense\n"):
        with pytest.raises(KilnError) as caught:
            run_prepare(data)
        assert caught.value.code == "KLN212"
        assert "xlam" in caught.value.hint


def test_a_file_without_rows(run_prepare: Prepare) -> None:
    for data in (b"", b"\n \n", b"[]\n"):
        with pytest.raises(KilnError) as caught:
            run_prepare(data)
        assert caught.value.code == "KLN107"


def test_a_source_of_chat_rows_is_refused(run_prepare: Prepare) -> None:
    with pytest.raises(KilnError) as caught:
        run_prepare(vector_b(), source="messages")
    assert caught.value.code == "KLN212"


def test_no_datasets(make_run: Callable[..., Path], plugins: Plugins) -> None:
    root = make_run({"kiln.toml": 'schema = "kiln.config.v1"\n'})
    with pytest.raises(KilnError) as caught:
        prepare.run(load_config(root / "kiln.toml"), root / "run", plugins)
    assert caught.value.code == "KLN203"


def test_a_file_that_changes_while_it_is_read(
    run_prepare: Prepare, run_dir: Path, tmp_path: Path, plugins: Plugins
) -> None:
    class Meddler:
        @contextmanager
        def task(self, label: str, total: int | None, unit: str, done: int = 0) -> Iterator[Any]:
            yield self

        def advance(self, count: int = 1, note: str = "") -> None:
            with (tmp_path / "project" / "rows.jsonl").open("ab") as stream:
                stream.write(b"\n")

    run_prepare(vector_b(), (6, 3, 2))
    before = tree(run_dir)
    with pytest.raises(KilnError) as caught:
        prepare.run(load_config(tmp_path / "project" / "kiln.toml"), run_dir, plugins, Meddler())
    assert (caught.value.code, caught.value.exit_code) == ("KLN207", 2)
    assert tree(run_dir)["data_manifest.json"] == before["data_manifest.json"]


def test_a_disk_that_fails_at_any_call(run_prepare: Prepare, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every call: exit 4, no debris, no manifest, and the next run gives what an undisturbed one gives."""

    class Failing(Filesystem):
        left = -1
        seen = 0

        def tick(self) -> None:
            Failing.seen += 1
            Failing.left -= 1
            if Failing.left == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def create(self, path: Path) -> int:
            self.tick()
            return super().create(path)

        def write(self, descriptor: int, data: bytes | memoryview) -> int:
            self.tick()
            return super().write(descriptor, data)

        def fsync(self, descriptor: int) -> None:
            self.tick()
            super().fsync(descriptor)

        def replace(self, source: Path, target: Path) -> None:
            self.tick()
            super().replace(source, target)

    run_prepare(vector_b(), (6, 3, 2))
    expected = {name: data for name, data in tree(run_dir).items() if name.startswith("data/")}
    monkeypatch.setattr(files, "FS", Failing())
    shutil.rmtree(run_dir)
    Failing.left, Failing.seen = 10**9, 0
    run_prepare(vector_b(), (6, 3, 2))
    calls = Failing.seen
    assert calls > 25
    for place in range(calls):
        shutil.rmtree(run_dir)
        Failing.left = place
        with pytest.raises(KilnError) as caught:
            run_prepare(vector_b(), (6, 3, 2))
        assert (caught.value.code, caught.value.exit_code) == ("KLN402", 4), place
        assert [path.name for path in run_dir.rglob(".kiln-tmp-*")] == [], place
        if place < calls - 1:  # the last call flushes the directory in which the manifest already stands
            assert not (run_dir / "data_manifest.json").exists(), place
        if place % 6 == 0:
            Failing.left = 10**9
            run_prepare(vector_b(), (6, 3, 2))
            assert {name: data for name, data in tree(run_dir).items() if name.startswith("data/")} == expected
