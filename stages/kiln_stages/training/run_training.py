"""What ``kiln train`` and ``kiln resume`` share: from a run directory to a plan, and from the last step to a receipt.

A run directory holds one training. ``train/training.json`` says which: it is written before the first step, so that a
training that was cut short can be told from another one. ``train_receipt.json`` is written last of all.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import FS, hash_file, write_file, writing
from kiln_cli.manifests import (
    RECEIPT_NAME,
    document,
    manifest_files,
    read_document,
    read_manifest,
    read_receipt,
    reference,
    relative_base,
    require_unchanged,
)
from kiln_cli.plugins import Plugins, version
from kiln_cli.receipts import (
    Held,
    IngestionReceipt,
    StageManifest,
    TrainReceipt,
)
from kiln_cli.terminal import Progress, Speed, table
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Terms, load_terms
from kiln_stages.admitting.corpus import AdmittedRow, admitted_sha256, read_corpus
from kiln_stages.admitting.recheck import require_same_admission
from kiln_stages.evidence.model_card import adapter_card
from kiln_stages.evidence.receipt_claims import LOSS_CURVE, LOSS_LOG, receipt_claims
from kiln_stages.evidence.signature import signature_path
from kiln_stages.training.base_adapter import BaseAdapter, read_base_adapter
from kiln_stages.training.determinism import peak_memory_mib
from kiln_stages.training.interrupts import settle_on_signals
from kiln_stages.training.loop import StepRecord, TrainRow
from kiln_stages.training.loss_curve import write_loss_curve
from kiln_stages.training.metrics import kept_lines, read_steps
from kiln_stages.training.smoke_test import smoke_test
from kiln_stages.training.tensors import Shard, base_model_sha256, model_config_sha256, weight_shards
from kiln_stages.training.tokenizer_copy import write_tokenizer
from kiln_stages.training.train_receipt import Evidence, Failure, describe, describe_failure
from kiln_stages.training.trainer import Outcome, Plan, Trainer, train_adapter
from kiln_stages.training.training_file import TRAINING_NAME, TRAINING_SCHEMA, HeldOutLoss, Training

REMOVALS_SHOWN = 8  # steps of removed checkpoints that a line names


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
            kept_corpus_sha256=self.ingestion.kept_corpus_sha256,
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


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """``receipt`` is None where a signal stopped the run; ``checkpoint`` then holds what is left of it."""

    receipt: TrainReceipt | None
    outcome: Outcome | None
    checkpoint: Path | None = None
    signal: int | None = None
    unchanged: bool = False
    resumed_from: int | None = None

    def account(self, out: Path) -> str:
        """What was trained, for people."""
        receipt = self.receipt
        if receipt is None:
            assert self.outcome is not None and self.checkpoint is not None, "a stopped run has both"
            return (
                f"train: stopped after step {self.outcome.state.global_step}; what is left is in "
                f"{printable(self.checkpoint)}{self._removals()}"
            )
        rows: list[list[object]] = [
            ["steps", receipt.steps],
            ["supervised tokens", receipt.token_counts["action_tokens"]],
            ["context tokens", receipt.token_counts["context_tokens"]],
        ]
        if self.outcome is not None:
            history, count = self.outcome.state.loss_history, receipt.data.sft_ingestion.rows_kept
            rows += [["mean loss, first epoch", sum(history[:count]) / count]]
            rows += [["mean loss, last epoch", sum(history[-count:]) / count]]
            rows += [["tokens a second", round(receipt.produced["training_tokens_per_second"] or 0)]]
        if receipt.held_out is not None:
            rows += [["held-out loss before", receipt.held_out.loss_before]]
            rows += [["held-out loss after", receipt.held_out.loss_after]]
        state = "unchanged" if self.unchanged else "written"
        where = f"{printable(out)}/{receipt.adapters['output']['path']}, {printable(out)}/{RECEIPT_NAME}"
        written = f"{state}: {where}\nloss curve: {printable(out)}/{LOSS_CURVE}{self._removals()}"
        return f"train: adapter {printable(receipt.adapter_name)}\n{table(rows)}\n{written}"

    def _removals(self) -> str:
        """A line on the checkpoints that --keep-last removed, if it did."""
        steps = self.outcome.removed if self.outcome is not None else []
        if not steps:
            return ""
        shown = ", ".join(map(str, steps[:REMOVALS_SHOWN]))
        more = f" and {len(steps) - REMOVALS_SHOWN} more up to {steps[-1]}" if len(steps) > REMOVALS_SHOWN else ""
        plural = "checkpoint" if len(steps) == 1 else "checkpoints"
        return f"\nremoved by --keep-last: {len(steps)} older {plural}, of steps {shown}{more}"


def read_inputs(config: LoadedConfig, out: Path, plugins: Plugins, progress: Progress) -> Inputs:
    """Reads what admit left, admits the rows a second time, and hashes the base weights.

    Raises KilnError: KLN206 where admit has not run, KLN207 where a file or setting changed after it or the rows give
    another receipt, KLN203 for `heldout_interval` without held-out rows, KLN212 for a loss that no plugin has, KLN302
    for missing model files.
    """
    admit = read_manifest(out, "admit")
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


def finished(inputs: Inputs) -> TrainReceipt | None:
    """The receipt of this very training, if it is there and its outputs are still what it says."""
    path = inputs.out / RECEIPT_NAME
    if not path.exists():
        return None
    receipt = read_receipt(path)
    if receipt.status != "success" or not _is_of(receipt, inputs):
        return None
    for ref in receipt.outputs:
        output = inputs.out / ref.path
        if not output.is_file() or hash_file(output) != (ref.sha256, ref.bytes):
            return None
    files = manifest_files(inputs.out, inputs.admit)
    if receipt.produced.get("manifest_files") != files:
        # A stage before was run again to the same content: only the times in its manifest are others.
        receipt.produced["manifest_files"] = files
        receipt.seal()
        write_file(path, document(receipt))
    return receipt


def _is_of(receipt: TrainReceipt, inputs: Inputs) -> bool:
    """Whether a receipt is of the training that these inputs are for."""
    wanted, model = inputs.training(), receipt.model
    return receipt.adapters["base"] == (inputs.base_adapter and inputs.base_adapter.in_receipt()) and (
        wanted.config_sha256,
        wanted.corpus_sha256,
        wanted.base_model_sha256,
        wanted.model_config_sha256,
    ) == (
        receipt.config_sha256,
        receipt.previous.content_sha256,
        model["base_weight_shards"]["sha256"],
        model["config_sha256"],
    )


def _read_if_readable(path: Path) -> TrainReceipt | None:
    try:
        return read_receipt(path) if path.exists() else None
    except KilnError:
        return None  # damaged: no receipt of anything


def discard_failed_receipt(out: Path) -> None:
    """Before steps are made: the receipt of a failed attempt speaks of a loss log that is about to change."""
    path = out / RECEIPT_NAME
    if (receipt := _read_if_readable(path)) is not None and receipt.status == "failed":
        with writing(path):
            FS.unlink(path)
            FS.sync_directory(out)


def move_aside(out: Path) -> Path | None:
    """Moves ``train/`` and its receipt to ``train.<digest8>``. None where there is nothing to move."""
    directory, receipt = out / "train", out / RECEIPT_NAME
    if not directory.exists():
        discard_failed_receipt(out)  # of a training that left nothing else
    if not directory.exists() and not receipt.exists():
        return None
    path = directory / TRAINING_NAME
    name = f"train.{_digest8(path)}"
    taken = {entry.name for entry in out.iterdir()}
    number = 2
    target = name
    while target in taken:
        target, number = f"{name}-{number}", number + 1
    with writing(directory):
        FS.make_directory(directory)
        if receipt.exists():  # first: a receipt must not outlive the files that it speaks of
            FS.replace(receipt, directory / RECEIPT_NAME)
        if (signature := signature_path(receipt)).exists():
            FS.replace(signature, directory / signature.name)
        FS.rename_directory(directory, out / target)
        FS.sync_directory(out)
    return out / target


def run_steps(
    trainer: Trainer, inputs: Inputs, progress: Progress, keep_last: int | None
) -> tuple[Outcome, int | None]:
    """Trains what is left; a signal settles the step and publishes a checkpoint. The number is that signal's."""
    total, done = trainer.plan.total_steps, trainer.state.global_step
    kept_lines(inputs.out / LOSS_LOG, trainer.state.loss_history)  # or nothing begins, and nothing goes
    discard_failed_receipt(inputs.out)
    with settle_on_signals() as stop, progress.task("train", total, "steps", done) as task:
        speed = Speed()

        def show(record: StepRecord) -> None:
            speed.add(record.tokens)
            task.advance(note=f"epoch {record.epoch + 1}  loss {record.loss:.4f}  {speed.a_second():,.0f} tokens/s")

        try:
            outcome = train_adapter(
                trainer, inputs.directory, stop=stop, on_step=show, held_out=inputs.held_out, keep_last=keep_last
            )
        except KilnError as error:
            if error.code == "KLN104":  # a loss that went wrong is worth a look
                write_loss_curve(inputs.directory, len(inputs.rows))
            raise
    if outcome.stopped:
        write_loss_curve(inputs.directory, len(inputs.rows))
    return outcome, stop.signal


