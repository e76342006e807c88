"""The seeded split: shuffle the deduplicated pool, then slice it in the order train, validation, test.

Options keep a group in one split, or give every stratum its share. Whatever the option, the sizes are exact and the
result is a function of seed, sizes and pool alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kiln_cli.config import DataConfig
from kiln_cli.errors import KilnError

SPLITS = ("train", "validation", "test")


class Member(NamedTuple):
    """A row of the pool and its group or stratum, None where it has none."""

    row: int
    label: str | None


Splits = dict[str, list[int]]
K = TypeVar("K", bound=Hashable)


def sizes(limits: DataConfig, pool: int) -> dict[str, int]:
    """Rows asked for by each split: fixed counts, or shares of the pool where ``[data] ratios`` is given."""
    if limits.ratios is None:
        return {"train": limits.n_train, "validation": limits.n_validation, "test": limits.n_test}
    return dict(zip(SPLITS, apportion(dict(enumerate(limits.ratios)), pool).values(), strict=True))


def split_pool(
    pool: Sequence[int],
    wanted: Mapping[str, int],
    seed: int,
    limits: DataConfig,
    labels: Sequence[str | None] | None = None,
) -> Splits:
    """The rows of each split, in shuffled order. ``labels``: the group or stratum of each row, where one is asked for.

    The shuffle is ``random.Random(seed)`` over the whole pool before it is cut, so other sizes move the borders but not
    the order. Raises KilnError KLN205 where the pool, or what grouping leaves of it, is too small.
    """
    need = sum(wanted.values())
    if len(pool) < need:
        raise KilnError("KLN205", f"too few rows for the splits: need {need}, got {len(pool)}")
    if not all(wanted.values()):
        raise KilnError(
            "KLN205",
            f"too few rows for the splits: of {len(pool)}, [data] ratios give {dict(wanted)}",
            hint="raise the ratio of the split that gets none, or bring more rows",
        )
    order = list(range(len(pool)))
    random.Random(seed).shuffle(order)
    if labels is not None:
        shuffled = [Member(pool[place], labels[place]) for place in order]
        return _by_group(shuffled, wanted) if limits.group_by is not None else _by_stratum(shuffled, wanted)
    splits: Splits = {}
    start = 0
    for name, size in wanted.items():
        splits[name] = [pool[place] for place in order[start : start + size]]
        start += size
    return splits


def _by_group(shuffled: list[Member], wanted: Mapping[str, int]) -> Splits:
    """Groups in the order of their first rows; where that does not come out even, the largest groups first."""
    groups: dict[object, list[int]] = defaultdict(list)
    for member in shuffled:
        groups[member.label if member.label is not None else ("alone", member.row)].append(member.row)
    splits = _place_groups(groups.values(), wanted)
    if _short(splits, wanted):
        splits = _place_groups(sorted(groups.values(), key=len, reverse=True), wanted)
    if short := _short(splits, wanted):
        raise KilnError(
            "KLN205",
            f"too few groups for the splits: still missing {short}",
            hint="lower the sizes of the splits, or split without [data] group_by",
        )
    return splits


def _place_groups(groups: Iterable[list[int]], wanted: Mapping[str, int]) -> Splits:
    """Each group into the first split with room for all of it.

    A group that fits nowhere whole gives the fullest-open split as many rows as that split still lacks; its other rows
    stay unused. So no group is ever in two splits.
    """
    splits: Splits = {name: [] for name in wanted}
    left_over: list[list[int]] = []
    for rows in groups:
        name = next((name for name in wanted if len(splits[name]) + len(rows) <= wanted[name]), None)
        if name is None:
            left_over.append(rows)
        else:
            splits[name] += rows
    for rows in left_over:
        name = max(wanted, key=lambda name: wanted[name] - len(splits[name]))
        splits[name] += rows[: wanted[name] - len(splits[name])]
    return splits


def _short(splits: Splits, wanted: Mapping[str, int]) -> dict[str, int]:
    return {name: wanted[name] - len(rows) for name, rows in splits.items() if len(rows) < wanted[name]}


def _by_stratum(shuffled: list[Member], wanted: Mapping[str, int]) -> Splits:
    """Each split takes from every stratum in proportion to its share of the pool, in shuffled order."""
    waiting: dict[str, list[int]] = defaultdict(list)
    place = {member.row: number for number, member in enumerate(shuffled)}
    for member in shuffled:
        waiting[member.label or ""].append(member.row)
    shares = _shares({stratum: len(waiting[stratum]) for stratum in sorted(waiting)}, wanted)
    splits: Splits = {}
    for name in wanted:
        taken: list[int] = []
        for stratum, share in shares[name].items():
            taken += waiting[stratum][:share]
            del waiting[stratum][:share]
        splits[name] = sorted(taken, key=place.__getitem__)
    return splits


def _shares(strata: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Rows of each stratum for each split: the exact share rounded down or up, so that sizes add up.

    Rounding up goes to the largest remainders, but first to strata whose rows would else outnumber the splits that are
    still to come, the splits with most to round up first: then no stratum is ever asked for more rows than it has.
    """
    pool = sum(strata.values())
    shares = {name: {key: size * count // pool for key, count in strata.items()} for name, size in wanted.items()}
    spare = {key: count - sum(share[key] for share in shares.values()) for key, count in strata.items()}
    order = {key: number for number, key in enumerate(strata)}
    missing = {name: size - sum(shares[name].values()) for name, size in wanted.items()}
    to_come = len(wanted)
    for name in sorted(wanted, key=lambda name: -missing[name]):
        ranked = sorted(
            (key for key in strata if spare[key]),
            key=lambda key: (-min(spare[key], to_come), -(wanted[name] * strata[key] % pool), order[key]),
        )
        for key in ranked[: missing[name]]:
            shares[name][key] += 1
            spare[key] -= 1
        to_come -= 1
    return shares


def apportion(weights: Mapping[K, float], total: int) -> dict[K, int]:
    """Whole shares of ``total`` in proportion to the weights, by largest remainder; ties go to the earlier key."""
    whole = sum(weights.values())
    exact = {key: total * weight / whole if whole else 0.0 for key, weight in weights.items()}
    shares = {key: int(share) for key, share in exact.items()}
    order = {key: number for number, key in enumerate(weights)}
    by_remainder = sorted(weights, key=lambda key: (shares[key] - exact[key], order[key]))
    for key in by_remainder[: total - sum(shares.values())]:
        shares[key] += 1
    return shares


def require_disjoint(keys: Iterable[tuple[str, bytes]]) -> None:
    """The leakage invariant: no query stands in two splits. Raises KilnError KLN501: dedupe and pairing forbid it."""
    seen: dict[bytes, str] = {}
    for split, key in keys:
        if seen.setdefault(key, split) != split:
            raise KilnError("KLN501", f"query {key.hex()} stands in both {seen[key]} and {split}")
