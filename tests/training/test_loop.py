"""The step and the epoch; and exactness: a run cut after any step and restored is the run that was never cut."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kiln_plugins.cross_entropy import cross_entropy
from kiln_stages.training.checkpoint import list_checkpoints, load_checkpoint
from kiln_stages.training.loop import (
    StepRecord,
    TrainRow,
    gradient_norms,
    require_no_divergence,
    row_loss,
    supervised_positions,
)
from kiln_stages.training.loop_state import LoopState
from kiln_stages.training.order import epoch_order
from kiln_stages.training.phases import PhaseSeconds
from kiln_stages.training.tensors import StoredTensor, adapter_content_sha256
from kiln_stages.training.trainer import Trainer, train_adapter
from torch import Tensor
from training.tiny_models import make_plan, make_rows

from kiln_cli import KilnError, LossBatch, LossOut

Run = tuple[Path, list[StepRecord], str]


@pytest.fixture(scope="module", params=["muon", "adam_w", "sgd"])
def uncut(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """Twelve steps with a checkpoint after each of the first eleven."""
    directory = tmp_path_factory.mktemp("uncut")
    trainer = Trainer(make_plan(model_dir, optimizer=request.param, checkpoint_interval=1))
    records: list[StepRecord] = []
    train_adapter(trainer, directory, on_step=records.append)
    return request.param, (directory, records, adapter_content_sha256(trainer.adapter_tensors()))


def test_every_row_is_seen_once_an_epoch_in_the_seeded_order(uncut: tuple[str, Run]) -> None:
    _, (_, records, _) = uncut
    assert [record.step for record in records] == list(range(1, 13))
    for epoch in range(3):
        seen = [record for record in records if record.epoch == epoch]
        assert [record.row_index - 1 for record in seen] == epoch_order(42, epoch, 4)
        assert [record.cursor for record in seen] == [0, 1, 2, 3]


def test_training_lowers_the_loss(uncut: tuple[str, Run]) -> None:
    kind, (_, records, _) = uncut
    first, last = (math.fsum(r.loss for r in records if r.epoch == epoch) for epoch in (0, 2))
    assert last < first, kind


@pytest.mark.parametrize("step", range(1, 12))
def test_a_run_cut_after_any_step_ends_in_the_same_bits(step: int, uncut: tuple[str, Run], model_dir: Path) -> None:
    kind, (directory, records, digest) = uncut
    trainer = Trainer(make_plan(model_dir, optimizer=kind, checkpoint_interval=1))
    trainer.restore(load_checkpoint(list_checkpoints(directory)[step - 1][1]))
    assert list(trainer.steps()) == records[step:]
    assert adapter_content_sha256(trainer.adapter_tensors()) == digest
    assert trainer.state.loss_history == [record.loss for record in records]


def test_zeroed_momentum_gives_another_adapter(uncut: tuple[str, Run], model_dir: Path) -> None:
    kind, (directory, _, digest) = uncut
    if kind == "sgd":
        pytest.skip("plain SGD has no state")
    checkpoint = load_checkpoint(list_checkpoints(directory)[5][1])
    empty = [tensor._replace(data=bytes(len(tensor.data))) for tensor in checkpoint.optimizer]
    assert _digest_after(make_trainer(kind, model_dir), checkpoint._replace(optimizer=empty)) != digest


def test_a_moved_cursor_gives_another_adapter(uncut: tuple[str, Run], model_dir: Path) -> None:
    kind, (directory, _, digest) = uncut
    trainer = make_trainer(kind, model_dir)
    trainer.restore(load_checkpoint(list_checkpoints(directory)[5][1]))
    trainer.state.global_step += 1
    for _ in trainer.steps():
        pass
    assert adapter_content_sha256(trainer.adapter_tensors()) != digest


def test_values_off_by_one_bit_give_another_adapter(uncut: tuple[str, Run], model_dir: Path) -> None:
    kind, (directory, _, digest) = uncut
    checkpoint = load_checkpoint(list_checkpoints(directory)[10][1])
    flipped = [_flip_lowest_bits(checkpoint.adapter[0]), *checkpoint.adapter[1:]]
    assert _digest_after(make_trainer(kind, model_dir), checkpoint._replace(adapter=flipped)) != digest


@pytest.mark.parametrize("change", [{"seed": 43}, {"rows": 5}, {"learning_rate": 1.1e-2}])
def test_other_inputs_give_another_adapter(change: dict[str, Any], model_dir: Path) -> None:
    digests = set()
    for plan in (make_plan(model_dir, epochs=1), make_plan(model_dir, **{"epochs": 1, **change})):
        trainer = Trainer(plan)
        assert list(trainer.steps())
        digests.add(adapter_content_sha256(trainer.adapter_tensors()))
    assert len(digests) == 2


@pytest.mark.parametrize("optimizer", ["muon", "adam_w"])
def test_bfloat16_runs_resume_exactly_too(optimizer: str, model_dir: Path, tmp_path: Path) -> None:
    whole = Trainer(make_plan(model_dir, optimizer=optimizer, dtype="bfloat16", checkpoint_interval=5))
    train_adapter(whole, tmp_path)
    resumed = Trainer(make_plan(model_dir, optimizer=optimizer, dtype="bfloat16", checkpoint_interval=5))
    resumed.restore(load_checkpoint(list_checkpoints(tmp_path)[0][1]))
    assert len(list(resumed.steps())) == 7
    assert resumed.adapter_tensors() == whole.adapter_tensors()
    assert {tensor.dtype for tensor in whole.adapter_tensors()} == {"BF16"}


def test_the_state_before_a_token_predicts_it(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir))
    row = make_rows(1)[0]
    out, batch = row_loss(trainer.model, cross_entropy, row)
    places = supervised_positions(row)
    with torch.no_grad():
        logits = trainer.model.causal(input_ids=torch.tensor([row.input_ids])).logits[0].double()
    expected = [-torch.log_softmax(logits[q - 1], -1)[row.input_ids[q]].item() for q in places]
    assert batch.targets.tolist() == [row.input_ids[q] for q in places]
    assert out.loss.item() == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)


def test_losses_match_transformers_own(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir))
    for row in make_rows(4):
        labels = torch.full((1, len(row.input_ids)), -100)
        for q in supervised_positions(row):
            labels[0, q] = row.input_ids[q]
        with torch.no_grad():
            reference = trainer.model.causal(input_ids=torch.tensor([row.input_ids]), labels=labels).loss
        assert row_loss(trainer.model, cross_entropy, row)[0].loss.item() == pytest.approx(reference.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("spans", "positions"),
    [([(0, 3)], [1, 2]), ([(1, 2), (4, 5)], [1, 4]), ([(4, 5)], [4])],
)
def test_a_labelled_first_token_has_none_before_it(spans: list[tuple[int, int]], positions: list[int]) -> None:
    assert supervised_positions(TrainRow(1, "sha256:x", [0] * 5, spans)) == positions


@pytest.mark.parametrize("spans", [[], [(0, 1)], [(3, 6)], [(2, 4), (3, 5)], [(3, 4), (1, 2)]])
def test_spans_without_a_token_out_of_the_row_or_overlapping_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(KilnError, match="row 9: label spans") as caught:
        supervised_positions(TrainRow(9, "sha256:x", [0] * 5, spans))
    assert caught.value.code == "KLN206"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_row(bad: float, model_dir: Path) -> None:
    def loss(hidden: Tensor, project: Any, batch: LossBatch) -> LossOut:
        return LossOut(loss=hidden.float().sum() * bad)

    trainer = Trainer(make_plan(model_dir, loss=loss))
    before = trainer.adapter_tensors()
    first = epoch_order(42, 0, 4)[0] + 1
    with pytest.raises(KilnError, match=rf"the loss of row {first} \(sha256:0") as caught:
        next(trainer.steps())
    assert caught.value.code == "KLN104"
    assert trainer.adapter_tensors() == before
    assert trainer.state.global_step == 0


def test_a_leaf_without_gradient_is_named(model_dir: Path) -> None:
    def loss(hidden: Tensor, project: Any, batch: LossBatch) -> LossOut:
        return LossOut(loss=next(iter(trainer.model.parameters.values())).sum())

    trainer = Trainer(make_plan(model_dir, loss=loss))
    with pytest.raises(KilnError, match=r"the gradient of base_model\S+ is missing at row") as caught:
        next(trainer.steps())
    assert caught.value.code == "KLN104"


def test_a_gradient_that_is_not_finite_is_named(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir))
    leaf = list(trainer.model.parameters.values())[3]
    leaf.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    with pytest.raises(KilnError, match="is not finite at row"):
        next(trainer.steps())


def test_a_gradient_of_a_base_weight_is_named(model_dir: Path) -> None:
    """A loss of a plugin can reach the model's head, and could switch it on."""

    def loss(hidden: Tensor, project: Any, batch: LossBatch) -> LossOut:
        trainer.model.causal.get_input_embeddings().weight.requires_grad_(True)  # type: ignore[operator,union-attr]
        return cross_entropy(hidden, project, batch)

    trainer = Trainer(make_plan(model_dir, loss=loss))
    with pytest.raises(KilnError, match=r"the gradient of model\.embed_tokens\.weight is there, though") as caught:
        next(trainer.steps())
    assert caught.value.code == "KLN104"


