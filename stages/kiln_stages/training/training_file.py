"""``train/training.json``: which training a run directory holds. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.manifests import read_document
from kiln_cli.text import printable

TRAINING_SCHEMA = "kiln.training.v1"
TRAINING_NAME = "training.json"


class HeldOutLoss(NamedTuple):
    """Loss on rows that are not trained on: the mean of row means, and the mean over all supervised tokens."""

    rows: int
    supervised_tokens: int
    mean_per_row: float
    mean_per_token: float


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which training the directory holds, and the held-out loss before its first step."""

    schema: str = TRAINING_SCHEMA
    adapter: str
    base_adapter_sha256: str | None = None  # content_sha256 of its tensors
    base_model_sha256: str  # of the weights
    model_config_sha256: str  # of its config.json
    config_sha256: str
    corpus_sha256: str  # content_sha256 of admit_manifest.json
    held_out_before: HeldOutLoss | None

    def digest8(self) -> str:
        return sha256_hex(canonical_json([self.adapter, self.config_sha256, self.corpus_sha256]))[:8]


def read_training(directory: Path) -> Training | None:
    """Which training a ``train/`` directory holds; None for a directory that is not there or is empty.

    Raises KilnError KLN208 where it holds something else.
    """
    path = directory / TRAINING_NAME
    if path.exists():
        return read_document(path, Training, TRAINING_SCHEMA)
    if directory.exists() and any(directory.iterdir()):
        raise KilnError(
            "KLN208",
            f"{printable(directory)} holds files but no {TRAINING_NAME}: it is no training that kiln began",
            hint="use another --out, or --fresh, which moves it aside",
        )
    return None
