"""The kinds of training: what of a run, its checkpoints and its receipt depends on which kind it is. Needs no torch.

``sft`` learns conversations, in a new order each epoch; ``opd`` learns a teacher's scores of them (off-policy
distillation), one scored example a step, in the order of the file. Everything else is one mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kiln_cli.identity import Domain
from kiln_stages.training.order import epoch_order

IDENTITY = "identity"  # the order of the file, in every epoch
LORA_STREAM, ORDER_STREAM = "lora-init", "epoch-order"


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: ``training_kind`` of checkpoints and ``mode`` of receipts. ``source_kind``: what a checkpoint counts
    its data in. ``shuffle``: the algorithm of the order in which an epoch visits its rows."""

    name: Literal["sft", "opd"]
    source_kind: str
    loop_state_type: str
    loop_state_file: str
    shuffle: str
    row: str  # what one row is called
    settings: tuple[str, ...] = ()  # sections of the config, beside [train], that decide the loss

    def checkpoint_id(self, step: int) -> str:
        return f"{self.name}-step-{step:08}"

    def order(self, seed: int, epoch: int, count: int) -> Sequence[int]:
        """The permutation of ``range(count)`` in which an epoch, counted from 0, visits its rows."""
        return range(count) if self.shuffle == IDENTITY else epoch_order(seed, epoch, count)

    def streams(self) -> dict[str, str]:
        """Algorithms of the random streams of a training, by the names that checkpoints give them."""
        drawn = {LORA_STREAM: Domain.LORA_INIT.value}
        return drawn if self.shuffle == IDENTITY else {ORDER_STREAM: self.shuffle, **drawn}

    def times_trained(self, seed: int, steps: int, count: int) -> list[int]:
        """How often each of ``count`` rows was visited by the first ``steps`` steps."""
        epochs, cursor = divmod(steps, count)
        times = [epochs] * count
        if cursor:
            for index in self.order(seed, epochs, count)[:cursor]:
                times[index] += 1
        return times


SFT = Kind(
    name="sft",
    source_kind="sft-valid-example-order-v1",
    loop_state_type="kiln.sft-loop-state.v1",
    loop_state_file="sft_loop_state.json",
    shuffle=Domain.EPOCH_ORDER.value,
    row="conversation",
)
OPD = Kind(
    name="opd",
    source_kind="inline-off-policy-opd-candidate-order-v1",
    loop_state_type="kiln.opd-loop-state.v1",
    loop_state_file="opd_loop_state.json",
    shuffle=IDENTITY,
    row="scored example",
    settings=("distill",),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (SFT, OPD)}


def kind_named(name: object) -> Kind:
    """Raises ValueError for a name that no kind has."""
    if name not in KINDS:
        raise ValueError(f"a training of kind {name!r} is not known here, only {', '.join(KINDS)}")
    return KINDS[str(name)]
