"""One row through every source is one row: the same hash, token ids and labels, and one digest of the corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from kiln_stages import admit
from tiny_model import Kiln

from kiln_cli.config import load_config
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import INGESTION_SOURCES

TEXTS = [("What is the weather? ", "city 17"), ("And in Café ☃?", "\tcity 18\n")]
ROWS = [
    {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
    for user, answer in TEXTS
]


class Sources:
    """Each method admits ``ROWS`` into a run of its name below ``root``."""

    def __init__(self, root: Path, model: Path, kiln: Kiln, plugins: Plugins) -> None:
        self.root, self.model, self.kiln, self.plugins = root, model, kiln, plugins
        self.rows = root / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def admit(self, run: str, *arguments: str | Path) -> None:
        done = self.kiln("admit", *arguments, "--model", self.model, "--out", self.root / run)
        assert done.code == 0, done.err

    def dataset_path(self) -> None:
        self.admit("dataset_path", "--file", self.rows)

    def inline(self) -> None:
        self.admit("inline", *(part for row in ROWS for part in ("--row", json.dumps(row, indent=1))))

    def request(self) -> None:
        path = self.root / "request.json"
        path.write_text(json.dumps({"examples": ROWS, "config": {}}))
        self.admit("request", path)

    def python(self) -> None:
        config = load_config(None, options={"model": {"path": str(self.model)}})
        admit.run(config, self.root / "python", self.plugins, rows=ROWS)

    def named_dataset(self) -> None:
        """No split is empty, so that there is a third row; a seed is looked for that holds out this one."""
        registry, more = ["--registry", self.root / "registry"], self.root / "more.jsonl"
        more.write_text(self.rows.read_text() + json.dumps(ROWS[0]).replace("weather", "time") + "\n")
        shares = ["--train-percent", "99", "--validation-percent", "0"]
        done = self.kiln("dataset", "add", "mine", more, *shares, *registry)
        assert done.code == 0, done.err
        train = self.root / "registry" / "datasets" / "mine" / "train.jsonl"
        for seed in range(50):
            if train.read_bytes() == self.rows.read_bytes():
                break
            assert self.kiln("dataset", "split", "mine", "--seed", str(seed), *registry).code == 0
        self.admit("named_dataset", "--dataset", "mine", *registry)

    def corrections(self) -> None:
        registry = ["--registry", self.root / "registry"]
        for number, (user, ideal) in reversed(list(enumerate(TEXTS))):  # the newest comes first
            fields = ["--request-id", f"r{number}", "--user", user, "--ideal", ideal]
            assert self.kiln("corrections", "add", *fields, *registry).code == 0
        made = ["--model", self.model, "--out", self.root / "corrections"]
        done = self.kiln("corrections", "admit", *registry, *made)
        assert done.code == 0, done.err

    def recipe(self) -> None:
        """Trained, too: a recipe has no command that admits alone."""
        path = self.root / "recipe.json"
        step = {"kind": "sft", "name": "recipe", "examples_from": {"examples": ROWS}, "config": {"epochs": 1}}
        path.write_text(json.dumps({"name": "one", "model": {"path": str(self.model)}, "steps": [step]}))
        done = self.kiln("recipe", "run", path, "--out", self.root)
        assert done.code == 0, done.err


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln, plugins: Plugins) -> Path:
    sources = Sources(tmp_path_factory.mktemp("sources"), tiny_model, kiln, plugins)
    for name in NAMES:
        getattr(sources, name)()
    return sources.root


NAMES = [name for name in vars(Sources) if not name.startswith("_") and name != "admit"]


def receipt(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    return value


def test_these_are_all_sources_that_admit_writes(admitted: Path) -> None:
    """The public server writes ``rust_api`` where it is called directly; a call from Python is ``inline`` here."""
    found = {name: receipt(admitted / name)["source"] for name in NAMES}
    assert {*found.values(), "rust_api"} == set(INGESTION_SOURCES)
    assert found["python"] == found["request"] == "inline"


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_row_through_every_source(admitted: Path, name: str) -> None:
    mine, first = receipt(admitted / name), receipt(admitted / "dataset_path")
    assert mine["rows_kept"] == len(ROWS)
    for key in ("kept_row_hashes", "kept_corpus_sha256"):
        assert mine[key] == first[key], key
    tables = [pl.read_parquet(admitted / run / "admit" / "corpus.parquet") for run in (name, "dataset_path")]
    columns = ("row_sha256", "input_ids", "label_spans", "labels")
    assert tables[0].select(columns).equals(tables[1].select(columns))
    manifests = [json.loads((admitted / run / "admit_manifest.json").read_bytes()) for run in (name, "dataset_path")]
    assert manifests[0]["details"]["admitted_sha256"] == manifests[1]["details"]["admitted_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_cannot_be_read_again_are_kept_in_the_run(admitted: Path, name: str) -> None:
    kept, source = admitted / name / "admit" / "rows.jsonl", receipt(admitted / name)["source"]
    assert kept.exists() == (source != "dataset_path")
    if kept.exists():
        assert [json.loads(line) for line in kept.read_bytes().splitlines()] == ROWS
