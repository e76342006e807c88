"""Exact checkpoints: an immutable directory that holds all that the rest of a run depends on, and what it is bound to.

``{adapter}-checkpoint-step-00000016.kiln-checkpoint/`` has ``checkpoint_manifest.json``, ``adapter.safetensors``,
``sft_loop_state.json`` (of a distillation: ``opd_loop_state.json``) and, where the optimizer has state,
``optimizer.safetensors`` (float32). The manifest names every other file by size and SHA-256. Nothing here needs torch:
tensors pass through as bytes.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.files import discard_directory, publish_directory, read_sealed, write_file
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import document
from kiln_cli.text import printable
from kiln_stages.training.checkpoint_manifest import (
    MANIFEST_LIMIT,
    Artifact,
    Binding,
    CheckpointManifest,
    OptimizerPart,
    Progress,
    RngStream,
    SchedulerPart,
    StateFiles,
    manifest_faults,
)
from kiln_stages.training.kinds import KINDS, ORDER_STREAM, Kind
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.tensors import StoredTensor, encode_tensors, read_tensors

MANIFEST = "checkpoint_manifest.json"
ADAPTER, OPTIMIZER = "adapter.safetensors", "optimizer.safetensors"
SENTINEL = ".incomplete"
NAME = re.compile(r"(?P<adapter>[A-Za-z0-9_-][A-Za-z0-9._-]*)-checkpoint-step-(?P<step>[0-9]{8,})\.kiln-checkpoint\Z")
SEALED = 0o444
ARTIFACT_LIMIT = 64 * 1024**3

T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint whose every byte was checked against its manifest."""

    path: Path
    manifest: CheckpointManifest
    manifest_sha256: str  # hex
    loop: LoopState
    adapter: list[StoredTensor]
    optimizer: list[StoredTensor]  # empty for an optimizer without state


def checkpoint_name(adapter: str, step: int) -> str:
    return f"{adapter}-checkpoint-step-{step:08}.kiln-checkpoint"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a directory, ascending. Unfinished ones have other names and are not seen."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((int(match["step"]), path) for path in paths if (match := NAME.match(path.name)))


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = list_checkpoints(directory)
    return found[-1][1] if found else None


def publish_checkpoint(
    directory: Path,
    binding: Binding,
    state: LoopState,
    adapter: list[StoredTensor],
    optimizer: list[StoredTensor],
) -> Path:
    """Writes the checkpoint of ``state`` into ``directory`` and returns its path. It is there whole or not at all.

    Raises KilnError KLN206 where the step has one already, KLN402 where the disk refuses, ValueError where the parts
    contradict each other.
    """
    kind = KINDS[binding.training_kind]
    target = directory / checkpoint_name(binding.adapter_name, state.global_step)
    contents = {ADAPTER: encode_tensors(adapter), kind.loop_state_file: document(state)}
    if optimizer:
        contents[OPTIMIZER] = encode_tensors(optimizer)
    manifest = _describe(binding, state, contents)
    faults = manifest_faults(manifest) + state.faults(kind, binding.data.item_count)
    encoded = document(manifest)
    if len(encoded) > MANIFEST_LIMIT:
        faults.append(f"the manifest has {len(encoded)} bytes, more than {MANIFEST_LIMIT}")
    if faults:
        raise ValueError(f"checkpoint of step {state.global_step}: " + "; ".join(faults))

    def fill(staging: Path) -> None:
        for name, data in contents.items():
            write_file(staging / name, data, SEALED)
        _require_exact_files(staging, {*contents, SENTINEL})
        write_file(staging / MANIFEST, encoded, SEALED)

    publish_directory(target, fill)
    return target


def retire_checkpoints(directory: Path, adapter: str, keep: int) -> list[int]:
    """Removes the checkpoints of ``adapter`` but for the newest ``keep``, and returns their steps, ascending.

    The newest one is loaded first, so that one that loads is always left. Raises KilnError KLN215 where it does not,
    with nothing removed, KLN402 where the disk refuses.
    """
    found = [
        (step, path)
        for step, path in list_checkpoints(directory)
        if path.name == checkpoint_name(adapter, step) and path.is_dir() and not path.is_symlink()
    ]
    older = found[:-keep]
    if older:
        load_checkpoint(found[-1][1])
    for _, path in older:
        discard_directory(path)
    return [step for step, _ in older]


def load_checkpoint(path: Path) -> Checkpoint:
    """Loads a checkpoint after checking all of it: kind of every file, exact set, sizes, hashes, and that parts agree.

    Raises KilnError KLN215, naming the first thing that is wrong. Not a byte reaches torch before the checks are done.
    """
    manifest, manifest_sha256 = read_checkpoint_manifest(path)
    _require_exact_files(path, {*manifest.files, MANIFEST})
    contents: dict[str, bytes] = {}
    for name, artifact in sorted(manifest.files.items()):
        data = _read_sealed(path / name, min(artifact.size_bytes, ARTIFACT_LIMIT))
        found = len(data), sha256_hex(data)
        if found != (artifact.size_bytes, artifact.sha256):
            raise _unloadable(
                path,
                f"{name} has {found[0]} bytes and sha256 {found[1]}, "
                f"the manifest says {artifact.size_bytes} and {artifact.sha256}",
            )
        contents[name] = data
    loop_state = KINDS[manifest.training_kind].loop_state_file
    loop = _decode(path, loop_state, contents[loop_state], LoopState)
    faults = _loop_faults(loop, manifest)
    if faults:
        raise _unloadable(path, f"{loop_state}: " + "; ".join(faults))
    adapter = _tensors(path, ADAPTER, contents[ADAPTER])
    optimizer = _tensors(path, OPTIMIZER, contents[OPTIMIZER]) if OPTIMIZER in contents else []
    return Checkpoint(path, manifest, manifest_sha256, loop, adapter, optimizer)


