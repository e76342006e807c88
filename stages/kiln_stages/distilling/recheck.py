"""A scored corpus admitted again, before a model is loaded: the same file by the same teacher must give the same rows.

What admission left behind is never believed by itself: not the rows, not the receipt, not the teacher that it names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Contract, build_contract, load_terms
from kiln_stages.admitting.recheck import require_same_terms
from kiln_stages.distilling.admission import read_scored
from kiln_stages.distilling.held_out import HELD_OUT_RECEIPT, Apart, Keep, held_out_config
from kiln_stages.distilling.ingestion import RECEIPT, ScoredIngestion, read_scored_ingestion
from kiln_stages.distilling.rows import PackedScoredRow


def require_same_scored_admission(
    config: LoadedConfig, out: Path, plugins: Plugins, manifest: AdmitManifest, progress: Progress
) -> ScoredIngestion:
    """Reads and judges the whole corpus again, and the held-out one; returns the receipt of the first.

    Raises KilnError KLN207 with the first field of the receipt that comes out otherwise (the file's path or bytes, the
    teacher, a count, the rows), and as admission does for a corpus that no longer holds, an alias that is pinned to
    another identity, and files that are missing.
    """
    terms = load_terms(config, plugins)
    require_same_terms(terms, manifest)
    contract = build_contract(config, terms)
    again = partial(_again, out=out, contract=contract, manifest=manifest, progress=progress)
    apart, second = Apart(config), held_out_config(config)
    found = again(config, keep=apart.corpus(_forget), receipt=RECEIPT, split="corpus")
    if second is not None:
        again(second, keep=apart.held_out(_forget), receipt=HELD_OUT_RECEIPT, split="heldout")
    return found


def _again(
    config: LoadedConfig,
    *,
    out: Path,
    contract: Contract,
    manifest: AdmitManifest,
    progress: Progress,
    keep: Keep,
    receipt: str,
    split: str,
) -> ScoredIngestion:
    written = read_scored_ingestion(out / receipt)
    label = f"check admission: {split}"
    found = read_scored(config, contract, keep, progress=progress, label=label).receipt
    _require_equal(out / receipt, written, found)
    expected = manifest.details.admitted_sha256.get(split)
    if expected != found.scored_corpus_sha256:
        raise KilnError(
            "KLN207",
            f"the scored rows of {split} now have identity {found.scored_corpus_sha256}, expected {expected}",
            hint="run `kiln admit` again",
        )
    return found


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
