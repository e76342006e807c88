"""Fixtures of the tests of named data sets: the tiny model, and a registry with one data set."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataset_rows import chat, kiln, write_rows
from kiln_stages.training import determinism
from tiny_model import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """Set before the first test, so that no test is the one that changes the environment."""
    determinism.go_offline()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A registry with the data set ``trips`` of twelve rows."""
    rows = write_rows(tmp_path / "trips.jsonl", [chat(f"city {number}", f"number {number}") for number in range(12)])
    done = kiln("dataset", "add", "trips", rows, "--registry", tmp_path / ".kiln")
    assert done.code == 0, done.err
    return tmp_path / ".kiln"
