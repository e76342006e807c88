"""Fixtures of the chain tests: the tiny model, projects around it, a finished run, and kiln in process or as one."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln_stages.training import determinism
from tiny_model import RUN, Kiln, Outcome, write_project, write_tiny_model

from kiln_cli import app


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """Set before the first test, so that no test is the one that changes the environment."""
    determinism.go_offline()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def kiln() -> Kiln:
    """``kiln(*arguments)``: one command line in this process."""

    def call(*arguments: str | Path) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run([str(argument) for argument in arguments])
        return Outcome(int(code), out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def kiln_process() -> Kiln:
    """``kiln_process(*arguments, env={...})``: one command line in a process of its own."""

    def call(*arguments: str | Path, env: dict[str, str] | None = None) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "kiln_cli.app", *map(str, arguments)],
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """A directory with ``kiln.toml``, ``raw.jsonl`` and ``model``; nothing has run yet."""
    return write_project(tmp_path / "project", tiny_model).parent


@pytest.fixture(scope="session")
def admitted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln) -> Path:
    """A project whose run is prepared and admitted. Copy it before changing it (``copy_of``)."""
    project = write_project(tmp_path_factory.mktemp("admitted") / "project", tiny_model).parent
    for stage in ("prepare", "admit"):
        done = kiln(stage, project / "kiln.toml", "--out", project / RUN)
        assert done.code == 0, done.err
    return project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, admitted: Path, kiln: Kiln) -> Path:
    """A project whose run is trained to the end. Copy it before changing it (``copy_of``)."""
    project = _copy(admitted, tmp_path_factory.mktemp("finished") / "project")
    done = kiln("train", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 0, done.err
    return project


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """``copy_of(project, name="copy", own_model=False)``: a project to change at will, and its model too if asked."""

    def copy(project: Path, name: str = "copy", *, own_model: bool = False) -> Path:
        target = _copy(project, tmp_path / name)
        if own_model:
            real = (target / "model").resolve()
            (target / "model").unlink()
            shutil.copytree(real, target / "model")
        return target

    return copy


def _copy(project: Path, target: Path) -> Path:
    shutil.copytree(project, target, symlinks=True)
    return target
