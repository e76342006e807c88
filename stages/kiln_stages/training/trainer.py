"""From plain values to a trained adapter: what ``kiln train`` and ``kiln resume`` both do, without files of a stage.

A :class:`Trainer` holds model, optimizer and loop state, and knows what they are bound to; :func:`train_adapter` drives
it through the steps that are left, keeping the log and publishing checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from kiln_cli.config import TrainConfig
from kiln_cli.errors import KilnError
from kiln_cli.extensions import LossFunction
from kiln_cli.files import write_file
from kiln_cli.identity import canonical_json
from kiln_stages.training import determinism
from kiln_stages.training.anomaly import watched
from kiln_stages.training.base_adapter import BaseAdapter, require_fit
from kiln_stages.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    publish_checkpoint,
    retire_checkpoints,
)
from kiln_stages.training.checkpoint_manifest import (
    Binding,
    DataPart,
    PrecisionPolicy,
    RngStream,
    require_same,
    scheduler_state,
)
from kiln_stages.training.kinds import OPD, SFT, Kind
from kiln_stages.training.loop import StepRecord, TrainRow, evaluate, train
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.lora import adapter_config, load_adapter, restore, store
from kiln_stages.training.metrics import begin_log
from kiln_stages.training.model import attention_of, load_language_model
from kiln_stages.training.optimizers import STATE_KEYS, build_optimizer, effective, export_state, restore_state
from kiln_stages.training.order import place
from kiln_stages.training.phases import PhaseSeconds
from kiln_stages.training.tensors import StoredTensor, adapter_content_sha256, encode_tensors, model_config_sha256
from kiln_stages.training.training_file import HeldOutLoss
from kiln_stages.training.written_adapter import require_written

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a training follows from.

    ``base_model_id`` is how the adapter names its base; ``identities`` are digests and versions of the stages before
    (ingestion receipt, tokenizer, template, plugins), which bind checkpoints along with all the rest.
    ``corpus_sha256``: of the kept rows of an admission, or the bytes of a scored corpus. ``settings``: what beside
    ``config`` decides the loss, by section; it stands in the effective config.
    """

    config: TrainConfig
    seed: int
    model_dir: Path
    base_model_id: str
    base_model_sha256: str
    rows: Sequence[TrainRow]
    corpus_sha256: str
    loss: LossFunction
    base_adapter: BaseAdapter | None = None
    kind: Kind = SFT
    settings: dict[str, Any] = {}
    identities: dict[str, Any] = {}

    @property
    def total_steps(self) -> int:
        return self.config.epochs * len(self.rows)

    def effective_config(self) -> dict[str, Any]:
        """The config with rate, seed and the optimizer's defaults written out. Seeds are decimal text."""
        value: dict[str, Any] = msgspec.to_builtins(self.config)
        optimizer = {"kind": self.config.optimizer.kind, **self.config.optimizer.resolved()}
        resolved = {"learning_rate": self.config.rate, "optimizer": optimizer, "seed": str(self.seed)}
        return value | resolved | self.settings

    def order(self, epoch: int) -> Sequence[int]:
        """Places of the rows in the order in which an epoch visits them."""
        return self.kind.order(self.seed, epoch, len(self.rows))


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter as files: where they lie, their digests and sizes by name, and the digest of the tensors."""

    path: Path
    content_sha256: str
    files: dict[str, tuple[str, int]]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How far :func:`train_adapter` came. ``stopped`` means that steps remain and ``checkpoint`` holds them."""

    state: LoopState
    first_step: int  # committed before this call
    tokens: int  # trained in this call
    supervised_tokens: int
    seconds: float  # of this call, held-out losses aside
    phases: PhaseSeconds  # of the trainer that made the steps
    stopped: bool
    checkpoint: Path | None
    removed: list[int] = []  # steps of the checkpoints that ``keep_last`` removed


