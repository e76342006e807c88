"""`kiln verify-receipt` beside `sha256sum` over the same files: the raw rows, the model, and everything of the run."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import cost, seconds, spread
from prepare import generate

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "smollm2-135m-instruct"
KILN = [sys.executable, "-m", "kiln_cli.app", "--quiet"]
TRAINED_ROWS = 4  # each is a step of the real model, which no bench of hashing should wait for

CONFIG = """schema = "kiln.config.v1"
[model]
path = "{model}"
id = "SmolLM2-135M-Instruct"
[[datasets]]
path = "{rows}"
[data]
n_train = {trained}
n_validation = 8
n_test = 1000
[admit]
max_tokens = 400
invalid_row_policy = "skip"
[train]
epochs = 1
checkpoint_interval = 2
"""


def measure(folder: Path, count: int, pairs: int) -> None:
    """Makes a run over ``count`` raw rows once, then lets both programs take turns."""
    rows, config, run = folder / f"verify-rows-{count}.jsonl", folder / "verify.toml", folder / "verified-run"
    generate(rows, count)
    config.write_text(CONFIG.format(model=MODEL, rows=rows.name, trained=TRAINED_ROWS))
    for stage in ("prepare", "admit", "train"):
        seconds([*KILN, stage, str(config), "--out", str(run)])
    compare(run, rows, pairs)
    rows.unlink()


def compare(run: Path, rows: Path, pairs: int) -> None:
    files = [str(path) for path in _files(run, rows)]
    size = sum(Path(path).stat().st_size for path in files)
    verify, sums = [*KILN, "verify-receipt", str(run), "--require-all"], ["sha256sum", *files]
    start_up = statistics.median(seconds([*KILN, "verify-receipt", "--help"]) for _ in range(pairs))
    cost(verify), cost(sums)  # warms the file cache
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(cost(verify))
        theirs.append(cost(sums))
    wall = [them.wall / us.wall for us, them in zip(ours, theirs, strict=True)]
    processor = [them.processor / us.processor for us, them in zip(ours, theirs, strict=True)]
    print(
        f"verify-receipt, {size / 1e6:.0f} MB with {rows.stat().st_size / 1e6:.0f} MB of raw rows: times the speed of "
        f"sha256sum: {spread(wall)}; by processor time of all cores: {spread(processor)}; "
        f"{statistics.median(us.wall for us in ours):.2f} s, of which {start_up:.2f} s start-up, "
        f"against {statistics.median(them.wall for them in theirs):.2f} s",
        flush=True,
    )


def _files(run: Path, rows: Path) -> Iterator[Path]:
    """What the claims are about: the raw rows, the model's files that a receipt names, and the whole run."""
    receipt = json.loads((run / "train_receipt.json").read_bytes())
    yield rows
    yield from (MODEL / shard["filename"] for shard in receipt["model"]["base_weight_shards"]["shards"])
    yield from (MODEL / name for name in receipt["tokenizer"]["files"])
    yield MODEL / "config.json"
    yield from sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith("."))
