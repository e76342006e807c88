"""Forty steps, cut behind every one, each resumed by a process of its own: Muon and AdamW, conversations and scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from cut_runs import KINDS, STEPS, admitted_project, require_cuts_end_equal
from scored_run import forty_steps

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_resumed_by_a_fresh_process_equals_the_uncut_run(kind: str, tmp_path: Path) -> None:
    require_cuts_end_equal(admitted_project(tmp_path / "admitted", kind), tmp_path, range(1, STEPS + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_of_a_distillation_resumed_by_a_fresh_process_equals_the_uncut_run(kind: str, tmp_path: Path) -> None:
    require_cuts_end_equal(forty_steps(tmp_path / "admitted", kind), tmp_path, range(1, STEPS + 1))
