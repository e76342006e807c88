"""`kiln prepare` beside the same policy written plainly (``plain_prepare.py``)."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

from measure import peak_mb, seconds, spread

HERE = Path(__file__).resolve().parent
SEED_ROWS = HERE.parent / "fixtures" / "downloaded" / "bfcl_xlam_rows.jsonl"
LONGEST_TOOLS = 4_000
FRESH_SHARE = 0.97

CONFIG = """schema = "kiln.config.v1"
[[datasets]]
path = "{rows}"
id = "rows"
[data]
n_train = 15000
n_validation = 1000
n_test = 1000
"""


def measure(folder: Path, counts: list[int], pairs: int) -> None:
    peaks = {count: prepare(folder, count, pairs) for count in counts}
    if len(peaks) > 1:
        small, large = min(peaks), max(peaks)
        print(
            f"prepare, peak memory at {large:,} rows: {peaks[large] / peaks[small]:.2f} times that at {small:,} rows "
            f"({peaks[large]:.0f} MB, {peaks[small]:.0f} MB)",
            flush=True,
        )


def prepare(folder: Path, count: int, pairs: int) -> float:
    """Times `kiln prepare` against the plain program; returns kiln's peak memory in MB."""
    rows = folder / f"rows-{count}.jsonl"
    generate(rows, count)
    config = folder / f"config-{count}.toml"
    config.write_text(CONFIG.format(rows=rows.name))
    kiln = [sys.executable, "-m", "kiln_cli.app", "--quiet", "prepare", str(config), "--out"]
    plain = [sys.executable, str(HERE / "plain_prepare.py"), str(rows)]
    # Watching memory takes time, so it has runs of its own, which also warm the file cache.
    peak = peak_mb([*kiln, str(folder / f"kiln-{count}")])
    plain_peak = peak_mb([*plain, str(folder / f"plain-{count}")])
    require_same_rows(folder / f"kiln-{count}" / "data", folder / f"plain-{count}")
    ratios, ours, theirs = [], [], []
    for number in range(pairs):
        ours.append(seconds([*kiln, str(folder / f"kiln-{count}-{number}")]))
        theirs.append(seconds([*plain, str(folder / f"plain-{count}-{number}")]))
        ratios.append(theirs[-1] / ours[-1])
    rows.unlink()
    print(
        f"prepare, {count:,} rows ({rows_mb(count):.0f} MB): times faster than plain json: {spread(ratios)}; "
        f"{statistics.median(ours):.2f} s against {statistics.median(theirs):.2f} s; "
        f"peak {peak:.0f} MB against {plain_peak:.0f} MB",
        flush=True,
    )
    return peak


_sizes: dict[int, int] = {}


def rows_mb(count: int) -> float:
    return _sizes[count] / 1e6


def generate(path: Path, count: int) -> None:
    """Rows in the shape of the downloaded ones, with about three in a hundred queries repeated."""
    seeds = [json.loads(line) for line in SEED_ROWS.read_text(encoding="utf-8").splitlines()]
    seeds = [row for row in seeds if len(row["tools"]) < LONGEST_TOOLS]
    chance = random.Random(1)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            seed = seeds[chance.randrange(len(seeds))]
            query = f"{seed['query']} (case {number})" if chance.random() < FRESH_SHARE else seed["query"]
            row = {"id": number, "query": query, "tools": seed["tools"], "answers": seed["answers"]}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    _sizes[count] = path.stat().st_size


def require_same_rows(kiln: Path, plain: Path) -> None:
    """Both programs must have chosen the same rows in the same order, or the comparison means nothing."""
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        # As values: the plain program writes small doubles in another way (1e-05, not 0.00001).
        if not all(same(*pair) for pair in zip((kiln / name).open("rb"), (plain / name).open("rb"), strict=True)):
            raise SystemExit(f"{name} differs between kiln and the plain program")


def same(left: bytes, right: bytes) -> bool:
    return left == right or json.loads(left) == json.loads(right)
