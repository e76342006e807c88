"""What a training is told of its corpus by the receipt of the corpus's admission, whichever kind it is of. No torch."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from kiln_cli.receipts import IngestionReceipt, ReceiptData
from kiln_cli.stage_manifests import AdmitManifest
from kiln_stages.distilling.ingestion import ScoredIngestion
from kiln_stages.evidence.training_data import training_data
from kiln_stages.training.kinds import OPD, SFT, Kind

Ingestion = IngestionReceipt | ScoredIngestion


class Corpus(msgspec.Struct, frozen=True):
    """The rows of a training as their admission tells of them. ``provenance``: where rows of a data set come from."""

    ingestion: Ingestion
    provenance: dict[str, Any] | None = None

    @property
    def kind(self) -> Kind:
        return OPD if isinstance(self.ingestion, ScoredIngestion) else SFT

    @property
    def sha256(self) -> str:
        """Of the kept rows of conversations, or of the bytes of a scored corpus; ``sha256:`` and hex digits."""
        found = self.ingestion
        return found.source_sha256 if isinstance(found, ScoredIngestion) else found.kept_corpus_sha256

    @property
    def read(self) -> int:
        found = self.ingestion
        return found.examples if isinstance(found, ScoredIngestion) else found.rows_read

    @property
    def filtered(self) -> int:
        """Rows that are not trained on. Of a scored corpus there are none: it is refused whole."""
        return 0 if isinstance(self.ingestion, ScoredIngestion) else self.ingestion.rows_rejected

    @property
    def kept(self) -> int:
        return self.read - self.filtered

    def training_data(self) -> dict[str, Any]:
        """``training_data`` of the train receipt."""
        found = self.ingestion
        if isinstance(found, ScoredIngestion):
            return {"path": found.source_locator, "sha256": found.source_sha256, "source": found.source}
        return training_data(found, self.provenance)

    def receipt_data(self, steps: int) -> ReceiptData:
        """``data`` of the train receipt after so many steps."""
        found = self.ingestion
        data = ReceiptData(examples_read=self.read, examples_filtered=self.filtered, examples_trained=steps)
        if isinstance(found, ScoredIngestion):
            return msgspec.structs.replace(data, scored_ingestion=msgspec.to_builtins(found))
        return msgspec.structs.replace(data, sft_ingestion=found)

    def identities(self) -> dict[str, Any]:
        """What checkpoints are bound to: the receipt by its digest, and so much of it that a difference has a name."""
        return {"ingestion": self.ingestion.summary(), "ingestion_receipt_sha256": self.ingestion.identity()}


def corpus_of(data: ReceiptData) -> Corpus:
    """The corpus that a train receipt tells of. Raises ValueError where it has not exactly one ingestion receipt,
    msgspec.ValidationError for one that is none."""
    sft, scored = data.sft_ingestion, data.scored_ingestion
    if isinstance(sft, IngestionReceipt) and not isinstance(scored, dict):
        return Corpus(sft)
    if isinstance(scored, dict) and not isinstance(sft, IngestionReceipt):
        return Corpus(msgspec.convert(scored, ScoredIngestion))
    raise ValueError("data has not exactly one of sft_ingestion and scored_ingestion")


def admitted_kind(admit: AdmitManifest) -> Kind:
    """The kind of training that the rows of an admission are for."""
    return OPD if admit.details.opd is not UNSET else SFT
