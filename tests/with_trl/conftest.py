"""SmolLM2's tokenizer as a model directory, and rows admitted under it by any template."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from kiln_stages.training import determinism
from tests_support import shared_path
from with_trl.chat_files import Row

from kiln_cli import app


class Corpus(NamedTuple):
    """Rows of ``corpus.parquet`` and codes of ``rejected.jsonl``, both by row number, from 1."""

    path: Path
    kept: dict[int, dict[str, Any]]
    refused: dict[int, str]


Admit = Callable[[list[Row], str | Path], Corpus]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    determinism.go_offline()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What admission reads of a model directory, without weights."""
    directory, source = tmp_path_factory.mktemp("smollm2"), shared_path("data/tokenizers/smollm2")
    (directory / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((source / name).read_bytes())
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def admit(smollm2: Path, tmp_path: Path) -> Admit:
    """``admit(rows, template)``: one ``kiln admit`` of the rows as messages."""

    def call(rows: list[Row], template: str | Path) -> Corpus:
        file, out = tmp_path / "rows.jsonl", tmp_path / "run"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        options = ["--file", file, "--source", "messages", "--model", smollm2, "--template", template, "--out", out]
        options += ["--set", "admit.unknown_markers=text"]  # templates of models whose tokens SmolLM2 has not
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = app.run(["--quiet", "admit", *map(str, options), "--invalid-row-policy", "skip"])
        assert code == 0, told.getvalue()
        path = out / "admit" / "corpus.parquet"
        rejected = [json.loads(line) for line in (out / "admit" / "rejected.jsonl").read_bytes().splitlines()]
        kept = {row["row_index"]: row for row in pl.read_parquet(path).iter_rows(named=True)}
        return Corpus(path, kept, {row["row_index"]: row["code"] for row in rejected})

    return call