class Trainer:
    """Model, optimizer and loop state of one training. Making one loads the model and puts LoRA on it.

    Raises KilnError KLN302, KLN214 or KLN301 as :func:`load_language_model` does, KLN217 for a base adapter that does
    not fit.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        determinism.fix(config.threads)
        self.plan = plan
        self.state = LoopState(state_type=plan.kind.loop_state_type)
        self.phases = PhaseSeconds()
        self.attention = attention_of(plan.model_dir)
        self.model = load_language_model(
            plan.model_dir, dtype=config.dtype, attention=self.attention, device=config.device
        )
        self.model.add_lora(config.lora_rank, config.lora_alpha, plan.seed, config.target_modules)
        if plan.base_adapter is not None:
            require_fit(plan.base_adapter, store(self.model.parameters), config.lora_rank, config.lora_alpha)
            load_adapter(self.model.parameters, plan.base_adapter.tensors)
        self._begun = {tensor.name: tensor for tensor in store(self.model.parameters) if ".lora_B." in tensor.name}
        segments = config.grad_checkpoint_segments
        self.layers_of_segments = self.model.split_layers(segments) if segments else None
        self.optimizer = build_optimizer(
            config.optimizer.kind, self.model.parameters, config.rate, config.optimizer.resolved()
        )
        self.binding = self._bind()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts the run where the checkpoint stands. Raises KilnError KLN209 with every difference, KLN215 for tensors
        that are not those of this model."""
        require_same(self.binding, checkpoint.manifest, checkpoint.path.name)
        kind, step = self.plan.config.optimizer.kind, checkpoint.loop.global_step
        try:
            load_adapter(self.model.parameters, checkpoint.adapter)
            if STATE_KEYS[kind]:
                restore_state(kind, self.optimizer, self.model.parameters, restore(checkpoint.optimizer), step)
        except (ValueError, KeyError) as error:
            raise KilnError(
                "KLN215",
                f"checkpoint {checkpoint.path.name} does not fit this model: {error}",
                hint="name another with --checkpoint",
            ) from error
        self.state = checkpoint.loop

    def steps(self) -> Iterator[StepRecord]:
        """The steps that are left; see :func:`kiln_stages.training.loop.train`."""
        plan = self.plan
        steps = train(
            self.model,
            self.optimizer,
            plan.loss,
            plan.rows,
            order=plan.order,
            epochs=plan.config.epochs,
            state=self.state,
            phases=self.phases,
        )
        return watched(steps, self.model.causal, self._next_row) if plan.config.detect_anomaly else steps

    def held_out(self, rows: Sequence[TrainRow], on_row: Callable[[], None] = lambda: None) -> HeldOutLoss:
        return evaluate(self.model, self.plan.loss, rows, on_row)

    def publish_checkpoint(self, directory: Path) -> Path:
        """An exact checkpoint of this moment, which must be between steps."""
        return publish_checkpoint(directory, self.binding, self.state, self.adapter_tensors(), self.optimizer_tensors())

    def adapter_tensors(self) -> list[StoredTensor]:
        return store(self.model.parameters)

    def optimizer_tensors(self) -> list[StoredTensor]:
        """The optimizer's state as checkpoints have it; at least one step must have been taken."""
        return store(export_state(self.plan.config.optimizer.kind, self.optimizer, self.model.parameters))

    def write_adapter(self, directory: Path) -> Adapter:
        """Writes the adapter in PEFT's layout, ``adapter_config.json`` and ``adapter_model.safetensors``, and reads it
        back. Raises KilnError KLN402 where it reads otherwise, KLN104 where nothing was trained."""
        shape = self.model.shape
        assert shape is not None, "LoRA is put on when the trainer is made"
        tensors = self.adapter_tensors()
        contents = (adapter_config(shape, self.plan.base_model_id), encode_tensors(tensors))
        written = [write_file(directory / name, data) for name, data in zip(ADAPTER_FILES, contents, strict=True)]
        require_written(directory, tensors, self._begun)
        return Adapter(
            path=directory,
            content_sha256=adapter_content_sha256(tensors),
            files={out.path.name: (out.sha256, out.size) for out in written},
        )

    def _next_row(self) -> str:
        """The row of the next step, for messages."""
        plan, step = self.plan, self.state.global_step
        epoch, cursor = place(step, len(plan.rows))
        row = plan.rows[plan.order(epoch)[cursor]]
        return f"step {step + 1}, row {row.row_index} ({row.row_sha256})"

    def _bind(self) -> Binding:
        plan, config, shape = self.plan, self.plan.config, self.model.shape
        assert shape is not None, "LoRA is put on when the trainer is made"
        seed = str(plan.seed)
        return Binding(
            training_kind=plan.kind.name,
            adapter_name=config.adapter,
            effective_config=plan.effective_config(),
            precision_policy=PrecisionPolicy(
                parameter_dtype=config.dtype,
                optimizer_state_dtype=config.dtype,
                activation_dtype=config.dtype,
                gradient_dtype=config.dtype,
                stochastic_rounding={"enabled": False},
            ),
            data=DataPart(
                source_kind=plan.kind.source_kind,
                content_sha256=plan.corpus_sha256.removeprefix("sha256:"),
                item_count=len(plan.rows),
            ),
            total_steps=plan.total_steps,
            optimizer_kind=config.optimizer.kind,
            optimizer_hyperparameters=effective(self.optimizer),
            scheduler_state=scheduler_state(config.profile, config.rate),
            rng_streams={
                name: RngStream(algorithm=algorithm, seed=seed, position=0)
                for name, algorithm in plan.kind.streams().items()
            },
            auxiliary_state={
                "base_adapter_sha256": plan.base_adapter and plan.base_adapter.content_sha256,
                "base_model_weights_sha256": plan.base_model_sha256,
                "execution": determinism.execution_identity(
                    device=config.device, dtype=config.dtype, attention=self.attention
                ),
                "gradient_checkpoint_plan": self.layers_of_segments,
                "fast_paths": self.model.fast_paths.identity(),
                **({"head_columns": self.model.head.columns.used} if plan.kind is OPD else {}),
                "head_probe": {"bound": self.model.probe.bound, "exact": self.model.probe.exact},
                "loop_state_type": plan.kind.loop_state_type,
                "lora": {"alpha": shape.alpha, "rank": shape.rank, "target_modules": list(shape.target_modules)},
                "model_config_sha256": model_config_sha256(plan.model_dir),
                **plan.identities,
            },
        )


