"""What a finished training says of itself: the fields of ``train_receipt.json``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.files import hash_file
from kiln_cli.manifests import manifest_reference
from kiln_cli.plugins import DISTRIBUTION, Plugins, version
from kiln_cli.receipts import (
    CheckpointRef,
    FileRef,
    Held,
    IngestionReceipt,
    ReceiptData,
    StageManifest,
    TrainReceipt,
)
from kiln_stages.training.checkpoint import list_checkpoints, read_checkpoint_manifest
from kiln_stages.training.loop import supervised_positions
from kiln_stages.training.metrics import loss_log_sha256, read_steps
from kiln_stages.training.tensors import Shard
from kiln_stages.training.trainer import Adapter, Trainer


class Evidence(NamedTuple):
    """What the stages before left, as far as the receipt tells of it."""

    config: LoadedConfig
    out: Path
    admit: StageManifest
    ingestion: IngestionReceipt
    shards: list[Shard]
    plugins: Plugins


def describe(trainer: Trainer, evidence: Evidence, adapter: Adapter, held: Held | None) -> TrainReceipt:
    """The receipt of a finished training, but for ``produced`` and its digests."""
    settings, plan, ingestion = evidence.config.run, trainer.plan, evidence.ingestion
    epochs = settings.train.epochs
    supervised = sum(len(supervised_positions(row)) for row in plan.rows)
    tokens = sum(len(row.input_ids) for row in plan.rows)
    metrics = evidence.out / "train" / "metrics.jsonl"
    files = [*(adapter.path / name for name in sorted(adapter.files)), metrics]
    kinds = ["adapter_config", "adapter_parameters", "metrics"]
    locator = ingestion.source_locator if isinstance(ingestion.source_locator, str) else None
    return TrainReceipt(
        adapter_name=settings.train.adapter,
        status="success",
        kiln={"distribution": DISTRIBUTION, "package_version": version()},
        plugins=evidence.plugins.loaded(),
        model=_model(trainer, evidence),
        tokenizer={
            "files": evidence.admit.details.get("tokenizer"),
            "template": evidence.admit.details.get("template"),
        },
        adapters={"base": None, "output": _output(adapter, evidence.out)},
        training_data={"source": ingestion.source, "path": locator, "sha256": ingestion.kept_corpus_sha256},
        hyperparameters=_hyperparameters(trainer),
        data=ReceiptData(
            examples_read=ingestion.rows_read,
            examples_filtered=ingestion.rows_rejected,
            examples_trained=trainer.state.global_step,
            sft_ingestion=ingestion,
        ),
        token_counts={"action_tokens": supervised * epochs, "context_tokens": (tokens - supervised) * epochs},
        steps=trainer.state.global_step,
        loss_log_sha256=loss_log_sha256(read_steps(metrics)),
        held_out=held,
        execution=_execution(trainer),
        config=msgspec.to_builtins(settings),
        config_sha256=evidence.config.sha256(*TRAIN_SECTIONS),
        previous=manifest_reference(evidence.out, "admit"),
        inputs=[ref for ref in evidence.admit.outputs if ref.kind in ("corpus", "heldout")],
        outputs=[_file(path, evidence.out, kind, plan.total_steps) for path, kind in zip(files, kinds, strict=True)],
        checkpoints=[
            CheckpointRef(name=path.name, step=step, manifest_sha256=read_checkpoint_manifest(path)[1])
            for step, path in list_checkpoints(evidence.out / "train")
        ],
    )


def _model(trainer: Trainer, evidence: Evidence) -> dict[str, Any]:
    return {
        "base_weight_shards": {
            "schema": "kiln.base-weight-shards.v1",
            "sha256": trainer.plan.base_model_sha256,
            "shards": [shard._asdict() for shard in evidence.shards],
            "total_bytes": sum(shard.size_bytes for shard in evidence.shards),
        },
        "config_sha256": trainer.binding.auxiliary_state["model_config_sha256"],
        "id": trainer.plan.base_model_id,
        "path": evidence.config.run.model.path,
    }


def _output(adapter: Adapter, out: Path) -> dict[str, Any]:
    sha256, size = adapter.files["adapter_model.safetensors"]
    return {
        "adapter_model_bytes": size,
        "adapter_model_sha256": sha256,
        "content_sha256": adapter.content_sha256,
        "path": adapter.path.relative_to(out).as_posix(),
    }


def _hyperparameters(trainer: Trainer) -> dict[str, Any]:
    config, binding = trainer.plan.config, trainer.binding
    return {
        "alpha": config.lora_alpha,
        "alpha_over_rank": config.lora_alpha / config.lora_rank,
        "epochs": config.epochs,
        "init": binding.rng_streams["lora-init"].algorithm,
        "learning_rate": config.rate,
        "loss": config.loss,
        "mode": "sft",
        "optimizer": {"kind": binding.optimizer_kind, "effective": binding.optimizer_hyperparameters},
        "profile": config.profile,
        "rank": config.lora_rank,
        "seed": str(trainer.plan.seed),
        "shuffle": binding.rng_streams["epoch-order"].algorithm,
        "target_modules": binding.auxiliary_state["lora"]["target_modules"],
    }


def _execution(trainer: Trainer) -> dict[str, Any]:
    auxiliary = trainer.binding.auxiliary_state
    return {
        **auxiliary["execution"],
        "gradient_checkpoint_plan": auxiliary["gradient_checkpoint_plan"],
        "head_probe": trainer.model.probe._asdict(),
        "loss_route": "supervised_positions",
        "precision": msgspec.to_builtins(trainer.binding.precision_policy),
    }


def _file(path: Path, out: Path, kind: str, steps: int) -> FileRef:
    sha256, size = hash_file(path)
    rows = steps if kind == "metrics" else None
    relative = Path(os.path.relpath(path, out)).as_posix()
    return FileRef(path=relative, base="run", kind=kind, sha256=sha256, bytes=size, rows=rows)
