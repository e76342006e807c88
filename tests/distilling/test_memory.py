"""Admission of a scored corpus reads it piece by piece: a corpus five times as large takes no more memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scored_corpus import ALIAS, Scorer, corpus, line, register_teacher, teacher_identity

SMALL, LARGE = 8_000_000, 40_000_000  # bytes of corpus
RESPONSE = "It rains. " * 50  # of a context of 512 tokens

# Pieces of the file and of what is written are small, so that the small corpus too has many of them. The peaks are the
# kernel's, not samples: of this process once all rows are read, before the parts on disk are joined, which takes memory
# that could hide what reading took; of this process in all; and of the largest that it started. (Not ru_maxrss of this
# process: it begins with that of the one that started it.)
ADMISSION = """
import re, resource, sys
from pathlib import Path

from kiln_cli.app import run
from kiln_stages.distilling import corpus
from kiln_stages.distilling.rows import ScoredWriter

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def join(writer, join=ScoredWriter._join):
    peaks.append(peak())
    return join(writer)

peaks = []
ScoredWriter._join = join
corpus.RANGE_BYTES, ScoredWriter.part_bytes = 256 * 1024, 512 * 1024
code = run(["admit", "--kind", "opd", "--workers", "2", *sys.argv[1:]])
print(code, *peaks, peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path: Path, student: Path, scorer: Scorer) -> None:
    register_teacher(tmp_path / ".kiln", teacher_identity(student))
    small, large = (_peaks(tmp_path, student, scorer, size) for size in (SMALL, LARGE))
    # Were all scores kept, it would be 0.3 bytes of memory a byte of corpus.
    most = (LARGE - SMALL) / 10
    for name, before, after in zip(("reading", "in all", "a worker"), small, large, strict=True):
        assert after - before < most, name


def _peaks(tmp_path: Path, student: Path, scorer: Scorer, size: int) -> list[int]:
    """Bytes of memory that the admission of a corpus of about ``size`` bytes takes at most, as ADMISSION has them."""
    example = scorer.example("00000000", RESPONSE)  # its scores are those of the response, whatever is asked
    for entry in example["teacher_tokens"]:
        for rank, candidate in enumerate(entry["top_logprobs"], start=1):
            candidate["logprob"] = -rank  # of few bytes
    row = line(example)
    rows = [row.replace(b"00000000", b"%08d" % number) for number in range(size // len(row))]
    path = tmp_path / f"{size}.jsonl"
    path.write_bytes(corpus(teacher_identity(student), rows))
    arguments = ["--file", path, "--model", student, "--teacher", ALIAS, "--registry", tmp_path / ".kiln"]
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", ADMISSION, *map(str, arguments), "--out", str(tmp_path / f"run-{size}")],
        env=os.environ | {"PYTHONPATH": paths, "POLARS_MAX_THREADS": "1"},  # what threads are ahead varies
        capture_output=True,
        text=True,
        check=True,
    )
    code, *peaks = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return [1024 * peak for peak in peaks]
