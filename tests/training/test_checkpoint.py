"""Checkpoints on disk: what is written, what is refused on load, and what resume compares."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.training.checkpoint import (
    ADAPTER,
    MANIFEST,
    OPTIMIZER,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    publish_checkpoint,
)
from kiln_stages.training.checkpoint_manifest import Binding, RngStream, differences, require_same, scheduler_state
from kiln_stages.training.kinds import SFT
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.order import epoch_order
from kiln_stages.training.trainer import Trainer, require_no_later, train_adapter
from training.tiny_models import make_plan

from kiln_cli import KilnError
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import document


@pytest.fixture(scope="module")
def trainer(model_dir: Path) -> Trainer:
    return Trainer(make_plan(model_dir, checkpoint_interval=3))


@pytest.fixture(scope="module")
def directory(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training of 12 steps with checkpoints at 3, 6 and 9."""
    path = tmp_path_factory.mktemp("train")
    train_adapter(trainer, path)
    return path


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    source = list_checkpoints(directory)[1][1]
    target = tmp_path / source.name
    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def test_interval_checkpoints_are_published_but_never_for_the_last_step(directory: Path) -> None:
    assert [step for step, _ in list_checkpoints(directory)] == [3, 6, 9]
    latest = latest_checkpoint(directory)
    assert latest is not None and latest.name == "adapter-checkpoint-step-00000009.kiln-checkpoint"
    assert latest_checkpoint(directory / "absent") is None


def test_the_layout_is_that_of_the_contract(directory: Path) -> None:
    path = list_checkpoints(directory)[1][1]
    assert {entry.name for entry in path.iterdir()} == {MANIFEST, ADAPTER, OPTIMIZER, SFT.loop_state_file}
    assert all(entry.stat().st_mode & 0o777 == 0o444 for entry in path.iterdir())
    manifest = json.loads((path / MANIFEST).read_bytes())
    assert manifest["manifest_type"] == "kiln.training-checkpoint.v1"
    assert manifest["checkpoint_id"] == "sft-step-00000006"
    assert manifest["progress"] == {
        "cursor_in_epoch": 2,
        "data_order": epoch_order(42, 1, 4),
        "epoch_index": 1,
        "global_step": 6,
        "total_steps": 12,
    }
    assert {name: entry["role"] for name, entry in manifest["files"].items()} == {
        ADAPTER: "adapter-parameters",
        OPTIMIZER: "optimizer-state",
        SFT.loop_state_file: "loss-history",
    }
    assert manifest["rng_states"]["epoch-order"] == {
        "algorithm": "kiln-cli.epoch-order.v1",
        "position": 1,
        "seed": "42",
    }
    assert manifest["optimizer"]["step"] == manifest["scheduler"]["step"] == 6


def test_a_checkpoint_loads_with_its_tensors_and_history(directory: Path) -> None:
    checkpoint = load_checkpoint(list_checkpoints(directory)[1][1])
    assert checkpoint.loop.global_step == 6
    assert len(checkpoint.loop.loss_history) == 6
    assert {tensor.dtype for tensor in checkpoint.optimizer} == {"F32"}
    assert [t.name + ".momentum_buffer" for t in checkpoint.adapter] == [t.name for t in checkpoint.optimizer]
    assert checkpoint.manifest_sha256 == sha256_hex((checkpoint.path / MANIFEST).read_bytes())


def test_an_sgd_checkpoint_has_no_optimizer_file(model_dir: Path, tmp_path: Path) -> None:
    train_adapter(Trainer(make_plan(model_dir, optimizer="sgd", checkpoint_interval=3)), tmp_path)
    checkpoint = load_checkpoint(list_checkpoints(tmp_path)[0][1])
    assert checkpoint.optimizer == [] and not (checkpoint.path / OPTIMIZER).exists()


def test_published_steps_are_immutable(trainer: Trainer, directory: Path) -> None:
    checkpoint = load_checkpoint(list_checkpoints(directory)[0][1])
    args = trainer.binding, checkpoint.loop, checkpoint.adapter, checkpoint.optimizer
    with pytest.raises(KilnError, match="exists and is immutable") as caught:
        publish_checkpoint(directory, *args)
    assert caught.value.code == "KLN206"


