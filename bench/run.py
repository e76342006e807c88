"""Side-by-side measurements, as ratios within one run. `make bench` prints them; nothing here is asserted.

    python bench/run.py [prepare] [admit] [train] [distil] [verify] [--pairs 3] [--prepare-rows 60000 600000]
                        [--rows 100000] [--trl-python PYTHON]

Machines are noisy, so the programs take turns and the median of the pairs' ratios is what counts. ``--rows 5000
--pairs 1`` is a quick look at admit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import admit
import distil
import prepare
import train
import verify

MEASUREMENTS = ("prepare", "admit", "train", "distil", "verify")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure kiln against plain programs and against TRL.")
    parser.add_argument("what", nargs="*", metavar="|".join(MEASUREMENTS), help="what to measure; all unless named")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each program")
    parser.add_argument("--prepare-rows", type=int, nargs="+", default=[60_000, 600_000])
    parser.add_argument("--rows", type=int, default=100_000, help="conversations that are admitted")
    parser.add_argument("--verify-rows", type=int, default=200_000, help="raw rows of the run that is verified")
    parser.add_argument("--trl-python", type=Path, default=None, help="a Python that has bench/requirements.txt")
    parser.add_argument("--keep", type=Path, default=None, help="work here and keep rows and outputs")
    arguments = parser.parse_args()
    what = arguments.what or list(MEASUREMENTS)
    if unknown := set(what) - set(MEASUREMENTS):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if "prepare" in what:
            prepare.measure(folder, arguments.prepare_rows, arguments.pairs)
        if "admit" in what:
            admit.measure(folder, arguments.rows, arguments.pairs, arguments.trl_python)
        if "train" in what:
            train.measure(folder, arguments.pairs, arguments.trl_python)
        if "distil" in what:
            distil.measure()
        if "verify" in what:
            verify.measure(folder, arguments.verify_rows, arguments.pairs)


if __name__ == "__main__":
    main()
