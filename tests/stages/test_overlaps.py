"""Overlaps of sets of rows beside an oracle that compares every pair of rows by the words of each rule."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import unicodedata
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kiln_stages.contamination.overlaps import overlaps
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.references import open_reference
from kiln_stages.contamination.row_sets import RANGE_BYTES, RowSet

from kiln_cli.plugins import Plugins
from kiln_cli.terminal import SILENT

Row = dict[str, Any]
needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is absent")
WORDS = (
    "Kiel",
    "kiel",
    "caf\u00e9",
    "cafe\u0301",
    "CAFE\u0301",
    "a  b",
    "a b",
    " a b ",
    "\u00a0x",
    "x",
    "\u0130",
    "SS",
)


def random_rows(rng: random.Random, count: int) -> list[Row]:
    return [random_row(rng) for _ in range(count)]


def random_row(rng: random.Random) -> Row:
    turns: list[Row] = [{"role": "user", "content": f"{rng.choice(WORDS)}{rng.randrange(8)}"}]
    if rng.random() < 0.3:
        turns.insert(0, {"role": "system", "content": rng.choice(WORDS)})
    if rng.random() < 0.8:
        answer: Row = {"role": "assistant", "content": rng.choice(WORDS)}
        if rng.random() < 0.2:
            arguments = {"a": rng.choice(WORDS)}
            spelled = json.dumps(arguments) if rng.random() < 0.5 else arguments
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": spelled}}]
        if rng.random() < 0.2:
            answer["weight"] = rng.choice((0, 1))
        turns.append(answer)
        if rng.random() < 0.2:
            turns.append({"role": "tool", "content": rng.choice(WORDS)})
    row: Row = {"messages": turns}
    for name in ("group_id", "session_id"):
        if rng.random() < 0.2:
            place = rng.choice((row, row.setdefault("metadata", {})))
            place[name] = rng.choice(("one", " one ", "two", " ", f"{rng.randrange(9)}"))
    if rng.random() < 0.1:
        row["note"] = rng.choice(WORDS)
    return row


# The rules in other words.


def text(value: str) -> str:
    white = re.sub("[\t\n\x0b\x0c\r \x85\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+", " ", value)
    return white.strip(" ").lower()


def walked(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: walked(item, change) for key, item in value.items()}
    return [walked(item, change) for item in value] if isinstance(value, list) else (
        change(value) if isinstance(value, str) else value
    )  # fmt: skip


def dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def said(row: Row) -> list[Row]:
    turns = [{key: item for key, item in turn.items() if key != "weight"} for turn in row["messages"]]
    turns = [turn for turn in turns if turn["role"] != "system"]
    while turns and turns[-1]["role"] == "tool":
        turns.pop()
    return turns


def in_nfc(row: Row) -> list[Row]:
    turns: list[Row] = json.loads(json.dumps(said(row)))
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    found: list[Row] = walked(turns, lambda value: unicodedata.normalize("NFC", text(value)))
    return found


def conversation(row: Row) -> str:
    """What the hash of receipts covers: the weight of an assistant's turn only where it is 0."""
    turns = [{key: item for key, item in turn.items() if not (key == "weight" and item)} for turn in row["messages"]]
    return dumped(turns)


def named(row: Row, name: str) -> str | None:
    for place in (row, row.get("metadata", {})):
        if place.get(name, "").strip():
            return str(place[name]).strip()
    return None


def answered(row: Row) -> bool:
    return bool(said(row)) and said(row)[-1]["role"] == "assistant"


def prompt(row: Row) -> str:
    turns = in_nfc(row)
    return dumped(turns[:-1] if answered(row) else turns)


class Views(NamedTuple):
    """A row as each rule sees it; two rows meet where their views are equal and not None."""

    same_row: str
    same_source_row: str
    same_example: str
    normal_source_row: str
    normal_example: str
    prompt: str
    open_ended: bool
    same_group: str | None
    same_session: str | None


def views(row: Row) -> Views:
    return Views(
        conversation(row),
        dumped(row),
        dumped(said(row)),
        dumped(walked(row, text)),
        dumped(in_nfc(row)),
        prompt(row),
        not answered(row),
        named(row, "group_id"),
        named(row, "session_id"),
    )


def rule_of(a: Views, b: Views) -> str | None:
    """The first rule by which two rows meet."""
    for rule in ORDER:
        if rule == "same_prompt":
            holds = a.prompt == b.prompt and (a.open_ended or b.open_ended)
        elif rule == "other_answer":
            holds = a.prompt == b.prompt
        else:
            holds = getattr(a, rule) is not None and getattr(a, rule) == getattr(b, rule)
        if holds:
            return rule
    return None


ORDER = ("same_row", "same_source_row", "same_example", "normal_source_row", "normal_example", "same_prompt",
         "same_group", "same_session", "other_answer")  # fmt: skip


def first_rule(row: Views, others: list[Views]) -> str | None:
    found = {rule_of(row, other) for other in others}
    return next((rule for rule in ORDER if rule in found), None)


