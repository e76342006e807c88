"""Held-out rows stay out of training: every rule, every kind of thing that can name them, and train looks again."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from forging import rebuild_chain
from tiny_model import RUN, Kiln, Outcome

from kiln_cli.manifests import content_sha256, document
from kiln_cli.stage_manifests import AdmitManifest

needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is absent")

Row = dict[str, Any]


def chat(asked: str = "a", answered: str | None = "b", system: str | None = None, **more: Any) -> Row:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": asked})
    messages += [] if answered is None else [{"role": "assistant", "content": answered}]
    return {"messages": messages, **more}


def call(arguments: object) -> Row:
    called = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "call it"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
        ]
    }


def lines(*rows: Row) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class Bench(NamedTuple):
    """A directory with a model and ``train.jsonl`` of three rows; ``admit(*options)`` admits them into ``run``."""

    path: Path
    admit: Callable[..., Outcome]

    def write(self, name: str, *rows: Row) -> Path:
        (self.path / name).write_bytes(lines(*rows))
        return self.path / name

    @property
    def manifest(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / "run" / "admit_manifest.json").read_bytes())
        return value

    @property
    def rejected(self) -> list[dict[str, Any]]:
        text = (self.path / "run" / "admit" / "rejected.jsonl").read_bytes()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def bench(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Bench:
    (tmp_path / "model").symlink_to(tiny_model)

    def admit(*options: str | Path, rows: str = "train.jsonl") -> Outcome:
        fixed = ("--file", tmp_path / rows, "--model", tmp_path / "model", "--out", tmp_path / "run")
        return kiln("admit", *fixed, *options)

    return Bench(tmp_path, admit)


LONG = "the quick brown fox jumps over the lazy dog and runs away into the dark wood"
CASES = {
    "same_row": (chat("q", "x"), chat("q", "x", note="other field")),
    # A system turn, or a field that changes nothing, makes another source row and not another example.
    "same_example": (chat("q", "x", system="Be brief."), chat("q", "x")),
    "normal_example": (chat("Q ", "x"), chat("q", "X", note=1)),
    "normal_source_row": (chat("Q ", "x"), chat("q", "X")),
    "same_prompt": (chat("Which one?", "this"), chat("which  one?", None)),
    "same_group": (chat("p", "x", group_id=" g1 "), chat("q", "y", metadata={"group_id": "g1"})),
    "same_session": (chat("p", "x", session_id="s"), chat("q", "y", extra={"session_id": "s"})),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_names_both_rows(bench: Bench, rule: str) -> None:
    trained, held_out = CASES[rule]
    bench.write("train.jsonl", chat("one", "1"), trained)
    bench.write("eval.jsonl", chat("two", "2"), chat("three", "3"), held_out)
    done = bench.admit("--held-out", bench.path / "eval.jsonl")
    assert done.code == 1
    assert "kiln: KLN109: 1 row to train on meets held-out rows:\n  corpus row 2 (line 2): " + rule in done.err
    assert f"held-out {bench.path / 'eval.jsonl'} row 3 (line 3)\n" in done.err
    assert not (bench.path / "run" / "admit_manifest.json").exists()


def test_the_same_source_row(bench: Bench) -> None:
    """The JSON value is the same and the conversation another one only where a reader makes it one: by a map."""
    row = {"prompt": "p", "reply": "r", "group_id": "g"}
    bench.write("train.jsonl", row)
    bench.write("eval.jsonl", row)
    done = bench.admit("--held-out", bench.path / "eval.jsonl", "--map", "user=/prompt", "--map", "assistant=/reply")
    assert done.code == 1
    assert "same_row: held-out" in done.err


@pytest.mark.parametrize(
    ("trained", "held_out", "rule"),
    [
        pytest.param(chat("caf\u00e9", "x"), chat("cafe\u0301", "x", n=1), "normal_example", id="composition"),
        pytest.param(call('{"a": 1}'), call({"a": 1}), "normal_example", id="arguments_as_text"),
        pytest.param(
            {"messages": [*chat("q", "x")["messages"], {"role": "tool", "content": "result"}]},
            chat("q", "x"),
            "same_example",
            id="tool_results_at_the_end",
        ),
        pytest.param(
            {"messages": [*chat("q", "x")["messages"], *2 * [{"role": "tool", "content": "result"}]]},
            chat("q", "x"),
            "same_example",
            id="two_tool_results_at_the_end",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": "hi", "weight": 0}, *chat("q", "x")["messages"]]},
            {"messages": [{"role": "assistant", "content": "hi"}, *chat("q", "x")["messages"]]},
            "same_example",
            id="weight",
        ),
    ],
)
def test_what_makes_no_other_example(bench: Bench, trained: Row, held_out: Row, rule: str) -> None:
    bench.write("train.jsonl", trained)
    bench.write("eval.jsonl", held_out)
    # The tiny template prints no calls; as text of the answer it does.
    done = bench.admit("--held-out", bench.path / "eval.jsonl", "--set", "admit.tools=system")
    assert f"{rule}: held-out" in done.err


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        pytest.param(chat("q", "x"), chat("q", "y"), id="another_answer"),
        pytest.param(chat("q", "x", group_id="g"), chat("p", "y", session_id="g"), id="a_group_is_no_session"),
        pytest.param(chat("q", "x", group_id=" "), chat("p", "y", group_id=" "), id="blank_groups"),
        pytest.param(chat("\ufb01x", "x"), chat("fix", "x"), id="compatibility_forms"),
        pytest.param(chat(LONG, "x"), chat(LONG + " at night", "x"), id="near_without_asking"),
    ],
)
def test_what_stays_apart(bench: Bench, trained: Row, held_out: Row) -> None:
    bench.write("train.jsonl", trained)
    bench.write("eval.jsonl", held_out)
    done = bench.admit("--held-out", bench.path / "eval.jsonl")
    assert done.code == 0, done.err
    assert f"held out: {bench.path / 'eval.jsonl'}: 1 row\n" in done.err
    assert bench.manifest["counts"]["corpus"]["reasons"]["contaminated"] == 0
    assert bench.manifest["details"]["held_out"]["met"] == {}


def test_dropped_rows_are_counted_under_their_own_code(bench: Bench) -> None:
    """Under ``fail``, too: such a row is not invalid."""
    bench.write("train.jsonl", chat("one", "1"), chat("two", "2"), chat("three", "3", group_id="g"))
    held_out = bench.write("eval.jsonl", chat("TWO", "2"), chat("x", "y", group_id="g"))
    done = bench.admit("--held-out", held_out, "--drop-contaminated")
    assert done.code == 0, done.err
    counts = bench.manifest["counts"]["corpus"]
    assert (counts["rows_read"], counts["rows_kept"], counts["rows_rejected"]) == (3, 1, 2)
    assert {code: count for code, count in counts["reasons"].items() if count} == {"contaminated": 2}
    assert bench.manifest["details"]["held_out"]["met"] == {"normal_source_row": 1, "same_group": 1}
    assert [(row["row_index"], row["reason"], row["code"], row["detail"]) for row in bench.rejected] == [
        (2, "tokenization_error", "contaminated", f"normal_source_row: held-out {held_out} row 1 (line 1)"),
        (3, "tokenization_error", "contaminated", f"same_group: group_id 'g': held-out {held_out} row 2 (line 2)"),
    ]
    receipt = json.loads((bench.path / "run/admit/sft_ingestion.json").read_bytes())
    assert (receipt["invalid_row_policy"], [row["row_index"] for row in receipt["rejected_rows"]]) == ("fail", [2, 3])


def test_an_invalid_row_is_refused_for_what_it_is(bench: Bench) -> None:
    bench.write("train.jsonl", {"messages": []}, chat("one", "1"))
    held_out = bench.write("eval.jsonl", chat("one", "1"), chat("two", "2"))
    done = bench.admit("--held-out", held_out, "--drop-contaminated")
    assert (done.code, done.err.split(": ")[1]) == (1, "KLN101")
    done = bench.admit("--held-out", held_out, "--drop-contaminated", "--invalid-row-policy", "skip")
    assert (done.code, done.err.split(": ")[1]) == (1, "KLN102")


def test_without_held_out_rows_nothing_claims_that_somebody_looked(bench: Bench) -> None:
    bench.write("train.jsonl", chat("one", "1"))
    assert bench.admit().code == 0
    assert "contaminated" not in bench.manifest["counts"]["corpus"]["reasons"]
    assert "held_out" not in bench.manifest["details"]


@needs_rensa
def test_near_duplicates_on_request(bench: Bench) -> None:
    bench.write("train.jsonl", chat("one", "1"), chat(LONG + " at night", "never"))
    held_out = bench.write("eval.jsonl", chat("two", "2"), chat(LONG, "never"))
    assert bench.admit("--held-out", held_out, "--near-threshold", "0.9").code == 0
    done = bench.admit("--held-out", held_out, "--near-threshold", "0.7")
    # 17 words and 19: of 15 and 17 shingles 14 are shared, 14 / 18.
    assert done.code == 1
    assert "corpus row 2 (line 2): near_duplicate: 0.778 alike: held-out" in done.err


@needs_rensa
def test_all_cores_find_the_same(bench: Bench) -> None:
    """Many rows, so that several processes work; near duplicates too, whose package does not outlive every fork."""
    rows = [chat(f"row {number} asks for {LONG} of {number}", f"answer {number} " * 20) for number in range(3000)]
    bench.write("train.jsonl", *rows)
    held_out = bench.write("eval.jsonl", *rows[7:3000:500], chat(f"row {LONG} of 12 asks for 13", "no"))
    options = ("--held-out", held_out, "--near-threshold", "0.99", "--drop-contaminated")
    found = []
    for workers in ("1", "2"):
        assert bench.admit(*options, "--workers", workers).code == 0
        found.append((bench.path / "run/admit/rejected.jsonl").read_bytes())
    assert found[0] == found[1]
    assert [row["row_index"] for row in bench.rejected] == list(range(8, 3000, 500))


def test_any_file_of_rows_serves(bench: Bench) -> None:
    """Another shape and another packing than the rows have."""
    bench.write("train.jsonl", chat("one", "1"))
    share = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}]}
    packed = bench.path / "eval.json.gz"
    packed.write_bytes(gzip.compress(json.dumps([share], indent=1).encode()))
    done = bench.admit("--held-out", packed)
    assert done.code == 1
    assert f"same_row: held-out {packed} row 1 (line" in done.err


def test_a_held_out_row_that_is_no_conversation_is_named(bench: Bench) -> None:
    bench.write("train.jsonl", chat("one", "1"))
    held_out = bench.write("eval.jsonl", chat("two", "2"), {"messages": [{"content": "x"}]})
    done = bench.admit("--held-out", held_out)
    assert (done.code, done.err.split(": ")[1]) == (2, "KLN206")
    assert "row 2 (line 2): missing_field" in done.err


@pytest.mark.parametrize(
    ("given", "code"),
    [("nothing.jsonl", "KLN204"), ("run:test", "KLN204"), ("set:elsewhere", "KLN204"), ("-", "KLN204")],
)
def test_what_names_nothing(bench: Bench, given: str, code: str) -> None:
    bench.write("train.jsonl", chat("one", "1"))
    done = bench.admit("--held-out", given)
    assert (done.code, done.err.split(": ")[1]) == (2, code)
    assert f"'{given}' names nothing that is there" in done.err


@pytest.mark.parametrize("setting", ["drop_contaminated=true", "near_threshold=0.8"])
def test_settings_about_nothing_are_refused(bench: Bench, setting: str) -> None:
    bench.write("train.jsonl", chat("one", "1"))
    done = bench.admit("--set", f"admit.{setting}")
    assert (done.code, done.err.split(": ")[1]) == (2, "KLN203")
    assert "is about held_out, which names no rows" in done.err


# Another run's evidence in place of a file.


@pytest.fixture
def other(bench: Bench, kiln: Kiln) -> Path:
    """A run in which ``eval.jsonl`` was admitted, its second row dropped as too short to be one."""
    rows = bench.write("eval.jsonl", chat("two", "2"), {"messages": []}, chat("Three", "3", group_id="g"))
    out = bench.path / "other"
    options = ("--model", bench.path / "model", "--out", out, "--invalid-row-policy", "skip")
    done = kiln("admit", "--file", rows, *options)
    assert done.code == 0, done.err
    return out


def test_a_receipt_by_itself_serves_by_hash(bench: Bench, other: Path) -> None:
    bench.write("train.jsonl", chat("one", "1"), chat("Three", "3"), chat("three", "3"), chat("x", "y", group_id="g"))
    alone = shutil.copy(other / "admit" / "sft_ingestion.json", bench.path / "receipt.json")
    done = bench.admit("--held-out", alone, "--drop-contaminated")
    assert done.code == 0, done.err
    assert f"held out: {alone}: 2 rows, by hash alone: only the same conversation is found\n" in done.err
    assert [row["detail"] for row in bench.rejected] == [f"same_row: held-out {alone} row 3"]


@pytest.mark.parametrize("name", ["", "admit/sft_ingestion.json", "admit_manifest.json"])
def test_a_run_beside_its_files_serves_by_every_rule(bench: Bench, other: Path, name: str) -> None:
    bench.write("train.jsonl", chat("one", "1"), chat("Three", "3"), chat("three", "3"), chat("x", "y", group_id="g"))
    done = bench.admit("--held-out", other / name, "--drop-contaminated")
    assert done.code == 0, done.err
    assert [row["detail"].partition(": ")[0] for row in bench.rejected] == ["same_row", "normal_example", "same_group"]
    assert all("row 3 (line 3)" in row["detail"] for row in bench.rejected)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param([chat("another", "file")], id="other_rows"),
        # The conversations are those of the receipt, and nobody vouches for the rest of the file.
        pytest.param([chat("two", "2"), {"messages": []}, chat("Three", "3", group_id="h")], id="another_group"),
    ],
)
def test_where_the_file_of_a_run_changed_its_hashes_stand(bench: Bench, other: Path, now: list[Row]) -> None:
    bench.write("train.jsonl", chat("one", "1"), chat("Three", "3"), chat("three", "3"), chat("x", "y", group_id="h"))
    bench.write("eval.jsonl", *now)
    done = bench.admit("--held-out", other, "--drop-contaminated")
    assert done.code == 0, done.err
    assert "by hash alone" in done.err
    assert [row["detail"] for row in bench.rejected] == [f"same_row: held-out {other} row 3"]


def test_a_run_whose_receipt_was_edited_is_refused(bench: Bench, other: Path) -> None:
    bench.write("train.jsonl", chat("one", "1"))
    receipt = other / "admit" / "sft_ingestion.json"
    receipt.write_bytes(receipt.read_bytes().replace(b'"skip"', b'"fail"'))
    done = bench.admit("--held-out", other)
    assert (done.code, done.err.split(": ")[1]) == (2, "KLN207")


# Prepared runs, and train.


@pytest.fixture
def prepared(admitted: Path, copy_of: Callable[..., Path]) -> Path:
    return copy_of(admitted)


def queries(run: Path, split: str) -> list[str]:
    return [json.loads(line)["query"] for line in (run / "data" / f"{split}.jsonl").read_bytes().splitlines()]


def test_a_prepared_run_is_covered(prepared: Path, kiln: Kiln, tmp_path: Path) -> None:
    config, run = prepared / "kiln.toml", prepared / RUN
    for split in ("test", "validation"):  # they are apart, as prepare made them
        done = kiln("admit", config, "--out", run, "--held-out", f"{run}:{split}")
        assert done.code == 0, done.err
    # Another seed puts other rows into the splits: some that one trains on the other holds out.
    other = tmp_path / "other"
    assert kiln("prepare", config, "--out", other, "--set", "project.seed=7").code == 0
    shared = set(queries(run, "train")) & set(queries(other, "test"))
    assert shared
    options = ("--set", "project.seed=42", "--held-out", f"{other}:test", "--drop-contaminated")
    done = kiln("admit", config, "--out", run, *options)
    assert done.code == 0, done.err
    manifest = json.loads((run / "admit_manifest.json").read_bytes())
    counts = manifest["counts"]["corpus"]
    too_long = [query for query in shared if "Please think" in query]
    assert counts["reasons"]["contaminated"] == len(shared) - len(too_long)
    # Tools become text in this admission and nobody admitted the other run: the examples are the same, not the rows.
    assert manifest["details"]["held_out"]["met"] == {"same_example": len(shared) - len(too_long)}
    assert manifest["counts"]["heldout"]["reasons"]["contaminated"] == 0
    # The run's own config carries it: admitting again from there gives the same.
    again = kiln("admit", run / "config.resolved.toml", "--out", run)
    assert again.code == 0, again.err
    assert "unchanged" in again.err


def test_prepared_rows_meet_conversations_however_they_are_rendered(prepared: Path, kiln: Kiln, tmp_path: Path) -> None:
    """The tiny model's template knows no tools, so that prepared rows become text; the example is the same."""
    config, run = prepared / "kiln.toml", prepared / RUN
    example = json.loads((run / "data" / "train.jsonl").read_bytes().splitlines()[0])
    held_out = tmp_path / "eval.jsonl"
    called = [{"type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
              for c in example["gold_calls"]]  # fmt: skip
    asked = {"role": "user", "content": example["query"].upper()}
    held_out.write_bytes(lines({"messages": [asked, {"role": "assistant", "content": None, "tool_calls": called}]}))
    done = kiln("admit", config, "--out", run, "--held-out", held_out)
    assert done.code == 1
    assert f"corpus row 1 (line 1, {example['example_id']}): normal_example: held-out" in done.err


def test_train_looks_again(prepared: Path, kiln: Kiln) -> None:
    run = prepared / RUN
    held_out = prepared / "eval.jsonl"
    asked = queries(run, "train")[0]
    held_out.write_bytes(lines({"messages": [{"role": "user", "content": asked}]}))
    done = kiln("admit", prepared / "kiln.toml", "--out", run, "--held-out", held_out, "--drop-contaminated")
    assert done.code == 0, done.err
    config = run / "config.resolved.toml"
    refused = kiln("train", prepared / "kiln.toml", "--out", run)
    assert refused.code == 2  # without the held-out rows it is another admission
    held_out.write_bytes(lines({"messages": [{"role": "user", "content": asked + " "}]}))
    changed = kiln("train", config, "--out", run)
    assert (changed.code, changed.err.split(": ")[1]) == (2, "KLN207")
    assert f"the held-out rows of {held_out} are not those that admit_manifest.json names" in changed.err
    held_out.write_bytes(lines({"messages": [{"role": "user", "content": asked}]}))
    trained = kiln("train", config, "--out", run)
    assert trained.code == 0, trained.err
    receipt = json.loads((run / "train_receipt.json").read_bytes())
    assert receipt["data"]["examples_filtered"] == receipt["data"]["sft_ingestion"]["rows_rejected"] > 0
    verified = kiln("verify-receipt", run, "--deep")
    assert verified.code == 0, verified.out + verified.err
    shown = kiln("inspect", run, "row:1")
    assert "contaminated: same_prompt: held-out" in shown.out
    # Who says that another row met them, and makes every digest right again, is found out by both.
    manifest = msgspec.json.decode((run / "admit_manifest.json").read_bytes(), type=AdmitManifest)
    held_out_rows = msgspec.structs.replace(manifest.details.held_out, met={})
    manifest.details = msgspec.structs.replace(manifest.details, held_out=held_out_rows)
    manifest.content_sha256 = content_sha256(manifest)
    (run / "admit_manifest.json").write_bytes(document(manifest))
    rebuild_chain(run)
    assert kiln("verify-receipt", run).code == 0
    forged = kiln("verify-receipt", run, "--deep")
    assert forged.code == 1
    assert "held-out rows meet the rows that the manifest says" in forged.out
    again = kiln("train", config, "--out", run, "--fresh")
    assert (again.code, again.err.split(": ")[1]) == (2, "KLN207")
    assert "does not say what meets the held-out rows" in again.err
