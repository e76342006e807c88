"""The rule of the split: the vector of the contract, and what holds for any rows, against a second implementation."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from dataset_rows import A, B, C, chat, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.datasets.building import split_manifest
from kiln_stages.datasets.moves import moves
from kiln_stages.datasets.partition import SPLITS, RowKeys, SplitConfig, bucket, partition

CONTENT_A = "sha256:c84092777d884dc1d39d594a8f2147450651b9b50b96758c66eef144b426a162"
NORMAL_B = "sha256:0e7a7ad9d2653b445d27daaf879e2416e9e6e7cf7e120c191c003336780d0834"
CONTENT_B = "sha256:788debd93256349cb1f3529bb3379c52f69daec4491b043d3fefb2179e150d3e"
CONTENT_C = "sha256:1e668c312c90bdea2c04024ffa6d19cc67c587f43cdec22355e0a01ad8f336ed"


def splits_of(rows: list[RowKeys], config: SplitConfig) -> list[str]:
    found = {row: component.split for component in partition(rows, config) for row in component.rows}
    return [found[row] for row in range(len(rows))]


# --- the vector


def test_the_vector_of_the_contract() -> None:
    rows = keys_of([A, B, C])
    assert rows == [
        RowKeys(content_sha256=CONTENT_A, normalized_sha256=CONTENT_A),
        RowKeys(content_sha256=CONTENT_B, normalized_sha256=NORMAL_B, group_id="g1"),
        RowKeys(content_sha256=CONTENT_C, normalized_sha256=CONTENT_C, session_id="s1"),
    ]
    found = {component.key: component for component in partition(rows, SplitConfig())}
    assert [found[key].bucket for key in (CONTENT_A, NORMAL_B, CONTENT_C)] == [99, 82, 95]
    assert [found[key].drawn for key in (CONTENT_A, NORMAL_B, CONTENT_C)] == ["holdout", "validation", "holdout"]
    assert splits_of(rows, SplitConfig()) == ["holdout", "train", "validation"]
    manifest = split_manifest("v", rows, partition(rows, SplitConfig()), SplitConfig())
    assert manifest.corpus_sha256 == "sha256:0ff570cdbeffd2d4ffc446611505d0a98b882c0677f33c5ff73524d4e11d12dc"
    assert manifest.normalized_corpus_sha256 == (
        "sha256:2461b1efbda7930daa1918073a0adac00f7f506d336fd26c3426390a70026946"
    )


def test_the_bucket_is_a_number_of_seed_and_key() -> None:
    for seed in ("0", "1", "18446744073709551615"):
        data = b"kiln.dataset-split-assignment.v1\0" + int(seed).to_bytes(8, "big") + NORMAL_B.encode()
        assert bucket(NORMAL_B, seed) == int.from_bytes(hashlib.sha256(data).digest()[:8], "big") % 100


# --- repair


def keys_with_buckets(*wanted: int) -> list[RowKeys]:
    """Rows that are alone, one a bucket, under seed 0."""
    found = []
    for number in wanted:
        name = next(n for n in itertools.count() if bucket(_hash(f"{len(found)} {n}"), "0") == number)
        text = _hash(f"{len(found)} {name}")
        found.append(RowKeys(content_sha256=text, normalized_sha256=text))
    return found


def _hash(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "buckets, expected",
    [
        ([99], ["train"]),
        ([10], ["train"]),
        ([10, 20], ["train", "holdout"]),
        ([95, 91], ["holdout", "train"]),
        ([10, 85], ["train", "validation"]),  # each alone in its split: there is none to move to holdout
        ([10, 20, 30], ["validation", "train", "holdout"]),
        ([85, 86, 87], ["train", "validation", "holdout"]),
        ([10, 20, 95], ["validation", "train", "holdout"]),
        ([10, 85, 86], ["train", "validation", "holdout"]),
        ([99, 98, 97, 96], ["holdout", "holdout", "validation", "train"]),
    ],
)
def test_splits_that_would_be_empty_are_repaired_in_order(buckets: list[int], expected: list[str]) -> None:
    assert splits_of(keys_with_buckets(*buckets), SplitConfig()) == expected


def test_no_row_is_moved_to_a_validation_that_nobody_asked_for() -> None:
    assert splits_of(keys_with_buckets(10, 20, 30), SplitConfig(validation_percent=0)) == ["train", "train", "holdout"]


@pytest.mark.parametrize("number", [99, 10])
def test_ties_go_to_the_smallest_key(number: int) -> None:
    rows = keys_with_buckets(number, number, number, number)
    smallest = min(row.normalized_sha256 for row in rows)
    for order in itertools.permutations(rows):
        found = dict(zip((row.normalized_sha256 for row in order), splits_of(list(order), SplitConfig()), strict=True))
        assert found[smallest] == ("train" if number == 99 else "holdout")


# --- any rows, against a second implementation

LETTERS = st.sampled_from(["a", "b", "c", "d"])
ROWS = st.lists(
    st.builds(
        lambda asked, group, session: chat(
            asked, "x", **({"group_id": group} if group else {}), **({"session_id": session} if session else {})
        ),
        st.sampled_from([f"{letter}{number}" for letter in "ab" for number in range(6)]),
        st.one_of(st.none(), LETTERS),
        st.one_of(st.none(), LETTERS),
    ),
    min_size=1,
    max_size=14,
)
CONFIGS = st.builds(
    lambda seed, train, validation: SplitConfig(
        seed=str(seed), train_percent=train, validation_percent=min(validation, 99 - train)
    ),
    st.integers(0, 2**64 - 1),
    st.integers(1, 99),
    st.integers(0, 60),
)


def plain_components(rows: list[RowKeys]) -> list[set[int]]:
    """By joining sets until none share anything: slow, and another way than union-find."""
    found = [({number}, set(row.links())) for number, row in enumerate(rows)]
    while pair := next(((a, b) for a, b in itertools.combinations(found, 2) if a[1] & b[1]), None):
        found = [each for each in found if each not in pair] + [(pair[0][0] | pair[1][0], pair[0][1] | pair[1][1])]
    return [members for members, _ in found]


def plain_splits(rows: list[RowKeys], config: SplitConfig) -> list[str]:
    """The rule once more, written as it is told."""
    groups = [(min(rows[row].normalized_sha256 for row in members), members) for members in plain_components(rows)]
    drawn = {key: bucket(key, config.seed) for key, _ in groups}

    def raw(number: int) -> str:
        if number < config.train_percent:
            return "train"
        return "validation" if number < config.train_percent + config.validation_percent else "holdout"

    split = {key: raw(number) for key, number in drawn.items()}
    low = sorted(split, key=lambda key: (drawn[key], key))
    high = sorted(split, key=lambda key: (-drawn[key], key))
    if "train" not in split.values():
        split[low[0]] = "train"
    for order, target, least in ((high, "holdout", 2), (low, "validation", 3 if config.validation_percent else 10**9)):
        crowded = [key for key in order if Counter(split.values())[split[key]] > 1]
        if len(split) >= least and target not in split.values() and crowded:
            split[crowded[0]] = target
    return [next(split[key] for key, members in groups if row in members) for row in range(len(rows))]


@settings(max_examples=300, deadline=None)
@given(ROWS, CONFIGS)
def test_the_split_is_that_of_a_second_implementation(rows: list[Any], config: SplitConfig) -> None:
    keys = keys_of(rows)
    assert splits_of(keys, config) == plain_splits(keys, config)


@settings(max_examples=100, deadline=None)
@given(ROWS, CONFIGS, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_count(rows: list[Any], config: SplitConfig, chance: random.Random) -> None:
    keys = keys_of(rows)
    shuffled = list(keys)
    chance.shuffle(shuffled)
    placed = dict(zip((key.content_sha256 for key in keys), splits_of(keys, config), strict=False))
    again = dict(zip((key.content_sha256 for key in shuffled), splits_of(shuffled, config), strict=False))
    assert placed == again


@settings(max_examples=100, deadline=None)
@given(ROWS, CONFIGS)
def test_what_is_related_is_in_one_split(rows: list[Any], config: SplitConfig) -> None:
    keys = keys_of(rows)
    found: dict[tuple[str, str], set[str]] = {}
    for key, split in zip(keys, splits_of(keys, config), strict=True):
        for link in key.links():
            found.setdefault(link, set()).add(split)
    assert all(len(splits) == 1 for splits in found.values())


@settings(max_examples=300, deadline=None)
@given(ROWS, ROWS, CONFIGS)
def test_rows_that_are_added_move_others_by_union_or_repair_alone(
    old: list[Any], new: list[Any], config: SplitConfig
) -> None:
    """And each row that moves is named, with the one of the two that it is."""
    before, after = keys_of(old), keys_of([*old, *new])
    was, now = partition(before, config), partition(after, config)
    component_was = {row: each for each in was for row in each.rows}
    component_now = {row: each for each in now for row in each.rows}
    told = moves(split_manifest("d", before, was, config), split_manifest("d", after, now, config))
    reasons = {move.row_number - 1: move for move in told}
    for row in range(len(before)):
        left, right = component_was[row], component_now[row]
        if left.split == right.split:
            assert row not in reasons
            continue
        move = reasons[row]
        assert (move.before, move.after, move.content_sha256) == (left.split, right.split, before[row].content_sha256)
        if left.key == right.key:  # the same draw: a split was or would be empty
            assert move.reason == "repair"
            assert left.repaired or right.repaired
        else:
            assert move.reason == "union"
            assert any(other >= len(before) for other in right.rows)
    # Rows that came with a content that was there before are named as well, and nothing else is.
    contents = {key.content_sha256 for key in before}
    assert all(after[row].content_sha256 in contents for row in reasons)


def test_every_split_has_rows_where_there_are_components_enough() -> None:
    chance = random.Random(1)
    for _ in range(200):
        rows = keys_with_buckets(*(chance.randrange(100) for _ in range(chance.randrange(3, 8))))
        assert set(splits_of(rows, SplitConfig())) == set(SPLITS)


# --- settings


@pytest.mark.parametrize(
    "config",
    [
        SplitConfig(seed="18446744073709551616"),
        SplitConfig(train_percent=90, validation_percent=10),
        SplitConfig(train_percent=99, validation_percent=98),
    ],
)
def test_settings_that_contradict_themselves(config: SplitConfig) -> None:
    assert config.fault()


def test_a_component_of_many_rows_that_moves_is_told_row_by_row_and_looked_at_once() -> None:
    """Twenty thousand rows of one session: each for itself would be four hundred million looks."""
    config, alone = SplitConfig(), keys_with_buckets(10, 85, 95)
    many = [_row_of_session(_hash(f"row {number}")) for number in range(20_000)]
    key = min(row.normalized_sha256 for row in many)
    # A row that joins them with a smaller hash, whose bucket is in another split.
    smaller = (f"sha256:{number:064x}" for number in itertools.count())
    split = partition([*alone, *many], config)
    drawn = next(each.drawn for each in split if each.key == key)
    joining = next(text for text in smaller if partition([_row_of_session(text)], config)[0].drawn != drawn)
    after = [*alone, *many, _row_of_session(joining)]
    told = moves(
        split_manifest("d", [*alone, *many], split, config),
        split_manifest("d", after, partition(after, config), config),
    )
    assert len(told) == len(many)
    assert {(move.reason, move.detail.split(";")[0]) for move in told} == {
        ("union", "row 20004 has the same session_id (s)")
    }


def _row_of_session(text: str) -> RowKeys:
    return RowKeys(content_sha256=text, normalized_sha256=text, session_id="s")
