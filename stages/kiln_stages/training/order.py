"""The order in which an epoch visits its rows: ``kiln-cli.epoch-order.v1``, a pure function with no state to save.

Row i of n has the key SHA-256(domain NUL || u64be seed || u64be epoch || u64be i); rows are visited by ascending key,
then by i. So the data state of a run is one integer, its global step, and any language can recompute the order.
"""

from __future__ import annotations

from kiln_cli.identity import Domain, domain_hasher

U64_MAX = 2**64 - 1


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The permutation of ``range(count)`` for an epoch. ``seed`` is a u64; ``epoch`` counts from 0.

    Raises ValueError for values outside their bounds.
    """
    if not 0 <= seed <= U64_MAX:
        raise ValueError(f"seed {seed} is outside 0..2^64-1")
    if not 0 <= epoch <= U64_MAX or count < 0:
        raise ValueError(f"epoch {epoch} or row count {count} is out of bounds")
    keys = [order_key(seed, epoch, index) for index in range(count)]
    return sorted(range(count), key=lambda index: (keys[index], index))


def order_key(seed: int, epoch: int, index: int) -> bytes:
    """The 32 bytes that place one row within one epoch."""
    digest = domain_hasher(Domain.EPOCH_ORDER)
    for number in (seed, epoch, index):
        digest.update(number.to_bytes(8, "big"))
    return digest.digest()


def place(step: int, count: int) -> tuple[int, int]:
    """(epoch, cursor within it) of the row that is trained after ``step`` committed steps over ``count`` rows."""
    return divmod(step, count)
