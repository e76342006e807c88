"""One example of a scored corpus: a row to distil, or every rule that it breaks, in the order of the contract."""

from __future__ import annotations

from typing import NamedTuple

from kiln_cli.errors import RowFault
from kiln_stages.admitting.packed_numbers import pack_float32, pack_int32
from kiln_stages.distilling.examples import Example
from kiln_stages.distilling.rows import PackedScoredRow, row_identity
from kiln_stages.distilling.scores import SUSPECT, candidate_fault, id_faults, narrowed, require_count
from kiln_stages.distilling.targets import TargetFinder, Targets


class Verdict(NamedTuple):
    """``row`` is None where there is a fault. ``proven``: how many of its tokens name the id of their target;
    ``beyond``: candidates that were not read; ``suspect``: scores that may stand for minus infinity."""

    row: PackedScoredRow | None
    faults: list[RowFault]
    proven: int = 0
    beyond: int = 0
    suspect: int = 0
    notes: tuple[str, ...] = ()


class Judge:
    """``top_k``: how many candidates are read; ``vocabulary``: ids are below it; ``require_ids``: every token must name
    its id."""

    def __init__(self, targets: TargetFinder, top_k: int, vocabulary: int, *, require_ids: bool) -> None:
        self._targets = targets
        self.top_k = top_k
        self._vocabulary = vocabulary
        self._require_ids = require_ids

    def judge(self, example: Example, row_index: int, line: int) -> Verdict:
        """A fault of tokens stands beside others of its kind; one that comes before them stands alone."""
        try:
            found = self._find(example)
            expected = [found.input_ids[at] for at in found.action_targets]
            text_of = _Texts(self._targets, found)
            require_count(example.entries, expected, text_of)
        except RowFault as fault:
            return Verdict(None, [fault])
        faults = list(id_faults(example.entries, expected, text_of, required=self._require_ids))
        scores = [narrowed(entry) for entry in example.entries]
        for at, (entry, values) in enumerate(zip(example.entries, scores, strict=True)):
            broken = candidate_fault(entry, values, at, self.top_k, self._vocabulary)
            faults += [] if broken is None else [broken]
        if faults:
            return Verdict(None, faults)
        bare = PackedScoredRow(
            row_index=row_index,
            line=line,
            row_sha256="",
            input_ids=pack_int32(found.input_ids),
            action_targets=pack_int32(found.action_targets),
            teacher_token_ids=pack_int32([token for entry in example.entries for token in entry.candidate_ids]),
            teacher_logprobs=pack_float32([score for values in scores for score in values]),
            observation_targets=pack_int32(found.observation_targets),
            observation_tokens=found.observation_tokens,
        )
        return Verdict(
            row=bare.with_identity(row_identity(bare)),
            faults=[],
            proven=sum(entry.token_id is not None for entry in example.entries),
            beyond=sum(max(entry.offered - self.top_k, 0) for entry in example.entries),
            suspect=sum(values.count(SUSPECT) for values in scores),
            notes=found.notes,
        )

    def _find(self, example: Example) -> Targets:
        """The targets of an example. Raises RowFault."""
        if not example.messages:
            raise RowFault("empty_messages", "the example has no messages", "/messages")
        if not example.response:
            raise RowFault("empty_teacher_response", "the text is empty", "/teacher_response")
        return self._targets.find(example.messages, example.response, example.segments)


class _Texts:
    """The texts of targets by number. They take a second encoding, which only a row with a fault is worth."""

    def __init__(self, finder: TargetFinder, targets: Targets) -> None:
        self._finder, self._targets = finder, targets
        self._texts: list[str] | None = None

    def __call__(self, number: int) -> str:
        if self._texts is None:
            self._texts = self._finder.token_texts(self._targets)
        return self._texts[self._targets.action_targets[number]]
