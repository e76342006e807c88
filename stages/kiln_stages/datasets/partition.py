"""Which split a row of a data set is in: a function of the rows and the settings, whatever their order or file.

Rows that share a text in normal form, a group or a session are one component, and a component is in one split. Its key,
the smallest of its rows' normalised hashes, draws a bucket from 0 to 99 under the seed; the buckets below
``train_percent`` are train, the next ``validation_percent`` validation, the rest holdout. So a row's split does not
hang on other components, but for the repair of splits that would be empty. Rule: ``docs/artifacts.md``, *named data
sets*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_cli.identity import Domain, domain_hasher

Split = Literal["train", "validation", "holdout"]
SPLITS: tuple[Split, ...] = get_args(Split)


class SplitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``seed``: a u64 as decimal text. ``train_percent`` + ``validation_percent`` stay below 100; holdout is the rest.
    ``group_by``: a JSON pointer into the row; rows with one value there are one component too."""

    seed: Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,19})\Z")] = "0"
    train_percent: Annotated[int, Meta(ge=1, le=99)] = 80
    validation_percent: Annotated[int, Meta(ge=0, le=98)] = 10
    group_by: Annotated[str, Meta(pattern=r"^(/([^~]|~[01])*)\Z")] | UnsetType = UNSET

    def fault(self) -> str:
        """What contradicts itself, "" where nothing does."""
        if int(self.seed) >= 2**64:
            return f"seed is {self.seed}, at most 2^64-1"
        if (asked := self.train_percent + self.validation_percent) >= 100:
            return (
                f"train_percent {self.train_percent} and validation_percent {self.validation_percent} add up to "
                f"{asked}, which leaves nothing for holdout"
            )
        return ""

    def percent(self, split: Split) -> int:
        rest = 100 - self.train_percent - self.validation_percent
        return {"train": self.train_percent, "validation": self.validation_percent, "holdout": rest}[split]


class RowKeys(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a row is known and related by. ``group_by_sha256``: content hash of the value that ``group_by`` leads to."""

    content_sha256: str
    normalized_sha256: str
    group_id: str | None = None
    session_id: str | None = None
    group_by_sha256: str | None = None

    def links(self) -> Iterator[tuple[str, str]]:
        """What makes rows relatives, each with its kind, so that a group is never taken for a session."""
        yield "normalized text", self.normalized_sha256
        for kind, text in (
            ("group_id", self.group_id),
            ("session_id", self.session_id),
            ("group_by", self.group_by_sha256),
        ):
            if text is not None:
                yield kind, text


class Component(msgspec.Struct, kw_only=True):
    """Rows (indices from 0, ascending) that must stay together. ``drawn``: the split of the bucket; ``split``: after
    the repair."""

    key: str
    rows: list[int]
    bucket: int
    drawn: Split
    split: Split

    @property
    def repaired(self) -> bool:
        return self.split != self.drawn


def partition(rows: Sequence[RowKeys], config: SplitConfig) -> list[Component]:
    """The components of the rows by ascending key, each with its split."""
    found = []
    for members in _related(rows):
        key = min(rows[row].normalized_sha256 for row in members)
        drawn = _drawn(number := bucket(key, config.seed), config)
        found.append(Component(key=key, rows=members, bucket=number, drawn=drawn, split=drawn))
    found.sort(key=lambda component: component.key)
    _repair(found, config)
    return found


def bucket(key: str, seed: str) -> int:
    """A number from 0 to 99 that seed and key alone decide."""
    digest = domain_hasher(Domain.DATASET_SPLIT_ASSIGNMENT)
    digest.update(int(seed).to_bytes(8, "big") + key.encode("ascii"))
    return int.from_bytes(digest.digest()[:8], "big") % 100


def _drawn(number: int, config: SplitConfig) -> Split:
    if number < config.train_percent:
        return "train"
    return "validation" if number < config.train_percent + config.validation_percent else "holdout"


def _related(rows: Sequence[RowKeys]) -> Iterable[list[int]]:
    """Indices of the rows of each component: union-find, a set's root being its first row."""
    parents = list(range(len(rows)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    first_with: dict[tuple[str, str], int] = {}
    for row, keys in enumerate(rows):
        for link in keys.links():
            one, other = root(first_with.setdefault(link, row)), root(row)
            parents[max(one, other)] = min(one, other)
    members: dict[int, list[int]] = {}
    for row in range(len(rows)):
        members.setdefault(root(row), []).append(row)
    return members.values()


def _repair(components: list[Component], config: SplitConfig) -> None:
    """Moves at most one component into each split that would be empty. Ties of buckets go to the smallest key.

    Order: train takes the lowest bucket; holdout, where there are two components, the highest; validation, where there
    are three and it is asked for, the lowest. The last two take none that is alone in its split.
    """
    sizes = Counter(component.split for component in components)

    def move(candidates: Iterable[Component], target: Split, *, highest: bool = False) -> None:
        sign = -1 if highest else 1
        chosen = min(candidates, key=lambda component: (sign * component.bucket, component.key), default=None)
        if chosen is not None:
            sizes.subtract((chosen.split,))
            sizes.update((target,))
            chosen.split = target

    def movable() -> list[Component]:
        return [component for component in components if sizes[component.split] > 1]

    if not sizes["train"]:
        move(components, "train")
    if len(components) >= 2 and not sizes["holdout"]:
        move(movable(), "holdout", highest=True)
    if len(components) >= 3 and config.validation_percent > 0 and not sizes["validation"]:
        move(movable(), "validation")
