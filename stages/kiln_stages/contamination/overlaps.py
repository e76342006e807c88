"""Which rows of several sets stand in two of them that must be apart.

Two splits of one run or data set are apart. So are what one run trains on and another holds out. What two runs both
train on, or both hold out, may be the same, and is not looked at. A set that no run has a use for (a file, a receipt)
is apart from all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

from kiln_cli.terminal import Progress
from kiln_stages.contamination.index import Index
from kiln_stages.contamination.keys import NEAR, RULES
from kiln_stages.contamination.row_sets import RowSet

OTHER_ANSWER = "other_answer"  # no rule: one prompt may have several answers, and a person may want to know
_ORDER = {rule: place for place, rule in enumerate((*RULES, NEAR))}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row stands. ``line`` is null where only its hash is known; a prepared example has an id."""

    set: str
    row_index: int
    line: int | None
    example_id: str | None = None


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Two rows that meet, and by which rule; ``what``: the id that they share, or how near they are."""

    rule: str
    what: str
    a: Place
    b: Place


class RuleCount(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of ``a`` that meet one of ``b`` by this rule first, and the other way round; of near duplicates ``rows_b``
    are those that the rows of ``a`` are told with."""

    a: str
    b: str
    rule: str
    rows_a: int
    rows_b: int


class Overlaps(msgspec.Struct, frozen=True, kw_only=True):
    """``counts`` of the pairs of sets that share anything; ``leaks`` in the order of the sets and their rows.

    ``other_answers``: rows with one prompt and different answers, which no rule forbids. ``not_compared``: pairs of
    sets that may share rows.
    """

    counts: list[RuleCount]
    leaks: list[Meeting]
    other_answers: list[Meeting]
    not_compared: list[tuple[str, str]]


def overlaps(sets: Sequence[RowSet], near_threshold: float | None, progress: Progress) -> Overlaps:
    """Compares every pair of sets that are apart. Memory: the keys of all rows, and an index of one set at a time."""
    pairs = list(combinations(range(len(sets)), 2))
    apart = [pair for pair in pairs if _apart(sets[pair[0]], sets[pair[1]])]
    told: dict[tuple[int, int], list[Meeting]] = {}
    met: dict[tuple[int, int], Counter[str]] = {}
    with progress.task("leak: compare", len(apart), "pairs of sets") as task:
        for number, rows in enumerate(sets):
            if earlier := [left for left, right in apart if right == number]:
                index = Index([rows], near_threshold, "--near")
                told |= {(left, number): list(_meetings(sets[left], index)) for left in earlier}
                task.advance(len(earlier))
            if later := [right for left, right in apart if left == number]:
                index = Index([rows], None, "")
                met |= {(number, right): _rules_met(sets[right], index) for right in later}
    found = {pair: [each for each in told[pair] if each.rule != OTHER_ANSWER] for pair in apart}
    return Overlaps(
        counts=[count for a, b in apart for count in _counts(sets[a].name, sets[b].name, found[a, b], met[a, b])],
        leaks=[each for pair in apart for each in found[pair]],
        other_answers=[each for pair in apart for each in told[pair] if each.rule == OTHER_ANSWER],
        not_compared=[(sets[a].name, sets[b].name) for a, b in pairs if (a, b) not in apart],
    )


def _counts(a: str, b: str, found: list[Meeting], met: Counter[str]) -> Iterator[RuleCount]:
    """What two sets share, rule by rule. ``met``: rows of ``b`` by rule, near duplicates aside."""
    of_a = Counter(each.rule for each in found)
    of_b = met + Counter({NEAR: len({each.b for each in found if each.rule == NEAR})})
    for rule in sorted(of_a | of_b, key=_ORDER.__getitem__):
        yield RuleCount(a=a, b=b, rule=rule, rows_a=of_a[rule], rows_b=of_b[rule])


def _rules_met(rows: RowSet, index: Index) -> Counter[str]:
    return Counter(match.rule for keys in rows.keys if (match := index.match(keys)) is not None)


def _apart(a: RowSet, b: RowSet) -> bool:
    """Whether two sets must have nothing in common."""
    return a.owner == b.owner or a.role is None or b.role is None or a.role != b.role


def _meetings(rows: RowSet, index: Index) -> Iterator[Meeting]:
    """Each row of a set that meets one of the index; one that has only its prompt is told of as OTHER_ANSWER."""
    for number, keys in enumerate(rows.keys):
        match = index.first(keys)
        if match is None and (match := index.same_prompt(keys)) is not None:
            match = match._replace(rule=OTHER_ANSWER)
        if match is not None:
            there = index.sets[match.set_number]
            yield Meeting(rule=match.rule, what=match.what, a=_place(rows, number), b=_place(there, match.number))


def _place(rows: RowSet, number: int) -> Place:
    return Place(
        set=rows.name,
        row_index=rows.row_indices[number],
        line=rows.lines[number] or None,
        example_id=rows.example_ids.get(number),
    )
