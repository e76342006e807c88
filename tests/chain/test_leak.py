"""``kiln leak``: which rows stand in two sets that must be apart, over files, receipts, runs and named data sets."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import RUN, Kiln, Outcome

needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is absent")

Row = dict[str, Any]
LONG = "the quick brown fox jumps over the lazy dog and runs away into the dark wood"


def chat(asked: str = "a", answered: str = "b", **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}], **more}


def lines(*rows: Row) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


Leak = Callable[..., Outcome]


@pytest.fixture
def leak(tmp_path: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> Leak:
    """``leak({"a.jsonl": [row, ...]}, *options)``: what is told of these files, in a directory of their own."""
    monkeypatch.chdir(tmp_path)

    def call(files: dict[str, list[Row]], *options: str) -> Outcome:
        for name, rows in files.items():
            (tmp_path / name).write_bytes(lines(*rows))
        return kiln("leak", *files, *options)

    return call


def test_nothing_in_common(leak: Leak) -> None:
    done = leak({"a.jsonl": [chat("p", "x")], "b.jsonl": [chat("q", "x"), chat("r", "x")]})
    assert (done.code, done.err) == (0, "")
    assert done.out == "a.jsonl: 1 row\nb.jsonl: 2 rows\nno row stands in two of them\n"


def test_rules_counts_and_both_places(leak: Leak) -> None:
    a = [chat("one", "1"), chat("x", "y", group_id="g"), chat("two", "2"), chat("two", "2"), chat("far", "away")]
    b = [chat("u", "v", group_id="g"), chat("w", "v", group_id="g"), chat("TWO", "2"), chat("One", "1", more=1)]
    done = leak({"a.jsonl": a, "b.jsonl": b}, "--json")
    assert done.code == 1
    assert "kiln: KLN111: 4 rows stand in two sets that must be apart" in done.err
    found = json.loads(done.out)
    assert [(count["rule"], count["rows_a"], count["rows_b"]) for count in found["counts"]] == [
        ("normal_source_row", 2, 1),
        ("normal_example", 1, 1),
        ("same_group", 1, 2),
    ]
    assert [(each["rule"], each["what"], each["a"]["line"], each["b"]["line"]) for each in found["leaks"]] == [
        ("normal_example", "", 1, 4),
        ("same_group", "group_id 'g'", 2, 1),
        ("normal_source_row", "", 3, 3),
        ("normal_source_row", "", 4, 3),
    ]
    page = leak({"a.jsonl": a, "b.jsonl": b}).out
    assert "same_group (group_id 'g'): a.jsonl row 2 (line 2) = b.jsonl row 1 (line 1)\n" in page


def test_one_prompt_and_other_answers_are_told_of_apart(leak: Leak) -> None:
    done = leak({"a.jsonl": [chat("Which?", "this")], "b.jsonl": [chat("which?", "that")]})
    assert done.code == 0
    assert done.out.endswith(
        "no row stands in two of them\n"
        "one prompt, other answers (no leak by itself): 1 row\n"
        "other_answer: a.jsonl row 1 (line 1) = b.jsonl row 1 (line 1)\n"
    )


def test_the_first_rows_are_named_and_all_on_request(leak: Leak) -> None:
    rows = [chat(f"q{number}", "x") for number in range(50)]
    files = {"a.jsonl": rows, "b.jsonl": rows[::-1]}
    done = leak(files)
    assert done.out.count(" = b.jsonl row ") == 20
    assert done.out.endswith("and 30 more (--all names them)\n")
    assert leak(files, "--all").out.count(" = b.jsonl row ") == 50
    found = json.loads(leak(files, "--json").out)
    assert (found["leaks_total"], len(found["leaks"])) == (50, 20)


@needs_rensa
def test_near_duplicates(leak: Leak) -> None:
    files = {"a.jsonl": [chat("q", "x"), chat(LONG, "never")], "b.jsonl": [chat(f"{LONG} at night", "never")]}
    assert leak(files).code == 0
    assert leak(files, "--near", "0.8").code == 0
    done = leak(files, "--near", "0.75")
    assert done.code == 1
    assert "near_duplicate (0.778 alike): a.jsonl row 2 (line 2) = b.jsonl row 1 (line 1)\n" in done.out


def test_rows_that_are_no_conversations_are_compared_by_what_they_have(leak: Leak) -> None:
    odd = {"messages": "none", "group_id": "g"}
    done = leak({"a.jsonl": [chat("q", "x"), odd], "b.jsonl": [chat("p", "x", group_id="g")]})
    assert done.code == 1
    assert "a.jsonl: 2 rows, 1 of them no conversations and compared by their JSON alone; row 2 (line 2): " in done.out
    assert "same_group (group_id 'g'): a.jsonl row 2 (line 2) = b.jsonl row 1 (line 1)\n" in done.out


def test_three_sets_are_three_pairs(leak: Leak) -> None:
    a, b, c = chat("one", "1"), chat("two", "2"), chat("three", "3")
    found = json.loads(leak({"a.jsonl": [a, b], "b.jsonl": [b, c], "c.jsonl": [c, a]}, "--json").out)
    assert [(count["a"], count["b"]) for count in found["counts"]] == [
        ("a.jsonl", "b.jsonl"),
        ("a.jsonl", "c.jsonl"),
        ("b.jsonl", "c.jsonl"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a.jsonl",), "KLN201", "nothing to compare: a.jsonl"),
        (("a.jsonl", "a.jsonl"), "KLN201", "a.jsonl is named twice"),
        (("a.jsonl", "none.jsonl"), "KLN204", "'none.jsonl' names nothing that is there"),
        (("a.jsonl", "some:train"), "KLN212", "has no data set 'some'"),
        (("a.jsonl", "--near", "0"), "KLN201", "--near 0 calls everything alike"),
        (("a.jsonl", "--near", "1.5"), "KLN201", "less than or equal to 1"),
    ],
)
def test_usage(leak: Leak, kiln: Kiln, arguments: tuple[str, ...], code: str, words: str) -> None:
    leak({"a.jsonl": [chat()]})
    done = kiln("leak", *arguments)
    assert done.code == 2
    assert f"kiln: {code}: " in done.err
    assert words in done.err


# Runs.


def lines_of(run: Path, split: str) -> list[str]:
    return [json.loads(line)["query"] for line in (run / "data" / f"{split}.jsonl").read_bytes().splitlines()]


@pytest.fixture
def two_seeds(tmp_path: Path, admitted: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs ``first`` and ``second`` of one project with different seeds, both prepared and admitted."""
    project = tmp_path / "project"
    shutil.copytree(admitted, project, symlinks=True)
    monkeypatch.chdir(project)
    (project / RUN).rename(project / "first")
    for stage in ("prepare", "admit"):
        done = kiln(stage, "kiln.toml", "--out", "second", "--set", "project.seed=7")
        assert done.code == 0, done.err
    return project


