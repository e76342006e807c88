"""Sets of rows laid out so that a row that comes by finds the one that it must not meet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kiln_cli.similarity import NearTexts
from kiln_cli.text import printable
from kiln_stages.contamination.keys import NEAR, RULES, RowKeys
from kiln_stages.contamination.row_sets import RowSet

# Rules that a person wants to see the value of.
_SHOWN = {"same_group": ("group_id", "group"), "same_session": ("session_id", "session")}


class Match(NamedTuple):
    """A row of the index that a row meets: the rule, the set and the row's place in it (both from 0).

    ``what``: the id that both share, or how near they are; "" where the rule says it all.
    """

    rule: str
    set_number: int
    number: int
    what: str = ""


class Index:
    """The rows of some sets by every key. Of several rows with one key the first stands for all.

    Memory: a table entry a key, and a signature a row with ``near_threshold`` (above 0, at most 1). Raises KilnError
    KLN301, naming ``purpose``, where near duplicates are asked for and rensa is not installed.
    """

    def __init__(self, sets: Sequence[RowSet], near_threshold: float | None, purpose: str) -> None:
        self.sets = sets
        self._starts: list[int] = []
        self._tables: dict[str, dict[object, int]] = {theirs: {} for rule in RULES.values() for _, theirs in rule.pairs}
        self._near = None if near_threshold is None else NearTexts(near_threshold, purpose)
        self._near_rows: list[int] = []
        count = 0
        for rows in sets:
            self._starts.append(count)
            for keys in rows.keys:
                self._add(count, keys)
                count += 1

    @property
    def near(self) -> bool:
        """Whether near duplicates are asked for."""
        return self._near is not None

    def first(self, keys: RowKeys) -> Match | None:
        """The row that the row of these keys meets by the first rule that finds one, near duplicates last."""
        return self.match(keys) or self.near_match(keys)

    def match(self, keys: RowKeys) -> Match | None:
        """The first row that the row of these keys meets, by the first rule that finds one; near duplicates aside."""
        for name, rule in RULES.items():
            for mine, theirs in rule.pairs:
                key = getattr(keys, mine)
                if key is not None and (found := self._tables[theirs].get(key)) is not None:
                    field, attribute = _SHOWN.get(name, ("", ""))
                    what = f"{field} {printable(repr(getattr(keys, attribute)))}" if field else ""
                    return self._match(name, found, what)
        return None

    def near_match(self, keys: RowKeys) -> Match | None:
        """The first near duplicate, where they are asked for."""
        if self._near is None or keys.text is None:
            return None
        near = self._near.first_near(self._near.sketch(keys.text))
        return None if near is None else self._match(NEAR, self._near_rows[near.place], f"{near.similarity:.3f} alike")

    def same_prompt(self, keys: RowKeys) -> Match | None:
        """The first row that has the same prompt, whatever its answer."""
        found = None if keys.prompt is None else self._tables["prompt"].get(keys.prompt)
        return None if found is None else self._match("same_prompt", found, "")

    def place(self, match: Match) -> str:
        """The row that was met, in words."""
        return self.sets[match.set_number].place(match.number)

    def _add(self, number: int, keys: RowKeys) -> None:
        for name, table in self._tables.items():
            key = getattr(keys, name)
            if key is not None:
                table.setdefault(key, number)
        if self._near is not None and keys.text is not None:
            self._near.add(self._near.sketch(keys.text))
            self._near_rows.append(number)

    def _match(self, rule: str, number: int, what: str) -> Match:
        at = bisect_right(self._starts, number) - 1
        return Match(rule, at, number - self._starts[at], what)
