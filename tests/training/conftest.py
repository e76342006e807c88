"""Fixtures of the training tests; the models are made on the spot (``tiny_models``)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kiln_stages import train
from kiln_stages.training import determinism
from training.admitted_run import admitted_run
from training.tiny_models import tiny_causal

from kiln_cli.plugins import Plugins


@pytest.fixture(scope="session", autouse=True)
def _repeatable() -> None:
    determinism.fix()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model directory."""
    path = tmp_path_factory.mktemp("model")
    tiny_causal("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Path:
    """The run directory of a finished training, to be read only."""
    config, out = admitted_run(tmp_path_factory.mktemp("finished"))
    train.run(config, out, plugins)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The same, with its config and model beside it, to be changed."""
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "run"
