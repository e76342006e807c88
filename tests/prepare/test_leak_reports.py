"""Reports of users of other tools on rows that leak between splits (``shared/cases/reports.md``, section F)."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import leak, prepare
from prepare.conftest import SPLITS, data_files, examples, ids, jsonl, project, raw, reasons

from kiln_cli.plugins import Plugins

needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is absent")

EN: dict[str, object] = {"path": "rows.jsonl"}


# --- L1: two builds of one config keep different duplicates


def near_rows() -> list[dict[str, Any]]:
    """A thousand rows: a hundred pairs of near duplicates, far from one another in the file, and rows of their own."""
    rows = [raw(number, query=f"tell me all that you know of subject {number} and of its {number} parts")
            for number in range(900)]  # fmt: skip
    for number in range(100):
        rows.append(raw(900 + number, query=f"{rows[9 * number]['query']} please"))
    return rows


@needs_rensa
def test_l1_the_first_of_a_family_stays_for_any_number_of_workers(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "available", lambda wanted=None: wanted or 1)  # as many as are asked for
    limits = {"checks": ["near_duplicate_query"], "ratios": [0.8, 0.1, 0.1]}
    config = project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*near_rows())}, limits=limits)
    found = []
    for workers in (1, 4, 16):
        run = tmp_path / f"run{workers}"
        prepare.run(config, run, plugins, workers=workers, range_bytes=10_000)
        found.append(data_files(run))
    assert found[0] == found[1] == found[2]
    # The total order is that of the file: of each pair the row that stands first is kept.
    dropped = {name for name, reason in reasons(tmp_path / "run1").items() if reason == "near_duplicate_query"}
    assert dropped == {f"s{number}" for number in range(900, 1000)}


@needs_rensa
def test_l1_rows_in_another_order_keep_the_one_that_is_first_now(tmp_path: Path, plugins: Plugins) -> None:
    limits = {"checks": ["near_duplicate_query"], "ratios": [0.8, 0.1, 0.1]}
    config = project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*near_rows()[::-1])}, limits=limits)
    prepare.run(config, tmp_path / "run", plugins)
    assert set(reasons(tmp_path / "run")) == {f"s{9 * number}" for number in range(100)}


@needs_rensa
def test_l1_files_in_another_order_give_the_same_rows(tmp_path: Path, plugins: Plugins) -> None:
    """The source without ``source_id_column`` is read first wherever it is listed."""
    rows = near_rows()
    pairs = [raw(f"f{number}", query=f"Requête numéro {number} sur le sujet", source_example_id=f"s{number}")
             for number in range(50)]  # fmt: skip
    french: dict[str, object] = {"path": "fr.jsonl", "language": "fr", "source_id_column": "source_example_id"}
    found = []
    for name, datasets in (("one", (EN, french)), ("other", (french, EN))):
        files = {"rows.jsonl": jsonl(*rows), "fr.jsonl": jsonl(*pairs)}
        limits = {"checks": ["near_duplicate_query"], "ratios": [0.8, 0.1, 0.1]}
        config = project(tmp_path / name, datasets, files=files, limits=limits)
        prepare.run(config, tmp_path / name / "run", plugins)
        found.append(data_files(tmp_path / name / "run"))
    assert found[0] == found[1]


# --- L2: split by chunk, not by document


def chunks() -> list[dict[str, Any]]:
    """Twelve rows, three of each of four documents."""
    return [raw(number, doc=f"d{number % 4 + 1}") for number in range(12)]


def documents(run: Path, rows: list[dict[str, Any]]) -> dict[str, set[object]]:
    by_id = {row["source_id"]: row.get("doc") for row in rows}
    return {split: {by_id[name] for name in ids(run, split)} for split in SPLITS}


@pytest.mark.parametrize("seed", range(8))
def test_l2_no_document_is_in_two_splits(tmp_path: Path, plugins: Plugins, seed: int) -> None:
    limits = {"ratios": [0.5, 0.25, 0.25], "group_by": "/doc"}
    config = project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*chunks())}, limits=limits, seed=seed)
    summary = prepare.run(config, tmp_path / "run", plugins).summary
    found = documents(tmp_path / "run", chunks())
    assert {split: len(docs) for split, docs in found.items()} == {"train": 2, "validation": 1, "test": 1}
    assert not (found["train"] & found["test"] or found["train"] & found["validation"])
    # As asked and as got.
    assert summary.requested == {"train": 6, "validation": 3, "test": 3}
    assert summary.languages["en"].split_sizes == summary.requested


def test_l2_a_row_without_the_field_stands_alone_and_sizes_that_groups_do_not_give_are_told(
    tmp_path: Path, plugins: Plugins
) -> None:
    rows = [*chunks(), raw(12), raw(13)]
    files = {"rows.jsonl": jsonl(*rows)}
    config = project(tmp_path, (EN,), (7, 3, 3), files=files, limits={"group_by": "/doc"})
    summary = prepare.run(config, tmp_path / "run", plugins).summary
    found = documents(tmp_path / "run", rows)
    shared = [docs - {None} for docs in found.values()]
    assert sum(map(len, shared)) == len(set.union(*shared)) == 4
    assert summary.languages["en"].split_sizes == {"train": 7, "validation": 3, "test": 3}
    assert summary.kiln["en"].unused == 1  # one of the two that stand alone: counted, not lost


def test_l2_a_split_by_chunk_is_found_out(tmp_path: Path, plugins: Plugins) -> None:
    """Rows that name their document by ``group_id``, cut without regard to it: the leak check names both rows."""
    rows = [
        {"messages": [{"role": "user", "content": f"chunk {n}"}, {"role": "assistant", "content": f"{n}"}],
         "group_id": f"d{n % 4 + 1}"}
        for n in range(12)
    ]  # fmt: skip
    for name, part in (("train", rows[:9]), ("test", rows[9:])):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*part))
    found = leak.run([str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")], plugins)
    assert [(count.rule, count.rows_a, count.rows_b) for count in found.counts] == [("same_group", 6, 3)]
    assert (found.leaks[0].what, found.leaks[0].a.line, found.leaks[0].b.line) == ("group_id 'd2'", 2, 1)


# --- L4: duplicates up to case, space and composition leak from test into train

COMPOSED, DECOMPOSED = "Where is the caf\u00e9 {}?", "Where is the cafe\u0301 {}?"


def repeated_rows() -> list[dict[str, Any]]:
    """Forty queries, each again with another case and space, a line end behind it, or its letter decomposed."""
    other = json.dumps([{"name": "get_weather", "arguments": {"city": "Bremen"}}])
    rows = []
    for number in range(40):
        rows.append(raw(f"{number}a", query=COMPOSED.format(number)))
        again = {
            0: {"query": f"where  is the CAF\u00c9 {number}?"},
            1: {"query": COMPOSED.format(number) + "\n"},
            2: {"query": DECOMPOSED.format(number)},
            3: {"query": COMPOSED.format(number).upper(), "answers": other},
        }[number % 4]
        rows.append(raw(f"{number}b", **again))
    return rows


def places(run: Path) -> dict[str, set[str]]:
    """The splits that each kept query stands in, by ``query_sha256``: the stated key."""
    found: dict[str, set[str]] = {}
    for split in SPLITS:
        for example in examples(run, split):
            found.setdefault(example["query_sha256"], set()).add(split)
    return found


def tools() -> str:
    return json.dumps([{"name": "get_weather", "description": "", "parameters": {"city": {"type": "string"}}}])


@pytest.fixture
def repeated(tmp_path: Path) -> Any:
    def config(*checks: str) -> Any:
        rows = [{**row, "tools": tools()} for row in repeated_rows()]
        answers = json.dumps([{"name": "get_weather", "arguments": {"city": "Kiel"}}])
        rows = [{**row, "answers": row["answers"] if "Bremen" in row["answers"] else answers} for row in rows]
        limits = {"ratios": [0.7, 0.1, 0.2], "checks": list(checks)}
        return project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*rows)}, limits=limits, seed=42)

    return config


def test_l4_each_key_is_in_one_split_and_the_leak_check_finds_what_the_key_does_not_fold(
    tmp_path: Path, plugins: Plugins, repeated: Any
) -> None:
    run = tmp_path / "run"
    prepare.run(repeated(), run, plugins)
    assert Counter(reasons(run).values()) == {"duplicate_query": 30}
    assert all(len(splits) == 1 for splits in places(run).values())
    # The key of prepare folds case and white space and leaves composition alone; that of the leak check folds it, too.
    found = leak.run([str(run)], plugins, limit=None)
    assert {count.rule for count in found.counts} == {"normal_example"}
    kept = {example["query"]: split for split in SPLITS for example in examples(run, split)}
    apart = [n for n in range(40) if n % 4 == 2 and kept[COMPOSED.format(n)] != kept[DECOMPOSED.format(n)]]
    assert apart
    assert found.leaks_total == len(apart)


def test_l4_with_the_opt_in_checks_each_reason_has_its_count_and_nothing_leaks(
    tmp_path: Path, plugins: Plugins, repeated: Any
) -> None:
    run = tmp_path / "run"
    prepare.run(repeated("conflicting_answer", "unicode_duplicate_query"), run, plugins)
    # Conflicting answers for one prompt are counted apart from rows that repeat all of an earlier one.
    assert Counter(reasons(run).values()) == {
        "duplicate_query": 20,
        "unicode_duplicate_query": 10,
        "conflicting_answer": 10,
    }
    assert leak.run([str(run)], plugins).leaks_total == 0


def test_l4_conflicting_answers_between_two_files_are_reported_apart(tmp_path: Path, plugins: Plugins) -> None:
    def chat(asked: str, answered: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}

    train = [chat("Hello  World", "a"), chat("caf\u00e9", "b"), chat("tail\n", "c"), chat("Who?", "d")]
    test = [chat("hello world", "A"), chat("cafe\u0301", "b"), chat("tail", "c"), chat("who?", "not d")]
    for name, rows in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*rows))
    found = leak.run([str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")], plugins)
    assert [(each.rule, each.a.line, each.b.line) for each in found.leaks] == [
        ("normal_source_row", 1, 1),
        ("normal_example", 2, 2),
        ("normal_source_row", 3, 3),
    ]
    assert [(each.rule, each.a.line, each.b.line) for each in found.other_answers] == [("other_answer", 4, 4)]
