"""The plugin by itself and through prepare. Run with `pytest plugins/kiln-plugin-csv/tests`."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import kiln_plugin_csv
import pytest
from kiln_stages import prepare

from kiln_cli import plugins
from kiln_cli.config import load_config
from kiln_cli.plugins import Plugins, load_plugins

TOOLS = json.dumps([{"name": "f", "description": "d", "parameters": {}}])
ANSWERS = json.dumps([{"name": "f", "arguments": {"x": 1}}])
CONFIG = """schema = "kiln.config.v1"
[[datasets]]
path = "rows.csv"
source = "csv"
[data]
n_train = 1
n_validation = 1
n_test = 1
"""


def quoted(*fields: str) -> str:
    return ",".join('"' + field.replace('"', '""') + '"' for field in fields)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """kiln with the plugin, as if it were installed."""

    class EntryPoint:
        name = "csv"

        def load(self) -> ModuleType:
            return kiln_plugin_csv

    owner = plugins.Owner("kiln-plugin-csv", "0.1.0")
    monkeypatch.setattr(plugins, "_third_parties", lambda: [(EntryPoint(), owner)])
    return load_plugins()


def test_rows_are_prepared_and_faults_counted(loaded: Plugins, tmp_path: Path) -> None:
    lines = [
        "id,query,tools,answers",
        quoted("a", "what is the weather?", TOOLS, ANSWERS),
        quoted("b", 'say "hello, world"', TOOLS, ANSWERS),
        '"c","never closed',
        "d,too few",
        "",
        quoted("e", "a third good question", TOOLS, ANSWERS),
        quoted("f", "short", TOOLS, ANSWERS),
    ]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "kiln.toml").write_text(CONFIG)
    result = prepare.run(load_config(tmp_path / "kiln.toml"), tmp_path / "run", loaded)
    drops = result.summary.kiln["en"]
    assert (drops.rows_read, drops.kept, drops.dropped, drops.blank_lines) == (6, 3, 3, 1)
    assert drops.counts["missing_field"] == 2
    assert result.summary.languages["en"].counts["query_too_short"] == 1
    rejected = [json.loads(line) for line in (tmp_path / "run" / "data" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == [
        (4, "missing_field"),
        (5, "missing_field"),
        (8, "query_too_short"),
    ]
    kept: list[Any] = []
    for split in ("train", "validation", "test"):
        kept += [json.loads(line) for line in (tmp_path / "run" / "data" / f"{split}.jsonl").read_text().splitlines()]
    assert sorted(row["query"] for row in kept) == [
        "a third good question",
        'say "hello, world"',
        "what is the weather?",
    ]