def read_checkpoint_manifest(path: Path) -> tuple[CheckpointManifest, str]:
    """The validated manifest of a checkpoint directory and the hex SHA-256 of its bytes. Raises KilnError KLN215."""
    if path.is_symlink() or not path.is_dir():
        raise _unloadable(path, "it is a symbolic link" if path.is_symlink() else "there is no such directory")
    if os.path.lexists(path / SENTINEL):
        raise _unloadable(path, f"it holds {SENTINEL}: its writer did not finish")
    if not os.path.lexists(path / MANIFEST):
        raise _unloadable(path, f"{MANIFEST} is missing: adapter snapshots in PEFT's layout cannot be resumed")
    data = _read_sealed(path / MANIFEST, MANIFEST_LIMIT)
    manifest = _decode(path, MANIFEST, data, CheckpointManifest)
    faults = manifest_faults(manifest)
    roles = {name: artifact.role for name, artifact in manifest.files.items()}
    if not faults:
        layout = _roles(KINDS[manifest.training_kind])
        if any(layout.get(name) != role for name, role in roles.items()):
            faults.append(f"files and roles are {roles}, the layout has {layout}")
    name = checkpoint_name(manifest.adapter_name, manifest.progress.global_step)
    if path.name != name:
        faults.append(f"the directory is named {path.name}, its manifest says {name}")
    if faults:
        raise _unloadable(path, f"{MANIFEST}: " + "; ".join(faults))
    return manifest, sha256_hex(data)


def _roles(kind: Kind) -> dict[str, str]:
    return {ADAPTER: "adapter-parameters", OPTIMIZER: "optimizer-state", kind.loop_state_file: "loss-history"}


def _describe(binding: Binding, state: LoopState, contents: dict[str, bytes]) -> CheckpointManifest:
    step, kind, count = state.global_step, KINDS[binding.training_kind], binding.data.item_count
    seed = int(next(iter(binding.rng_streams.values())).seed)  # the streams of a training have one seed
    stateful = OPTIMIZER if OPTIMIZER in contents else None
    return CheckpointManifest(
        checkpoint_id=kind.checkpoint_id(step),
        training_kind=kind.name,
        adapter_name=binding.adapter_name,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        effective_config=binding.effective_config,
        precision_policy=binding.precision_policy,
        progress=Progress(
            global_step=step,
            total_steps=binding.total_steps,
            epoch_index=state.epoch_index,
            cursor_in_epoch=state.cursor_in_epoch,
            data_order=list(kind.order(seed, state.epoch_index, count)),
        ),
        data=binding.data,
        rng_states={
            name: RngStream(
                algorithm=stream.algorithm,
                seed=stream.seed,
                position=state.epoch_index if name == ORDER_STREAM else 0,
            )
            for name, stream in binding.rng_streams.items()
        },
        optimizer=OptimizerPart(
            kind=binding.optimizer_kind,
            step=step,
            hyperparameters=binding.optimizer_hyperparameters,
            state_file=stateful,
        ),
        scheduler=SchedulerPart(kind="constant", step=step, state=binding.scheduler_state),
        state_files=StateFiles(adapter_parameters=ADAPTER, optimizer_state=stateful, loss_history=kind.loop_state_file),
        auxiliary_state=binding.auxiliary_state,
        files={
            name: Artifact(role=_roles(kind)[name], size_bytes=len(data), sha256=sha256_hex(data))
            for name, data in sorted(contents.items())
        },
    )


def _loop_faults(loop: LoopState, manifest: CheckpointManifest) -> list[str]:
    progress = manifest.progress
    here = loop.global_step, loop.epoch_index, loop.cursor_in_epoch
    there = progress.global_step, progress.epoch_index, progress.cursor_in_epoch
    faults = loop.faults(KINDS[manifest.training_kind], manifest.data.item_count)
    if here != there:
        faults.append(f"step, epoch and cursor are {here}, the manifest says {there}")
    return faults or loop.history_faults(manifest.data.item_count)


def _require_exact_files(path: Path, expected: set[str]) -> None:
    found = {entry.name for entry in path.iterdir()}
    if found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        raise _unloadable(path, f"files are missing: {missing}; files too many: {extra}")
    for name in sorted(expected):
        status = (path / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise _unloadable(path, f"{name} is no regular file of its own (a link, or linked elsewhere)")


def _read_sealed(path: Path, limit: int) -> bytes:
    try:
        return read_sealed(path, limit)
    except KilnError as error:
        raise _unloadable(path.parent, error.message) from None


def _tensors(path: Path, name: str, data: bytes) -> list[StoredTensor]:
    try:
        return read_tensors(data, name)
    except KilnError as error:
        raise _unloadable(path, error.message) from None


def _decode(path: Path, name: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.convert(strict_json.parse_object(data), kind)
    except strict_json.JsonFault as fault:
        raise _unloadable(path, f"{name}: {fault.detail}") from None
    except msgspec.ValidationError as error:
        raise _unloadable(path, f"{name}: {error}") from None


def _unloadable(path: Path, detail: str) -> KilnError:
    return KilnError(
        "KLN215",
        f"checkpoint {printable(path)} cannot be loaded: {printable(detail, limit=600)}",
        hint="name another with --checkpoint, or train again with --fresh",
    )
