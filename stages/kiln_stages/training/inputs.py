"""What ``kiln train`` and ``kiln resume`` take from a run directory, checked before a model is loaded."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError, not_built
from kiln_cli.manifests import read_manifest, require_unchanged
from kiln_cli.plugins import Plugins, version
from kiln_cli.receipts import IngestionReceipt, StageManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Terms, load_terms
from kiln_stages.admitting.corpus import AdmittedRow, admitted_sha256, read_corpus
from kiln_stages.admitting.recheck import require_same_admission
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.training.base_adapter import BaseAdapter, read_base_adapter, with_its_receipt
from kiln_stages.training.loop import TrainRow
from kiln_stages.training.tensors import Shard, base_model_sha256, model_config_sha256, weight_shards
from kiln_stages.training.train_receipt import Evidence
from kiln_stages.training.trainer import Plan
from kiln_stages.training.training_file import HeldOutLoss, Training


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a training takes from a run directory, checked against the manifest that vouches for it."""

    config: LoadedConfig
    out: Path
    admit: StageManifest
    ingestion: IngestionReceipt
    rows: list[TrainRow]
    held_out: list[TrainRow]
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
            self.ingestion,
            self.rows,
            self.shards,
            self.plugins,
            self.base_adapter,
        )

    def plan(self) -> Plan:
        """Raises KilnError KLN212 for a loss that no plugin has."""
        base = base_model_sha256(self.shards)
        settings = self.config.run
        return Plan(
            config=settings.train,
            seed=settings.project.seed,
            model_dir=self.config.model_dir(),
            base_model_id=settings.model.id or base,
            base_model_sha256=base,
            rows=self.rows,
            corpus_sha256=self.ingestion.kept_corpus_sha256,
            base_adapter=self.base_adapter,
            loss=self.plugins.losses.get(settings.train.loss).load(),
            identities={
                "admit_content_sha256": self.admit.content_sha256,
                "base_model_id": settings.model.id or base,
                "ingestion": self.ingestion.summary(),
                "ingestion_receipt_sha256": self.ingestion.identity(),
                "kiln_train_version": version(),
                "plugins": {p.distribution: p.version for p in self.plugins.loaded()},
                "template": self.admit.details.get("template"),
                "tokenizer": self.admit.details.get("tokenizer"),
            },
        )


def read_inputs(config: LoadedConfig, out: Path, plugins: Plugins, progress: Progress) -> Inputs:
    """Reads what admit left, admits the rows a second time, and hashes the base weights.

    Raises KilnError: KLN206 where admit has not run, KLN207 where a file or setting changed after it or the rows give
    another receipt, KLN203 for `heldout_interval` without held-out rows, KLN212 for a loss that no plugin has, KLN302
    for missing model files.
    """
    admit = read_manifest(out, "admit")
    if scored_corpus(admit) is not None:
        raise not_built("training on a scored corpus")
    _require_settings(config, admit, out)
    _require_held_out(config, admit, out)
    plugins.losses.get(config.run.train.loss)  # a name that is unknown need not wait for the rows
    for ref in admit.outputs:
        if ref.kind != "rejected_rows":  # private, and no input of a training
            require_unchanged(ref, out / ref.path, "admit_manifest.json")
    began = time.monotonic()
    ingestion = require_same_admission(config, out, plugins, admit, progress)
    admission_seconds = time.monotonic() - began
    rows = _read_rows(out, admit, "corpus")
    held_out = _read_rows(out, admit, "heldout") if _has(admit, "admit/heldout.parquet") else []
    return Inputs(
        config=config,
        out=out,
        admit=admit,
        ingestion=ingestion,
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


def train_row(row: AdmittedRow) -> TrainRow:
    return TrainRow(row.row_index, row.row_sha256, row.input_ids, row.label_spans)


def _read_rows(out: Path, admit: StageManifest, split: str) -> list[TrainRow]:
    name = f"admit/{split}.parquet"
    path = out / name
    rows = read_corpus(path)
    found, expected = admitted_sha256(rows), admit.details.get("admitted_sha256", {}).get(split)
    if found != expected:
        raise KilnError(
            "KLN207",
            f"{printable(path)} holds other rows than admit_manifest.json says: {found}, expected {expected}",
            hint="run `kiln admit` again",
        )
    return [train_row(row) for row in rows]


def _has(manifest: StageManifest, path: str) -> bool:
    return any(ref.path == path for ref in manifest.outputs)


def _require_settings(config: LoadedConfig, admit: StageManifest, out: Path) -> None:
    """What admit read of the config must still be what the config says, or the receipt would tell of another run."""
    sections = admit.details.get("config_sections", [])
    found = config.sha256(*sections)
    if found != admit.config_sha256:
        names = " and ".join(f"[{name}]" for name in sections)
        raise KilnError(
            "KLN207",
            f"{names} of the config changed after `kiln admit`: digest {found}, expected {admit.config_sha256}",
            hint=f"run `kiln admit` again, or train with {printable(out)}/config.resolved.toml",
        )


def _require_held_out(config: LoadedConfig, admit: StageManifest, out: Path) -> None:
    """An interval that nothing could be measured at would be a setting without effect."""
    interval = config.run.train.heldout_interval
    if interval is not None and not _has(admit, "admit/heldout.parquet"):
        raise KilnError(
            "KLN203",
            f"[train] heldout_interval = {interval}, and {printable(out)} has no held-out rows",
            hint="leave the key out; `kiln prepare` of raw rows makes a validation split, which is held out",
        )
