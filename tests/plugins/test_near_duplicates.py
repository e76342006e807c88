"""Near duplicates: planted ones are found, others are not, and the answer is the one that comparing all pairs gives."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kiln_plugins.near_duplicates import NEAR_DUPLICATE_QUERY, match, normalised_query

from kiln_cli import Candidate, KilnError, ToolCallRow
from kiln_cli.config import DataConfig
from kiln_cli.similarity import banding, shingles

needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is absent")

LONG = "please tell me how the weather will be in the old town of the city that lies by the sea tomorrow at noon"
OTHER = "what does it cost to send a parcel of two kilograms from here to the other side of the country by train"


def drops(queries: Sequence[str], threshold: float = 0.8) -> list[tuple[int, int]]:
    return list(match(queries, DataConfig(near_duplicate_threshold=threshold)))


def jaccard(one: str, other: str) -> float:
    """Written down once more, on words and not on texts."""
    sets = []
    for text in (one, other):
        words = text.split()
        sets.append({tuple(words[at : at + 3]) for at in range(len(words) - 2)} or {tuple(words)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def all_pairs(queries: Sequence[str], threshold: float) -> list[tuple[int, int]]:
    kept: list[int] = []
    found: list[tuple[int, int]] = []
    for place, query in enumerate(queries):
        first = next((at for at in kept if jaccard(query, queries[at]) >= threshold), None)
        if first is None:
            kept.append(place)
        else:
            found.append((place, first))
    return found


def sentences(count: int, seed: int) -> list[str]:
    """Random sentences of few words; about half are an earlier one with a word or two changed."""
    rng = random.Random(seed)
    words = [f"w{number}" for number in range(40)]
    made: list[list[str]] = []
    for _ in range(count):
        if made and rng.random() < 0.5:
            copy = list(rng.choice(made))
            for _ in range(rng.randint(0, 2)):
                copy[rng.randrange(len(copy))] = rng.choice(words)
            made.append(copy)
        else:
            made.append([rng.choice(words) for _ in range(rng.randint(1, 25))])
    return [" ".join(sentence) for sentence in made]


@needs_rensa
def test_planted_ones_are_found_and_others_not() -> None:
    queries = [OTHER, LONG, f"{LONG} sharp", "weather", OTHER.replace("train", "ship"), "weather tomorrow", "weather"]
    assert drops(queries) == [(2, 1), (4, 0), (6, 3)]


@needs_rensa
def test_the_first_row_wins() -> None:
    assert drops([LONG, f"{LONG} sharp"]) == drops([f"{LONG} sharp", LONG]) == [(1, 0)]
    assert drops([LONG, LONG, LONG]) == [(1, 0), (2, 0)]
    assert drops([]) == []


@needs_rensa
def test_a_dropped_row_drops_no_others() -> None:
    """A is near B and B near C, but A is not near C: C stays."""
    a = LONG
    b = f"{LONG} so that we know"
    c = f"{b} what to wear there"
    assert jaccard(a, b) >= 0.8
    assert jaccard(b, c) >= 0.8
    assert jaccard(a, c) < 0.8
    assert drops([a, b, c]) == [(1, 0)]
    assert drops([b, a, c]) == [(1, 0), (2, 0)]


@needs_rensa
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_against_all_pairs(threshold: float) -> None:
    queries = sentences(300, seed=7)
    expected = all_pairs(queries, threshold)
    assert drops(queries, threshold) == expected
    assert len(expected) > 20


@needs_rensa
def test_the_threshold_itself_counts() -> None:
    one, other = "a b c d e f", "a b c d e g"  # 3 of 5 shingles are shared
    assert drops([one, other], 0.6) == [(1, 0)]
    assert drops([one, other], 0.61) == []


@needs_rensa
def test_more_rows_than_a_batch() -> None:
    queries = [f"query {number} asks for {number} things of its own" for number in range(2_500)]
    assert drops([*queries, queries[1_700]]) == [(2_500, 1_700)]


@needs_rensa
def test_processes_agree() -> None:
    script = "from test_near_duplicates import *\nprint(drops(sentences(300, 11), 0.5))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**env, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{drops(sentences(300, 11), 0.5)}\n"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("a b c d", {"a b c", "b c d"}),
        ("a b c", {"a b c"}),
        ("a b", {"a b"}),
        ("a", {"a"}),
        ("", {""}),
        ("a a a a", {"a a a"}),
    ],
)
def test_shingles(query: str, expected: set[str]) -> None:
    assert shingles(query) == expected


@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0])
def test_a_pair_at_the_threshold_hardly_ever_escapes(threshold: float) -> None:
    bands, rows = banding(threshold)
    assert (1 - threshold**rows) ** bands <= 1e-6
    assert bands * rows <= 256 or rows == 1


def test_the_key_is_the_query_as_duplicate_query_sees_it() -> None:
    one, other = (Candidate(ToolCallRow(query=query)) for query in (" Straße\u00a0 of\n CARS", "strasse of cars "))
    assert normalised_query(one) == normalised_query(other) == "strasse of cars"
    assert one.query_sha256 == other.query_sha256


def test_without_rensa_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(KilnError) as caught:
        drops(["a"])
    assert (caught.value.code, caught.value.hint) == ("KLN301", "pip install rensa")


def test_the_reason() -> None:
    reason = NEAR_DUPLICATE_QUERY
    assert (reason.scope, reason.order, reason.opt_in, reason.match) == ("pool", 115, True, match)
