"""Side-by-side measurements, as ratios within one run. `make bench` prints them; nothing here is asserted.

    python bench/run.py [--rows 60000 600000] [--pairs 3]

Machines are noisy, so the two programs take turns and the median of the pairs' ratios is what counts. Memory is the
peak of the whole process tree (sum of the proportional set sizes), sampled while a program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED_ROWS = HERE.parent / "fixtures" / "downloaded" / "bfcl_xlam_rows.jsonl"
SAMPLE_SECONDS = 0.02
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure kiln against plain programs.")
    parser.add_argument("--rows", type=int, nargs="+", default=[60_000, 600_000])
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peaks = {count: prepare(Path(folder), count, arguments.pairs) for count in arguments.rows}
    if len(peaks) > 1:
        small, large = min(peaks), max(peaks)
        print(
            f"prepare, peak memory at {large:,} rows: {peaks[large] / peaks[small]:.2f} times that at {small:,} rows "
            f"({peaks[large]:.0f} MB, {peaks[small]:.0f} MB)"
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
        f"prepare, {count:,} rows ({rows_mb(count):.0f} MB): {statistics.median(ratios):.2f} times faster than plain "
        f"json (median of {pairs} pairs, {min(ratios):.2f} to {max(ratios):.2f}); "
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


def seconds(command: list[str]) -> float:
    """Wall time of a whole process, start-up included. What was written before is flushed first: kiln's own flushes
    would else wait for the other program's pages."""
    os.sync()
    started = time.perf_counter()
    require_success(command, subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode)
    return time.perf_counter() - started


def peak_mb(command: list[str]) -> float:
    """Peak memory of a process and all that it starts, in MB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = [0.0]
    watcher = threading.Thread(target=watch, args=(process, peak))
    watcher.start()
    require_success(command, process.wait())
    watcher.join()
    return peak[0] / 1e6


def require_success(command: list[str], code: int) -> None:
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}")


def watch(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    while process.poll() is None:
        peak[0] = max(peak[0], sum(proportional_size(pid) for pid in tree(process.pid)))
        time.sleep(SAMPLE_SECONDS)


def tree(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread has ended meanwhile
    return found


def proportional_size(pid: int) -> int:
    """Bytes of memory of a process, shared pages counted by their share; 0 where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


if __name__ == "__main__":
    main()
