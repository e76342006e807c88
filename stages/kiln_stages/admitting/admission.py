"""The one admission contract: a conversation becomes token ids with proven labels, or has a declared reason not to.

Order for one row: it parses, it has messages, its roles are known, its template renders it with labels that two methods
agree on, it tokenizes without loss, it fits. The first failure is the row's only reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.chat import ChatRow, misfit, raw_row_sha256, require_structure
from kiln_cli.config import AdmitConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import Source
from kiln_cli.identity import Domain, canonical_json, corpus_sha256, domain_sha256
from kiln_cli.lines import LINE_CAP
from kiln_cli.receipts import IngestionReceipt, RejectedRow
from kiln_cli.records import PreparedExample, Record
from kiln_cli.terminal import Task
from kiln_cli.text import printable
from kiln_stages.admitting.corpus import AdmittedRow
from kiln_stages.admitting.labels import LabelFinder, Rendered
from kiln_stages.admitting.prepared_rows import ToolsMode, to_chat_row
from kiln_stages.admitting.tokens import Encoded, RowTokenizer

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
    "mask_disagreement": "tokenization_error",
    "no_supervised_tokens": "tokenization_error",
    "control_token_in_content": "tokenization_error",
    "token_loss": "tokenization_error",
    "duplicate_bos": "tokenization_error",
    "boundary_straddle": "tokenization_error",
    "over_length": "tokenization_error",
}


class IncomingRow(msgspec.Struct, frozen=True):
    """A row on its way in: ``row``, or the fault that keeps it from being one and the hash of its raw bytes."""

    record: Record
    row: ChatRow | None
    example_id: str | None = None
    fault: RowFault | None = None

    def sha256(self) -> str:
        if self.row is not None:
            return self.row.sha256()
        text = self.record.text if self.record.text is not None else b""
        if self.record.element:
            try:
                return domain_sha256(Domain.RAW_ELEMENT, canonical_json(strict_json.parse(text)))
            except strict_json.JsonFault:
                pass  # broken inside: there is no canonical form, so its bytes stand for it
        return raw_row_sha256(text)


class RejectedDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``admit/rejected.jsonl``: private, beside the receipt, which holds hashes and reasons alone."""

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


class Admitted(msgspec.Struct, frozen=True):
    """The outcome of one file of rows. ``reasons`` is the closed set of codes that were in force."""

    split: str
    reasons: tuple[str, ...]
    kept: list[AdmittedRow]
    rejected: list[RejectedDetail]
    ignored_fields: dict[str, int]
    notes: dict[str, int]

    def counts(self) -> dict[str, int | dict[str, int]]:
        codes = dict.fromkeys(self.reasons, 0)
        for row in self.rejected:
            codes[row.code] += 1
        return {
            "rows_read": len(self.kept) + len(self.rejected),
            "rows_kept": len(self.kept),
            "rows_rejected": len(self.rejected),
            "reasons": codes,
            "tokens": sum(len(row.input_ids) for row in self.kept),
            "supervised_tokens": sum(row.supervised for row in self.kept),
            "longest_row": max((len(row.input_ids) for row in self.kept), default=0),
            "ignored_fields": self.ignored_fields,
            "template_notes": self.notes,
        }

    def receipt(self, source: str, locator: str, policy: Literal["fail", "skip"]) -> IngestionReceipt:
        hashes = [row.row_sha256 for row in self.kept]
        return IngestionReceipt(
            source=source,
            source_locator=locator,
            invalid_row_policy=policy,
            rows_read=len(self.kept) + len(self.rejected),
            rows_kept=len(self.kept),
            rows_rejected=len(self.rejected),
            kept_row_hashes=hashes,
            rejected_rows=[
                RejectedRow(row_index=row.row_index, row_sha256=row.row_sha256, reason=row.reason)
                for row in self.rejected
            ],
            kept_corpus_sha256=corpus_sha256(hashes),
        )


class _Kept(NamedTuple):
    row: AdmittedRow
    notes: tuple[str, ...]