def test_parts_that_contradict_each_other_are_not_published(trainer: Trainer, directory: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(list_checkpoints(directory)[0][1])
    checkpoint.loop.loss_history.append(1.0)
    with pytest.raises(ValueError, match="loss_history has 4 losses for step 3"):
        publish_checkpoint(tmp_path, trainer.binding, checkpoint.loop, checkpoint.adapter, checkpoint.optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [MANIFEST, ADAPTER, OPTIMIZER, SFT.loop_state_file])
def test_any_flipped_bit_is_refused(name: str, copy: Path) -> None:
    data = (copy / name).read_bytes()
    for place in sorted({0, 9, len(data) // 3, len(data) // 2, len(data) - 2}):
        (copy / name).write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        if name == MANIFEST and place != 0:
            continue  # what a manifest says of itself is not covered by it: its digest stands in the receipt
        with pytest.raises(KilnError) as caught:
            load_checkpoint(copy)
        assert caught.value.code == "KLN215"


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / ".incomplete").write_bytes(b""), "its writer did not finish"),
        (lambda p: (p / MANIFEST).unlink(), "PEFT's layout cannot be resumed"),
        (lambda p: (p / ADAPTER).unlink(), r"files are missing: \['adapter.safetensors'\]"),
        (lambda p: (p / "extra").write_bytes(b""), r"files too many: \['extra'\]"),
        (lambda p: os.link(p / ADAPTER, p.parent / "other"), "adapter.safetensors is no regular file of its own"),
        (lambda p: os.link(p / MANIFEST, p.parent / "other"), "checkpoint_manifest.json is no regular file of its own"),
        (lambda p: _replace_by_link(p / ADAPTER), "adapter.safetensors is no regular file of its own"),
        (lambda p: _replace_by_link(p / MANIFEST), "checkpoint_manifest.json: Too many levels"),
        (lambda p: _replace_by_fifo(p / MANIFEST), "checkpoint_manifest.json is no regular file"),
        (lambda p: (p / ADAPTER).write_bytes(b""), "adapter.safetensors has 0 bytes"),
        (lambda p: (p / ADAPTER).write_bytes((p / ADAPTER).read_bytes() + b" "), "adapter.safetensors has"),
        (lambda p: (p / MANIFEST).write_bytes(b" " * (16 * 1024 * 1024 + 1)), "expected at most 16777216"),
        (lambda p: (p / MANIFEST).write_bytes(b"{"), "checkpoint_manifest.json: "),
        (lambda p: (p / MANIFEST).write_bytes(b'{"a": 1, "a": 2}'), "'a' stands twice"),
    ],
)
def test_damage_is_named(damage: Damage, message: str, copy: Path) -> None:
    damage(copy)
    with pytest.raises(KilnError, match=message) as caught:
        load_checkpoint(copy)
    assert caught.value.code == "KLN215"


def test_a_link_to_a_checkpoint_is_none(copy: Path, tmp_path: Path) -> None:
    link = tmp_path / "linked" / copy.name
    link.parent.mkdir()
    link.symlink_to(copy)
    with pytest.raises(KilnError, match="symbolic link"):
        load_checkpoint(link)
    with pytest.raises(KilnError, match="no such directory"):
        load_checkpoint(tmp_path / "absent")


