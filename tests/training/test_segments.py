"""``grad_checkpoint_segments``: less memory, the same bits, and a plan that the checkpoint is bound to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kiln_plugins.cross_entropy import cross_entropy
from kiln_stages.training.checkpoint import list_checkpoints, load_checkpoint
from kiln_stages.training.fast_paths import ReadRows
from kiln_stages.training.loop import row_loss
from kiln_stages.training.segments import split_layers
from kiln_stages.training.trainer import Trainer, train_adapter
from torch import Tensor, nn
from training.tiny_models import FAMILIES, TARGETS, make_plan, make_rows, tiny_causal

from kiln_cli import KilnError


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of five layers."""
    path = tmp_path_factory.mktemp("deep")
    tiny_causal("llama", num_hidden_layers=5).save_pretrained(path)
    return path


def kept_bytes(trainer: Trainer) -> int:
    """What the forward pass of one row keeps for the backward, as far as autograd is handed it."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.causal.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, _ = row_loss(trainer.model, cross_entropy, make_rows(1)[0])
    assert out.loss.requires_grad
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_losses_and_gradients_have_the_same_bits(segments: int, dtype: str, deep_model: Path) -> None:
    plain = Trainer(make_plan(deep_model, epochs=2, dtype=dtype))
    split = Trainer(make_plan(deep_model, epochs=2, dtype=dtype, grad_checkpoint_segments=segments))
    for expected, found in zip(plain.steps(), split.steps(), strict=True):
        assert found == expected
        for name, parameter in plain.model.parameters.items():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, split.model.parameters[name].grad), name  # type: ignore[arg-type]
    assert split.adapter_tensors() == plain.adapter_tensors()


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_can_be_split(kind: str, tmp_path: Path) -> None:
    tiny_causal(kind).save_pretrained(tmp_path)
    runs = []
    for segments in (None, 1, 2):
        plan = make_plan(
            tmp_path, rows=2, epochs=1, target_modules=TARGETS.get(kind), grad_checkpoint_segments=segments
        )
        trainer = Trainer(plan)
        runs.append((list(trainer.steps()), trainer.adapter_tensors()))
    assert runs[0] == runs[1] == runs[2]


def test_less_is_kept_for_the_backward(deep_model: Path) -> None:
    whole, five, one = (
        kept_bytes(Trainer(make_plan(deep_model, grad_checkpoint_segments=segments))) for segments in (None, 5, 1)
    )
    assert one < five < whole / 3


@pytest.mark.parametrize("segments, sizes", [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1, 1, 1, 1, 1])])
def test_segments_are_as_equal_as_can_be(segments: int, sizes: list[int], deep_model: Path) -> None:
    trainer = Trainer(make_plan(deep_model, grad_checkpoint_segments=segments))
    assert trainer.binding.auxiliary_state["gradient_checkpoint_plan"] == sizes


def test_more_segments_than_layers_are_refused(deep_model: Path) -> None:
    with pytest.raises(KilnError, match="= 6 is more than the model's 5 decoder layers") as caught:
        Trainer(make_plan(deep_model, grad_checkpoint_segments=6))
    assert caught.value.code == "KLN214"


def test_a_checkpoint_is_bound_to_the_plan(deep_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_interval": 5, "epochs": 2}
    whole = Trainer(make_plan(deep_model, grad_checkpoint_segments=2, **settings))
    train_adapter(whole, tmp_path)
    checkpoint = load_checkpoint(list_checkpoints(tmp_path)[0][1])
    again = Trainer(make_plan(deep_model, grad_checkpoint_segments=2, **settings))
    again.restore(checkpoint)
    assert len(list(again.steps())) == 3
    assert again.adapter_tensors() == whole.adapter_tensors()
    with pytest.raises(KilnError) as caught:
        Trainer(make_plan(deep_model, grad_checkpoint_segments=3, **settings)).restore(checkpoint)
    assert caught.value.code == "KLN209"
    lines = [line.split() for line in caught.value.message.splitlines()[2:]]
    assert ["bound.gradient_checkpoint_plan", "[3,2]", "[2,2,1]"] in lines
    assert ["config.grad_checkpoint_segments", "2", "3"] in lines


def test_a_decoder_that_works_between_its_layers_is_refused(deep_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is only collected hands on what it got; whoever looks at it in between sees something else."""
    trainer = Trainer(make_plan(deep_model))
    layers = trainer.model.causal.get_submodule("model.layers")
    layers[1].register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[index]
    with pytest.raises(KilnError, match="its layers give other hidden states in segments") as caught:
        trainer.model.split_layers(1)
    assert caught.value.code == "KLN214"


def test_a_decoder_whose_layers_are_in_no_list_is_refused() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = tiny_causal("llama").config
            self.layers = nn.ModuleDict({"one": nn.Identity(), "two": nn.Identity()})

    with pytest.raises(KilnError, match="2 decoder layers cannot be told: 0 lists"):
        split_layers(Decoder(), 1, ReadRows())