class Leaf(NamedTuple):
    """As much of a parameter as the check looks at: torch itself lets no gradient of another shape be assigned."""

    shape: torch.Size
    dtype: torch.dtype
    grad: Tensor | None


def leaf(gradient: Tensor | None) -> Any:
    return Leaf(torch.Size([2, 3]), torch.float32, gradient)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (None, r"the gradient of b is missing at row 1 \(sha256:0+1\)"),
        (torch.ones(3, 2), r"the gradient of b is torch\.float32 \(3, 2\), expected torch\.float32 \(2, 3\)"),
        (torch.ones(6), r"the gradient of b is torch\.float32 \(6,\), expected"),
        (torch.ones(2, 3, dtype=torch.bfloat16), r"the gradient of b is torch\.bfloat16 \(2, 3\), expected"),
        (torch.tensor([[1.0, 1, 1], [1, math.nan, 1]]), "the gradient of b is not finite"),
        (torch.tensor([[1.0, 1, 1], [1, -math.inf, 1]]), "the gradient of b is not finite"),
    ],
)
def test_the_set_of_gradients_is_exact(gradient: Tensor | None, message: str) -> None:
    row = make_rows(1)[0]
    with pytest.raises(KilnError, match=message) as caught:
        gradient_norms({"a": leaf(torch.zeros(2, 3)), "b": leaf(gradient)}, {"frozen": leaf(None)}, row)
    assert caught.value.code == "KLN104"