def held_out_loss(trainer: Trainer, inputs: Inputs, progress: Progress, when: str) -> HeldOutLoss | None:
    """The loss on the held-out rows as the model stands; None where there are no such rows."""
    if not inputs.held_out:
        return None
    with progress.task(f"held-out loss {when}", len(inputs.held_out), "rows") as task:
        return trainer.held_out(inputs.held_out, task.advance)


def finish(
    trainer: Trainer, inputs: Inputs, training: Training, started: float, outcome: Outcome, progress: Progress
) -> TrainReceipt:
    """Held-out loss after the last step, loss curve, adapter and tokenizer, smoke test, card, and the receipt."""
    before = training.held_out_before
    after = held_out_loss(trainer, inputs, progress, "after")
    last = None if after is None else (trainer.state.global_step, after.mean_per_token)
    curve = write_loss_curve(inputs.directory, len(inputs.rows), last)
    adapter = trainer.write_adapter(inputs.directory / "adapter")
    held = None
    if before is not None and after is not None:
        held = Held(
            rows=after.rows,
            supervised_tokens=after.supervised_tokens,
            loss_before=before.mean_per_token,
            loss_after=after.mean_per_token,
        )
    template: dict[str, Any] = inputs.admit.details.get("template", {})
    tokenizer = write_tokenizer(inputs.terms, template, adapter.path, inputs.out)
    receipt = describe(trainer, inputs.evidence(), adapter, held)
    if prompts := inputs.config.run.train.smoke_prompts:
        receipt.adapter_smoke_test = smoke_test(trainer.model, adapter.path, inputs.config.model_dir(), prompts)
    card = adapter_card(receipt, read_steps(inputs.out / LOSS_LOG))
    receipt.outputs.append(reference(write_file(adapter.path / "README.md", card), inputs.out, "model_card"))
    if curve is not None:
        receipt.outputs.append(reference(curve, inputs.out, "loss_curve"))
    receipt.outputs += tokenizer
    receipt.produced = {
        **_produced(trainer, inputs, started),
        "steps_in_last_process": len(outcome.state.loss_history) - outcome.first_step,
        "training_seconds": round(outcome.seconds, 3),
        "training_tokens_per_second": round(outcome.tokens / outcome.seconds, 1) if outcome.seconds else None,
    }
    write_receipt(receipt, inputs.out)
    return receipt


