"""`kiln train` beside TRL's SFTTrainer: same model, same rows in the same order, one a step, AdamW, same first adapter.

Both stay loaded and make blocks of steps by turns, each on the block that the other has just made or is about to make.
What is compared is a block's time from its first step to its last; imports, loading and preparation lie before.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from measure import cost, output, require_success, spread
from steps_on_demand import Worker

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "smollm2-135m-instruct"
CONFIG = HERE.parent / "fixtures" / "demo.toml"
THREADS, WARM_UP, BLOCK = 2, 2, 5
RATE = 3e-4  # of the demo's config
LONG, FEWER, POSITIONS = 150_000, 100_000, 2_048


def measure(folder: Path, pairs: int, trl_python: Path | None) -> None:
    run = admitted(folder)
    for dtype in ("bfloat16", "float32"):
        kiln_worker, place = kiln(folder, run, dtype, "adam_w")
        theirs = None if trl_python is None else trl(trl_python, run, place, dtype)
        if theirs is None:
            print("train against TRL: not measured, since no --trl-python is given (`make bench` gives one)")
        compare(dtype, kiln_worker, theirs, pairs)
        muon(folder, run, dtype)
    long_vocabulary()


def admitted(folder: Path) -> Path:
    """The demo's rows, prepared and admitted."""
    run = folder / "train-run"
    for stage in ("prepare", "admit"):
        cost([sys.executable, "-m", "kiln_cli.app", "--quiet", stage, str(CONFIG), "--out", str(run)])
    return run


def kiln(folder: Path, run: Path, dtype: str, optimizer: str) -> tuple[Worker, Path]:
    place = folder / f"train-{dtype}-{optimizer}"
    place.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "training_kiln.py"), str(CONFIG), str(run), str(place)]
    return Worker([*command, "--dtype", dtype, "--optimizer", optimizer, "--threads", str(THREADS)]), place


def trl(python: Path, run: Path, place: Path, dtype: str) -> Worker:
    command = [
        str(python),
        str(HERE / "training_trl.py"),
        str(MODEL),
        str(run / "admit" / "corpus.parquet"),
        str(place),
    ]
    return Worker([*command, "--dtype", dtype, "--rate", str(RATE), "--threads", str(THREADS)])


def compare(dtype: str, ours: Worker, theirs: Worker | None, pairs: int) -> None:
    sides = [ours] if theirs is None else [ours, theirs]
    for side in sides:
        side.make(WARM_UP)
    blocks = [[side.make(BLOCK) for side in sides] for _ in range(pairs)]
    mine = [block[0] for block in blocks]
    last = [side.end() for side in sides]
    speed = statistics.median(block["tokens"] / block["seconds"] for block in mine)
    count = sum(block["tokens"] for block in mine) / pairs / BLOCK
    print(f"train, {dtype}, {pairs} x {BLOCK} steps of {count:.0f} tokens: kiln {speed:.0f} tokens/s", flush=True)
    print(
        f"train, {dtype}, share of the arithmetic limit: {speed / last[0]['limit_tokens_per_second']:.2f} "
        f"({last[0]['limit_tokens_per_second']:.0f} tokens/s; the products with base weights and head alone, "
        f"{last[0]['gigaflops_per_second']:.0f} GFLOP/s, {last[0]['gigaflops_per_token']:.2f} GFLOP a token)",
        flush=True,
    )
    if theirs is not None:
        report(dtype, mine, [block[1] for block in blocks], last)


def report(dtype: str, mine: list[Any], others: list[Any], last: list[Any]) -> None:
    both = list(zip(mine, others, strict=True))
    clock = spread([other["seconds"] / one["seconds"] for one, other in both])
    processor = spread([other["processor"] / one["processor"] for one, other in both])
    print(f"train, {dtype}, kiln over TRL: {clock}; by processor time {processor}")
    steps = [pair for one, other in both for pair in zip(one["losses"], other["losses"], strict=True)]
    apart = max(abs(one - other) / other for one, other in steps)
    print(f"train, {dtype}, losses of {len(steps)} steps: at most {apart:.1e} apart, relative to TRL's")
    print(
        f"train, {dtype}, peak memory over TRL's: {last[0]['peak_mb'] / last[1]['peak_mb']:.2f} "
        f"({last[0]['peak_mb']:,.0f} MB, {last[1]['peak_mb']:,.0f} MB)",
        flush=True,
    )


def muon(folder: Path, run: Path, dtype: str) -> None:
    """What an update costs beside AdamW's, by turns."""
    workers = [kiln(folder, run, dtype, optimizer)[0] for optimizer in ("muon", "adam_w")]
    for worker in workers:
        worker.make(WARM_UP)
    pairs = [[worker.make(BLOCK) for worker in workers] for _ in range(2)]
    for worker in workers:
        worker.end()
    spent = [statistics.median(pair[side]["optimizer_seconds"] for pair in pairs) / BLOCK * 1000 for side in (0, 1)]
    print(f"train, {dtype}, an update by Muon: {spent[0]:.0f} ms; by AdamW: {spent[1]:.0f} ms", flush=True)


def long_vocabulary() -> None:
    """Memory of the loss above weights and hidden states, and how it grows with the vocabulary."""
    program = [sys.executable, str(HERE / "long_vocabulary.py")]
    told = {
        name: json.loads(output([*program, str(vocabulary), str(POSITIONS), *options]))
        for name, vocabulary, options in (("few", FEWER, []), ("long", LONG, []), ("full", LONG, ["--full"]))
    }
    long, full = told["long"], told["full"]
    require_success(["the losses of both ways"], int(abs(long["loss"] - full["loss"]) > 1e-5 * full["loss"]))
    print(
        f"train, loss over {LONG:,} tokens at {POSITIONS:,} positions: {long['peak_mb'] / full['peak_mb']:.2f} times "
        f"the memory of full logits ({long['peak_mb']:,.0f} MB, {full['peak_mb']:,.0f} MB), "
        f"{full['seconds'] / long['seconds']:.2f} times as fast"
    )
    growth = (long["peak_mb"] - told["few"]["peak_mb"]) / (LONG - FEWER) * 1000
    print(f"train, growth with the vocabulary: {growth:.2f} MB a thousand tokens", flush=True)
