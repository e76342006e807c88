"""Ways to split beside fixed counts: ratios, groups that stay together, strata that are shared out evenly."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kiln_stages import prepare
from kiln_stages.preparing.pool import Pool
from kiln_stages.preparing.split import apportion, require_disjoint, sizes, split_pool
from prepare.conftest import SPLITS, A, examples, ids, jsonl, project, raw, rejected, tree

from kiln_cli.config import DataConfig
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins

EN: dict[str, object] = {"path": "rows.jsonl"}


def shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def wanted_of(numbers: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(SPLITS, numbers, strict=True))


# --- ratios


@pytest.mark.parametrize(
    "ratios, pool, expected",
    [
        ([0.8, 0.1, 0.1], 10, (8, 1, 1)),
        ([0.7, 0.2, 0.1], 10, (7, 2, 1)),
        ([0.6, 0.3, 0.1], 1000, (600, 300, 100)),
        ([0.5, 0.25, 0.25], 7, (3, 2, 2)),  # exact 3.5, 1.75, 1.75: the larger remainders get the rest
        ([0.4, 0.3, 0.3], 11, (5, 3, 3)),  # exact 4.4, 3.3, 3.3
        ([0.34, 0.33, 0.33], 4, (2, 1, 1)),
        ([1 / 3, 1 / 3, 1 / 3], 5, (2, 2, 1)),  # equal remainders: the earlier split first
        ([0.98, 0.01, 0.01], 26735, (26200, 268, 267)),  # exact 26200.3, 267.35, 267.35
    ],
)
def test_ratios_give_sizes_by_largest_remainder(ratios: list[float], pool: int, expected: tuple[int, int, int]) -> None:
    assert tuple(sizes(DataConfig(ratios=ratios), pool).values()) == expected
    assert list(sizes(DataConfig(ratios=ratios), pool)) == list(SPLITS)


@settings(max_examples=200, deadline=None)
@given(st.tuples(*[st.integers(1, 1000)] * 3), st.integers(3, 100_000))
def test_ratios_use_the_whole_pool(weights: tuple[int, int, int], pool: int) -> None:
    ratios = [weight / sum(weights) for weight in weights]
    found = sizes(DataConfig(ratios=ratios), pool)
    assert sum(found.values()) == pool
    for weight, size in zip(weights, found.values(), strict=True):
        assert abs(size - Fraction(pool * weight, sum(weights))) < 1 + Fraction(1, 10**6)


def test_a_run_by_ratios(tmp_path: Path, plugins: Plugins) -> None:
    rows = [raw(n) for n in range(20)] + [raw(20, query="short"), raw(21, query=raw(3)["query"])]
    config = project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*rows)}, limits={"ratios": [0.7, 0.2, 0.1]})
    result = prepare.run(config, tmp_path / "run", plugins)
    assert result.summary.requested == {"train": 14, "validation": 4, "test": 2}
    assert result.summary.languages["en"].split_sizes == result.summary.requested
    assert result.summary.kiln["en"].unused == 0
    # The order is that of the fixed counts: the borders are all that the ratios set.
    order = [f"s{n}" for n in shuffled(20, 42)]
    assert [name for split in SPLITS for name in ids(tmp_path / "run", split)] == order


@pytest.mark.parametrize("ratios", [[0.7, 0.2, 0.2], [0.5, 0.2, 0.2], [1.0, 0.1, 0.1]])
def test_ratios_that_are_not_one(tmp_path: Path, ratios: list[float]) -> None:
    with pytest.raises(KilnError) as caught:
        project(tmp_path, (EN,), limits={"ratios": ratios})
    assert caught.value.code == "KLN203"
    assert "ratios" in caught.value.message and f"{sum(ratios):g}" in caught.value.message


@pytest.mark.parametrize("ratios", [[0.9, 0.1], [0.4, 0.2, 0.2, 0.2], [1.1, -0.05, -0.05], [1.0, 0, 0], "0.8", []])
def test_ratios_of_another_shape(tmp_path: Path, ratios: Any) -> None:
    with pytest.raises(KilnError) as caught:
        project(tmp_path, (EN,), limits={"ratios": ratios})
    assert caught.value.code == "KLN203"


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_ratios_that_leave_a_split_empty(tmp_path: Path, plugins: Plugins, count: int) -> None:
    """Nothing smaller than asked for is written in silence: a split of no rows is too small a pool."""
    rows = jsonl(*(raw(n) for n in range(count)), raw("x", query="short"))
    config = project(
        tmp_path, ({**EN, "source": "sommelier"},), files={"rows.jsonl": rows}, limits={"ratios": [0.9, 0.05, 0.05]}
    )
    with pytest.raises(KilnError) as caught:
        prepare.run(config, tmp_path / "run", plugins)
    assert caught.value.code == "KLN205"
    assert tree(tmp_path / "run") == {}


# --- groups


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=60), st.data(), st.integers(0, 2**32))
def test_no_group_is_in_two_splits(labels: list[int], data: st.DataObject, seed: int) -> None:
    pool = range(len(labels))
    groups = [str(label) if label else None for label in labels]
    train = data.draw(st.integers(1, len(labels) - 2))
    validation = data.draw(st.integers(1, len(labels) - train - 1))
    test = data.draw(st.integers(1, len(labels) - train - validation))
    wanted = wanted_of((train, validation, test))
    try:
        splits = split_pool(pool, wanted, seed, DataConfig(group_by="tool"), groups)
    except KilnError as error:
        assert error.code == "KLN205"
        assume(False)
        return
    assert {name: len(rows) for name, rows in splits.items()} == wanted
    everything = [row for rows in splits.values() for row in rows]
    assert len(set(everything)) == len(everything)
    homes: dict[int, set[str]] = {}
    for name, rows in splits.items():
        for row in rows:
            homes.setdefault(labels[row], set()).add(name)
    assert all(len(found) == 1 for label, found in homes.items() if label)
    assert splits == split_pool(pool, wanted, seed, DataConfig(group_by="tool"), groups)


def test_groups_of_one_are_the_plain_split() -> None:
    pool = range(50)
    wanted = wanted_of((30, 10, 5))
    plain = split_pool(range(50), wanted, 5, DataConfig())
    assert split_pool(pool, wanted, 5, DataConfig(group_by="tool"), list(map(str, pool))) == plain


def called(name: str) -> str:
    return A.replace('"f"', json.dumps(name))


def test_a_run_by_the_tool_called(tmp_path: Path, plugins: Plugins) -> None:
    rows = [raw(n, answers=called(f"tool{n % 8}")) for n in range(40)]
    config = project(tmp_path, (EN,), (20, 8, 6), files={"rows.jsonl": jsonl(*rows)}, limits={"group_by": "tool"})
    result = prepare.run(config, tmp_path / "run", plugins)
    tools = [{e["gold_calls"][0]["name"] for e in examples(tmp_path / "run", split)} for split in SPLITS]
    assert tools[0].isdisjoint(tools[1] | tools[2]) and tools[1].isdisjoint(tools[2])
    assert result.summary.languages["en"].split_sizes == {"train": 20, "validation": 8, "test": 6}
    drops = result.summary.kiln["en"]
    assert (drops.kept, drops.dropped, drops.unused) == (34, 0, 6)
    assert rejected(tmp_path / "run") == []


@pytest.mark.parametrize("pointer", ["/topic", "/meta/deep topic", "/a~1b/m~0n", "/list/1", "/meta"])
def test_a_run_by_a_pointer(tmp_path: Path, plugins: Plugins, pointer: str) -> None:
    """RFC 6901: ``~1`` is a slash, ``~0`` a tilde, numbers are places in arrays."""

    def labelled(n: int) -> dict[str, object]:
        return {
            "topic": n % 6,
            "meta": {"deep topic": f"topic {n % 6}"},
            "a/b": {"m~n": [n % 6]},
            "list": [n, {"k": n % 6}],
        }

    rows = [raw(n, **labelled(n)) for n in range(30)]
    config = project(tmp_path, (EN,), (15, 5, 5), files={"rows.jsonl": jsonl(*rows)}, limits={"group_by": pointer})
    prepare.run(config, tmp_path / "run", plugins)
    topics = [{int(name[1:]) % 6 for name in ids(tmp_path / "run", split)} for split in SPLITS]
    assert [len(found) for found in topics] == [3, 1, 1]
    assert len(set.union(*topics)) == 5


def test_rows_without_a_label_stand_alone(tmp_path: Path, plugins: Plugins) -> None:
    rows = [raw(n, **({"topic": "big"} if n < 4 else {})) for n in range(10)]
    config = project(tmp_path, (EN,), (4, 3, 3), files={"rows.jsonl": jsonl(*rows)}, limits={"group_by": "/topic"})
    prepare.run(config, tmp_path / "run", plugins)
    homes = {split for split in SPLITS for name in ids(tmp_path / "run", split) if int(name[1:]) < 4}
    assert homes == {"train"}


@pytest.mark.parametrize("topics", [1, 2])
def test_too_few_groups(tmp_path: Path, plugins: Plugins, topics: int) -> None:
    rows = [raw(n, topic=n % topics) for n in range(30)]
    config = project(tmp_path, (EN,), (5, 5, 5), files={"rows.jsonl": jsonl(*rows)}, limits={"group_by": "/topic"})
    with pytest.raises(KilnError) as caught:
        prepare.run(config, tmp_path / "run", plugins)
    assert (caught.value.code, caught.value.exit_code) == ("KLN205", 2)
    assert "group" in caught.value.message
    assert tree(tmp_path / "run") == {}


# --- strata


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=80),
    st.data(),
    st.integers(0, 2**32),
)
def test_each_split_takes_its_share_of_every_stratum(labels: list[int], data: st.DataObject, seed: int) -> None:
    pool = range(len(labels))
    strata = [str(label) if label else None for label in labels]
    train = data.draw(st.integers(1, len(labels) - 2))
    validation = data.draw(st.integers(1, len(labels) - train - 1))
    test = data.draw(st.integers(1, len(labels) - train - validation) | st.just(len(labels) - train - validation))
    wanted = wanted_of((train, validation, test))
    splits = split_pool(pool, wanted, seed, DataConfig(stratify_by="tool"), strata)
    assert {name: len(rows) for name, rows in splits.items()} == wanted
    everything = [row for rows in splits.values() for row in rows]
    assert len(set(everything)) == len(everything)
    counts = Counter(labels)
    order = shuffled(len(labels), seed)
    for rows in splits.values():
        assert rows == sorted(rows, key=order.index)
        taken = Counter(labels[row] for row in rows)
        for label, count in counts.items():
            assert abs(taken[label] - Fraction(len(rows) * count, len(labels))) <= 1


def test_one_stratum_is_the_plain_split() -> None:
    wanted = wanted_of((30, 10, 5))
    plain = split_pool(range(50), wanted, 5, DataConfig())
    for stratum in (None, "same"):
        assert split_pool(range(50), wanted, 5, DataConfig(stratify_by="tool"), [stratum] * 50) == plain


def test_a_run_by_strata_and_ratios(tmp_path: Path, plugins: Plugins) -> None:
    names = ["a"] * 50 + ["b"] * 30 + ["c"] * 20
    rows = [raw(n, answers=called(name)) for n, name in enumerate(names)]
    limits = {"stratify_by": "tool", "ratios": [0.8, 0.1, 0.1]}
    config = project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*rows)}, limits=limits)
    prepare.run(config, tmp_path / "run", plugins)
    shares = [Counter(e["gold_calls"][0]["name"] for e in examples(tmp_path / "run", split)) for split in SPLITS]
    assert shares == [{"a": 40, "b": 24, "c": 16}, {"a": 5, "b": 3, "c": 2}, {"a": 5, "b": 3, "c": 2}]


def test_groups_and_strata_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(KilnError) as caught:
        project(tmp_path, (EN,), limits={"group_by": "tool", "stratify_by": "/x"})
    assert caught.value.code == "KLN203"
    assert "group_by" in caught.value.message and "stratify_by" in caught.value.message


@pytest.mark.parametrize("label", ["topic", "", "tool/x", 5])
@pytest.mark.parametrize("option", ["group_by", "stratify_by"])
def test_labels_are_tool_or_a_pointer(tmp_path: Path, option: str, label: object) -> None:
    with pytest.raises(KilnError) as caught:
        project(tmp_path, (EN,), limits={option: label})
    assert caught.value.code == "KLN203"


def test_apportion_adds_up() -> None:
    assert apportion({"a": 1, "b": 1, "c": 1}, 4) == {"a": 2, "b": 1, "c": 1}
    assert apportion({"a": 0, "b": 0}, 0) == {"a": 0, "b": 0}


# --- the leakage assertion

OPTIONS: dict[str, dict[str, object]] = {
    "counts": {},
    "ratios": {"ratios": [0.4, 0.3, 0.3]},
    "groups": {"group_by": "/topic"},
    "strata": {"stratify_by": "/topic"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_leakage_stops_the_run_whatever_the_option(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Deduplication makes leakage impossible; with it broken, the assertion behind it must see it."""
    rows = [raw(n, query="the same query in all rows", topic=n) for n in range(9)]
    files = {"rows.jsonl": jsonl(*rows)}
    monkeypatch.setattr(Pool, "drop_duplicates", lambda self, without=frozenset(): None)
    config = project(tmp_path, (EN,), (3, 3, 3), files=files, limits=OPTIONS[option])
    with pytest.raises(KilnError) as caught:
        prepare.run(config, tmp_path / "run", plugins)
    assert (caught.value.code, caught.value.exit_code) == ("KLN501", 5)
    assert tree(tmp_path / "run") == {}


