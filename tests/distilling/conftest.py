"""A tiny student, a teacher with its tokenizer, and ``admit``: a corpus of rows through admission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import admit as stage
from kiln_stages.training import determinism
from scored_corpus import ALIAS, Admit, Refuse, Scorer, corpus, register_teacher, teacher_identity
from tiny_model import write_tiny_model

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """Set before the first test, so that no test is the one that changes the environment."""
    determinism.go_offline()


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="session")
def scorer(student: Path) -> Scorer:
    return Scorer(student)


@pytest.fixture
def admit(student: Path, tmp_path: Path) -> Admit:
    """``admit(rows, *assignments, identity=..., pinned=..., data=..., on_fault=...)``: rows behind the manifest line of
    a teacher that is registered, or the bytes of a whole file; the run is ``tmp_path / "run"``."""

    def admits(
        rows: Sequence[dict[str, Any] | bytes],
        *assignments: str,
        identity: Any = None,
        pinned: Any = None,
        data: bytes | None = None,
        model: Path = student,
        kind: str = "opd",
        teacher: str | None = ALIAS,
        **options: Any,
    ) -> stage.AdmitResult:
        identity = identity or teacher_identity(student)
        register_teacher(tmp_path / ".kiln", pinned or identity)
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(corpus(identity, rows) if data is None else data)
        settings: dict[str, Any] = {"file": str(path), "kind": kind, "registry": str(tmp_path / ".kiln")}
        config = load_config(
            None,
            [f"model.path={model}", *assignments],
            {"admit": settings, "distill": {} if teacher is None else {"teacher": teacher}},
        )
        return stage.run(config, tmp_path / "run", load_plugins(), **options)

    return admits


@pytest.fixture
def refuse(admit: Admit, tmp_path: Path) -> Refuse:
    def written() -> dict[Path, bytes]:
        run = tmp_path / "run"
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".kiln.lock"}

    def refuses(*arguments: Any, **options: Any) -> KilnError:
        before = written()
        with pytest.raises(KilnError) as caught:
            admit(*arguments, **options)
        assert written() == before
        return caught.value

    return refuses