def read(path: Path, rows: list[Row], plugins: Plugins, *, near: bool = False) -> RowSet:
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    reader = Reader(plugins, path.parent, path.parent, path.parent / ".kiln", near=near)
    (found,) = open_reference(path.name, reader).sets
    return found


@pytest.mark.parametrize("seed", range(8))
def test_against_every_pair(tmp_path: Path, plugins: Plugins, seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 60), random_rows(rng, 60)
    sets = [read(tmp_path / f"{name}.jsonl", each, plugins) for name, each in zip("ab", rows, strict=True)]
    a, b = ([views(row) for row in each] for each in rows)
    found = overlaps(sets, None, SILENT)
    met = {each.a.row_index: each for each in [*found.leaks, *found.other_answers]}
    for number, row in enumerate(a, start=1):
        expected = first_rule(row, b)
        assert (met[number].rule if number in met else None) == expected, rows[0][number - 1]
        if number in met:  # the row that it is told with is the first that it meets by this rule
            place = next(at for at, other in enumerate(b) if rule_of(row, other) == expected)
            assert met[number].b.row_index == place + 1
    of_b = [first_rule(row, a) for row in b]
    counted = {count.rule: (count.rows_a, count.rows_b) for count in found.counts}
    of_a = [first_rule(row, b) for row in a]
    rules = {rule for rule in (*of_a, *of_b) if rule not in (None, "other_answer")}
    assert counted == {rule: (of_a.count(rule), of_b.count(rule)) for rule in rules}
    assert len(rules) >= 4, "the rows are made so that many rules are met"


@needs_rensa
def test_near_duplicates_against_every_pair(tmp_path: Path, plugins: Plugins) -> None:
    rng = random.Random(5)
    vocabulary = [f"w{number}" for number in range(30)]
    made = [[rng.choice(vocabulary) for _ in range(rng.randint(6, 20))] for _ in range(150)]
    copies = [list(words) for words in made]
    for words in copies:
        for _ in range(rng.randint(0, 3)):
            words[rng.randrange(len(words))] = rng.choice(vocabulary)
    a, b = ([{"messages": [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": "yes"}]}
             for words in each] for each in (made, copies))  # fmt: skip
    sets = [read(tmp_path / "a.jsonl", a, plugins, near=True), read(tmp_path / "b.jsonl", b, plugins, near=True)]
    found = {each.a.row_index: each for each in overlaps(sets, 0.5, SILENT).leaks}

    def parts(words: list[str]) -> set[tuple[str, ...]]:
        whole = [*words, "yes"]
        return {tuple(whole[at : at + 3]) for at in range(len(whole) - 2)}

    near = 0
    for number, words in enumerate(made, start=1):
        alike = [len(parts(words) & parts(other)) / len(parts(words) | parts(other)) for other in copies]
        if number in found and found[number].rule == "near_duplicate":
            near += 1
            place = next(at for at, similarity in enumerate(alike) if similarity >= 0.5)
            assert (found[number].b.row_index, found[number].what) == (place + 1, f"{alike[place]:.3f} alike")
        elif number not in found:
            assert max(alike) < 0.5
    assert near > 30


def test_places_are_those_of_the_file_in_all_of_its_pieces(tmp_path: Path, plugins: Plugins) -> None:
    """A large file is read in pieces: rows and lines are counted through all of them, blank lines with them."""
    texts = [json.dumps({"messages": [{"role": "user", "content": f"{number} " * 100}]}) for number in range(6000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(f"\n{text}" for text in texts))
    assert (tmp_path / "rows.jsonl").stat().st_size > 4 * RANGE_BYTES
    reader = Reader(plugins, tmp_path, tmp_path, tmp_path / ".kiln")
    (found,) = open_reference("rows.jsonl", reader).sets
    assert list(found.row_indices) == list(range(1, 6001))
    assert list(found.lines) == list(range(2, 12001, 2))
    (tmp_path / "rows.jsonl").write_text("\n".join(f"\n{text}" for text in [*texts, "broken"]))
    (broken,) = open_reference("rows.jsonl", reader).sets
    assert [(each.row_index, each.line) for each in broken.misfits] == [(6001, 12002)]


def test_which_sets_are_apart() -> None:
    def a_set(name: str, owner: str | None, role: Any) -> RowSet:
        nothing = {"keys": [], "row_indices": array("q"), "lines": array("q")}
        return RowSet(name=name, by="rows", sha256="", size=0, owner=owner, role=role, **nothing)

    trained, held = ("trained", "held out")
    sets = [a_set("e", None, None), a_set("1t", "one", trained), a_set("1v", "one", held), a_set("1h", "one", held)]
    sets += [a_set("2t", "two", trained), a_set("2v", "two", held), a_set("f", None, None), a_set("g", None, None)]
    found = overlaps(sets, None, SILENT).not_compared
    assert found == [("1t", "2t"), ("1v", "2v"), ("1h", "2v")]
