"""A resume whose inputs are no longer those of ``kiln admit``: what else differs is still told, in one table.

Such a run is refused in any case. The inputs are taken as they are now, only to be compared with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.manifests import read_ingestion, read_manifest
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import AdmitManifest
from kiln_stages.admitting.contract import load_terms
from kiln_stages.admitting.corpus import read_corpus
from kiln_stages.admitting.tally import RECEIPTS
from kiln_stages.distilling.binding import pinned_teacher
from kiln_stages.distilling.ingestion import RECEIPT, read_scored_ingestion
from kiln_stages.training.checkpoint import Checkpoint
from kiln_stages.training.checkpoint_manifest import Difference, differences, refuse
from kiln_stages.training.corpora import Corpus, admitted_kind
from kiln_stages.training.inputs import CORPUS, Inputs, read_base, train_row
from kiln_stages.training.kinds import OPD
from kiln_stages.training.loop import TrainRow
from kiln_stages.training.scored_rows import ScoredTrainRows
from kiln_stages.training.tensors import weight_shards
from kiln_stages.training.trainer import Trainer


def refuse_with_all_differences(
    changed: KilnError, config: LoadedConfig, out: Path, plugins: Plugins, checkpoint: Checkpoint
) -> None:
    """Raises KilnError KLN209 with ``changed`` and every other difference from the checkpoint.

    Returns where there is no other, or where so much is gone that nothing can be compared: then ``changed`` says it.
    """
    try:
        binding = Trainer(_inputs_as_they_are(config, out, plugins).plan()).binding
    except (KilnError, OSError):
        return
    found = differences(binding, checkpoint.manifest)
    if found:
        row = Difference("admission", "admit_manifest.json", changed.message)
        refuse([row, *found], checkpoint.path.name)


def _inputs_as_they_are(config: LoadedConfig, out: Path, plugins: Plugins) -> Inputs:
    admit = read_manifest(out, AdmitManifest)
    terms = load_terms(config, plugins)
    files, choice = terms
    here = msgspec.structs.replace(admit.details, template=choice.used(), tokenizer=files.file_digests())
    return Inputs(
        config=config,
        out=out,
        admit=msgspec.structs.replace(admit, details=here),
        corpus=_corpus_as_it_is(config, out, admit),
        rows=_rows_as_they_are(out, admit),
        held_out=[],
        shards=weight_shards(config.model_dir()),
        base_adapter=read_base(config),
        terms=terms,
        plugins=plugins,
        admission_seconds=0.0,
    )


def _rows_as_they_are(out: Path, admit: AdmitManifest) -> Sequence[TrainRow]:
    path = out / CORPUS
    return ScoredTrainRows(path) if admitted_kind(admit) is OPD else [train_row(row) for row in read_corpus(path)]


def _corpus_as_it_is(config: LoadedConfig, out: Path, admit: AdmitManifest) -> Corpus:
    """The receipt of the admission, with the settings, the file and the teacher of now."""
    if admitted_kind(admit) is not OPD:
        written = read_ingestion(out / RECEIPTS["corpus"])
        return Corpus(msgspec.structs.replace(written, invalid_row_policy=config.run.admit.invalid_row_policy))
    scored, file = read_scored_ingestion(out / RECEIPT), config.run.admit.file
    teacher = pinned_teacher(config)
    now = msgspec.structs.replace(
        scored,
        source_locator=file or scored.source_locator,
        source_sha256=f"sha256:{hash_file(config.resolve(file))[0]}" if file else scored.source_sha256,
        teacher_alias=teacher.alias,
        teacher_content_revision=teacher.content_revision,
        teacher_identity=teacher.identity,
    )
    return Corpus(now)
