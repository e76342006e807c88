"""Fixtures of the training tests; the models are made on the spot (``tiny_models``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kiln_stages.training import determinism
from training.tiny_models import tiny_causal


@pytest.fixture(scope="session", autouse=True)
def _repeatable() -> None:
    determinism.fix()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model directory."""
    path = tmp_path_factory.mktemp("model")
    tiny_causal("llama").save_pretrained(path)
    return path