class Admission:
    """The contract under one template, tokenizer and cap."""

    def __init__(
        self,
        finder: LabelFinder,
        tokenizer: RowTokenizer,
        max_tokens: int | None,
        config: AdmitConfig,
        source_reasons: Iterable[str] = (),
    ) -> None:
        self._finder = finder
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._control = config.control_tokens
        self._reasons = REASONS | dict.fromkeys(source_reasons, "tokenization_error")

    def admit(self, split: str, rows: Iterable[IncomingRow], task: Task) -> Admitted:
        """Every row of a file, kept or rejected, in order. An undeclared reason is a bug (KilnError KLN501)."""
        kept: list[AdmittedRow] = []
        rejected: list[RejectedDetail] = []
        ignored: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        for batch in _batches(rows):
            for incoming, outcome in zip(batch, self._admit_batch(batch), strict=True):
                if incoming.row is not None:
                    ignored.update(incoming.row.ignored)
                if isinstance(outcome, RowFault):
                    rejected.append(self._rejection(split, incoming, outcome))
                else:
                    kept.append(outcome.row)
                    notes.update(outcome.notes)
            task.advance(len(batch))
        return Admitted(
            split, tuple(self._reasons), kept, rejected, dict(sorted(ignored.items())), dict(sorted(notes.items()))
        )

    def _admit_batch(self, batch: list[IncomingRow]) -> list[_Kept | RowFault]:
        """Rows are rendered one by one and encoded together, which is where the time goes."""
        rendered = [self._render(incoming) for incoming in batch]
        texts = [text for text in rendered if not isinstance(text, RowFault)]
        encoded = iter(self._tokenizer.encode_batch(texts, control=self._control))
        return [
            text if isinstance(text, RowFault) else self._keep(incoming, text, next(encoded))
            for incoming, text in zip(batch, rendered, strict=True)
        ]

    def _render(self, incoming: IncomingRow) -> Rendered | RowFault:
        if incoming.row is None:
            return incoming.fault or RowFault("invalid_json", "the row is empty")
        try:
            require_structure(incoming.row)
            return self._finder.find(incoming.row.messages, incoming.row.tools)
        except RowFault as fault:
            return fault

    def _keep(self, incoming: IncomingRow, text: Rendered, encoded: Encoded | RowFault) -> _Kept | RowFault:
        if isinstance(encoded, RowFault):
            return encoded
        if self._max_tokens is not None and len(encoded.input_ids) > self._max_tokens:
            return RowFault("over_length", f"{len(encoded.input_ids)} tokens, at most {self._max_tokens}")
        row = AdmittedRow(
            row_index=incoming.record.row_index,
            line=incoming.record.line,
            example_id=incoming.example_id,
            row_sha256=incoming.sha256(),
            input_ids=encoded.input_ids,
            label_spans=encoded.label_spans,
        )
        return _Kept(row, text.notes)

    def _rejection(self, split: str, incoming: IncomingRow, fault: RowFault) -> RejectedDetail:
        if fault.reason not in self._reasons:
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
            reason=self._reasons[fault.reason],
            code=fault.reason,
            pointer=fault.pointer,
            detail=fault.detail,
        )


def _batches(rows: Iterable[IncomingRow]) -> Iterator[list[IncomingRow]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, BATCH_ROWS)):
        yield batch


def prepared_rows(records: Iterable[Record], mode: ToolsMode) -> Iterator[IncomingRow]:
    """Rows of a split file that prepare wrote. Raises KilnError KLN206 for a line that is no prepared example."""
    for record in records:
        try:
            example = msgspec.json.decode(record.text or b"", type=PreparedExample)
        except msgspec.DecodeError as error:
            raise KilnError(
                "KLN206",
                f"line {record.line} is no prepared example: {printable(error)}",
                hint="run `kiln prepare` again",
            ) from None
        yield IncomingRow(record, to_chat_row(example, mode), example.example_id)


def chat_rows(records: Iterable[Record], source: Source) -> Iterator[IncomingRow]:
    """Rows of a file in a chat shape; a line that has not the shape keeps its place and carries its fault."""
    for record in records:
        try:
            row = source.convert(_object(record))
            if not isinstance(row, ChatRow):
                raise KilnError("KLN210", f"source {source.name!r} yielded {type(row).__name__}, not ChatRow")
            yield IncomingRow(record, row)
        except RowFault as fault:
            yield IncomingRow(record, None, None, fault)


def _object(record: Record) -> dict[str, object]:
    """The object of a record. Raises RowFault ``invalid_json``; the finer word is the parser's."""
    if record.text is None:
        raise RowFault("invalid_json", f"line_too_long: the line has {record.length} bytes, at most {LINE_CAP}")
    try:
        value = strict_json.parse(record.text)
    except strict_json.JsonFault as fault:
        raise RowFault("invalid_json", f"{fault.kind}: {fault.detail}", fault.pointer, fault.offset) from None
    if not isinstance(value, dict):
        raise misfit("", "an object", value, word="row_not_object")
    return value
