"""A run directory that is prepared and admitted, around the tiny model: as many rows as a test asks for."""

from __future__ import annotations

import json
from pathlib import Path

from kiln_stages import admit, prepare
from tiny_model import TOOLS, write_tiny_model

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.plugins import load_plugins

CONFIG = """
schema = "kiln.config.v1"
[project]
seed = 42
[model]
path = "{model}"
id = "tiny"
[[datasets]]
path = "raw.jsonl"
[data]
n_train = {rows}
n_validation = {held_out}
n_test = 1
[train]
epochs = 3
learning_rate = 0.01
lora_rank = 2
lora_alpha = 4.0
checkpoint_interval = 4
threads = 1
"""


def admitted_run(directory: Path, rows: int = 4, held_out: int = 2) -> tuple[LoadedConfig, Path]:
    """(config, run directory) with ``rows`` rows of corpus and ``held_out`` held-out rows."""
    write_tiny_model(directory / "model")
    path = directory / "kiln.toml"
    path.write_text(CONFIG.format(model="model", rows=rows, held_out=held_out))
    config = load_config(path)
    out = directory / "run"
    write_admitted(config, out, rows, held_out)
    return config, out


def write_admitted(config: LoadedConfig, out: Path, rows: int, held_out: int) -> None:
    """Prepares and admits the first rows of an endless supply."""
    raw = [_raw_row(number) for number in range(rows + held_out + 1)]
    (config.base_dir / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw))
    config = config.replace("data", n_train=rows, n_validation=held_out, n_test=1)
    plugins = load_plugins()
    prepare.run(config, out, plugins)
    admit.run(config, out, plugins)


def _raw_row(number: int) -> dict[str, object]:
    query = f"What is the weather like in city number {number} today?" + " Please." * (number % 3)
    calls = [{"name": "get_weather", "arguments": {"city": f"city {number}"}}]
    return {"id": number, "query": query, "tools": json.dumps(TOOLS), "answers": json.dumps(calls)}
