"""What a training says of itself: the fields of ``train_receipt.json``, whether it ended well or failed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.identity import Domain
from kiln_cli.manifests import manifest_reference
from kiln_cli.plugins import DISTRIBUTION, Plugins, version
from kiln_cli.receipts import CheckpointRef, FileRef, Held, TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_stages.admitting.model_files import tokenizer_identity
from kiln_stages.distilling.ingestion import ScoredIngestion
from kiln_stages.distilling.lengths import read_lengths
from kiln_stages.evidence.distillation import echo_block, opd_block, read_log, token_counts
from kiln_stages.training.base_adapter import BaseAdapter
from kiln_stages.training.checkpoint import list_checkpoints, read_checkpoint_manifest
from kiln_stages.training.corpora import Corpus
from kiln_stages.training.kinds import OPD
from kiln_stages.training.loop import TrainRow, supervised_positions
from kiln_stages.training.lora_norms import delta_norms, grad_norms
from kiln_stages.training.metrics import loss_log_sha256, read_steps
from kiln_stages.training.provenance import execution_provenance
from kiln_stages.training.tensors import Shard, base_model_sha256, model_config_sha256
from kiln_stages.training.trainer import Adapter, Trainer


class Evidence(NamedTuple):
    """What the stages before left, as far as the receipt tells of it."""

    config: LoadedConfig
    out: Path
    admit: AdmitManifest
    corpus: Corpus
    rows: Sequence[TrainRow]
    shards: list[Shard]
    plugins: Plugins
    base_adapter: BaseAdapter | None


class Failure(NamedTuple):
    """Why a training ended early: a reason of the closed set, and the words of the error."""

    reason: str
    message: str


def describe(trainer: Trainer, evidence: Evidence, adapter: Adapter, held: Held | None) -> TrainReceipt:
    """The receipt of a finished training, but for ``produced`` and its digests."""
    receipt = _describe(trainer, evidence, trainer.state.global_step)
    receipt.status = "success"
    receipt.adapters["output"] = _output(adapter, evidence.out)
    receipt.held_out = held
    receipt.lora_delta_norms = delta_norms(trainer.adapter_tensors(), receipt.hyperparameters["alpha_over_rank"])
    files = [adapter.path / name for name in sorted(adapter.files)]
    kinds = ["adapter_config", "adapter_parameters"]
    written = [_file(path, evidence.out, kind) for path, kind in zip(files, kinds, strict=True)]
    receipt.outputs = [*written, *receipt.outputs]
    return receipt


def describe_failure(trainer: Trainer | None, evidence: Evidence, failure: Failure) -> TrainReceipt:
    """The receipt of a training that failed, but for ``produced`` and its digests. ``trainer``: None where it failed
    before there was one; then the steps are those of the loss log that an earlier process left."""
    log = evidence.out / "train" / "metrics.jsonl"
    steps = trainer.state.global_step if trainer is not None else len(_whole_log(log) or ())
    receipt = _describe(trainer, evidence, steps)
    receipt.failure_reason, receipt.failure_message = failure
    return receipt


def _describe(trainer: Trainer | None, evidence: Evidence, steps: int) -> TrainReceipt:
    """What both kinds of receipt say, as of a failed training: no adapter, no norms of one, no held-out loss."""
    settings, corpus = evidence.config.run, evidence.corpus
    log = evidence.out / "train" / "metrics.jsonl"
    logged = _whole_log(log)
    receipt = TrainReceipt(
        adapter_name=settings.train.adapter,
        status="failed",
        kiln={"distribution": DISTRIBUTION, "package_version": version()},
        plugins=evidence.plugins.loaded(),
        model=_model(evidence),
        tokenizer=tokenizer_identity(evidence.config.model_dir(), evidence.admit.details),
        adapters={"base": evidence.base_adapter and evidence.base_adapter.in_receipt(), "output": None},
        training_data=corpus.training_data(),
        hyperparameters=_hyperparameters(trainer, evidence),
        data=corpus.receipt_data(steps),
        token_counts=_token_counts(evidence, steps),
        steps=steps,
        loss_log_sha256=loss_log_sha256(logged) if logged else None,
        held_out=None,
        lora_delta_norms=[],
        lora_grad_norms=grad_norms(trainer.state.lora_grad_norms) if trainer is not None else [],
        execution=_execution(trainer) if trainer is not None else None,
        config=msgspec.to_builtins(settings),
        config_sha256=evidence.config.sha256(*TRAIN_SECTIONS),
        previous=manifest_reference(evidence.out, AdmitManifest),
        inputs=[ref for ref in evidence.admit.outputs if ref.kind in ("corpus", "heldout")],
        outputs=[_file(log, evidence.out, "metrics", rows=steps)] if logged else [],
        checkpoints=[
            CheckpointRef(name=path.name, step=step, manifest_sha256=read_checkpoint_manifest(path)[1])
            for step, path in list_checkpoints(evidence.out / "train")
        ],
    )
    receipt.execution_provenance = execution_provenance(receipt)
    if isinstance(corpus.ingestion, ScoredIngestion):
        measured = read_log(log) if logged else []
        receipt.opd = opd_block(corpus.ingestion, settings.distill, receipt.token_counts, measured)
        receipt.echo = echo_block(settings.distill, measured)
    return receipt


def _whole_log(path: Path) -> list[Any] | None:
    """The steps of the loss log, None where there is no log or a write that failed left half a line."""
    try:
        return read_steps(path) if path.exists() else None
    except KilnError:
        return None


def _token_counts(evidence: Evidence, steps: int) -> dict[str, int]:
    """Tokens that the committed steps trained on and passed over, a row as often as it was visited."""
    rows, settings = evidence.rows, evidence.config.run
    visits = evidence.corpus.kind.times_trained(settings.project.seed, steps, len(rows))
    if evidence.corpus.kind is OPD:
        lengths = read_lengths(evidence.out / "admit" / "corpus.parquet")
        return token_counts(lengths, visits, settings.distill.echo)
    action = context = 0
    for row, times in zip(rows, visits, strict=True):
        supervised = len(supervised_positions(row))
        action += times * supervised
        context += times * (len(row.input_ids) - supervised)
    return {"action_tokens": action, "context_tokens": context}


def _model(evidence: Evidence) -> dict[str, Any]:
    model, base = evidence.config.run.model, base_model_sha256(evidence.shards)
    return {
        "base_weight_shards": {
            "schema": "kiln.base-weight-shards.v1",
            "sha256": base,
            "shards": [shard._asdict() for shard in evidence.shards],
            "total_bytes": sum(shard.size_bytes for shard in evidence.shards),
        },
        "config_sha256": model_config_sha256(evidence.config.model_dir()),
        "id": model.id or base,
        "path": model.path,
    }


def _output(adapter: Adapter, out: Path) -> dict[str, Any]:
    sha256, size = adapter.files["adapter_model.safetensors"]
    return {
        "adapter_model_bytes": size,
        "adapter_model_sha256": sha256,
        "content_sha256": adapter.content_sha256,
        "path": adapter.path.relative_to(out).as_posix(),
    }


def _hyperparameters(trainer: Trainer | None, evidence: Evidence) -> dict[str, Any]:
    """What the config says, and what only a model on a machine tells: target layers, torch's own hyper-parameters."""
    config = evidence.config.run.train
    binding = trainer.binding if trainer is not None else None
    return {
        "alpha": config.lora_alpha,
        "alpha_over_rank": config.lora_alpha / config.lora_rank,
        "epochs": config.epochs,
        "init": Domain.LORA_INIT.value if evidence.base_adapter is None else "base_adapter",
        "learning_rate": config.rate,
        "loss": config.loss,
        "mode": evidence.corpus.kind.name,
        "optimizer": {
            "kind": config.optimizer.kind,
            "effective": binding.optimizer_hyperparameters if binding is not None else None,
        },
        "profile": config.profile,
        "rank": config.lora_rank,
        "seed": str(evidence.config.run.project.seed),
        "shuffle": evidence.corpus.kind.shuffle,
        "target_modules": binding.auxiliary_state["lora"]["target_modules"] if binding is not None else None,
    }


def _execution(trainer: Trainer) -> dict[str, Any]:
    auxiliary = trainer.binding.auxiliary_state
    columns = {"head_columns": trainer.model.head.columns._asdict()} if trainer.plan.kind is OPD else {}
    return {
        **columns,
        **auxiliary["execution"],
        "gradient_checkpoint_plan": auxiliary["gradient_checkpoint_plan"],
        "fast_paths": trainer.model.fast_paths._asdict(),
        "head_probe": trainer.model.probe._asdict(),
        "loss_route": "supervised_positions",
        "precision": msgspec.to_builtins(trainer.binding.precision_policy),
    }


def _file(path: Path, out: Path, kind: str, rows: int | None = None) -> FileRef:
    sha256, size = hash_file(path)
    relative = Path(os.path.relpath(path, out)).as_posix()
    return FileRef(path=relative, base="run", kind=kind, sha256=sha256, bytes=size, rows=rows)