def test_require_disjoint() -> None:
    require_disjoint([("train", b"a"), ("train", b"a"), ("test", b"b")])
    with pytest.raises(KilnError) as caught:
        require_disjoint([("train", b"a"), ("test", b"b"), ("test", b"a")])
    assert "61" in caught.value.message and "train" in caught.value.message and "test" in caught.value.message


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(OPTIONS)), st.lists(st.integers(0, 5), min_size=12, max_size=30), st.integers(0, 99))
def test_every_row_has_one_place_whatever_the_option(
    plugins: Plugins, option: str, topics: list[int], seed: int
) -> None:
    rows = [raw(n, topic=topic, query=f"Query {n % 11} about a topic") for n, topic in enumerate(topics)]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        files = {"rows.jsonl": jsonl(*rows)}
        config = project(root, (EN,), (4, 2, 2), files=files, limits=OPTIONS[option], seed=seed)
        try:
            result = prepare.run(config, root / "run", plugins)
        except KilnError as error:
            assert error.code == "KLN205" and option == "groups"
            assert tree(root / "run") == {}
            return
        drops = result.summary.kiln["en"]
        assert drops.rows_read == len(rows) == drops.kept + drops.dropped + drops.unused
        assert drops.dropped == len(rows) - 11
        assert sum(len(ids(root / "run", split)) for split in SPLITS) == drops.kept