def test_a_renamed_checkpoint_is_refused(copy: Path) -> None:
    other = copy.rename(copy.with_name("adapter-checkpoint-step-00000005.kiln-checkpoint"))
    with pytest.raises(KilnError, match="its manifest says adapter-checkpoint-step-00000006"):
        load_checkpoint(other)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("schema_version", 2, "schema_version is 2"),
        ("manifest_type", "x", "manifest_type is 'x'"),
        ("checkpoint_kind", "weights", "checkpoint_kind"),
        ("training_kind", "grpo", "training_kind"),
        ("adapter_name", "a/b", "an identifier is malformed"),
        ("new_field", 1, "unknown field `new_field`"),
        ("progress.new_field", 1, "unknown field `new_field`"),
        ("progress.global_step", 13, "outside 0..12"),
        ("progress.global_step", 7, "imply another step"),
        ("progress.cursor_in_epoch", 3, "imply another step"),
        ("progress.data_order", [0, 1, 2, 3], "data_order is not the order that the seed gives"),
        ("progress.data_order", [], "data_order has 0 rows of 4 in epoch 1"),
        ("data.content_sha256", "sha256:" + "c" * 64, "content_sha256 is malformed"),
        ("data.item_count", 0, "item_count is 0"),
        ("rng_states.epoch-order.seed", "43", "data_order is not the order that the seed gives"),
        ("rng_states.epoch-order.seed", "-1", "each with a u64 seed"),
        ("rng_states.epoch-order.position", 0, "epoch-order stands at 0, expected 1"),
        ("rng_states.dropout", {"algorithm": "x", "position": 0, "seed": "1"}, "must be epoch-order and lora-init"),
        ("optimizer.step", 5, "optimizer.step 5 != global_step 6"),
        ("scheduler.step", 5, "scheduler.step 5 != global_step 6"),
        ("scheduler.kind", "cosine", "scheduler.kind"),
        ("optimizer.state_file", "other", "optimizer.state_file != state_files.optimizer_state"),
        ("optimizer.kind", "sgd", "optimizer 'sgd' must not have a state file"),
        ("state_files.optimizer_state", "other", "name different things"),
        ("files.adapter.safetensors.role", "rng-state", "name different things"),
        ("files.adapter.safetensors.size_bytes", -1, "digest or size is malformed"),
        ("files.adapter.safetensors.sha256", "x", "digest or size is malformed"),
        ("files...", {"role": "x", "sha256": "0" * 64, "size_bytes": 1}, "no plain name"),
        ("files..incomplete", {"role": "x", "sha256": "0" * 64, "size_bytes": 1}, "no plain name"),
        ("files.checkpoint_manifest.json", {"role": "x", "sha256": "0" * 64, "size_bytes": 1}, "no plain name"),
        ("files.../adapter.safetensors", {"role": "x", "sha256": "0" * 64, "size_bytes": 1}, "no plain name"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(at: str, value: Any, message: str, copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_bytes())
    _set(manifest, at, value)
    (copy / MANIFEST).write_bytes(document(manifest))
    with pytest.raises(KilnError, match=message) as caught:
        load_checkpoint(copy)
    assert caught.value.code == "KLN215"


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("schema_version", 2, "schema_version is 2"),
        ("state_type", "x", "state_type is 'x'"),
        ("loss_history", [1.0], "loss_history has 1 losses for step 6"),
        ("last_loss", 1.0, "last_loss is 1.0"),
        ("current_epoch_items", 1, "current_epoch_items 1 != cursor_in_epoch 2"),
        ("first_epoch_loss", None, "first and best epoch loss"),
        ("global_step", 5, "global_step 5"),
        ("extra", 1, "unknown field `extra`"),
        ("current_epoch_loss_sum", 1.5, "current_epoch_loss_sum is 1.5, the loss history gives"),
        ("first_epoch_loss", 99.0, "first_epoch_loss is 99.0, the loss history gives"),
        ("best_epoch_loss", 0.5, "best_epoch_loss is 0.5, the loss history gives"),
    ],
)
def test_a_loop_state_that_contradicts_itself_is_refused(at: str, value: Any, message: str, copy: Path) -> None:
    state = json.loads((copy / SFT.loop_state_file).read_bytes()) | {at: value}
    _seal(copy, SFT.loop_state_file, document(state))
    with pytest.raises(KilnError, match=message):
        load_checkpoint(copy)


def test_equal_things_have_no_differences(trainer: Trainer, directory: Path) -> None:
    manifest = load_checkpoint(list_checkpoints(directory)[0][1]).manifest
    assert differences(trainer.binding, manifest) == []
    require_same(trainer.binding, manifest, "it")


def test_a_number_beyond_1e16_is_bound_as_others_are(trainer: Trainer, copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_bytes())
    manifest["optimizer"]["hyperparameters"]["lr"] = 1e30
    (copy / MANIFEST).write_bytes(document(manifest))
    (found,) = differences(trainer.binding, load_checkpoint(copy).manifest)
    assert (found.what, found.checkpoint_value) == ("optimizer.lr", "1e+30")


