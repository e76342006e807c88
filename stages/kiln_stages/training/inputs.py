"""What ``kiln train`` and ``kiln resume`` take from a run directory, checked before a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Loss, LossFunction
from kiln_cli.manifests import read_manifest, require_unchanged
from kiln_cli.plugins import Plugins, version
from kiln_cli.stage_manifests import AdmitManifest, StageManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Terms, load_terms
from kiln_stages.admitting.corpus import AdmittedRow, admitted_sha256, read_corpus
from kiln_stages.admitting.recheck import require_same_admission
from kiln_stages.distilling.recheck import require_same_scored_admission
from kiln_stages.training.base_adapter import BaseAdapter, read_base_adapter, with_its_receipt
from kiln_stages.training.corpora import Corpus, admitted_kind
from kiln_stages.training.kinds import OPD, Kind
from kiln_stages.training.loop import TrainRow
from kiln_stages.training.scored_rows import COLUMNS, ScoredTrainRows
from kiln_stages.training.tensors import Shard, base_model_sha256, model_config_sha256, weight_shards
from kiln_stages.training.train_receipt import Evidence
from kiln_stages.training.trainer import Plan
from kiln_stages.training.training_file import HeldOutLoss, Training

CORPUS, HELD_OUT = "admit/corpus.parquet", "admit/heldout.parquet"


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a training takes from a run directory, checked against the manifest that vouches for it."""

    config: LoadedConfig
    out: Path
    admit: AdmitManifest
    corpus: Corpus
    rows: Sequence[TrainRow]
    held_out: Sequence[TrainRow]
    shards: list[Shard]
    base_adapter: BaseAdapter | None
    terms: Terms
    plugins: Plugins
    admission_seconds: float  # that admitting the rows again took: rendering, tokens and label masks

    @property
    def directory(self) -> Path:
        return self.out / "train"

    def training(self, held_out_before: HeldOutLoss | None = None) -> Training:
        return Training(
            adapter=self.config.run.train.adapter,
            base_adapter_sha256=self.base_adapter and self.base_adapter.content_sha256,
            base_model_sha256=base_model_sha256(self.shards),
            model_config_sha256=model_config_sha256(self.config.model_dir()),
            config_sha256=self.config.sha256(*TRAIN_SECTIONS),
            corpus_sha256=self.admit.content_sha256,
            held_out_before=held_out_before,
        )

    def evidence(self) -> Evidence:
        return Evidence(
            self.config,
            self.out,
            self.admit,
            self.corpus,
            self.rows,
            self.shards,
            self.plugins,
            self.base_adapter,
        )

    def plan(self) -> Plan:
        """Raises KilnError KLN212 for a loss that no plugin has, KLN203 for one that these rows are not for."""
        base = base_model_sha256(self.shards)
        settings = self.config.run
        return Plan(
            config=settings.train,
            seed=settings.project.seed,
            model_dir=self.config.model_dir(),
            base_model_id=settings.model.id or base,
            base_model_sha256=base,
            rows=self.rows,
            corpus_sha256=self.corpus.sha256,
            base_adapter=self.base_adapter,
            loss=self._loss(),
            kind=self.corpus.kind,
            settings={name: msgspec.to_builtins(getattr(settings, name)) for name in self.corpus.kind.settings},
            identities={
                "admit_content_sha256": self.admit.content_sha256,
                "base_model_id": settings.model.id or base,
                **self.corpus.identities(),
                "kiln_train_version": version(),
                "plugins": {p.distribution: p.version for p in self.plugins.loaded()},
                "template": msgspec.to_builtins(self.admit.details.template),
                "tokenizer": self.admit.details.tokenizer,
            },
        )

    def _loss(self) -> LossFunction:
        loss = loss_for(self.corpus.kind, self.config, self.plugins)
        if self.corpus.kind is not OPD:
            return loss.load()
        settings = self.config.run.distill
        factor = 0.0 if settings.echo is None else settings.echo.lambda_
        return loss.load(echo_lambda=factor, tail_bucket=settings.tail_bucket, coverage=settings.coverage)


def loss_for(kind: Kind, config: LoadedConfig, plugins: Plugins) -> Loss:
    """Raises KilnError KLN212 for a loss that no plugin has, KLN203 for one that is not for rows of this kind."""
    loss = plugins.losses.get(config.run.train.loss)
    there = COLUMNS if kind is OPD else ()
    missing = [name for name in loss.columns if name not in there]
    unused = kind is OPD and not loss.columns
    if missing or unused:
        why = f"it reads {', '.join(missing)}" if missing else "it reads nothing of the teacher's scores"
        raise KilnError(
            "KLN203",
            f"[train] loss = {loss.name!r} is not for a {kind.row}: {why}",
            hint="loss = 'teacher_top_k' is for rows that a teacher scored, 'cross_entropy' for conversations",
        )
    return loss


