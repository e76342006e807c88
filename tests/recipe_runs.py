"""Recipes in a directory of their own: run, planned, cut short, and carried out by Make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kiln_stages.training import loop
from kiln_stages.training.loop import StepRecord
from tiny_model import Kiln

OUT = "out"


class Killed(BaseException):
    """What ends a training in its own process as SIGKILL would: nothing catches it."""


def run(kiln: Kiln, project: Path, *options: str | Path) -> Any:
    return kiln("recipe", "run", project / "recipe.toml", "--out", project / OUT, *options)


def states(kiln: Kiln, project: Path) -> list[str]:
    done = kiln("recipe", "plan", project / "recipe.toml", "--out", project / OUT, "--json")
    assert done.code == 0, done.err
    return [step["state"] for step in json.loads(done.out)["steps"]]


def receipt(project: Path, name: str) -> dict[str, Any]:
    """Of the training in the step of this name."""
    found: dict[str, Any] = json.loads((project / OUT / name / "train_receipt.json").read_bytes())
    return found


def edit(project: Path, old: str, new: str) -> None:
    path = project / "recipe.toml"
    assert path.read_text().count(old) >= 1, old
    path.write_text(path.read_text().replace(old, new, 1))


def looks(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory, with its time; locks aside, which are touched."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".kiln.lock")
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def cut(step: int, end: Callable[[], object], *, of: int) -> Any:
    """Within the block the ``of``-th training that begins comes to its end behind ``step``."""
    begun = 0

    def train(*args: object, **kwargs: object) -> Iterator[StepRecord]:
        nonlocal begun
        begun += 1
        mine = begun
        for record in loop.train(*args, **kwargs):  # type: ignore[arg-type]
            if mine == of and record.step == step:
                end()
            yield record

    return patch("kiln_stages.training.trainer.train", train)


def killed() -> None:
    raise Killed


def make_file(kiln: Kiln, project: Path) -> str:
    before = Path.cwd()
    os.chdir(project)
    try:
        done = kiln("recipe", "plan", "recipe.toml", "--out", OUT, "--makefile")
    finally:
        os.chdir(before)
    assert done.code == 0, done.err
    (project / "Makefile").write_text(done.out)
    return done.out


def make(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-C", str(project), f"KILN={sys.executable} -m kiln_cli.app", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
