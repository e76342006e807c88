"""Reports R1, R2, R4, R6, R7 and H1 of other tools' users: resuming, and what an adapter's identity is."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import ROWS, RUN, End, admitted_project, cut_in_process, end_of, go_on, plan_of, rehash, train_in_process
from kiln_stages import verify_receipt
from kiln_stages.training.checkpoint import ADAPTER, checkpoint_name, load_checkpoint
from kiln_stages.training.loop import StepRecord
from kiln_stages.training.tensors import adapter_content_sha256, read_tensors
from kiln_stages.training.trainer import Plan, Trainer, train_adapter
from safetensors.numpy import load_file, save_file
from tiny_model import Kiln

from kiln_cli import KilnError
from kiln_cli.config import load_config
from kiln_cli.manifests import read_receipt

STEPS = 3 * ROWS
MODEL = "train/adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows, three epochs, a checkpoint behind every step, and a base whose config asks for dropout."""
    project = admitted_project(tmp_path_factory.mktemp("reports") / "project", "adam_w", epochs=3, interval=1)
    path = project / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.1}))
    return project


@pytest.fixture(scope="module")
def plan(admitted: Path) -> Plan:
    return plan_of(admitted)


@pytest.fixture(scope="module")
def uncut(plan: Plan, admitted: Path) -> tuple[Path, End]:
    directory = admitted / "uncut"
    trainer = Trainer(plan)
    train_adapter(trainer, directory)
    return directory, end_of(trainer, directory)


def leave(directory: Path, uncut: Path, step: int) -> Path:
    """What a kill behind ``step`` leaves."""
    name = checkpoint_name("adapter", step)
    shutil.copytree(uncut / name, directory / name)
    lines = (uncut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_bytes(b"".join(lines[:step]))
    return directory / name


def rows_of(log: bytes) -> list[int]:
    return [json.loads(line)["row_index"] for line in log.splitlines()]


def test_r1_rows_behind_a_cut_in_the_second_epoch_are_the_uncut_runs(
    plan: Plan, uncut: tuple[Path, End], tmp_path: Path
) -> None:
    directory, end = uncut
    leave(tmp_path, directory, 18)
    assert go_on(plan, tmp_path) == end
    rows = rows_of(end.log)
    epochs = [rows[at : at + ROWS] for at in range(0, STEPS, ROWS)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == ROWS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "an order of its own each epoch: one repeated would be seen"


@pytest.mark.parametrize("step", [10, 15])
def test_r2_no_stream_of_the_process_touches_a_step_at_an_epochs_end_or_within(
    step: int, plan: Plan, uncut: tuple[Path, End], tmp_path: Path
) -> None:
    """The base's config asks for dropout of 0.1; the model is not in training mode, so nothing is drawn. Other states
    of every generator of the process give the same losses and tensors."""
    directory, end = uncut
    checkpoint = leave(tmp_path, directory, step)
    trainer = Trainer(plan)
    trainer.restore(load_checkpoint(checkpoint))
    random.seed(step)
    np.random.seed(step)  # the stream that libraries would draw from
    torch.manual_seed(step)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    train_adapter(trainer, tmp_path)
    assert end_of(trainer, tmp_path) == end
    assert torch.equal(torch.get_rng_state(), before[0]), "nothing was drawn"
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]


@pytest.mark.parametrize(
    ("report", "key", "value"),
    [
        ("r1", "per_device_train_batch_size", "2"),
        ("r2", "lora_dropout", "0.1"),
        ("r4", "warmup_steps", "4"),
        ("r4", "lr_scheduler_type", "cosine"),
        ("r6", "batch_size", "2"),
        ("r6", "gradient_accumulation_steps", "2"),
        ("r7", "modules_to_save", '["embed_tokens", "lm_head"]'),
    ],
)
def test_r1_r2_r4_r6_r7_what_the_profile_does_not_have_is_refused_by_name(
    report: str, key: str, value: str, admitted: Path, kiln: Kiln
) -> None:
    done = kiln("train", admitted / "kiln.toml", "--out", admitted / RUN, "--set", f"train.{key}={value}")
    assert done.code == 2 and "KLN203" in done.err and f"train.{key}" in done.err
    assert "native_online_lora_v1" in done.err, "and why"


def test_r4_the_rate_is_the_same_before_and_behind_a_cut(plan: Plan, uncut: tuple[Path, End], tmp_path: Path) -> None:
    leave(tmp_path, uncut[0], 6)
    trainer = Trainer(plan)
    trainer.restore(load_checkpoint(tmp_path / checkpoint_name("adapter", 6)))
    rates: list[float] = []

    def note(record: StepRecord) -> None:
        rates.extend(group["lr"] for group in trainer.optimizer.param_groups)

    train_adapter(trainer, tmp_path, on_step=note)
    assert rates == [0.01] * (STEPS - 6)
    states = [load_checkpoint(tmp_path / checkpoint_name("adapter", step)).manifest.scheduler for step in (6, 7, 29)]
    assert [state.step for state in states] == [6, 7, 29]
    assert all(state.state == states[0].state for state in states), "steps are counted once"


@pytest.fixture
def cut(admitted: Path, tmp_path: Path) -> Path:
    """The same training, cut behind step 6."""
    return cut_in_process(admitted, tmp_path / "cut", 6) / RUN


def edit(run: Path, old: str, new: str) -> None:
    path = run / "config.resolved.toml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def refused(run: Path, kiln: Kiln, *parts: str) -> None:
    before = {path: path.read_bytes() for path in (run / "train").rglob("*") if path.is_file()}
    done = kiln("resume", run)
    assert done.code == 2, done.err
    for part in parts:
        assert part in done.err, done.err
    assert {path: path.read_bytes() for path in (run / "train").rglob("*") if path.is_file()} == before


def test_r4_another_number_of_epochs_is_refused_with_both(cut: Path, kiln: Kiln) -> None:
    edit(cut, "epochs = 3", "epochs = 4")
    refused(cut, kiln, "KLN209", "config.epochs", "total_steps")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("threads = 1", "threads = 2", ("KLN209", "config.threads", "bound.execution.threads_intra_op")),
        ("[train]\n", "[train]\nbatch_size = 1\n", ("KLN203", "train.batch_size")),
        ("[train]\n", "[train]\ngradient_accumulation_steps = 2\n", ("KLN203", "train.gradient_accumulation_steps")),
    ],
)
def test_r6_another_way_to_spread_the_steps_is_refused_before_anything_is_loaded(
    old: str, new: str, names: tuple[str, ...], cut: Path, kiln: Kiln
) -> None:
    edit(cut, old, new)
    refused(cut, kiln, *names)


