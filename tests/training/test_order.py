"""The epoch order against the vectors of ``kiln-cli.epoch-order.v1``."""

from __future__ import annotations

import hashlib

import pytest
from kiln_stages.training.order import epoch_order, order_key, place


@pytest.mark.parametrize(
    ("seed", "epoch", "order"),
    [
        (42, 0, [3, 4, 2, 5, 0, 8, 1, 6, 9, 7]),
        (42, 1, [8, 4, 2, 5, 0, 9, 6, 7, 1, 3]),
        (0, 0, [4, 0, 2, 3, 1]),
        (2**64 - 1, 0, [9, 1, 3, 6, 5, 8, 0, 4, 2, 7]),
    ],
)
def test_orders_are_those_of_the_contract(seed: int, epoch: int, order: list[int]) -> None:
    assert epoch_order(seed, epoch, len(order)) == order


def test_the_key_hashes_48_bytes_behind_the_domain() -> None:
    by_hand = hashlib.sha256(b"kiln-cli.epoch-order.v1\0" + (42).to_bytes(8, "big") + bytes(16)).hexdigest()
    assert order_key(42, 0, 0).hex() == by_hand
    assert by_hand == "537338e0cd55f122a7060ec26f91fada327c899cdb22151822ac9a2e13a4fc88"


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    orders = [epoch_order(7, epoch, 50) for epoch in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(7, 0, 0) == []


@pytest.mark.parametrize(("seed", "epoch", "count"), [(-1, 0, 3), (2**64, 0, 3), (0, -1, 3), (0, 0, -1)])
def test_values_out_of_bounds_are_refused(seed: int, epoch: int, count: int) -> None:
    with pytest.raises(ValueError, match="out"):
        epoch_order(seed, epoch, count)


def test_a_place_is_the_step_divided_by_the_rows() -> None:
    assert [place(step, 3) for step in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
