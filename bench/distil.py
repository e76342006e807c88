"""One step of distillation beside the full-vocabulary way: memory and time, each in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from measure import output, require_success

PROGRAM = Path(__file__).resolve().parent / "distil_step.py"
VOCABULARY, POSITIONS, CANDIDATES = 150_000, 2_048, 32


def measure() -> None:
    command = [sys.executable, str(PROGRAM), str(VOCABULARY), str(POSITIONS), str(CANDIDATES)]
    ours, full = (json.loads(output([*command, *options])) for options in ([], ["--full"]))
    require_success(["the losses of both ways"], int(abs(ours["loss"] - full["loss"]) > 1e-5 * full["loss"]))
    print(
        f"distil, one step over {VOCABULARY:,} tokens at {POSITIONS:,} positions with {CANDIDATES} candidates: "
        f"{ours['peak_mb'] / full['peak_mb']:.2f} times the memory of full logits ({ours['peak_mb']:,.0f} MB, "
        f"{full['peak_mb']:,.0f} MB), {full['seconds'] / ours['seconds']:.2f} times as fast",
        flush=True,
    )
