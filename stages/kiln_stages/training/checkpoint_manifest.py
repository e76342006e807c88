"""``kiln.training-checkpoint.v1``: the fields of a checkpoint's manifest, its limits, and what resume compares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.identity import canonical_json
from kiln_cli.text import printable
from kiln_stages.training.kinds import KINDS, LORA_STREAM, ORDER_STREAM, Kind
from kiln_stages.training.order import U64_MAX

MANIFEST_TYPE = "kiln.training-checkpoint.v1"
MANIFEST_LIMIT = 16 * 1024 * 1024
MAX_ARTIFACTS = 64
IDENTIFIER = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")
HEX = re.compile(r"[0-9a-f]{64}\Z")
STATELESS = frozenset({"sgd"})
ABSENT = "(absent)"
RESERVED = frozenset({".", "..", ".incomplete", "checkpoint_manifest.json"})  # no names of artifacts


def scheduler_state(profile: str, learning_rate: float) -> dict[str, Any]:
    """The update contract: a fixed rate, one conversation a step, no accumulation, warm-up or clipping."""
    return {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "none",
        "learning_rate": learning_rate,
        "microbatch_conversations": 1,
        "profile": profile,
        "warmup_steps": 0,
    }


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the manifest. Unknown fields are refused at every depth; optional fields are left out when absent."""


class PrecisionPolicy(Part, frozen=True, kw_only=True):
    parameter_dtype: str
    optimizer_state_dtype: str
    activation_dtype: str
    gradient_dtype: str
    stochastic_rounding: dict[str, Any]


class Progress(Part, frozen=True, kw_only=True):
    """``data_order``: the running epoch's permutation; empty when all is done. Epoch and cursor count from 0."""

    global_step: int
    total_steps: int
    epoch_index: int
    cursor_in_epoch: int
    data_order: list[int]


class DataPart(Part, frozen=True, kw_only=True):
    """``content_sha256``: the kept corpus, bare hex. ``item_count``: its rows."""

    source_kind: str
    content_sha256: str
    item_count: int


class RngStream(Part, frozen=True, kw_only=True):
    """A pure function of its seed (decimal text of a u64); ``position`` is the epoch for the epoch order, else 0."""

    algorithm: str
    seed: str
    position: int
    state_file: str | None = None


class OptimizerPart(Part, frozen=True, kw_only=True):
    kind: str
    step: int
    hyperparameters: dict[str, Any]
    state_file: str | None = None


class SchedulerPart(Part, frozen=True, kw_only=True):
    kind: str
    step: int
    state: dict[str, Any]


class StateFiles(Part, frozen=True, kw_only=True):
    adapter_parameters: str
    optimizer_state: str | None = None
    reference_state: str | None = None
    ema_state: str | None = None
    reward_normalization_state: str | None = None
    loss_history: str | None = None


