"""Random byte flips over all that a training left, and its manifests: verify-receipt sees every single one."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cut_runs import RUN, admitted_project, train_in_process
from kiln_stages import verify_receipt
from kiln_stages.evidence import claims
from kiln_stages.evidence.digests import Digests

MANIFESTS = ("train_receipt.json", "admit_manifest.json", "data_manifest.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training of forty steps with checkpoints behind 15 and 30."""
    project = admitted_project(tmp_path_factory.mktemp("flips") / "project", "adam_w")
    train_in_process(project)
    return project / RUN


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verify-receipt reads through these functions is kept for as long as the file is the same, by its status:
    config, weights and rows are never flipped here."""
    rows = verify_receipt._read_rows
    monkeypatch.setattr(claims, "load_config", _kept(claims.load_config))
    monkeypatch.setattr(verify_receipt, "load_config", claims.load_config)
    monkeypatch.setattr(verify_receipt, "weight_shards", _kept(verify_receipt.weight_shards))
    monkeypatch.setattr(verify_receipt, "_read_rows", _kept(rows, lambda run, ref, digests: run / ref.path))


def _kept(function: Callable[..., Any], file: Callable[..., Path] = lambda path, *_: path) -> Callable[..., Any]:
    results: dict[str, Any] = {}

    def call(*arguments: Any) -> Any:
        status = file(*arguments).stat()
        told = [each for each in arguments if not isinstance(each, Digests)]
        key = repr((told, status.st_ino, status.st_size, status.st_mtime_ns))
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return call


def files_of(run: Path) -> list[Path]:
    """Receipt, manifests, and every file below ``train/``: log, adapter, checkpoints. Empty ones have no byte."""
    return [run / name for name in MANIFESTS] + sorted(path for path in (run / "train").rglob("*") if path.is_file())


def detected(run: Path) -> bool:
    """Whether a claim fails. An error of the command is no verdict, and fails the test."""
    return any(claim.status == "fails" for claim in verify_receipt.run(run).claims)


def flips(files: list[Path], count: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """(file, place, mask): every file in turn, any place, any change of the byte."""
    generator = random.Random(seed)
    for number in range(count):
        path = files[number % len(files)]
        yield path, generator.randrange(path.stat().st_size), generator.randrange(1, 256)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.faults)])
def test_every_flipped_byte_is_detected(count: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, started, files = random.SystemRandom().randrange(2**32), time.monotonic(), files_of(run)
    assert len(files) >= 16
    assert not detected(run)
    missed = []
    for path, place, mask in flips(files, count, seed):
        data, status = path.read_bytes(), path.stat()
        path.chmod(0o644)
        path.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
        if not detected(run):
            missed.append(f"{path.relative_to(run)}: byte {place} ^ {mask:#04x}")
        path.write_bytes(data)
        path.chmod(status.st_mode)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not detected(run), "the run is whole again"
    with capsys.disabled():
        print(f"\n  {count} flips in {len(files)} files, seed {seed}, {time.monotonic() - started:.0f} s", end=" ")
    assert not missed, f"seed {seed}: {len(missed)} of {count} flips were not seen: {missed[:5]}"
