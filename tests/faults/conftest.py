"""Tests of minutes. ``make test-faults`` runs them; ``make test`` does not."""

from __future__ import annotations

import pytest
from kiln_stages.training import determinism


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """Set before the first test, so that no test is the one that changes the environment."""
    determinism.go_offline()
