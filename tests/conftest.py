"""Fixtures for all tests: a clean environment, files from a dict, the loaded plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kiln_cli.plugins import Plugins, load_plugins

_KEPT = ("KILN_SHARED", "KILN_REQUIRE_SHARED")
# Variables that libraries and pytest itself set when they are first used.
_FOREIGN = ("PYTEST_", "CUBLAS_", "OMP_", "KMP_", "MKL_", "TORCH", "TRITON_", "TOKENIZERS_", "CUDA_", "HF_", "_RJEM_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of minutes run where they are asked for by ``-m faults``, whatever else ``-m`` says."""
    if "faults" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("faults")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """No KILN_* variable reaches a test, and no test may leave the environment changed."""
    whole = dict(os.environ)
    for name in whole:
        if name.startswith("KILN_") and name not in _KEPT:
            del os.environ[name]
    before = _watched()
    yield
    after = _watched()
    for name in set(os.environ) - set(whole):
        if not name.startswith(_FOREIGN):
            del os.environ[name]
    os.environ.update({name: value for name, value in whole.items() if not name.startswith("PYTEST_")})
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not changed, f"the test leaves the environment changed: {', '.join(changed)}"


def _watched() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run({"kiln.toml": text, "rows.jsonl": data}, "name")`` writes the files below ``tmp_path/name``."""

    def make(files: Mapping[str, str | bytes], name: str = "project") -> Path:
        root = tmp_path / name
        root.mkdir(parents=True, exist_ok=True)
        for relative, content in files.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return root

    return make


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """What kiln brings and what is installed beside it."""
    return load_plugins()
