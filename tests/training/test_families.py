"""Any decoder of transformers: tiny random models of six families are trained, loaded by peft, cut and resumed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from kiln_stages.training.checkpoint import list_checkpoints, load_checkpoint
from kiln_stages.training.model import attention_of
from kiln_stages.training.trainer import Outcome, Plan, Trainer, train_adapter
from torch import Tensor
from training.tiny_models import FAMILIES, TARGETS, make_plan, make_rows, tiny_causal

# Gemma-3 with caps on its attention scores too; its own default caps only logits, and then only if asked to.
KINDS = (*FAMILIES, "gemma3 capped")
# Largest difference of logits relative to the largest: sums may be taken in another order.
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}


class Trained(NamedTuple):
    kind: str
    dtype: str
    model: Path
    run: Path
    trainer: Trainer
    outcome: Outcome


def plan_of(kind: str, dtype: str, model: Path) -> Plan:
    """Twelve steps with a checkpoint in the middle of the second epoch."""
    targets = TARGETS.get(kind.split()[0])
    return make_plan(model, dtype=dtype, epochs=3, checkpoint_interval=6, target_modules=targets)


@pytest.fixture(
    scope="module", params=[(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")], ids="-".join
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    kind, dtype = request.param
    model, run = (tmp_path_factory.mktemp(name) for name in ("model", "run"))
    family, _, capped = kind.partition(" ")
    # The family's own cap of 0.1 leaves so little of the logits that bfloat16's rounding would be most of it.
    changes = {"final_logit_softcapping": 2.0} if family == "gemma3" else {}
    tiny_causal(family, **changes, **({"attn_logit_softcapping": 2.0} if capped else {})).save_pretrained(model)
    trainer = Trainer(plan_of(kind, dtype, model))
    outcome = train_adapter(trainer, run)
    trainer.write_adapter(run / "adapter")
    return Trained(kind, dtype, model, run, trainer, outcome)


def peft_logits(trained: Trained, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of the base model and of base and adapter, loaded as any user would, in the dtype of the training
    (peft's default is to compute a bfloat16 adapter in float32)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = cast(Any, AutoModelForCausalLM).from_pretrained(
        trained.model, dtype=getattr(torch, trained.dtype), attn_implementation=attention_of(trained.model)
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plain = base(input_ids=ids).logits[0].float()
        loaded = PeftModel.from_pretrained(base, str(trained.run / "adapter"), autocast_adapter_dtype=False)
        return plain, cast(Any, loaded).eval()(input_ids=ids).logits[0].float()


def test_the_loss_falls(trained: Trained) -> None:
    losses = trained.outcome.state.loss_history
    assert len(losses) == 12
    assert sum(losses[-4:]) < sum(losses[:4])


def test_peft_loads_the_adapter_and_gives_the_trained_logits(trained: Trained) -> None:
    ids = torch.tensor([make_rows(2)[1].input_ids])
    with torch.no_grad(), trained.trainer.model.modules_own():
        wanted = trained.trainer.model.causal(input_ids=ids).logits[0].float()
    plain, found = peft_logits(trained, ids)
    largest = wanted.abs().max()
    assert (found - wanted).abs().max() / largest <= BOUNDS[trained.dtype]
    assert (plain - wanted).abs().max() / largest > BOUNDS[trained.dtype], "the adapter must matter"


def test_a_cut_run_ends_in_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    (step, path), *_ = list_checkpoints(trained.run)
    assert step == 6
    again = Trainer(plan_of(trained.kind, trained.dtype, trained.model))
    again.restore(load_checkpoint(path))
    (tmp_path / "metrics.jsonl").write_bytes((trained.run / "metrics.jsonl").read_bytes())
    outcome = train_adapter(again, tmp_path)
    assert outcome.state.loss_history == trained.outcome.state.loss_history
    assert again.adapter_tensors() == trained.trainer.adapter_tensors()


def test_scores_that_are_capped_are_never_computed_without_the_cap(trained: Trained) -> None:
    capped = trained.kind in ("gemma2", "gemma3 capped")
    assert attention_of(trained.model) == ("eager" if capped else "sdpa")
    assert trained.trainer.binding.auxiliary_state["execution"]["attention"] == attention_of(trained.model)
