"""``kiln resume RUN --prove K``: steps before a checkpoint trained again and compared; nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_runs import RUN, admitted_project, rehash, train_in_process
from kiln_stages.training.checkpoint import ADAPTER, OPTIMIZER, checkpoint_name, load_checkpoint
from kiln_stages.training.kinds import SFT
from kiln_stages.training.loop_state import LoopState
from safetensors.numpy import load_file, save_file
from tiny_model import Kiln

from kiln_cli.manifests import document


@pytest.fixture(scope="module", params=["muon", "adam_w", "sgd"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps with checkpoints of 15 and 30, done."""
    project = admitted_project(tmp_path_factory.mktemp("prove") / "project", request.param)
    train_in_process(project)
    return project


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy")) / RUN


def snapshot(run: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file of a run, with the time it was last written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}


def cut(run: Path) -> None:
    """Leaves what a kill behind step 35 leaves."""
    (run / "train_receipt.json").unlink()
    shutil.rmtree(run / "train" / "adapter")
    log = run / "train" / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:35]))


@pytest.mark.parametrize("state", ["finished", "cut"])
def test_the_last_steps_before_the_newest_checkpoint_are_proven(run: Path, kiln: Kiln, state: str) -> None:
    if state == "cut":
        cut(run)
    before = snapshot(run)
    done = kiln("resume", run, "--prove", "15")
    assert done.code == 0, done.err
    start, end = checkpoint_name("adapter", 15), checkpoint_name("adapter", 30)
    assert f"proven: steps 16 to 30, trained again from {start}, give {end} bit for bit: 15 losses" in done.err
    assert snapshot(run) == before


def test_the_nearest_earlier_state_is_chosen_and_named(run: Path, kiln: Kiln) -> None:
    """One step needs no more than the checkpoint of 15; sixteen need the untrained adapter."""
    for steps, start, first in ((1, checkpoint_name("adapter", 15), 16), (16, None, 1), (30, None, 1)):
        done = kiln("resume", run, "--prove", str(steps), "--json")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert (found["start"], found["first_step"], found["last_step"]) == (start, first, 30)
        assert found["losses"] == 31 - first
        stored = load_checkpoint(run / "train" / found["checkpoint"])
        counts = len(stored.adapter), len(stored.optimizer)
        assert (found["adapter_tensors"], found["optimizer_tensors"]) == counts
    assert "from the beginning" in done.err


def test_an_older_checkpoint_can_be_proven_beside_later_ones(run: Path, kiln: Kiln) -> None:
    done = kiln("resume", run, "--prove", "3", "--checkpoint", checkpoint_name("adapter", 15))
    assert done.code == 0 and "steps 1 to 15" in done.err, done.err


def test_more_steps_than_lie_before_the_checkpoint_name_what_is_there(run: Path, kiln: Kiln) -> None:
    done = kiln("resume", run, "--prove", "31")
    assert done.code == 2 and "KLN201" in done.err
    assert "has 30 steps behind it; before it there are checkpoints of steps 15 and the beginning" in done.err
    assert "--prove 30" in done.err
    assert kiln("resume", run, "--prove", "0").code == 2


def test_a_run_without_checkpoints_has_nothing_to_prove(run: Path, kiln: Kiln) -> None:
    for step in (15, 30):
        shutil.rmtree(run / "train" / checkpoint_name("adapter", step))
    done = kiln("resume", run, "--prove", "1")
    assert done.code == 2 and "KLN215" in done.err


def _edit(path: Path, part: str, change: Callable[[Any], object]) -> None:
    tensors = load_file(path)
    change(tensors[next(name for name in sorted(tensors) if part in name)])
    path.chmod(0o644)
    save_file(tensors, path, metadata={"format": "pt"})


def _last_bit(array: Any) -> None:
    """The lowest bit of one number, and no more."""
    array.reshape(-1).view(np.uint32)[5] ^= 1


def _history(path: Path) -> None:
    state = msgspec_loop(path)
    again = LoopState(lora_grad_norms=state.lora_grad_norms)
    for place, loss in enumerate(state.loss_history):
        again.commit(float(np.nextafter(loss, 9)) if place == 21 else loss, {}, 10)
    path.chmod(0o644)
    path.write_bytes(document(again))


def _norms(path: Path) -> None:
    state = msgspec_loop(path)
    state.lora_grad_norms[0].max *= 2
    path.chmod(0o644)
    path.write_bytes(document(state))


def msgspec_loop(path: Path) -> LoopState:
    return load_checkpoint(path.parent).loop


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapter": (
        lambda at: _edit(at / ADAPTER, "layers.1.mlp.down_proj.lora_B", _last_bit),
        "behind step 30, adapter tensor base_model.model.model.layers.1.mlp.down_proj.lora_B.weight has bits",
    ),
    "loss": (lambda at: _history(at / SFT.loop_state_file), "step 22 has loss "),
    "gradient norms": (lambda at: _norms(at / SFT.loop_state_file), "behind step 30, loop.lora_grad_norms"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_bit_in_a_checkpoint_that_hashes_right_is_the_first_difference(run: Path, kiln: Kiln, change: str) -> None:
    """Such a checkpoint loads: only training the steps again can tell."""
    edit, message = CHANGES[change]
    checkpoint = run / "train" / checkpoint_name("adapter", 30)
    (checkpoint / "checkpoint_manifest.json").chmod(0o644)
    edit(checkpoint)
    rehash(checkpoint)
    load_checkpoint(checkpoint)
    done = kiln("resume", run, "--prove", "2")
    assert done.code == 1 and "KLN108" in done.err and message in done.err, done.err


def test_one_bit_of_the_optimizer_state_is_the_first_difference(run: Path, kiln: Kiln) -> None:
    checkpoint = run / "train" / checkpoint_name("adapter", 30)
    if load_checkpoint(checkpoint).manifest.optimizer.kind == "sgd":  # has no state
        assert not (checkpoint / OPTIMIZER).exists()
        return
    (checkpoint / "checkpoint_manifest.json").chmod(0o644)
    _edit(checkpoint / OPTIMIZER, "layers.0.self_attn.o_proj.lora_A", _last_bit)
    rehash(checkpoint)
    done = kiln("resume", run, "--prove", "2")
    assert done.code == 1 and "behind step 30, optimizer tensor" in done.err, done.err
    assert "at element 5" in done.err


def test_what_differs_from_the_checkpoint_is_listed_before_anything_is_trained(run: Path, kiln: Kiln) -> None:
    path = run / "config.resolved.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    done = kiln("resume", run, "--prove", "2")
    assert done.code == 2 and "KLN209" in done.err and "config.learning_rate" in done.err
