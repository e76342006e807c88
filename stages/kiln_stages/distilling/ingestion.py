"""The receipt of a scored corpus: what was read, who scored it, and what it came to. It holds no row and no row's hash.

``admit/scored_ingestion.json``; checkpoints and train receipts of a distillation are bound to its identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kiln_cli.distillation import TOP_K_SIZES
from kiln_cli.identity import canonical_json, is_hash, sha256_hex
from kiln_cli.manifests import damaged, read_document
from kiln_stages.distilling.admitted import Alignment, ScoredBy, ScoredCorpus
from kiln_stages.distilling.identity import TeacherIdentity

SCORED_INGESTION_SCHEMA = "kiln.scored-ingestion.v1"
SOURCE = "jsonl_off_policy_opd_teacher"  # as the public server's train receipt names it
RECEIPT = "admit/scored_ingestion.json"

Size = Annotated[int, Meta(ge=0)]


class ScoredIngestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``source_sha256`` covers the exact bytes of the file. ``duplicate_rows``: rows that repeat the scores of an
    earlier one; they are kept. ``scored_corpus_sha256``: the identities of all rows in order."""

    schema: str = SCORED_INGESTION_SCHEMA
    source: str = SOURCE
    source_locator: str
    source_sha256: str
    source_bytes: Size
    teacher_alias: str
    teacher_content_revision: str
    teacher_identity: TeacherIdentity
    top_k: int
    examples: Size
    duplicate_rows: Size
    tokens: Size
    action_tokens: Size
    observation_tokens: Size
    alignment: Alignment
    scored_corpus_sha256: str

    def faults(self) -> Iterator[str]:
        """What contradicts what; nothing for a sound receipt."""
        if self.source != SOURCE:
            yield f"source is {self.source!r}, expected {SOURCE!r}"
        if not self.source_locator.strip():
            yield "source_locator is blank"
        for field in ("source_sha256", "scored_corpus_sha256"):
            if not is_hash(getattr(self, field)):
                yield f"{field} is no hash"
        yield from (f"teacher_identity: {fault}" for fault in self.teacher_identity.faults())
        if (found := self.teacher_identity.content_revision()) != self.teacher_content_revision:
            yield f"teacher_content_revision is {self.teacher_content_revision}, its identity has {found}"
        if self.top_k not in TOP_K_SIZES or self.top_k > self.teacher_identity.max_top_k:
            yield f"top_k is {self.top_k}, expected 16 or 32 and at most {self.teacher_identity.max_top_k}"
        if self.examples == 0:
            yield "no example is kept"
        if self.action_tokens < self.examples:
            yield f"action_tokens is {self.action_tokens}, and there are {self.examples} examples"
        if self.action_tokens + self.observation_tokens > self.tokens:
            yield f"{self.action_tokens} action and {self.observation_tokens} observation tokens of {self.tokens}"
        if self.alignment.of != self.action_tokens or self.alignment.proven > self.alignment.of:
            yield f"alignment is {self.alignment.proven} of {self.alignment.of}, of {self.action_tokens} action tokens"
        if self.duplicate_rows >= max(self.examples, 1):
            yield f"duplicate_rows is {self.duplicate_rows} of {self.examples}"

    def identity(self) -> str:
        """What checkpoints are bound to: SHA-256 of the canonical JSON, without a domain."""
        return "sha256:" + sha256_hex(canonical_json(self))

    def corpus(self) -> ScoredCorpus:
        """What admit_manifest.json says of the corpus."""
        return ScoredCorpus(
            path=self.source_locator,
            sha256=self.source_sha256,
            teacher=ScoredBy(
                alias=self.teacher_alias,
                content_revision=self.teacher_content_revision,
                identity=self.teacher_identity,
            ),
            top_k=self.top_k,
            alignment=self.alignment,
            rows_sha256=self.scored_corpus_sha256,
        )

    def summary(self) -> dict[str, Any]:
        """What checkpoints hold beside the identity, so that a difference from it has a name."""
        return {
            "source_locator": self.source_locator,
            "source_sha256": self.source_sha256,
            "teacher_alias": self.teacher_alias,
            "teacher_content_revision": self.teacher_content_revision,
            "top_k": self.top_k,
            "examples": self.examples,
        }


def read_scored_ingestion(path: Path) -> ScoredIngestion:
    """A receipt that agrees with itself. Raises KilnError KLN206 with the first fault it has."""
    receipt = read_document(path, ScoredIngestion, SCORED_INGESTION_SCHEMA)
    if fault := next(receipt.faults(), None):
        raise damaged(path, fault)
    return receipt
