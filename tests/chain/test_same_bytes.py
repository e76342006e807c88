"""Same rows, same bytes: wherever they lie, however they are read, whatever the process was started with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import admit
from kiln_stages.admitting import pipeline
from tiny_model import Kiln

from kiln_cli.config import load_config
from kiln_cli.plugins import load_plugins

ROWS = (
    b"".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"wie groß ist {number}?"},
                    {"role": "assistant", "content": f"ziemlich, nämlich {number}", "mood": "calm", "zeal": 1},
                ],
                "b": 1,
                "a": {"tags": ["x", "y"]},
            },
            ensure_ascii=number % 2 == 0,
        ).encode()
        + b"\n"
        for number in range(40)
    )
    + b'{"messages": [{"role": "robot", "content": "?"}]}\n{"messages": [], "c": 2}\nnot json\n'
)


def receipt(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    return value


def test_h2_identity_depends_on_no_path_time_chunk_or_process(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = load_plugins()
    receipts, corpora = [], []
    for number, (place, range_bytes, workers) in enumerate([("a", 1 << 19, 1), ("b/deeper", 200, 1), ("c", 999, 3)]):
        rows = tmp_path / place / f"rows-{number}.jsonl"
        rows.parent.mkdir(parents=True)
        rows.write_bytes(ROWS)
        os.utime(rows, (1e9 + number, 1e9 + number))
        monkeypatch.setattr(pipeline, "RANGE_BYTES", range_bytes)
        monkeypatch.setattr(pipeline, "available", lambda limit: limit)
        settings = {"admit": {"file": str(rows), "invalid_row_policy": "skip"}, "model": {"path": str(tiny_model)}}
        run = tmp_path / f"run-{number}"
        admit.run(load_config(None, (), settings), run, plugins, workers=workers)
        receipts.append(receipt(run))
        corpora.append((run / "admit" / "corpus.parquet").read_bytes())
    assert [found.pop("source_locator") for found in receipts] == [
        str(tmp_path / "a" / "rows-0.jsonl"),
        str(tmp_path / "b/deeper" / "rows-1.jsonl"),
        str(tmp_path / "c" / "rows-2.jsonl"),
    ]
    assert receipts[0] == receipts[1] == receipts[2] and receipts[0]["rows_kept"] == 40
    assert corpora[0] == corpora[1] == corpora[2]


def test_h4_no_byte_depends_on_hash_seed_or_locale(tmp_path: Path, tiny_model: Path, kiln_process: Kiln) -> None:
    found = []
    environments = [
        {"PYTHONHASHSEED": "0", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ]
    for env in environments:
        folder = tmp_path / "project"
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(ROWS)
        (folder / "model").symlink_to(tiny_model, target_is_directory=True)
        (folder / "kiln.toml").write_text(
            'schema = "kiln.config.v1"\n[model]\npath = "model"\n'
            '[admit]\nfile = "rows.jsonl"\ninvalid_row_policy = "skip"\n'
        )
        validated = kiln_process("validate", "--json", folder / "rows.jsonl", env=env)
        assert validated.code == 1, validated.err
        admitted = kiln_process("admit", folder / "kiln.toml", "--out", folder / "run", env=env)
        assert admitted.code == 0, admitted.err
        manifest = json.loads((folder / "run" / "admit_manifest.json").read_bytes())
        del manifest["produced"]
        files = {p.name: p.read_bytes() for p in sorted((folder / "run" / "admit").iterdir()) if p.name[0] != "."}
        found.append((validated.out, manifest, files, (folder / "run" / "config.resolved.toml").read_bytes()))
        shutil.rmtree(folder)
    assert found[0] == found[1] == found[2]
    ignored = found[0][1]["counts"]["corpus"]["ignored_fields"]
    assert list(ignored) == sorted(ignored) == ["a", "b", "c", "messages[].mood", "messages[].zeal"]
