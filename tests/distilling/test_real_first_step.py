"""The default model learns from its own scores: the first step has nothing to learn, unless they are shifted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kiln_plugins.teacher_top_k import reverse_kl
from kiln_stages import admit as stage
from kiln_stages.training import determinism
from kiln_stages.training.loop import TrainRow, supervised_positions
from kiln_stages.training.model import LanguageModel, load_language_model
from kiln_stages.training.scored_rows import LOGPROBS, TOKEN_IDS, ScoredTrainRows
from scored_corpus import ALIAS, local_identity, register_teacher
from tests_support import shared_path
from torch import Tensor

from kiln_cli.config import load_config
from kiln_cli.plugins import load_plugins

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
ROWS = 3
determinism.go_offline()
pytestmark = pytest.mark.model


@torch.no_grad()
def divergences(model: LanguageModel, row: TrainRow, shift: int) -> Tensor:
    """[n]: of each target, by the student's logits of ``shift`` positions later."""
    last = len(row.input_ids) - 1
    rows = [min(position - 1 + shift, last) for position in supervised_positions(row)]
    hidden = model.hidden(torch.tensor([row.input_ids]))[0][rows]  # [n, H]
    return reverse_kl(model.head.at(hidden, row.columns[TOKEN_IDS]), row.columns[LOGPROBS])


def test_the_first_step_has_no_divergence_at_any_position_and_a_shift_raises_it_visibly(tmp_path: Path) -> None:
    """The scores were rounded to six decimals, and made elsewhere."""
    identity = local_identity(MODEL, max_top_k=32)
    register_teacher(tmp_path, identity)
    lines = shared_path("data/opd/smollm2_teacher_rows.jsonl").read_bytes().splitlines()[:ROWS]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([identity.manifest_line(), *lines]) + b"\n")
    settings = {"file": str(path), "registry": str(tmp_path)}
    config = load_config(None, [f"model.path={MODEL}"], {"admit": settings, "distill": {"teacher": ALIAS}})
    stage.run(config, tmp_path / "run", load_plugins())
    model = load_language_model(MODEL)
    assert model.head.columns.used
    model.add_lora(16, 32.0, 42)
    rows = ScoredTrainRows(tmp_path / "run" / "admit" / "corpus.parquet")
    assert len(rows) == ROWS
    for row in rows:
        assert divergences(model, row, 0).abs().max().item() <= 1e-6
        assert divergences(model, row, 1).mean().item() > 1
