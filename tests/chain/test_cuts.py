"""Forty steps, cut behind every one: what goes on is the uncut run, bit for bit. And why: what a checkpoint holds is
all of it needed. A stream, a buffer or a cursor that is left out or altered, with every hash made right again, is
refused by name or ends in other bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cut_runs import (
    FRESH,
    KINDS,
    ROWS,
    STEPS,
    End,
    admitted_project,
    end_of,
    go_on,
    plan_of,
    rehash,
    require_cuts_end_equal,
)
from kiln_stages.training.checkpoint import (
    ADAPTER,
    MANIFEST,
    OPTIMIZER,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
)
from kiln_stages.training.kinds import SFT
from kiln_stages.training.loop import StepRecord
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.order import epoch_order
from kiln_stages.training.trainer import Plan, Trainer, train_adapter
from safetensors.numpy import load_file, save_file

from kiln_cli import KilnError
from kiln_cli.manifests import document

DAMAGED = 17  # step of the checkpoint that the controls damage: cursor 7 of epoch 1
Changed = dict[str, Any]


class Uncut(NamedTuple):
    """A training in one go, a checkpoint published after each of its first 39 steps, and where it ended."""

    plan: Plan
    directory: Path
    end: End


@pytest.fixture(scope="module", params=KINDS)
def uncut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Uncut:
    project = admitted_project(tmp_path_factory.mktemp("uncut") / "project", request.param, interval=STEPS)
    plan, directory = plan_of(project), project / "train"
    trainer = Trainer(plan)

    def publish(record: StepRecord) -> None:
        if record.step < STEPS:
            trainer.publish_checkpoint(directory)

    train_adapter(trainer, directory, on_step=publish)
    assert [step for step, _ in list_checkpoints(directory)] == list(range(1, STEPS))
    return Uncut(plan, directory, end_of(trainer, directory))


def test_forty_cuts_each_gone_on_with_to_the_end(uncut: Uncut, tmp_path: Path) -> None:
    """Behind the last step there is no checkpoint: a run that is cut there does its last step again."""
    for step in range(1, STEPS + 1):
        directory = tmp_path / str(step)
        _leave(uncut, directory, logged=step, checkpoint=min(step, STEPS - 1))
        assert go_on(uncut.plan, directory) == uncut.end, f"cut behind step {step}"


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_resumed_by_fresh_processes_equal_the_uncut_run(kind: str, tmp_path: Path) -> None:
    require_cuts_end_equal(admitted_project(tmp_path / "admitted", kind), tmp_path, FRESH[kind])


def _leave(uncut: Uncut, directory: Path, *, logged: int, checkpoint: int) -> Path:
    """What a run leaves that dies behind step ``logged``, with one checkpoint, in a state to be damaged."""
    name = checkpoint_name("adapter", checkpoint)
    shutil.copytree(uncut.directory / name, directory / name)
    for path in (directory / name).iterdir():
        path.chmod(0o644)
    lines = (uncut.directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_bytes(b"".join(lines[:logged]))
    return directory / name


# Damage to state that changes the result.


def _edit_tensors(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _first(tensors: dict[str, Any], part: str) -> str:
    return next(name for name in sorted(tensors) if part in name)


def _zero(tensors: dict[str, Any], part: str) -> None:
    """Zeroes every tensor whose name ends in ``part``."""
    names = [name for name in tensors if name.endswith(part)]
    assert names, part
    tensors |= {name: np.zeros_like(tensors[name]) for name in names}


def _negate_one(tensors: dict[str, Any]) -> None:
    """The largest element of one tensor that is not all zeros."""
    array = next(tensors[name] for name in sorted(tensors) if np.any(tensors[name]))
    place = np.unravel_index(np.argmax(np.abs(array)), array.shape)
    array[place] = -array[place]


def _swap_layers(tensors: dict[str, Any]) -> None:
    names = [_first(tensors, f"layers.{layer}.self_attn.q_proj") for layer in (0, 1)]
    assert not np.array_equal(tensors[names[0]], tensors[names[1]])
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


ALTERED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "one number of the optimizer state": (OPTIMIZER, _negate_one),
    "the optimizer state of two layers swapped": (OPTIMIZER, _swap_layers),
    "one number of the adapter": (ADAPTER, _negate_one),
    "the adapter's B all zero": (ADAPTER, lambda tensors: _zero(tensors, "lora_B.weight")),
}


@pytest.mark.parametrize("damage", ALTERED)
def test_altered_tensors_that_hash_right_end_in_other_bits(damage: str, uncut: Uncut, tmp_path: Path) -> None:
    checkpoint = _leave(uncut, tmp_path, logged=DAMAGED, checkpoint=DAMAGED)
    name, edit = ALTERED[damage]
    _edit_tensors(checkpoint / name, edit)
    rehash(checkpoint)
    end = go_on(uncut.plan, tmp_path)
    assert end.adapter != uncut.end.adapter and end.log != uncut.end.log


BUFFERS = {"muon": (".momentum_buffer",), "adam_w": (".exp_avg", ".exp_avg_sq")}


def test_each_buffer_of_the_optimizer_left_at_zero_ends_in_other_bits(uncut: Uncut, tmp_path: Path) -> None:
    for part in BUFFERS[uncut.plan.config.optimizer.kind]:
        directory = tmp_path / part
        checkpoint = _leave(uncut, directory, logged=DAMAGED, checkpoint=DAMAGED)
        _edit_tensors(checkpoint / OPTIMIZER, lambda tensors, part=part: _zero(tensors, part))
        rehash(checkpoint)
        assert go_on(uncut.plan, directory).adapter != uncut.end.adapter, part


def test_a_cursor_moved_back_by_one_with_all_else_made_to_agree_ends_in_other_bits(
    uncut: Uncut, tmp_path: Path
) -> None:
    """The tensors of step 17 under the name and place of step 16: the checks cannot know, the comparison does."""
    checkpoint = _leave(uncut, tmp_path, logged=DAMAGED - 1, checkpoint=DAMAGED)
    honest = load_checkpoint(uncut.directory / checkpoint_name("adapter", DAMAGED - 1))
    manifest = json.loads((honest.path / MANIFEST).read_bytes())
    (checkpoint / SFT.loop_state_file).write_bytes((honest.path / SFT.loop_state_file).read_bytes())
    (checkpoint / MANIFEST).write_bytes(document(manifest))
    checkpoint = checkpoint.rename(checkpoint.with_name(honest.path.name))
    rehash(checkpoint)
    assert go_on(uncut.plan, tmp_path).adapter != uncut.end.adapter


# Damage that is refused, by name.


def _loop(checkpoint: Path, edit: Callable[[LoopState], object]) -> None:
    state = load_checkpoint(checkpoint).loop
    edit(state)
    (checkpoint / SFT.loop_state_file).write_bytes(document(state))


def _drop(path: Path, part: str) -> None:
    _edit_tensors(path, lambda tensors: tensors.pop(_first(tensors, part)))


def _manifest(checkpoint: Path, edit: Callable[[Changed], object]) -> None:
    value = json.loads((checkpoint / MANIFEST).read_bytes())
    edit(value)
    (checkpoint / MANIFEST).write_bytes(document(value))


def _without_optimizer(checkpoint: Path) -> None:
    (checkpoint / OPTIMIZER).unlink()
    _manifest(checkpoint, lambda m: (m["state_files"].pop("optimizer_state"), m["optimizer"].pop("state_file")))


def _with_order_of(seed: int) -> Callable[[Changed], object]:
    def edit(manifest: Changed) -> None:
        manifest["rng_states"]["epoch-order"]["seed"] = str(seed)
        manifest["progress"]["data_order"] = epoch_order(seed, 1, ROWS)

    return edit


def _swap_rows(manifest: Changed) -> None:
    order = manifest["progress"]["data_order"]
    order[0], order[1] = order[1], order[0]


def _forget_the_last_loss(state: LoopState) -> None:
    state.loss_history.pop()


def _alter_a_loss(state: LoopState) -> None:
    state.loss_history[3] += 2**-40


Refused = tuple[Callable[[Path], object], str, str]
REFUSED: dict[str, Refused] = {
    "order stream left out": (
        lambda at: _manifest(at, lambda m: m["rng_states"].pop("epoch-order")),
        "KLN215",
        "rng_states must be epoch-order and lora-init",
    ),
    "init stream left out": (
        lambda at: _manifest(at, lambda m: m["rng_states"].pop("lora-init")),
        "KLN215",
        "rng_states must be epoch-order and lora-init",
    ),
    "order stream at another epoch": (
        lambda at: _manifest(at, lambda m: m["rng_states"]["epoch-order"].update(position=0)),
        "KLN215",
        "epoch-order stands at 0, expected 1",
    ),
    "another seed of the order": (
        lambda at: _manifest(at, lambda m: m["rng_states"]["epoch-order"].update(seed="43")),
        "KLN215",
        "data_order is not the order that the seed gives",
    ),
    "another seed, and its order": (lambda at: _manifest(at, _with_order_of(43)), "KLN209", "rng.epoch-order"),
    "another seed of the first values": (
        lambda at: _manifest(at, lambda m: m["rng_states"]["lora-init"].update(seed="43")),
        "KLN209",
        "rng.lora-init",
    ),
    "another algorithm of the order": (
        lambda at: _manifest(at, lambda m: m["rng_states"]["epoch-order"].update(algorithm="mt19937")),
        "KLN209",
        "rng.epoch-order",
    ),
    "two rows of the order swapped": (
        lambda at: _manifest(at, _swap_rows),
        "KLN215",
        "data_order is not the order that the seed gives",
    ),
    "the cursor alone": (
        lambda at: _manifest(at, lambda m: m["progress"].update(cursor_in_epoch=8)),
        "KLN215",
        "imply another step than 17",
    ),
    "the cursor of the loop state": (
        lambda at: _loop(at, lambda s: setattr(s, "cursor_in_epoch", 8)),
        "KLN215",
        "current_epoch_items 7 != cursor_in_epoch 8",
    ),
    "the optimizer's step": (
        lambda at: _manifest(at, lambda m: m["optimizer"].update(step=16)),
        "KLN215",
        "optimizer.step 16 != global_step 17",
    ),
    "no optimizer state": (_without_optimizer, "KLN215", "needs a state file"),
    "one tensor of the optimizer state left out": (
        lambda at: _drop(at / OPTIMIZER, "q_proj"),
        "KLN215",
        "1 missing or unexpected tensors",
    ),
    "one tensor of the adapter left out": (
        lambda at: _drop(at / ADAPTER, "q_proj"),
        "KLN215",
        "does not fit this model",
    ),
    "a loss left out": (lambda at: _loop(at, _forget_the_last_loss), "KLN215", "16 losses for step 17"),
    "a loss altered": (lambda at: _loop(at, _alter_a_loss), "KLN215", "first_epoch_loss is"),
    "the best epoch": (
        lambda at: _loop(at, lambda s: setattr(s, "best_epoch_loss", 0.1)),
        "KLN215",
        "best_epoch_loss is",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_state_that_is_left_out_or_altered_is_refused_though_it_hashes_right(
    damage: str, uncut: Uncut, tmp_path: Path
) -> None:
    checkpoint = _leave(uncut, tmp_path, logged=DAMAGED, checkpoint=DAMAGED)
    change, code, message = REFUSED[damage]
    change(checkpoint)
    rehash(checkpoint)
    with pytest.raises(KilnError) as caught:
        go_on(uncut.plan, tmp_path)
    assert caught.value.code == code and message in caught.value.message


def test_a_whole_history_of_other_losses_is_not_that_of_the_log(uncut: Uncut, tmp_path: Path) -> None:
    """Losses, sums and means that agree with each other: the log beside them is the second witness."""
    checkpoint = _leave(uncut, tmp_path, logged=DAMAGED, checkpoint=DAMAGED)
    state = load_checkpoint(checkpoint).loop
    again = LoopState(lora_grad_norms=state.lora_grad_norms)
    for place, loss in enumerate(state.loss_history):
        again.commit(loss + 0.5 * (place == 3), {}, ROWS)
    (checkpoint / SFT.loop_state_file).write_bytes(document(again))
    rehash(checkpoint)
    with pytest.raises(KilnError, match="they agree for 3 of 17 steps") as caught:
        go_on(uncut.plan, tmp_path)
    assert caught.value.code == "KLN207"


def test_undamaged_the_same_path_leads_to_the_same_bits(uncut: Uncut, tmp_path: Path) -> None:
    """The controls above fail for their damage, not for how they are made."""
    checkpoint = _leave(uncut, tmp_path, logged=DAMAGED, checkpoint=DAMAGED)
    _edit_tensors(checkpoint / OPTIMIZER, lambda tensors: None)
    _loop(checkpoint, lambda state: None)
    rehash(checkpoint)
    assert go_on(uncut.plan, tmp_path) == uncut.end
