"""The opt-in drop reasons for repeated queries: which row repeats which, and what makes two keys one."""

from __future__ import annotations

from kiln_plugins.dedupe import composed_query, conflicts, query_and_answers

from kiln_cli import Candidate, ToolCallRow
from kiln_cli.config import DataConfig


def row(query: str, answers: str = "[]") -> Candidate:
    return Candidate(ToolCallRow(query=query, answers=answers))


def test_a_conflict_is_with_the_first_row_of_the_query() -> None:
    asked = [("q", "[1]"), ("p", "[1]"), ("Q ", "[2]"), ("q", "[ 1 ]"), ("q", "[3]"), ("p", "[1]")]
    keys = [query_and_answers(row(query, answers)) for query, answers in asked]
    assert list(conflicts(keys, DataConfig())) == [(2, 0), (4, 0)]


def test_how_answers_are_written_is_no_matter() -> None:
    one, other = row("q", '[{"a":1,"b":[2.0]}]'), row("q", ' [ {"b": [2.0], "a": 1} ]')
    assert query_and_answers(one) == query_and_answers(other)
    assert query_and_answers(one) != query_and_answers(row("q", '[{"a":1,"b":["2.0"]}]'))


def test_composed_and_decomposed_letters_are_one_query() -> None:
    assert composed_query(row("CAF\u00c9  au lait")) == composed_query(row("cafe\u0301 au lait")) == "caf\u00e9 au lait"
    assert composed_query(row("\u1fc3")) == composed_query(row("\u0397\u0345")), "iota below, and eta with it"
    assert composed_query(row("\ufb01x")) == "fix", "folding case takes this ligature apart"
    assert composed_query(row("\uff41")) != "a", "compatibility forms stay apart"
