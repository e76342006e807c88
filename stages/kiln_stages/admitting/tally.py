"""The account of one input: what became of its rows, in order, without the rows themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from kiln_cli.identity import corpus_sha256
from kiln_cli.receipts import IngestionReceipt, RejectedRow
from kiln_stages.admitting.admission import CONTAMINATED, RejectedDetail
from kiln_stages.admitting.corpus import AdmittedDigest
from kiln_stages.admitting.pipeline import Part, RowsInput

# Where the receipt of each split is written.
RECEIPTS = {"corpus": "admit/sft_ingestion.json", "heldout": "admit/heldout_ingestion.json"}
# Rejected rows that are kept whole, for the message of an error.
EXAMPLES = 20


class Tally:
    """Grows by :meth:`add`. Memory: the hash of every row, which the receipt must hold, and numbers.

    ``invalid`` and ``contaminated`` hold the first of the rejected rows, the latter those that meet a held-out row;
    ``met`` counts these by rule.
    """

    def __init__(self, source: RowsInput, reasons: Iterable[str]) -> None:
        self.source = source
        self.kept_hashes: list[str] = []
        self.rejected: list[RejectedRow] = []
        self.invalid: list[RejectedDetail] = []
        self.contaminated: list[RejectedDetail] = []
        self.met: Counter[str] = Counter()
        self._codes = dict.fromkeys(reasons, 0)
        self._ignored: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._over_length: list[int] = []
        self._digest = AdmittedDigest()
        self._tokens = self._supervised = self._longest = 0
        # What the plain file no longer shows, and what its pieces will.
        self._blank = source.plain.blank
        self._byte_order_marks = int(source.plain.had_bom)

    @property
    def split(self) -> str:
        return self.source.split

    @property
    def rows_read(self) -> int:
        return len(self.kept_hashes) + len(self.rejected)

    def add(self, part: Part) -> None:
        for row in part.kept:
            self.kept_hashes.append(row.row_sha256)
            self._digest.update(row)
            self._tokens += row.tokens
            self._supervised += row.supervised
            self._longest = max(self._longest, row.tokens)
        for detail in part.rejected:
            self._codes[detail.code] += 1
            self.rejected.append(
                RejectedRow(row_index=detail.row_index, row_sha256=detail.row_sha256, reason=detail.reason)
            )
            if detail.tokens is not None:
                self._over_length.append(detail.tokens)
            if detail.code == CONTAMINATED:
                self.met[detail.detail.partition(":")[0]] += 1
            examples = self.contaminated if detail.code == CONTAMINATED else self.invalid
            if len(examples) < EXAMPLES:
                examples.append(detail)
        self._blank += part.blank
        self._byte_order_marks += part.byte_order_marks
        self._ignored.update(part.ignored)
        self._notes.update(part.notes)

    def admitted_sha256(self) -> str:
        """Digest of what is trained on; see :func:`corpus.admitted_sha256`."""
        return self._digest.text()

    def counts(self) -> dict[str, Any]:
        return {
            "rows_read": self.rows_read,
            "rows_kept": len(self.kept_hashes),
            "rows_rejected": len(self.rejected),
            "reasons": self._codes,
            "tokens": self._tokens,
            "supervised_tokens": self._supervised,
            "longest_row": self._longest,
            "over_length_tokens": self._over_length,
            "blank_lines": self._blank,
            "byte_order_marks": self._byte_order_marks,
            "ignored_fields": dict(sorted(self._ignored.items())),
            "template_notes": dict(sorted(self._notes.items())),
        }

    def receipt(self, policy: Literal["fail", "skip"]) -> IngestionReceipt:
        locator = self.source.locator
        return IngestionReceipt(
            source=self.source.receipt_source,
            **({} if locator is None else {"source_locator": locator}),
            invalid_row_policy=policy,
            rows_read=self.rows_read,
            rows_kept=len(self.kept_hashes),
            rows_rejected=len(self.rejected),
            kept_row_hashes=self.kept_hashes,
            rejected_rows=self.rejected,
            kept_corpus_sha256=corpus_sha256(self.kept_hashes),
        )