def test_all_differences_are_gathered_in_order_with_both_values(trainer: Trainer, directory: Path) -> None:
    manifest = load_checkpoint(list_checkpoints(directory)[0][1]).manifest
    auxiliary: dict[str, Any] = json.loads(json.dumps(trainer.binding.auxiliary_state))
    auxiliary["execution"]["torch"] = "1.0"
    auxiliary["new"] = True
    del auxiliary["kiln_train_version"]
    now = msgspec.structs.replace(trainer.binding, adapter_name="other", total_steps=13, auxiliary_state=auxiliary)
    found = differences(now, manifest)
    assert [difference.what for difference in found] == [
        "adapter_name",
        "total_steps",
        "bound.execution.torch",
        "bound.kiln_train_version",
        "bound.new",
    ]
    assert found[0][1:] == ('"adapter"', '"other"')
    assert found[3].current_value == found[4].checkpoint_value == "(absent)"
    with pytest.raises(KilnError, match="5 things differ") as caught:
        require_same(now, manifest, "step 3")
    assert caught.value.code == "KLN209"
    assert "bound.execution.torch" in caught.value.message and '"1.0"' in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"training_kind": "opd"},
        {"adapter_name": "b"},
        {"effective_config": {"epochs": 4}},
        {"data": {"content_sha256": "d" * 64, "item_count": 4, "source_kind": "sft-valid-example-order-v1"}},
        {"total_steps": 16},
        {"optimizer_kind": "adam_w"},
        {"optimizer_hyperparameters": {"lr": 1.0}},
        {"scheduler_state": {"learning_rate": 1.0}},
        {"rng_streams": {"epoch-order": RngStream(algorithm="kiln-cli.epoch-order.v1", seed="1", position=0)}},
        {"auxiliary_state": {}},
    ],
)
def test_each_bound_part_alone_refuses_resume(change: dict[str, Any], trainer: Trainer, directory: Path) -> None:
    manifest = load_checkpoint(list_checkpoints(directory)[0][1]).manifest
    if "data" in change:
        change = {"data": msgspec.convert(change["data"], type(trainer.binding.data))}
    now: Binding = msgspec.structs.replace(trainer.binding, **change)
    assert differences(now, manifest)


def test_an_older_step_with_later_ones_beside_it_is_not_resumed(directory: Path) -> None:
    found = list_checkpoints(directory)
    require_no_later(directory, load_checkpoint(found[2][1]), found)
    with pytest.raises(KilnError, match="2 of later steps lie beside it") as caught:
        require_no_later(directory, load_checkpoint(found[0][1]), found)
    assert caught.value.code == "KLN215" and "move the later ones" in caught.value.hint


def test_a_loop_state_survives_json_bit_for_bit(directory: Path) -> None:
    state = load_checkpoint(list_checkpoints(directory)[2][1]).loop
    assert msgspec.json.decode(document(state), type=LoopState) == state


def test_files_under_other_names_than_the_layouts_are_refused(copy: Path) -> None:
    text = (copy / MANIFEST).read_text().replace(SFT.loop_state_file, "history.json")
    (copy / SFT.loop_state_file).rename(copy / "history.json")
    (copy / MANIFEST).write_bytes(document(json.loads(text)))
    with pytest.raises(KilnError, match=r"files and roles are .*history\.json") as caught:
        load_checkpoint(copy)
    assert caught.value.code == "KLN215"


def test_a_tensor_file_that_is_none_is_refused_though_the_manifest_vouches_for_it(copy: Path) -> None:
    _seal(copy, OPTIMIZER, b"no tensors")
    with pytest.raises(KilnError, match=r"optimizer\.safetensors is no safetensors file") as caught:
        load_checkpoint(copy)
    assert caught.value.code == "KLN215"


def test_a_link_that_leads_nowhere_is_not_written_over(trainer: Trainer, directory: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(list_checkpoints(directory)[0][1])
    link = tmp_path / checkpoint.path.name
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KilnError, match="exists and is immutable"):
        publish_checkpoint(tmp_path, trainer.binding, checkpoint.loop, checkpoint.adapter, checkpoint.optimizer)
    assert [path.name for path in tmp_path.iterdir()] == [link.name]


def _replace_by_link(path: Path) -> None:
    target = path.parent.parent / "target"
    path.rename(target)
    path.symlink_to(target)


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _seal(directory: Path, name: str, data: bytes) -> None:
    """Puts other bytes into a file and lets the manifest vouch for them."""
    (directory / name).write_bytes(data)
    manifest = json.loads((directory / MANIFEST).read_bytes())
    manifest["files"][name] |= {"sha256": sha256_hex(data), "size_bytes": len(data)}
    (directory / MANIFEST).write_bytes(document(manifest))


def _set(value: dict[str, Any], at: str, new: Any) -> None:
    """Sets a dotted path; below ``files`` the file's own name has dots."""
    if at.startswith("files."):
        rest = at.removeprefix("files.")
        if isinstance(new, dict):
            value["files"][rest] = new
            return
        name, _, key = rest.rpartition(".")
        value["files"][name][key] = new
        return
    *parents, last = at.split(".")
    for part in parents:
        value = value[part]
    value[last] = new


def test_the_schedule_is_that_of_the_contract() -> None:
    assert scheduler_state("native_online_lora_v1", 0.001) == {
        "profile": "native_online_lora_v1",
        "learning_rate": 0.001,
        "microbatch_conversations": 1,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "gradient_clipping": "none",
    }
