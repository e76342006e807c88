"""Which candidates are kept at a position, in which order, and how their scores are written."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.distilling.candidates import narrow, scored, shortest

from kiln_cli.errors import RowFault

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0.0)


def test_d10_an_extra_entry_of_the_prompts_own_token_is_kept_out() -> None:
    """Report D10: K = 2 with a third entry, the target, whose score is much lower."""
    found = scored([(7, -0.2), (9, -2.0), (3, -11.0)], 3, 0, 2, 10)
    assert [number for number, _ in found.candidates] == [7, 9]
    assert found.logprob == narrow(-11.0) and found.mass < 1


def test_d10_a_target_that_comes_first_is_ranked_by_its_score() -> None:
    """Report D10: servers put the prompt's own token first, wherever it ranks."""
    found = scored([(3, -2.0), (7, -0.2), (9, -3.0)], 3, 0, 2, 10)
    assert [number for number, _ in found.candidates] == [7, 3] and found.logprob == -2.0


def test_d10_fewer_than_k_are_refused_with_the_position() -> None:
    with pytest.raises(RowFault) as refused:
        scored([(7, -0.2)], 7, 5, 2, 10)
    assert refused.value.reason == "too_few_candidates" and "/teacher_tokens/5/" in refused.value.pointer


def test_of_equal_scores_the_lower_id_comes_first_also_at_the_edge() -> None:
    even = [(number, -math.log(8)) for number in random.Random(1).sample(range(8), 8)]
    assert [number for number, _ in scored(even, 0, 0, 3, 8).candidates] == [0, 1, 2]
    # Scores that are one as float32 are equal, whatever they were.
    close = [(5, -1.0), (4, -1.0 - 1e-9), (1, -3.0)]
    assert [number for number, _ in scored(close, 1, 0, 2, 8).candidates] == [4, 5]


STAND_INS = [
    (-9999.0, "logprob_sentinel"),
    (-1e30, "logprob_sentinel"),
    (-math.inf, "logprob_not_finite"),
    (math.inf, "logprob_not_finite"),
    (math.nan, "logprob_not_finite"),
    (-1e300, "logprob_not_finite"),
    (0.1, "logprob_positive"),
]


@pytest.mark.parametrize("value, reason", STAND_INS)
def test_d6_a_stand_in_is_never_written_as_a_score(value: float, reason: str) -> None:
    """Report D6: what a server sends in place of minus infinity, among the K."""
    with pytest.raises(RowFault) as refused:
        scored([(1, -0.5), (2, value)], 1, 4, 2, 10)
    assert refused.value.reason == reason and "/teacher_tokens/4/" in refused.value.pointer


def test_d6_a_stand_in_behind_the_k_leaves_that_tokens_score_out() -> None:
    found = scored([(1, -0.5), (2, -2.0), (3, -9999.0)], 3, 0, 2, 10)
    assert found.logprob is None and "logprob" not in found.written(3, "x")
    assert [number for number, _ in found.candidates] == [1, 2]


@pytest.mark.parametrize("value", [-9999.0, -math.inf, math.nan])
def test_d6_a_stand_in_of_another_token_is_refused_though_enough_are_left(value: float) -> None:
    """It was among the best K: what takes its place is the prompt's own token, which may rank anywhere."""
    with pytest.raises(RowFault) as refused:
        scored([(1, -0.5), (2, value), (3, -11.0)], 3, 0, 2, 10)
    assert refused.value.reason in ("logprob_sentinel", "logprob_not_finite")


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RowFault) as refused:
        scored([(1, -0.5), (10, -2.0)], 1, 0, 2, 10)
    assert refused.value.reason == "token_id_out_of_vocab"


def test_mass_above_one_is_refused_with_its_sum() -> None:
    with pytest.raises(RowFault) as refused:
        scored([(1, 0.0), (2, -0.5)], 1, 0, 2, 10)
    assert refused.value.reason == "mass_above_one" and "1.6" in refused.value.detail


@settings(max_examples=300)
@given(FLOATS)
def test_a_written_score_narrows_to_itself(value: float) -> None:
    short = shortest(value)
    assert narrow(short) == value
    assert len(repr(short)) <= len(repr(value))


def test_narrowing_is_that_of_the_machine() -> None:
    generator = random.Random(3)
    for _ in range(1000):
        value = -generator.expovariate(0.1)
        assert narrow(value) == struct.unpack("<f", struct.pack("<f", value))[0]
    assert narrow(-1e300) == -math.inf and math.isnan(narrow(math.nan))
