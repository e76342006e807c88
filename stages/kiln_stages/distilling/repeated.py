"""Rows of the same tokens in a corpus that is being scored: what was written first of a position is written again.

A server that computes rows together with others gives other scores each time, and so may a local model where other
positions are asked for. Admission takes the same position of the same tokens twice only with the same numbers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kiln_stages.admitting.packed_numbers import pack_int32
from kiln_stages.distilling.candidates import Scored, narrow
from kiln_stages.distilling.examples import parse_line, to_example
from kiln_stages.distilling.targets import TargetFinder, Targets


class WrittenRows:
    """The scored file ``path`` by the tokens of its rows: 16 bytes and a place of each are kept, no scores.

    ``finder`` and ``top_k`` are those that its rows were written by.
    """

    def __init__(self, path: Path, finder: TargetFinder, top_k: int) -> None:
        self._path, self._finder, self._top_k = path, finder, top_k
        self._places: dict[bytes, list[tuple[int, int]]] = {}
        self._size = 0

    def add(self, line: bytes, targets: Targets | None) -> None:
        """The next line of the file, without its line feed; the manifest line has no targets."""
        if targets is not None:
            self._places.setdefault(_key(targets), []).append((self._size, len(line)))
        self._size += len(line) + 1

    def settled(self, targets: Targets, scores: list[Scored]) -> list[Scored]:
        """One entry a target: as the first row that has it says, or else as it comes."""
        known: dict[int, Scored] = {}
        for place in self._places.get(_key(targets), ()):
            if known.keys() >= set(targets.action_targets):
                break  # a thousand equal rows are read once each
            known = self._said(*place) | known
        return [known.get(target, each) for target, each in zip(targets.action_targets, scores, strict=True)]

    def _said(self, offset: int, length: int) -> dict[int, Scored]:
        """What a row that was written says, by target."""
        with self._path.open("rb") as stream:
            stream.seek(offset)
            value = parse_line(stream.read(length), length)
        example = to_example(value, self._top_k)
        targets = self._finder.find(example.messages, example.response, example.segments)
        said = {}
        pairs = zip(example.entries, value["teacher_tokens"], strict=True)
        for target, (entry, written) in zip(targets.action_targets, pairs, strict=True):
            own = written.get("logprob")
            kept = list(zip(entry.candidate_ids, map(narrow, entry.logprobs), strict=True))
            said[target] = Scored(kept, None if own is None else narrow(own))
        return said


def _key(targets: Targets) -> bytes:
    return hashlib.sha256(pack_int32(targets.input_ids)).digest()[:16]
