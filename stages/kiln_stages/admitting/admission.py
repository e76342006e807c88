"""The one admission contract: a conversation becomes token ids with proven labels, or has a declared reason not to.

Order for one row: it parses, it has messages, its roles are known, its template renders it with labels that two methods
agree on, it tokenizes without loss, it fits. The first failure is the row's only reason. Each row is judged alone; but
where rows are held out, one that would be trained on must not meet any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from kiln_cli.chat import require_structure
from kiln_cli.config import AdmitConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.text import printable
from kiln_stages.admitting.corpus import AdmittedRow, PackedRow, packed
from kiln_stages.admitting.incoming import IncomingRow
from kiln_stages.contamination.index import Index
from kiln_stages.contamination.keys import row_keys
from kiln_stages.labelling.labels import TOOLS_IGNORED, LabelFinder, Rendered
from kiln_stages.labelling.tokens import Encoded, RowTokenizer

BATCH_ROWS = 256
# Every code a row can be rejected for, in the order of the checks, and the receipt's reason for it.
REASONS = {
    "invalid_json": "invalid_json",
    "empty_messages": "empty_messages",
    "invalid_role": "invalid_role",
    "tool_arguments_invalid_json": "tokenization_error",
    "no_assistant_message": "tokenization_error",
    "template_error": "tokenization_error",
    "template_lost_content": "tokenization_error",
    "unbalanced_reasoning_tags": "tokenization_error",
    "mask_disagreement": "tokenization_error",
    "no_supervised_tokens": "tokenization_error",
    "control_token_in_content": "tokenization_error",
    "token_loss": "tokenization_error",
    "duplicate_bos": "tokenization_error",
    "boundary_straddle": "tokenization_error",
    "over_length": "tokenization_error",
}
# The last check, declared where rows are held out: a count of 0 elsewhere would say that somebody looked.
CONTAMINATED = "contaminated"
TRAINED_SPLIT = "corpus"  # what no held-out row may stand in; validation rows are trained on by nobody


class RejectedDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``admit/rejected.jsonl``: private, beside the receipt, which holds hashes and reasons alone.

    ``tokens`` is the row's length where it came so far as to have one.
    """

    split: str
    row_index: int
    line: int
    offset: int
    length: int
    example_id: str | None
    row_sha256: str
    reason: str
    code: str
    pointer: str
    detail: str
    tokens: int | None = None


class Judged(NamedTuple):
    """One row's outcome, the fields of the input that changed nothing, and what the template did to it lawfully."""

    outcome: PackedRow | RejectedDetail
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


class _TooLong(RowFault):
    def __init__(self, tokens: int, most: int) -> None:
        super().__init__("over_length", f"{tokens} tokens, at most {most}")
        self.tokens = tokens


class Admission:
    """The contract under one template, tokenizer and cap. ``reasons``: the closed set of codes and the receipt's.

    ``held_out``: rows that no row to train on may meet; None where none are given.
    """

    def __init__(
        self,
        finder: LabelFinder,
        tokenizer: RowTokenizer,
        max_tokens: int | None,
        config: AdmitConfig,
        source_reasons: Iterable[str] = (),
        held_out: Index | None = None,
    ) -> None:
        self._finder = finder
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._control = config.control_tokens
        self._arguments = config.compat is None
        self._held_out = held_out
        last = () if held_out is None else (CONTAMINATED,)
        self.reasons = REASONS | dict.fromkeys((*source_reasons, *last), "tokenization_error")

    def judge(self, split: str, rows: Iterable[IncomingRow]) -> Iterator[Judged]:
        """Every row kept or rejected, in order. An undeclared reason is a bug (KilnError KLN501)."""
        iterator = iter(rows)
        while batch := list(itertools.islice(iterator, BATCH_ROWS)):
            yield from self._judge_batch(split, batch)

    def _judge_batch(self, split: str, batch: list[IncomingRow]) -> Iterator[Judged]:
        """Rows are rendered one by one and encoded together, which is where the time goes."""
        rendered = [self.render(incoming) for incoming in batch]
        texts = [text for text in rendered if not isinstance(text, RowFault)]
        encoded = iter(self._tokenizer.encode_batch(texts, control=self._control))
        for incoming, text in zip(batch, rendered, strict=True):
            ignored = incoming.row.ignored if incoming.row is not None else ()
            outcome = text if isinstance(text, RowFault) else self._fit(next(encoded))
            if self._held_out is not None and split == TRAINED_SPLIT and not isinstance(outcome, RowFault):
                outcome = _apart(incoming, self._held_out) or outcome
            if isinstance(outcome, RowFault):
                # Counted by a note, too: a whole file can fail for it, and one setting mends that.
                noted = (TOOLS_IGNORED,) if outcome.detail.endswith(TOOLS_IGNORED) else ()
                yield Judged(self._rejection(split, incoming, outcome), ignored, noted)
            else:
                notes = text.notes if isinstance(text, Rendered) else ()
                yield Judged(_admitted(incoming, outcome), ignored, notes)

    def render(self, incoming: IncomingRow) -> Rendered | RowFault:
        """The row's text with its proven spans, or the first fault on the way there."""
        if incoming.row is None:
            return incoming.fault or RowFault("invalid_json", "the row is empty")
        try:
            require_structure(incoming.row, arguments=self._arguments)
            return self._finder.find(incoming.row.messages, incoming.row.tools)
        except RowFault as fault:
            return fault

    def _fit(self, encoded: Encoded | RowFault) -> Encoded | RowFault:
        if isinstance(encoded, RowFault) or self._max_tokens is None:
            return encoded
        tokens = len(encoded.input_ids)
        return encoded if tokens <= self._max_tokens else _TooLong(tokens, self._max_tokens)

    def _rejection(self, split: str, incoming: IncomingRow, fault: RowFault) -> RejectedDetail:
        if fault.reason not in self.reasons:
            raise KilnError(
                "KLN501",
                f"a row was rejected for {printable(fault.reason)!r}, which is not declared",
                hint="a source declares its own reasons: Source(reasons=...)",
            )
        record = incoming.record
        return RejectedDetail(
            split=split,
            row_index=record.row_index,
            line=record.line,
            offset=record.offset,
            length=record.length,
            example_id=incoming.example_id,
            row_sha256=incoming.sha256(),
            reason=self.reasons[fault.reason],
            code=fault.reason,
            pointer=fault.pointer,
            # A plugin may quote text that no file of evidence can hold.
            detail=fault.detail.encode("utf-8", "backslashreplace").decode("utf-8"),
            tokens=fault.tokens if isinstance(fault, _TooLong) else None,
        )


def _apart(incoming: IncomingRow, held_out: Index) -> RowFault | None:
    """None for a row that meets no held-out one; else the fault. Its detail begins with the rule and names the row."""
    match = held_out.first(row_keys(incoming, near=held_out.near))
    if match is None:
        return None
    what = f"{match.what}: " if match.what else ""
    return RowFault(CONTAMINATED, f"{match.rule}: {what}held-out {held_out.place(match)}")


def _admitted(incoming: IncomingRow, encoded: Encoded) -> PackedRow:
    row = AdmittedRow(
        row_index=incoming.record.row_index,
        line=incoming.record.line,
        example_id=incoming.example_id,
        row_sha256=incoming.sha256(),
        input_ids=encoded.input_ids,
        label_spans=encoded.label_spans,
    )
    return packed(row)