def test_a_run_against_itself(two_seeds: Path, kiln: Kiln) -> None:
    done = kiln("leak", "first")
    assert done.code == 0, done.err
    assert done.out.endswith("no row stands in two of them\n")
    assert [line.split(":")[1] for line in done.out.splitlines()[:3]] == ["train", "validation", "test"]


def test_two_seeds_name_the_rows_that_one_trained_on_and_the_other_held_out(two_seeds: Path, kiln: Kiln) -> None:
    done = kiln("leak", "first", "second", "--all", "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert ["first:train", "second:train"] in found["not_compared"]
    splits = {(run, split): lines_of(two_seeds / run, split)
              for run in ("first", "second") for split in ("train", "validation", "test")}  # fmt: skip
    kept = {  # what is admitted, by split, is what was trained on or measured with
        (run, split): [query for query in queries if split == "test" or "Please think" not in query]
        for (run, split), queries in splits.items()
    }
    expected = set()
    for here, there in (("first", "second"), ("second", "first")):
        for split in ("validation", "test"):
            for query in set(kept[here, "train"]) & set(kept[there, split]):
                expected.add((here, splits[here, "train"].index(query) + 1, f"{there}:{split}",
                              splits[there, split].index(query) + 1))  # fmt: skip
    assert expected
    named = set()
    for each in found["leaks"]:
        ends = sorted((each["a"], each["b"]), key=lambda end: not end["set"].endswith(":train"))
        run = ends[0]["set"].removesuffix(":train")
        named.add((run, ends[0]["line"], ends[1]["set"], ends[1]["line"]))
    assert named == expected
    assert {each["rule"] for each in found["leaks"]} == {"same_row"}
    assert all(
        each["a"]["example_id"] and each["a"]["example_id"] == each["b"]["example_id"] for each in found["leaks"]
    )
    assert f"(line {each['a']['line']}, {each['a']['example_id']}) = " in kiln("leak", "first", "second", "--all").out


def test_receipts_in_place_of_runs(two_seeds: Path, kiln: Kiln) -> None:
    """Taken out of their runs they hold hashes alone, and these name the same rows of the training."""
    shutil.copy("first/admit/sft_ingestion.json", "trained.json")
    shutil.copy("second/admit/heldout_ingestion.json", "validation.json")
    by_hash = json.loads(kiln("leak", "trained.json", "validation.json", "--json").out)
    assert [each["by"] for each in by_hash["sets"]] == ["hashes", "hashes"]
    assert by_hash["sets"][0]["why"] == "the run that wrote it is not around it"
    by_rows = json.loads(kiln("leak", "first:train", "second:validation", "--json").out)
    places = [[(each["a"]["row_index"], each["b"]["row_index"]) for each in found["leaks"]]
              for found in (by_hash, by_rows)]  # fmt: skip
    assert places[0] == places[1] != []
    assert {each["a"]["line"] for each in by_hash["leaks"]} == {None}


def test_two_runs_may_train_on_the_same(two_seeds: Path, kiln: Kiln) -> None:
    done = kiln("leak", "first:train", "second:train")
    assert done.code == 2
    assert "nothing to compare: first:train, second:train" in done.err


# Named data sets.


def test_a_named_data_set_against_a_file_and_within(leak: Leak, kiln: Kiln, tmp_path: Path) -> None:
    rows = [chat(f"question {number}", f"answer {number}") for number in range(40)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    assert kiln("dataset", "add", "set", "rows.jsonl").code == 0
    assert kiln("leak", "set").code == 0
    done = leak({"a.jsonl": [chat("QUESTION 3", "answer 3"), chat("p", "q")]})
    done = kiln("leak", "a.jsonl", "set", "--json")
    assert done.code == 1
    assert "kiln: KLN111: 1 row stands in two sets that must be apart" in done.err
    (meeting,) = json.loads(done.out)["leaks"]
    split = meeting["b"]["set"]
    assert split in ("set:train", "set:validation", "set:holdout")
    stood = (tmp_path / ".kiln/datasets/set" / f"{split[4:]}.jsonl").read_bytes().splitlines()
    assert json.loads(stood[meeting["b"]["line"] - 1]) == rows[3]
    others = [f"set:{name}" for name in ("train", "validation", "holdout") if f"set:{name}" != split]
    assert kiln("leak", "a.jsonl", *others).code == 0


def test_two_named_data_sets_may_train_on_the_same(leak: Leak, kiln: Kiln, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(*(chat(f"question {number}", "x") for number in range(40))))
    for name in ("one", "two"):
        assert kiln("dataset", "add", name, "rows.jsonl").code == 0
    done = kiln("leak", "one", "two")
    assert done.code == 0, done.out
    told = "not compared, both may have the same rows"
    assert f"{told}: one:train, two:train\n" in done.out and f"{told}: one:holdout, two:holdout\n" in done.out
    assert kiln("leak", "one:train", "two:holdout").code == 0
    assert kiln("dataset", "split", "two", "--seed", "1").code == 0
    assert kiln("leak", "one:train", "two:holdout").code == 1


def test_rows_of_a_named_data_set_are_held_out(leak: Leak, kiln: Kiln, tmp_path: Path, tiny_model: Path) -> None:
    rows = [chat(f"question {number}", f"answer {number}") for number in range(40)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    assert kiln("dataset", "add", "set", "rows.jsonl").code == 0
    held_out = (tmp_path / ".kiln/datasets/set/holdout.jsonl").read_bytes().splitlines()
    options = ("--file", "rows.jsonl", "--model", tiny_model, "--out", "run", "--held-out", "set:holdout")
    done = kiln("admit", *options)
    assert done.code == 1
    assert f"kiln: KLN109: {len(held_out)} rows to train on meet held-out rows:" in done.err
    assert "same_row: held-out set:holdout row 1 (line 1)" in done.err
    done = kiln("admit", *options, "--drop-contaminated")
    assert done.code == 0, done.err
    receipt = json.loads((tmp_path / "run/admit/sft_ingestion.json").read_bytes())
    assert receipt["rows_kept"] == 40 - len(held_out)


def test_held_out_rows_are_looked_for_in_the_registry_that_is_named(
    leak: Leak, kiln: Kiln, tmp_path: Path, tiny_model: Path
) -> None:
    rows = [chat(f"question {number}", f"answer {number}") for number in range(40)]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    assert kiln("dataset", "add", "set", "rows.jsonl", "--registry", "elsewhere").code == 0
    held_out = (tmp_path / "elsewhere/datasets/set/holdout.jsonl").read_bytes().splitlines()
    options = ("--file", "rows.jsonl", "--model", tiny_model, "--out", "run", "--registry", "elsewhere")
    done = kiln("admit", *options, "--held-out", "set:holdout", "--drop-contaminated")
    assert done.code == 0, done.err
    receipt = json.loads((tmp_path / "run/admit/sft_ingestion.json").read_bytes())
    assert held_out and receipt["rows_kept"] == 40 - len(held_out)
    # What the run keeps of its settings names the same registry.
    assert kiln("admit", "run/config.resolved.toml", "--out", "run").code == 0
    refused = kiln("admit", *options)
    assert refused.code == 2 and "kiln: KLN201: --registry is for" in refused.err