def write_failure(trainer: Trainer | None, inputs: Inputs, failure: Failure, started: float) -> TrainReceipt | None:
    """The receipt of a training that failed. None, and nothing written, where the run has a successful one of it."""
    written = _read_if_readable(inputs.out / RECEIPT_NAME)
    if written is not None and written.status == "success" and _is_of(written, inputs):
        return None
    receipt = describe_failure(trainer, inputs.evidence(), failure)
    receipt.produced = _produced(trainer, inputs, started)
    write_receipt(receipt, inputs.out)
    return receipt


def write_receipt(receipt: TrainReceipt, out: Path) -> None:
    """Seals and writes a receipt. Raises KilnError KLN501 where it contradicts itself: then it is no evidence."""
    receipt.seal()
    for found in receipt_claims(receipt):
        if found.status != "holds":
            raise KilnError("KLN501", f"the train receipt contradicts itself: {found.name}: {found.detail}")
    write_file(out / RECEIPT_NAME, document(receipt))


def _produced(trainer: Trainer | None, inputs: Inputs, started: float) -> dict[str, Any]:
    """Times, place and memory of this process: evidence, and nothing that two runs are compared by."""
    phases: dict[str, float] = {"tokenize_ms": inputs.admission_seconds}
    if trainer is not None:
        spent = trainer.phases
        phases |= {
            "policy_forward_ms": spent.forward,
            "backward_ms": spent.backward,
            "optimizer_ms": spent.optimizer,
        }
    training = inputs.directory / TRAINING_NAME
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "base_dir": relative_base(inputs.out, inputs.config.base_dir),
        "manifest_files": manifest_files(inputs.out, inputs.admit),
        "training_sha256": hash_file(training)[0] if training.exists() else None,
        "phase_timings": {name: round(1000 * seconds, 1) for name, seconds in phases.items()},
        "runtime": {"wall_clock_ms": round(1000 * (time.monotonic() - started)), **peak_memory_mib()},
    }


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


def read_base(config: LoadedConfig) -> BaseAdapter | None:
    path = config.run.train.base_adapter
    return None if path is None else read_base_adapter(config.resolve(path), path)


def train_row(row: AdmittedRow) -> TrainRow:
    return TrainRow(row.row_index, row.row_sha256, row.input_ids, row.label_spans)


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


def _digest8(path: Path) -> str:
    try:
        return read_document(path, Training, TRAINING_SCHEMA).digest8()
    except KilnError:
        return "unknown"  # no training of ours, or damaged: it is only moved
