"""Reports of users of other tools on files of rows (``shared/cases/reports.md``), each through ``kiln admit``."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from kiln_stages.admitting.corpus import read_corpus
from tests_support import shared_path
from tiny_model import Kiln, Outcome

from kiln_cli.lines import BOM


class Run(NamedTuple):
    done: Outcome
    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        assert self.done.code == 0, self.done.err
        value: dict[str, Any] = json.loads((self.path / "admit_manifest.json").read_bytes())
        return value

    @property
    def counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.manifest["counts"]["corpus"]
        return counts

    @property
    def receipt(self) -> dict[str, Any]:
        assert self.done.code == 0, self.done.err
        value: dict[str, Any] = json.loads((self.path / "admit" / "sft_ingestion.json").read_bytes())
        return value

    @property
    def rejected(self) -> list[dict[str, Any]]:
        assert self.done.code == 0, self.done.err
        return [json.loads(line) for line in (self.path / "admit" / "rejected.jsonl").read_bytes().splitlines()]


Admit = Callable[..., Run]


@pytest.fixture
def admit(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Admit:
    """``admit(data, *options, name="rows.jsonl")``: what ``kiln admit --file`` makes of a file with these bytes."""
    runs = iter(range(100))

    def run(data: bytes, *options: str | Path, name: str = "rows.jsonl", policy: str = "fail") -> Run:
        out = tmp_path / f"run{next(runs)}"
        (tmp_path / name).write_bytes(data)
        arguments = ("--file", tmp_path / name, "--model", tiny_model, "--out", out, "--invalid-row-policy", policy)
        return Run(kiln("admit", *arguments, *options), out)

    return run


def chat(asked: str = "a", answered: str = "b", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}], **more}


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


GOOD = [chat("one", "1"), chat("two", "2"), chat("three", "3")]


def test_j1_a_byte_order_mark_changes_no_row(admit: Admit) -> None:
    plain, marked = admit(lines(*GOOD)), admit(BOM + lines(*GOOD))
    assert marked.receipt["kept_row_hashes"] == plain.receipt["kept_row_hashes"]
    assert marked.receipt["kept_corpus_sha256"] == plain.receipt["kept_corpus_sha256"]
    assert [plain.counts["byte_order_marks"], marked.counts["byte_order_marks"]] == [0, 1]
    assert marked.done.err.count("byte-order mark") == 1
    assert "byte-order mark" not in plain.done.err
    array = admit(BOM + json.dumps(GOOD).encode())
    assert array.receipt["kept_row_hashes"] == plain.receipt["kept_row_hashes"]
    assert array.counts["byte_order_marks"] == 1


def test_j1_a_byte_order_mark_elsewhere_is_a_fault_of_its_row(admit: Admit) -> None:
    run = admit(lines(GOOD[0]) + BOM + lines(*GOOD[1:]), policy="skip")
    assert [(row["row_index"], row["code"]) for row in run.rejected] == [(2, "invalid_json")]
    assert run.counts["rows_kept"] == 2
    assert run.counts["byte_order_marks"] == 0


def test_j3_nan_in_one_row_ends_nothing_else(admit: Admit) -> None:
    hundred = [chat(f"question {n}", str(n), score=n) for n in range(100)]
    nan = json.dumps(chat("question", "answer", score=float("nan"))).encode()
    assert b'"score": NaN' in nan
    data = lines(*hundred, nan, *hundred)
    refused = admit(data)
    assert refused.done.code == 1
    assert "row 101 (line 101)" in refused.done.err
    assert "invalid_json: not_finite: NaN is not JSON" in refused.done.err
    skipped = admit(data, policy="skip")
    assert (skipped.counts["rows_read"], skipped.counts["rows_kept"], skipped.counts["rows_rejected"]) == (201, 200, 1)
    assert [(row["line"], row["code"]) for row in skipped.rejected] == [(101, "invalid_json")]


def test_j5_side_fields_of_any_type_never_count(admit: Admit, kiln: Kiln, tmp_path: Path) -> None:
    """Twenty thousand nulls, then a text, then an object: no type is settled by what comes first."""
    last = [chat(meta="web"), chat(meta={"k": 1})]
    run = admit(lines(*[chat(meta=None)] * 300, *last))
    assert (run.counts["rows_kept"], run.counts["ignored_fields"]) == (302, {"meta": 302})
    assert len(set(run.receipt["kept_row_hashes"])) == 1
    (tmp_path / "many.jsonl").write_bytes(lines(*[chat(meta=None)] * 20_000, *last))
    done = kiln("validate", tmp_path / "many.jsonl")
    assert done.code == 0
    assert "20,002 rows, 0 faults" in done.out


DUPLICATES = [
    (
        b'{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"safe"}],"messages":[]}',
        "messages",
        1,
    ),
    (b'{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a","content":"b"}]}', "content", 3),
    (b'{"messages":[{"role":"user","content":"q"}],"meta":{"deep":[{"x":1,"y":2,"x":1}]}}', "x", 4),
]


@pytest.mark.parametrize(("row", "key", "depth"), DUPLICATES)
def test_j8_a_key_that_stands_twice_is_named_with_its_depth(admit: Admit, row: bytes, key: str, depth: int) -> None:
    (found,) = admit(lines(GOOD[0], row), policy="skip").rejected
    assert (found["code"], found["line"]) == ("invalid_json", 2)
    assert found["detail"].startswith(f"duplicate_key: key '{key}' stands twice in the ")
    assert found["detail"].endswith(f"(depth {depth})")
    assert found["pointer"].endswith(f"/{key}")
    assert found["row_sha256"] == "sha256:" + hashlib.sha256(b"kiln.sft-raw-row.v1\0" + row).hexdigest()


def test_j9_an_array_is_read_as_an_array_with_a_notice(admit: Admit) -> None:
    array = ("[ " + ",\n ".join(json.dumps(row) for row in GOOD) + " ]").encode()
    run = admit(array, name="a.json")
    assert run.receipt["kept_row_hashes"] == admit(lines(*GOOD)).receipt["kept_row_hashes"]
    assert run.manifest["details"]["rows"]["packing"] == "array"
    assert "rows: read as array, in the shape messages" in run.done.err


def test_j9_a_pretty_printed_row_is_one_row_with_a_notice(admit: Admit) -> None:
    pretty = json.dumps(GOOD[0], indent=2).encode()
    assert pretty.count(b"\n") > 8
    run = admit(pretty, name="b.jsonl")
    assert run.receipt["kept_row_hashes"] == admit(lines(GOOD[0])).receipt["kept_row_hashes"]
    assert "rows: read as object, in the shape messages" in run.done.err
    several = admit(pretty + b"\n" + pretty)
    assert several.done.code == 2
    assert several.done.err.count("kiln: ") == 1
    assert "looks pretty-printed" in several.done.err


def test_j10_a_last_line_needs_no_newline(admit: Admit) -> None:
    data = lines(*GOOD)
    whole, cut = admit(data), admit(data[:-1])
    assert cut.receipt == whole.receipt
    assert cut.counts["rows_kept"] == 3
    for path in (cut.path / "admit").glob("*.json*"):
        assert not path.read_bytes() or path.read_bytes().endswith(b"\n")


def test_j10_two_objects_on_a_line_are_told_apart(admit: Admit) -> None:
    first, second = (json.dumps(row).encode() for row in GOOD[:2])
    (found,) = admit(first + second + b"\n" + lines(GOOD[2]), policy="skip").rejected
    assert (found["line"], found["code"]) == (1, "invalid_json")
    assert found["detail"] == f"trailing_data: the value is followed by '{{' at column {len(first) + 1}"


EMPTY = {"empty.jsonl": b"", "blank.jsonl": b"\n\n \t\r\n\n", "mark.jsonl": BOM + b"\n", "array.json": b" [ ]\n"}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("source", ["auto", "messages"])
def test_j11_an_input_without_rows_is_an_error_of_its_own(admit: Admit, name: str, source: str) -> None:
    run = admit(EMPTY[name], "--source", source, name=name)
    assert run.done.code == 1
    assert "KLN107" in run.done.err and name in run.done.err and "no rows" in run.done.err
    assert not (run.path / "admit_manifest.json").exists()


def test_j11_empty_files_are_listed_and_others_checked(kiln: Kiln, tmp_path: Path) -> None:
    files = {**EMPTY, "empty.jsonl.gz": gzip.compress(b""), "good.jsonl": lines(*GOOD)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    done = kiln("validate", *(tmp_path / name for name in files))
    assert done.code == 0, done.err
    for name in files:
        rows = 3 if name == "good.jsonl" else 0
        (line,) = [line for line in done.out.splitlines() if f"/{name}: " in line]
        assert f"{rows} rows, 0 faults" in line
        assert ("every line of it is blank" in line) == (rows == 0)
    done = kiln("validate", *(tmp_path / name for name in EMPTY))
    assert done.code == 1
    assert "KLN107" in done.err
    assert "4 files" in done.err


def test_j13_one_trailing_comma_loses_one_row(admit: Admit) -> None:
    broken = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],}'
    data = lines(GOOD[0], broken, GOOD[2])
    refused = admit(data)
    assert refused.done.code == 1
    assert "row 2 (line 2)" in refused.done.err and "invalid_json: syntax: " in refused.done.err
    skipped = admit(data, policy="skip")
    assert skipped.counts["rows_kept"] == 2
    (found,) = skipped.rejected
    # The parser of Python 3.13 points at the comma, earlier ones at the bracket behind it.
    end = len(broken)
    assert any(
        found["detail"].endswith(f"at column {end - back}, found {sign!r}") for back, sign in ((0, "}"), (1, ","))
    )


def test_j14_line_ends_of_the_file_are_no_text_of_a_row(admit: Admit) -> None:
    rows = [chat("one", "1"), chat("two\r\nlines", "2\r\n")]
    unix, windows = admit(lines(*rows)), admit(lines(*rows).replace(b"\n", b"\r\n"))
    assert windows.receipt["kept_row_hashes"] == unix.receipt["kept_row_hashes"]
    digests = [run.manifest["inputs"][0]["sha256"] for run in (unix, windows)]
    assert digests == [
        hashlib.sha256(data).hexdigest() for data in (lines(*rows), lines(*rows).replace(b"\n", b"\r\n"))
    ]
    first, second = (read_corpus(run.path / "admit" / "corpus.parquet") for run in (unix, windows))
    assert [row.input_ids for row in first] == [row.input_ids for row in second]
    # "\r" is one token of the tiny model's byte-level vocabulary: in the second row as often as the row says it.
    carriage = json.loads((shared_model(unix) / "tokenizer.json").read_bytes())["model"]["vocab"]["č"]
    assert [row.input_ids.count(carriage) for row in second] == [0, 2]


def shared_model(run: Run) -> Path:
    text = (run.path / "config.resolved.toml").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("path = ")]
    return run.path / json.loads(line.partition(" = ")[2])


def test_j15_lines_are_the_files_own_and_what_is_no_object_is_named(admit: Admit) -> None:
    data = b"\n" + lines(GOOD[0]) + b'\n{"messages": \n[]\n42\nnull\n'
    run = admit(data, policy="skip")
    found = [(row["line"], row["row_index"], row["code"], row["detail"].partition(": ")[0]) for row in run.rejected]
    assert found == [
        (4, 2, "invalid_json", "syntax"),
        (5, 3, "invalid_json", "row_not_object"),
        (6, 4, "invalid_json", "row_not_object"),
        (7, 5, "invalid_json", "row_not_object"),
    ]
    assert (run.counts["rows_read"], run.counts["blank_lines"]) == (5, 2)
    assert "blank lines: 2" in run.done.err
    refused = admit(data)
    assert "(line 4)" in refused.done.err and "blank lines" in refused.done.err


def call(arguments: Any) -> dict[str, Any]:
    spoken = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    return {"messages": [{"role": "user", "content": "go"}, spoken]}


@pytest.mark.parametrize("template", ["qwen2_5.jinja", "qwen3.jinja"])
def test_t3_arguments_as_text_and_as_object_train_the_same_tokens(admit: Admit, template: str) -> None:
    """One of the templates prints a text as it is, the other quotes it once more; both get the object."""
    path = shared_path(f"data/templates/trl/{template}")
    data = lines(call('{"city":"SF"}'), call({"city": "SF"}), call('{"city": "SF"}'))
    run = admit(data, "--template", path)
    rows = read_corpus(run.path / "admit" / "corpus.parquet")
    assert rows[0].input_ids == rows[1].input_ids == rows[2].input_ids
    assert rows[0].label_spans == rows[1].label_spans
    # The row's own value is hashed (docs/artifacts.md, chat rows): three ways to write it, three hashes.
    assert len({row.row_sha256 for row in rows}) == 3


def test_t3_arguments_that_are_no_object_are_refused(admit: Admit) -> None:
    path = shared_path("data/templates/trl/qwen3.jinja")
    run = admit(lines(call("{}"), call("{bad"), call("[1]")), "--template", path, policy="skip")
    assert [(row["line"], row["code"], row["reason"]) for row in run.rejected] == [
        (2, "tool_arguments_invalid_json", "tokenization_error"),
        (3, "tool_arguments_invalid_json", "tokenization_error"),
    ]
    assert run.rejected[0]["pointer"] == "/messages/1/tool_calls/0/function/arguments"
    assert "'{bad' is no JSON" in run.rejected[0]["detail"]
    assert "holds an array, expected an object" in run.rejected[1]["detail"]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_t6_rows_without_an_answer_are_counted_and_the_rule_told(admit: Admit, policy: str) -> None:
    run = admit(lines(*[{"messages": [{"role": "user", "content": "a"}]}] * 3), policy=policy)
    assert run.done.code == 1
    assert ("KLN101" if policy == "fail" else "KLN102") in run.done.err
    assert "a row needs at least one message of role assistant" in run.done.err
    (count,) = [line.split() for line in run.done.err.splitlines() if line.strip().startswith("no_assistant_message")]
    assert count == ["no_assistant_message", "3"]
    assert not (run.path / "admit_manifest.json").exists()


def test_t10_an_answer_that_is_an_object_is_named(admit: Admit) -> None:
    row = {"instruction": "Extract", "input": "x", "output": {"a": 1, "b": None}}
    run = admit(lines({**row, "output": "y"}, row), policy="skip")
    (found,) = run.rejected
    assert (found["code"], found["pointer"]) == ("invalid_json", "/output")
    assert found["detail"] == "content_not_string: /output is an object; expected text"
    refused = admit(lines(row))
    assert refused.done.code == 1
    assert "content_not_string: /output is an object; expected text" in refused.done.err


# --- one row, whatever it is packed in


def test_a_parquet_file_with_a_messages_column_is_the_same_rows(admit: Admit, tmp_path: Path) -> None:
    """In a table every message has every field; what a message lacks is null there, and absent in its hash."""
    path = shared_path("data/templates/trl/qwen3.jinja")
    calls = [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"x":1}'}}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1.0}]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "reasoning_content": "think", "tool_calls": calls},
                {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"},
                {"role": "assistant", "content": "b", "reasoning_content": "more"},
            ],
            "tools": tools,
        },
        {"messages": [{"role": "assistant", "content": "x", "weight": 0.0}, {"role": "assistant", "content": "y"}]},
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "table.parquet")
    table = pl.read_parquet(tmp_path / "table.parquet").to_dicts()
    assert table[0]["tools"] is None and table[0]["messages"][0]["tool_calls"] is None, "absent fields are null there"
    plain = admit(lines(*rows), "--template", path)
    packed = admit((tmp_path / "table.parquet").read_bytes(), "--template", path, name="rows.parquet")
    assert packed.receipt["kept_row_hashes"] == plain.receipt["kept_row_hashes"]
    assert len(plain.receipt["kept_row_hashes"]) == 3
    assert packed.manifest["details"]["rows"]["packing"] == "parquet"
    assert packed.counts["ignored_fields"] == plain.counts["ignored_fields"] == {}