def read_inputs(config: LoadedConfig, out: Path, plugins: Plugins, progress: Progress) -> Inputs:
    """Reads what admit left, admits the rows a second time, and hashes the base weights.

    Raises KilnError: KLN206 where admit has not run, KLN207 where a file or setting changed after it or the rows give
    another receipt, KLN203 for `heldout_interval` without held-out rows, KLN212 for a loss that no plugin has, KLN302
    for missing model files.
    """
    admit = read_manifest(out, AdmitManifest)
    _require_settings(config, admit, out)
    _require_held_out(config, admit, out)
    plugins.losses.get(config.run.train.loss)  # a name that is unknown need not wait for the rows
    for ref in admit.outputs:
        if ref.kind != "rejected_rows":  # private, and no input of a training
            require_unchanged(ref, out / ref.path, "admit_manifest.json")
    began = time.monotonic()
    corpus = _admitted_again(config, out, plugins, admit, progress)
    admission_seconds = time.monotonic() - began
    rows, held_out = read_rows(out, admit)
    return Inputs(
        config=config,
        out=out,
        admit=admit,
        corpus=corpus,
        rows=rows,
        held_out=held_out,
        shards=weight_shards(config.model_dir()),
        base_adapter=read_base(config),
        terms=load_terms(config, plugins),
        plugins=plugins,
        admission_seconds=admission_seconds,
    )


def read_base(config: LoadedConfig) -> BaseAdapter | None:
    """The base adapter that the config names, and the receipt behind it. Raises KilnError as the two readers do."""
    path = config.run.train.base_adapter
    if path is None:
        return None
    directory = config.resolve(path)
    return with_its_receipt(read_base_adapter(directory, path), directory)


def _admitted_again(
    config: LoadedConfig, out: Path, plugins: Plugins, admit: AdmitManifest, progress: Progress
) -> Corpus:
    if admitted_kind(admit) is OPD:
        return Corpus(require_same_scored_admission(config, out, plugins, admit, progress))
    ingestion = require_same_admission(config, out, plugins, admit, progress)
    return Corpus(ingestion, admit.details.rows.provenance or None)


def read_rows(out: Path, admit: AdmitManifest) -> tuple[Sequence[TrainRow], Sequence[TrainRow]]:
    """The rows to train on, and those held out. Raises KilnError KLN206 or KLN207 for files that are not admit's."""
    held_out = _has(admit, HELD_OUT)
    if admitted_kind(admit) is OPD:
        return ScoredTrainRows(out / CORPUS), ScoredTrainRows(out / HELD_OUT, observed=False) if held_out else ()
    return _read_rows(out, admit, "corpus"), _read_rows(out, admit, "heldout") if held_out else ()


def train_row(row: AdmittedRow) -> TrainRow:
    return TrainRow(row.row_index, row.row_sha256, row.input_ids, row.label_spans)


def _read_rows(out: Path, admit: AdmitManifest, split: str) -> list[TrainRow]:
    name = f"admit/{split}.parquet"
    path = out / name
    rows = read_corpus(path)
    found, expected = admitted_sha256(rows), admit.details.admitted_sha256.get(split)
    if found != expected:
        raise KilnError(
            "KLN207",
            f"{printable(path)} holds other rows than admit_manifest.json says: {found}, expected {expected}",
            hint="run `kiln admit` again",
        )
    return [train_row(row) for row in rows]


def _has(manifest: StageManifest, path: str) -> bool:
    return any(ref.path == path for ref in manifest.outputs)


def _require_settings(config: LoadedConfig, admit: AdmitManifest, out: Path) -> None:
    """What admit read of the config must still be what the config says, or the receipt would tell of another run."""
    sections = admit.details.config_sections
    found = config.sha256(*sections)
    if found != admit.config_sha256:
        names = " and ".join(f"[{name}]" for name in sections)
        raise KilnError(
            "KLN207",
            f"{names} of the config changed after `kiln admit`: digest {found}, expected {admit.config_sha256}",
            hint=f"run `kiln admit` again, or train with {printable(out)}/config.resolved.toml",
        )


def _require_held_out(config: LoadedConfig, admit: AdmitManifest, out: Path) -> None:
    """An interval that nothing could be measured at would be a setting without effect."""
    interval = config.run.train.heldout_interval
    if interval is not None and not _has(admit, HELD_OUT):
        raise KilnError(
            "KLN203",
            f"[train] heldout_interval = {interval}, and {printable(out)} has no held-out rows",
            hint="leave the key out; `kiln prepare` of raw rows makes a validation split, which is held out",
        )
