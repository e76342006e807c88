"""Forty steps, cut behind every one, each resumed by a process of its own: eighty processes, Muon and AdamW."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cut_runs import (
    KINDS,
    RUN,
    STEPS,
    admitted_project,
    cut_in_process,
    kiln_process,
    require_equal_runs,
    train_in_process,
)

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_resumed_by_a_fresh_process_equals_the_uncut_run(kind: str, tmp_path: Path) -> None:
    admitted = admitted_project(tmp_path / "admitted", kind)
    whole = Path(shutil.copytree(admitted, tmp_path / "whole"))
    train_in_process(whole)
    cut = [cut_in_process(admitted, tmp_path / f"cut-{step:02}", step) for step in range(1, STEPS + 1)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda project: kiln_process("resume", project / RUN), cut))
    for project, process in zip(cut, done, strict=True):
        assert process.returncode == 0, f"{project.name}: {process.stderr}"
        require_equal_runs(project, whole)
