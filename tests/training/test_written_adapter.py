"""The adapter on disk is the one that was trained: report A1, an adapter file of 443 bytes after a full run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kiln_stages import train, verify_receipt
from kiln_stages.training import trainer as trainer_module
from kiln_stages.training.tensors import StoredTensor, encode_tensors, read_tensors
from kiln_stages.training.trainer import Trainer
from kiln_stages.training.written_adapter import require_written
from training.admitted_run import admitted_run
from training.tiny_models import make_plan

from kiln_cli import KilnError
from kiln_cli.config import load_config
from kiln_cli.files import AtomicFile
from kiln_cli.plugins import Plugins

Change = Callable[[list[StoredTensor]], list[StoredTensor]]
MODEL = "adapter_model.safetensors"


def no_tensors(tensors: list[StoredTensor]) -> list[StoredTensor]:
    return []


def zero_b(tensors: list[StoredTensor]) -> list[StoredTensor]:
    return [one._replace(data=bytes(len(one.data))) if ".lora_B." in one.name else one for one in tensors]


def one_missing(tensors: list[StoredTensor]) -> list[StoredTensor]:
    return tensors[1:]


def one_reshaped(tensors: list[StoredTensor]) -> list[StoredTensor]:
    return [tensors[0]._replace(shape=tensors[0].shape[::-1]), *tensors[1:]]


def one_bit_flipped(tensors: list[StoredTensor]) -> list[StoredTensor]:
    first = tensors[0]
    return [first._replace(data=bytes([first.data[0] ^ 1]) + first.data[1:]), *tensors[1:]]


def one_renamed(tensors: list[StoredTensor]) -> list[StoredTensor]:
    return [tensors[0]._replace(name="base_model.other.lora_A.weight"), *tensors[1:]]


CHANGES: list[Change] = [no_tensors, zero_b, one_missing, one_reshaped, one_bit_flipped, one_renamed]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Path:
    """A finished run of two steps."""
    directory = tmp_path_factory.mktemp("a1")
    _, out = admitted_run(directory, rows=2)
    train.run(load_config(directory / "kiln.toml", ["train.epochs=1"]), out, plugins)
    return out


@pytest.mark.parametrize("change", CHANGES)
def test_a1_verify_catches_an_adapter_that_was_swapped(change: Change, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    assert verify_receipt.run(out).named("fails") == []
    path = out / "train" / "adapter" / MODEL
    path.write_bytes(encode_tensors(change(read_tensors(path.read_bytes()))))
    failing = {claim.name for claim in verify_receipt.run(out).claims if claim.status == "fails"}
    assert {f"train/adapter/{MODEL} has its digest", "adapter tensors have their content digest and norms"} <= failing
    untrained = "the adapter was trained: it has tensors, and a LoRA-B that is not zero"
    assert (untrained in failing) == (change in (no_tensors, zero_b))


@pytest.mark.parametrize("change", CHANGES)
def test_a1_an_adapter_that_reads_back_otherwise_is_an_error(
    change: Change, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is changed between being written and being read: a state dict filtered twice, say."""
    trainer = Trainer(make_plan(model_dir, epochs=1))
    list(trainer.steps())

    def write(path: Path, data: bytes) -> AtomicFile:
        written = real(path, data)
        if path.name == MODEL:
            path.write_bytes(encode_tensors(change(read_tensors(data))))
        return written

    real = trainer_module.write_file
    monkeypatch.setattr(trainer_module, "write_file", write)
    with pytest.raises(KilnError, match="reads back otherwise than it was written: base_model") as caught:
        trainer.write_adapter(tmp_path)
    assert caught.value.code == "KLN402"


def test_a1_an_adapter_that_was_never_trained_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="every LoRA-B as it was before the first step") as caught:
        Trainer(make_plan(model_dir)).write_adapter(tmp_path)
    assert caught.value.code == "KLN104"


def test_a1_an_adapter_without_tensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(encode_tensors([]))
    with pytest.raises(KilnError, match="holds no tensor") as caught:
        require_written(tmp_path, [], {})
    assert caught.value.code == "KLN104"


def test_one_lora_b_that_moved_is_enough(tmp_path: Path) -> None:
    """A zero gradient of a leaf is legal."""
    begun = [StoredTensor(f"m.{name}.lora_B.weight", "F32", (1,), bytes(4)) for name in "ab"]
    trained = [begun[0], begun[1]._replace(data=b"\0\0\0\1")]
    (tmp_path / MODEL).write_bytes(encode_tensors(trained))
    require_written(tmp_path, trained, {tensor.name: tensor for tensor in begun})


def test_a2_a_failing_step_behind_the_training_leaves_the_adapter(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the last step may fail; the trained tensors are on disk by then."""
    config, out = admitted_run(tmp_path / "project", rows=2)

    def fail(*args: object) -> Iterator[object]:
        raise KilnError("KLN402", "the network is unreachable")

    monkeypatch.setattr("kiln_stages.training.run_training.describe", fail)
    with pytest.raises(KilnError, match="unreachable"):
        train.run(config, out, plugins)
    tensors = read_tensors((out / "train" / "adapter" / MODEL).read_bytes())
    assert any(any(one.data) for one in tensors if ".lora_B." in one.name)