class Artifact(Part, frozen=True, kw_only=True):
    role: str
    size_bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int = 1
    manifest_type: str = MANIFEST_TYPE
    checkpoint_kind: str = "resumable"
    checkpoint_id: str
    training_kind: str
    adapter_name: str
    created_at: str
    effective_config: dict[str, Any]
    precision_policy: PrecisionPolicy
    progress: Progress
    data: DataPart
    rng_states: dict[str, RngStream]
    optimizer: OptimizerPart
    scheduler: SchedulerPart
    state_files: StateFiles
    auxiliary_state: dict[str, Any]
    files: dict[str, Artifact]


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made of besides its place in the data. A checkpoint can be resumed only where all of it is equal.

    ``auxiliary_state`` holds identities: base weights, tokenizer, template, ingestion receipt, plugins, execution.
    """

    training_kind: str
    adapter_name: str
    effective_config: dict[str, Any]
    precision_policy: PrecisionPolicy
    data: DataPart
    total_steps: int
    optimizer_kind: str
    optimizer_hyperparameters: dict[str, Any]
    scheduler_state: dict[str, Any]
    rng_streams: dict[str, RngStream]
    auxiliary_state: dict[str, Any]


class Difference(NamedTuple):
    what: str
    checkpoint_value: str
    current_value: str


def manifest_faults(manifest: CheckpointManifest) -> list[str]:
    """What a manifest contradicts, of its limits and of itself; empty for a sound one."""
    kind = KINDS.get(manifest.training_kind)
    if kind is None:
        return [f"training_kind is {manifest.training_kind!r}, expected one of {', '.join(KINDS)}"]
    checks = [*_envelope(manifest, kind), *_steps(manifest, kind), *_streams(manifest, kind), *_artifacts(manifest)]
    return [text for text, holds in checks if not holds]


def differences(now: Binding, manifest: CheckpointManifest) -> list[Difference]:
    """All that differs between the checkpoint and what would be run now, in a fixed order."""
    then_parts, now_parts = _parts(binding_of(manifest)), _parts(now)
    found = []
    for part, value in then_parts.items():
        before, after = dict(flatten(part, value)), dict(flatten(part, now_parts[part]))
        for what in [*before, *(key for key in after if key not in before)]:
            pair = before.get(what, ABSENT), after.get(what, ABSENT)
            if pair[0] != pair[1]:
                found.append(Difference(what, *pair))
    return found


def require_same(now: Binding, manifest: CheckpointManifest, where: str) -> None:
    """Raises KilnError KLN209 with a table of every difference; there is no way to resume over one."""
    if found := differences(now, manifest):
        refuse(found, where)


def refuse(found: list[Difference], where: str) -> NoReturn:
    """Raises KilnError KLN209 with a table of the differences."""
    rows = [("", "checkpoint", "now"), *((printable(d.what), *map(printable, d[1:])) for d in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)
    plural = "thing differs" if len(found) == 1 else "things differ"
    raise KilnError(
        "KLN209",
        f"{printable(where)} cannot be resumed here: {len(found)} {plural}\n{table}",
        hint="restore what differs, or start a new training in another run directory",
        details={"differences": [difference._asdict() for difference in found]},
    )


Checks = list[tuple[str, bool]]


def _envelope(m: CheckpointManifest, kind: Kind) -> Checks:
    names = [m.checkpoint_id, m.adapter_name, m.optimizer.kind, m.scheduler.kind, *m.rng_states]
    return [
        (f"schema_version is {m.schema_version}, expected 1", m.schema_version == 1),
        (f"manifest_type is {m.manifest_type!r}, expected {MANIFEST_TYPE!r}", m.manifest_type == MANIFEST_TYPE),
        (f"checkpoint_kind is {m.checkpoint_kind!r}, expected 'resumable'", m.checkpoint_kind == "resumable"),
        ("an identifier is malformed", all(map(IDENTIFIER.match, names))),
        (
            f"data.source_kind is {m.data.source_kind!r}, expected {kind.source_kind!r}",
            m.data.source_kind == kind.source_kind,
        ),
        ("data.content_sha256 is malformed", HEX.match(m.data.content_sha256) is not None),
        (f"data.item_count is {m.data.item_count}", m.data.item_count > 0),
        (f"scheduler.kind is {m.scheduler.kind!r}, expected 'constant'", m.scheduler.kind == "constant"),
    ]


def _steps(m: CheckpointManifest, kind: Kind) -> Checks:
    step, count = m.progress.global_step, m.data.item_count
    wanted = (m.progress.epoch_index, m.progress.cursor_in_epoch)
    implied = divmod(step, count) if count > 0 else wanted
    return [
        (f"global_step {step} is outside 0..{m.progress.total_steps}", 0 <= step <= m.progress.total_steps),
        (f"optimizer.step {m.optimizer.step} != global_step {step}", m.optimizer.step == step),
        (f"scheduler.step {m.scheduler.step} != global_step {step}", m.scheduler.step == step),
        (f"checkpoint_id {m.checkpoint_id!r} is not that of step {step}", m.checkpoint_id == kind.checkpoint_id(step)),
        (f"epoch and cursor {wanted} imply another step than {step} over {count} rows", implied == wanted),
    ]


def _streams(m: CheckpointManifest, kind: Kind) -> Checks:
    streams = m.rng_states
    if set(streams) != set(kind.streams()) or not all(_is_u64(stream.seed) for stream in streams.values()):
        return [(f"rng_states must be {' and '.join(kind.streams())}, each with a u64 seed", False)]
    epoch, length = m.progress.epoch_index, len(m.progress.data_order)
    done = m.progress.global_step == m.progress.total_steps
    if not 0 <= epoch <= U64_MAX or length != (0 if done else m.data.item_count):  # else there is no order to make
        return [(f"data_order has {length} rows of {m.data.item_count} in epoch {epoch}", False)]
    order = streams.get(ORDER_STREAM)
    seed = int((order or streams[LORA_STREAM]).seed)
    expected = [] if done else list(kind.order(seed, epoch, m.data.item_count))
    positions = {name: epoch if name == ORDER_STREAM else 0 for name in streams}
    return [
        *(
            (f"{name} stands at {streams[name].position}, expected {at}", streams[name].position == at)
            for name, at in positions.items()
        ),
        (
            f"data_order is not {'the order of the file' if order is None else 'the order that the seed gives'}",
            m.progress.data_order == expected,
        ),
    ]


def _is_u64(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(U64_MAX)) and int(text) <= U64_MAX


def _artifacts(m: CheckpointManifest) -> Checks:
    named = {
        "adapter-parameters": m.state_files.adapter_parameters,
        "optimizer-state": m.state_files.optimizer_state,
        "loss-history": m.state_files.loss_history,
    }
    by_role = {artifact.role: name for name, artifact in m.files.items()}
    stateful = m.optimizer.kind not in STATELESS
    return [
        (f"{len(m.files)} files, at most {MAX_ARTIFACTS}", len(m.files) <= MAX_ARTIFACTS),
        ("a file name is no plain name", all(name not in RESERVED and IDENTIFIER.match(name) for name in m.files)),
        (
            "a file's digest or size is malformed",
            all(HEX.match(artifact.sha256) and artifact.size_bytes >= 0 for artifact in m.files.values()),
        ),
        (
            "files and state_files name different things",
            {role: name for role, name in named.items() if name is not None} == by_role
            and len(by_role) == len(m.files)
            and named["loss-history"] is not None,
        ),
        ("optimizer.state_file != state_files.optimizer_state", m.optimizer.state_file == named["optimizer-state"]),
        (
            f"optimizer {m.optimizer.kind!r} {'needs' if stateful else 'must not have'} a state file",
            stateful == (m.optimizer.state_file is not None),
        ),
    ]


def binding_of(manifest: CheckpointManifest) -> Binding:
    """What the run was made of that the checkpoint is of."""
    return Binding(
        training_kind=manifest.training_kind,
        adapter_name=manifest.adapter_name,
        effective_config=manifest.effective_config,
        precision_policy=manifest.precision_policy,
        data=manifest.data,
        total_steps=manifest.progress.total_steps,
        optimizer_kind=manifest.optimizer.kind,
        optimizer_hyperparameters=manifest.optimizer.hyperparameters,
        scheduler_state=manifest.scheduler.state,
        rng_streams=manifest.rng_states,
        auxiliary_state=manifest.auxiliary_state,
    )


def _parts(bound: Binding) -> dict[str, Any]:
    """By the names that people see. A stream's position is a place in the run, and not what the run is made of."""
    return {
        "training_kind": bound.training_kind,
        "adapter_name": bound.adapter_name,
        "config": bound.effective_config,
        "precision": bound.precision_policy,
        "data": bound.data,
        "total_steps": bound.total_steps,
        "optimizer.kind": bound.optimizer_kind,
        "optimizer": bound.optimizer_hyperparameters,
        "scheduler": bound.scheduler_state,
        "rng": {name: [stream.algorithm, stream.seed] for name, stream in bound.rng_streams.items()},
        "bound": bound.auxiliary_state,
    }


def flatten(at: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted path, canonical JSON) of every leaf; a list is one leaf."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict) and plain:
        for key in sorted(plain):
            yield from flatten(f"{at}.{key}", plain[key])
    else:
        yield at, canonical_json(plain).decode("utf-8")
