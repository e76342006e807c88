"""``detect_anomaly``: the operation that first made a NaN or an Inf, forward and backward, and nothing else changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kiln_plugins.cross_entropy import cross_entropy
from kiln_stages.training.anomaly import AnomalyWatch
from kiln_stages.training.order import epoch_order
from kiln_stages.training.trainer import Trainer
from torch import Tensor, nn
from training.tiny_models import FAMILIES, TARGETS, make_plan, tiny_causal

from kiln_cli import KilnError, LossBatch, LossOut


def caught_in(trainer: Trainer) -> KilnError:
    with pytest.raises(KilnError) as caught:
        for _ in trainer.steps():
            pass
    assert caught.value.code == "KLN104"
    return caught.value


def loss_with(more: Callable[[Tensor], Tensor]) -> Any:
    """Cross-entropy, and a term of the hidden states beside it."""

    def loss(hidden: Tensor, project: Any, batch: LossBatch) -> LossOut:
        return LossOut(loss=cross_entropy(hidden, project, batch).loss + more(hidden))

    return loss


@pytest.mark.parametrize("layer", [0, 1])
def test_an_inf_in_a_layer_is_named_with_its_operation_and_row(layer: int, model_dir: Path) -> None:
    """Torch's own mode would say nothing at all here: no gradient is NaN before the loss is."""

    class Overflowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1000).exp()

    trainer = Trainer(make_plan(model_dir, detect_anomaly=True))
    trainer.model.causal.get_submodule(f"model.layers.{layer}.mlp").act_fn = Overflowing()  # type: ignore[assignment]
    error = caught_in(trainer)
    row = epoch_order(42, 0, 4)[0] + 1
    assert f"aten.exp.default made an Inf in the forward of model.layers.{layer}.mlp.act_fn" in error.message
    assert f"step 1, row {row} (sha256:{row:064x})" in error.message
    assert trainer.state.global_step == 0


def test_a_nan_in_the_forward_is_named(model_dir: Path) -> None:
    trainer = Trainer(
        make_plan(model_dir, detect_anomaly=True, loss=loss_with(lambda h: (h.float().sum() * 0 - 1).log()))
    )
    assert "aten.log.default made a NaN in the forward of the head or the loss" in caught_in(trainer).message


def test_an_inf_made_in_the_backward_is_named(model_dir: Path) -> None:
    """sqrt at 0 has the value 0 and an infinite slope."""
    trainer = Trainer(make_plan(model_dir, detect_anomaly=True, loss=loss_with(lambda h: (h.float().sum() * 0).sqrt())))
    message = caught_in(trainer).message
    assert "made an Inf in the backward of the head or the loss (SqrtBackward0)" in message


def test_a_nan_made_in_the_backward_is_named(model_dir: Path) -> None:
    """A gradient of 0 through the same infinite slope."""
    loss = loss_with(lambda h: (h.float().sum() * 0).sqrt() * 0.0)
    message = caught_in(Trainer(make_plan(model_dir, detect_anomaly=True, loss=loss))).message
    assert "made a NaN in the backward of the head or the loss (SqrtBackward0)" in message


def test_the_backward_of_a_layer_is_named_by_the_layer(model_dir: Path) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).abs().sqrt()

    trainer = Trainer(make_plan(model_dir, detect_anomaly=True))
    trainer.model.causal.get_submodule("model.layers.1.mlp").act_fn = Flat()  # type: ignore[assignment]
    assert "in the backward of model.layers.1.mlp.act_fn (SqrtBackward0)" in caught_in(trainer).message


def test_the_first_one_is_named_not_the_last(model_dir: Path) -> None:
    """The Inf goes on through the second layer, becomes a NaN there, and reaches the loss."""
    trainer = Trainer(make_plan(model_dir, detect_anomaly=True))
    first = trainer.model.causal.get_submodule("model.layers.0.input_layernorm")
    first.register_forward_hook(lambda module, args, output: output / 0.0)
    assert "aten.div.Tensor made" in caught_in(trainer).message


def test_a_weight_that_is_not_finite_is_named(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir, detect_anomaly=True))
    weight = trainer.model.causal.get_submodule("model.layers.1.mlp.up_proj").get_parameter("base_layer.weight")
    with torch.no_grad():
        weight[3, 4] = math.inf
    assert "up_proj.base_layer.weight holds an Inf before the first step" in caught_in(trainer).message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["muon", "adam_w"])
def test_a_watched_run_has_the_same_bits(optimizer: str, dtype: str, model_dir: Path) -> None:
    settings = {"optimizer": optimizer, "dtype": dtype, "epochs": 2}
    plain, under_watch = (Trainer(make_plan(model_dir, **settings, detect_anomaly=detect)) for detect in (False, True))
    assert list(plain.steps()) == list(under_watch.steps())
    assert plain.adapter_tensors() == under_watch.adapter_tensors()


def test_a_watched_run_in_segments_has_the_same_bits(model_dir: Path) -> None:
    """Layers are computed again in the backward, and cut short there: the watch must keep its account of modules."""
    settings = {"epochs": 2, "grad_checkpoint_segments": 1}
    plain, under_watch = (Trainer(make_plan(model_dir, **settings, detect_anomaly=detect)) for detect in (False, True))
    assert list(plain.steps()) == list(under_watch.steps())
    assert plain.adapter_tensors() == under_watch.adapter_tensors()


def test_what_is_made_when_a_segment_is_computed_again_is_named_so(model_dir: Path) -> None:
    """A layer whose second run differs: the first one was sound."""

    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() / (0.0 if torch._C._current_graph_task_id() != -1 else 1.0)

    trainer = Trainer(make_plan(model_dir, detect_anomaly=True, grad_checkpoint_segments=2))
    trainer.model.causal.get_submodule("model.layers.1.mlp").act_fn = Second()  # type: ignore[assignment]
    message = caught_in(trainer).message
    assert "aten.div.Tensor made" in message
    assert "the forward of model.layers.1.mlp.act_fn, computed again in the backward" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_family_gives_a_false_alarm(kind: str, dtype: str, tmp_path: Path) -> None:
    """Attention masks hold -Inf, strict mode fills fresh memory with NaN, and neither is an anomaly."""
    tiny_causal(kind).save_pretrained(tmp_path)
    plan = make_plan(tmp_path, rows=2, epochs=1, dtype=dtype, detect_anomaly=True, target_modules=TARGETS.get(kind))
    assert len(list(Trainer(plan).steps())) == 2


def test_the_watch_leaves_nothing_behind(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir, detect_anomaly=True, epochs=1))
    list(trainer.steps())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.causal.modules())
    assert torch.tensor([1.0]).div(0).isinf().all()  # outside a step nothing is looked at


def test_a_mask_of_infs_is_no_anomaly_and_what_is_made_of_it_is() -> None:
    watch, model = AnomalyWatch(), nn.Identity()
    with watch.over(model, "step 1, row 1"):
        mask = torch.zeros(2, 2).masked_fill(torch.ones(2, 2).bool(), -math.inf)
        scores = torch.ones(2, 2) + mask
        with pytest.raises(KilnError, match=r"aten\._softmax\.default made a NaN"):
            scores.softmax(-1)
    with watch.over(model, ""):
        target = torch.ones(2)
        with pytest.raises(KilnError, match=r"aten\.div_\.Tensor made an Inf"):
            target.div_(0.0)