def train_adapter(
    trainer: Trainer,
    directory: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    held_out: Sequence[TrainRow] = (),
    keep_last: int | None = None,
) -> Outcome:
    """Runs the steps that are left, logging each in ``directory/metrics.jsonl`` and publishing checkpoints there.

    Every ``heldout_interval`` steps, the last aside, the step's line has the loss on ``held_out`` as well.
    A checkpoint comes every ``checkpoint_interval`` steps, never for the last. ``stop`` is asked after each committed
    step; where it says yes and steps remain, a checkpoint is published and the run ends. Once a checkpoint is there and
    loads, those before the newest ``keep_last`` are removed; None removes nothing. Raises KilnError KLN104 for a
    loss or gradient that is not finite and for divergence, KLN402 for the disk, KLN403 for memory.
    """
    interval, total = trainer.plan.config.checkpoint_interval, trainer.plan.total_steps
    every = trainer.plan.config.heldout_interval
    started, first_step = time.monotonic(), trainer.state.global_step
    tokens = supervised = 0
    aside = 0.0
    published: Path | None = None
    removed: list[int] = []
    with begin_log(directory / "metrics.jsonl", trainer.state.loss_history) as log:
        for record in or_out_of_memory(trainer.steps()):
            line = record._asdict()
            if record.step < total and held_out and every and record.step % every == 0:
                began = time.monotonic()
                line["held_out"] = trainer.held_out(held_out)._asdict()
                aside += time.monotonic() - began
            log.append(canonical_json(line))
            on_step(record)
            tokens += record.tokens
            supervised += record.supervised_tokens
            stopping = record.step < total and stop()
            if record.step < total and (stopping or (interval and record.step % interval == 0)):
                log.sync()
                published = trainer.publish_checkpoint(directory)
                if keep_last is not None:
                    removed += retire_checkpoints(directory, trainer.plan.config.adapter, keep_last)
            if stopping:
                break
        log.sync()
    return Outcome(
        state=trainer.state,
        first_step=first_step,
        tokens=tokens,
        supervised_tokens=supervised,
        seconds=time.monotonic() - started - aside,
        phases=trainer.phases,
        stopped=trainer.state.global_step < total,
        checkpoint=published,
        removed=removed,
    )


def require_no_later(directory: Path, checkpoint: Checkpoint, later: list[tuple[int, Path]]) -> None:
    """Raises KilnError KLN215 where steps after the checkpoint's were published: their names are taken for good."""
    names = [path.name for step, path in later if step > checkpoint.loop.global_step]
    if names:
        wanted = checkpoint_name(checkpoint.manifest.adapter_name, checkpoint.loop.global_step)
        raise KilnError(
            "KLN215",
            f"{wanted} is not the newest checkpoint: {len(names)} of later steps lie beside it, up to {names[-1]}",
            hint=f"resume the newest, or move the later ones out of {directory.name}/ first",
        )


def or_out_of_memory(steps: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """The same steps; an allocation that fails becomes KilnError KLN403, on the CPU as on an accelerator."""
    try:
        yield from steps
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's allocator raises a bare one
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise KilnError(
                "KLN403", f"out of memory in a training step: {error}", hint="lower [admit] max_tokens"
            ) from error
        raise
