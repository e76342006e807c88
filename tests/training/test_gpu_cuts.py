"""Cut and resumed on a CUDA device: forty steps, ten cuts, SDPA's math and flash kernels, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kiln_stages.training.checkpoint import checkpoint_name, load_checkpoint
from kiln_stages.training.tensors import StoredTensor
from kiln_stages.training.trainer import Plan, Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel
from training.tiny_models import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEPS = 40
CUTS = (1, 5, 9, 10, 11, 20, 23, 30, 37, 39)
KERNELS = [(SDPBackend.MATH, "float32"), (SDPBackend.MATH, "bfloat16"), (SDPBackend.FLASH_ATTENTION, "bfloat16")]


def to_the_end(trainer: Trainer) -> tuple[list[float], list[StoredTensor], list[StoredTensor]]:
    for _ in trainer.steps():
        pass
    return trainer.state.loss_history, trainer.adapter_tensors(), trainer.optimizer_tensors()


@pytest.mark.parametrize("kind", ["muon", "adam_w"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_ten_cuts_on_a_cuda_device_end_in_the_same_bits(
    kernel: SDPBackend, dtype: str, kind: str, model_dir: Path, tmp_path: Path
) -> None:
    plan: Plan = make_plan(model_dir, rows=10, epochs=4, optimizer=kind, device="cuda", dtype=dtype)
    assert plan.total_steps == STEPS
    with sdpa_kernel([kernel]):
        uncut = Trainer(plan)
        for record in uncut.steps():
            if record.step in CUTS:
                uncut.publish_checkpoint(tmp_path)
        end = to_the_end(uncut)
        for step in CUTS:
            trainer = Trainer(plan)
            trainer.restore(load_checkpoint(tmp_path / checkpoint_name("adapter", step)))
            assert to_the_end(trainer) == end, f"cut behind step {step}"