def test_r7_other_trained_layers_are_refused_with_both_lists(cut: Path, kiln: Kiln) -> None:
    edit(cut, "[train]\n", '[train]\ntarget_modules = ["q_proj", "down_proj"]\n')
    refused(cut, kiln, "KLN209", "bound.lora.target_modules", '["down_proj","q_proj"]', '"gate_proj"')


def _add(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.lm_head.weight"] = np.zeros((2, 2), np.float32)


def _remove(tensors: dict[str, Any]) -> None:
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]


@pytest.mark.parametrize(
    ("change", "name"), [(_add, "lm_head.weight"), (_remove, "layers.1.mlp.up_proj.lora_B.weight")]
)
def test_r7_another_set_of_parameters_is_refused_by_name_before_the_optimizer_is_touched(
    change: Callable[[dict[str, Any]], None], name: str, plan: Plan, uncut: tuple[Path, End], tmp_path: Path
) -> None:
    checkpoint = leave(tmp_path, uncut[0], 6)
    for path in checkpoint.iterdir():
        path.chmod(0o644)
    tensors = load_file(checkpoint / ADAPTER)
    change(tensors)
    save_file(tensors, checkpoint / ADAPTER, metadata={"format": "pt"})
    rehash(checkpoint)
    trainer = Trainer(plan)
    with pytest.raises(KilnError, match=name.replace(".", r"\.")) as caught:
        trainer.restore(load_checkpoint(checkpoint))
    assert caught.value.code == "KLN215"
    assert not trainer.optimizer.state


SAVE = """
import sys
from safetensors.numpy import load_file, save_file
save_file(load_file(sys.argv[1]), sys.argv[2], metadata={"format": "pt", "a": "1", "b": "2"})
"""


def test_h1_an_adapter_is_what_its_tensors_are_however_its_header_is_ordered(admitted: Path, tmp_path: Path) -> None:
    """Saved by two processes with three metadata keys; and trained twice, where the very bytes are the same."""
    runs = []
    for name in ("one", "two"):
        project = Path(shutil.copytree(admitted, tmp_path / name))
        train_in_process(project)
        runs.append(project / RUN)
        assert [claim for claim in verify_receipt.run(project / RUN).claims if claim.status == "fails"] == []
    outputs = [read_receipt(run / "train_receipt.json").adapters["output"] for run in runs]
    assert outputs[0] == outputs[1]
    assert (runs[0] / MODEL).read_bytes() == (runs[1] / MODEL).read_bytes()
    for name in ("a", "b"):
        path = tmp_path / f"{name}.safetensors"
        subprocess.run([sys.executable, "-c", SAVE, runs[0] / MODEL, path], check=True)
        data = path.read_bytes()
        assert data != (runs[0] / MODEL).read_bytes(), "the file is another, which its digest tells"
        assert adapter_content_sha256(read_tensors(data)) == outputs[0]["content_sha256"]


def test_h1_one_flipped_bit_of_a_weight_fails_both_facts(admitted: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(admitted, tmp_path / "flipped"))
    train_in_process(project)
    path = project / RUN / MODEL
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    failing = [claim.name for claim in verify_receipt.run(project / RUN).claims if claim.status == "fails"]
    assert f"{MODEL} has its digest" in failing
    assert any(name.startswith("adapter tensors have their content digest") for name in failing)


def test_the_reports_config_is_read_as_written(admitted: Path) -> None:
    """The base of these tests does ask for dropout, so that R2 is no empty case."""
    assert json.loads((admitted / "model" / "config.json").read_text())["attention_dropout"] == 0.1
    assert load_config(admitted / "kiln.toml").run.train.epochs == 3