def test_a_gradient_of_a_frozen_parameter_is_one_too_many() -> None:
    with pytest.raises(KilnError, match="the gradient of frozen is there"):
        gradient_norms({"a": leaf(torch.zeros(2, 3))}, {"frozen": leaf(torch.zeros(2, 3))}, make_rows(1)[0])


def test_zero_gradients_and_huge_finite_ones_are_legal() -> None:
    huge = torch.full((2, 3), 3e38)
    norms = gradient_norms({"a": leaf(torch.zeros(2, 3)), "b": leaf(huge)}, {}, make_rows(1)[0])
    assert norms == {"a": 0.0, "b": pytest.approx(math.sqrt(6) * 3e38)}


def test_metrics_and_counts_of_a_loss_reach_the_record(model_dir: Path) -> None:
    def loss(hidden: Tensor, project: Any, batch: LossBatch) -> LossOut:
        out = cross_entropy(hidden, project, batch)
        return LossOut(loss=out.loss, metrics={"double": 2 * out.loss.item()}, counts={"seen": len(batch.targets)})

    record = next(Trainer(make_plan(model_dir, loss=loss)).steps())
    assert record.metrics == {"double": 2 * record.loss}
    assert record.counts == {"seen": record.supervised_tokens}


def test_the_phases_of_a_step_are_timed(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_plan(model_dir))
    outcome = train_adapter(trainer, tmp_path)
    parts = (outcome.phases.forward, outcome.phases.backward, outcome.phases.optimizer)
    assert all(part > 0 for part in parts)
    assert sum(parts) < outcome.seconds


