"""SmolLM2's tokenizer as a model directory, with any template as its own, and rows admitted under it."""

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
from tokenizers import AddedToken, Tokenizer
from with_trl.chat_files import Row

from kiln_cli import app


class Corpus(NamedTuple):
    """Rows of ``corpus.parquet`` and codes of ``rejected.jsonl``, both by row number, from 1."""

    path: Path
    kept: dict[int, dict[str, Any]]
    refused: dict[int, str]


Admit = Callable[[list[Row], Path], Corpus]
ModelWith = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    determinism.go_offline()


@pytest.fixture
def model_with(tmp_path: Path) -> ModelWith:
    """``model_with(template, *markers)``: a model directory without weights, with SmolLM2's tokenizer and the markers
    beside, and a template as the model's own."""

    def make(template: Path, *markers: str) -> Path:
        directory, source = tmp_path / "model", shared_path("data/tokenizers/smollm2")
        directory.mkdir(exist_ok=True)
        tokenizer = Tokenizer.from_str(gzip.decompress((source / "tokenizer.json.gz").read_bytes()).decode("utf-8"))
        tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
        (directory / "chat_template.jinja").write_bytes(template.read_bytes())
        (directory / "config.json").write_text("{}")
        return directory

    return make


@pytest.fixture
def admit(tmp_path: Path) -> Admit:
    """``admit(rows, model)``: one ``kiln admit`` of the rows as messages."""

    def call(rows: list[Row], model: Path) -> Corpus:
        file, out = tmp_path / "rows.jsonl", tmp_path / "run"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        options = ["--file", file, "--source", "messages", "--model", model, "--out", out]
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = app.run(["--quiet", "admit", *map(str, options), "--invalid-row-policy", "skip"])
        assert code == 0, told.getvalue()
        path = out / "admit" / "corpus.parquet"
        rejected = [json.loads(line) for line in (out / "admit" / "rejected.jsonl").read_bytes().splitlines()]
        kept = {row["row_index"]: row for row in pl.read_parquet(path).iter_rows(named=True)}
        return Corpus(path, kept, {row["row_index"]: row["code"] for row in rejected})

    return call
