"""A scored corpus admitted again, before a model is loaded: the same file by the same teacher must give the same rows.

What admission left behind is never believed by itself: not the rows, not the receipt, not the teacher that it names.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import StageManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.admitting.recheck import require_same_terms
from kiln_stages.distilling.admission import read_scored
from kiln_stages.distilling.ingestion import RECEIPT, ScoredIngestion, read_scored_ingestion
from kiln_stages.distilling.rows import PackedScoredRow


def require_same_scored_admission(
    config: LoadedConfig, out: Path, plugins: Plugins, manifest: StageManifest, progress: Progress
) -> ScoredIngestion:
    """Reads and judges the whole corpus again; returns its receipt.

    Raises KilnError KLN207 with the first field of the receipt that comes out otherwise (the file's path or bytes, the
    teacher, a count, the rows), and as admission does for a corpus that no longer holds, an alias that is pinned to
    another identity, and files that are missing.
    """
    terms = load_terms(config, plugins)
    require_same_terms(terms, manifest)
    written = read_scored_ingestion(out / RECEIPT)
    found = read_scored(config, build_contract(config, terms), _forget, progress=progress, label="check admission")
    _require_equal(out / RECEIPT, written, found.receipt)
    expected = manifest.details["admitted_sha256"].get("corpus")
    if expected != found.receipt.scored_corpus_sha256:
        raise KilnError(
            "KLN207",
            f"the scored rows now have identity {found.receipt.scored_corpus_sha256}, expected {expected}",
            hint="run `kiln admit` again",
        )
    return found.receipt


def _forget(row: PackedScoredRow) -> None:
    """The rows are read from the run; here their identities count."""


def _require_equal(path: Path, written: ScoredIngestion, found: ScoredIngestion) -> None:
    here, there = msgspec.to_builtins(written), msgspec.to_builtins(found)
    for field in here:
        if here[field] != there[field]:
            raise KilnError(
                "KLN207",
                f"{printable(path)} does not say what its corpus gives: {field} is {printable(here[field], 300)}, "
                f"found {printable(there[field], 300)}",
                hint="run `kiln admit` again; if the corpus should not have changed, restore it first",
            )