def test_a_phase_that_fails_is_counted_too() -> None:
    phases = PhaseSeconds()
    with pytest.raises(ValueError, match="inside"), phases.timed("backward"):
        time.sleep(0.01)
        raise ValueError("inside")
    assert phases.backward >= 0.01
    assert (phases.forward, phases.optimizer) == (0.0, 0.0)


def test_held_out_loss_has_both_means_and_trains_nothing(model_dir: Path) -> None:
    trainer = Trainer(make_plan(model_dir))
    rows = make_rows(3, first=50)
    losses = [row_loss(trainer.model, cross_entropy, row)[0].loss.item() for row in rows]
    sizes = [len(supervised_positions(row)) for row in rows]
    before = trainer.adapter_tensors()
    held = trainer.held_out(rows)
    assert (held.rows, held.supervised_tokens) == (3, sum(sizes))
    assert held.mean_per_row == pytest.approx(sum(losses) / 3, rel=1e-6)
    weighted = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
    assert held.mean_per_token == pytest.approx(weighted / sum(sizes), rel=1e-6)
    assert trainer.adapter_tensors() == before
    assert trainer.held_out([]).rows == 0


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([1.0, 1.0, 20.0, 20.0], True),
        ([1.0, 1.0, 19.0, 21.0], True),  # the mean of the epoch counts
        ([1.0, 1.0, 8.0, 8.0], False),  # not above 8 times the first, though 7 above the best
        ([1.0, 1.0, 8.1, 8.1], True),
        ([0.5, 0.5, 5.5, 5.5], False),  # 11 times the first, but 5.0 above the best is not above 5
        ([0.5, 0.5, 5.6, 5.6], True),
        ([2.0, 2.0, 1.0, 1.0, 16.0, 16.0], False),  # the first epoch's mean is what 8 times counts from
        ([2.0, 2.0, 1.0, 1.0, 16.1, 16.1], True),
        ([1.0, 1.0, 20.0, 0.0], True),
        ([1.0, 1.0, 5.0, 5.0], False),
        ([0.1, 0.1, 4.0, 4.0], False),
        ([20.0, 20.0], False),  # the first epoch is never judged
        ([1.0, 1.0, 20.0], False),  # nor is an epoch that still runs
    ],
)
def test_divergence_is_judged_at_the_end_of_an_epoch(losses: list[float], diverged: bool) -> None:
    state = LoopState()
    for loss in losses:
        state.commit(loss, {}, 2)
    if not diverged:
        require_no_divergence(state, 2)
        return
    epochs, mean = len(losses) // 2, sum(losses[-2:]) / 2
    with pytest.raises(KilnError, match=rf"epoch {epochs} of the run has mean {mean:.4f}, the first") as caught:
        require_no_divergence(state, 2)
    assert caught.value.code == "KLN104"


def make_trainer(kind: str, model_dir: Path) -> Trainer:
    return Trainer(make_plan(model_dir, optimizer=kind, checkpoint_interval=1))


def _digest_after(trainer: Trainer, checkpoint: Any) -> str:
    trainer.restore(checkpoint)
    for _ in trainer.steps():
        pass
    return adapter_content_sha256(trainer.adapter_tensors())


def _flip_lowest_bits(tensor: StoredTensor) -> StoredTensor:
    """Of each float32 value: what an update adds may round one of them to the same."""
    return tensor._replace(data=bytes(byte ^ (place % 4 == 0) for place, byte in enumerate(tensor.data)))
