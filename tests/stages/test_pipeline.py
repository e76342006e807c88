"""Rows in pieces of file, judged by one process or several: same outcomes, same places, same bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import admit
from kiln_stages.admitting import corpus, pipeline
from tiny_model import write_tiny_model

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins


def row(number: int, words: int = 1) -> bytes:
    messages = [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": " ".join(["word"] * words)},
    ]
    return json.dumps({"messages": messages}).encode()


def content(count: int) -> bytes:
    """Kept rows, rejected ones of several kinds, blank lines, CRLF, and no line feed at the end."""
    lines = []
    for number in range(count):
        lines.append(row(number, 1 + number % 7))
        if number % 5 == 0:
            lines.append(b"{broken %d" % number)
        if number % 7 == 0:
            lines += [b"", b"  \r", row(number, 600)]
    return b"\n".join(lines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def config_for(model: Path, rows: Path, **more: Any) -> LoadedConfig:
    settings = {"admit": {"file": str(rows), "invalid_row_policy": "skip", **more}, "model": {"path": str(model)}}
    return load_config(None, (), settings)


def written(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "admit").iterdir()) if path.name[0] != "."}


@pytest.mark.parametrize(("workers", "range_bytes"), [(1, 64), (2, 64), (3, 1000), (2, 1 << 20)])
def test_bytes_do_not_depend_on_processes_or_cuts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, range_bytes: int
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(content(60))
    config = config_for(model, rows)
    whole = admit.run(config, tmp_path / "whole", load_plugins(), workers=1)
    monkeypatch.setattr(pipeline, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(pipeline, "available", lambda limit: limit)
    cut = admit.run(config, tmp_path / "cut", load_plugins(), workers=workers)
    assert whole.manifest.content_sha256 == cut.manifest.content_sha256
    assert written(tmp_path / "whole") == written(tmp_path / "cut")


def test_parts_do_not_show_in_the_rows(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(content(40))
    config = config_for(model, rows)
    admit.run(config, tmp_path / "one", load_plugins())
    monkeypatch.setattr(corpus, "PART_ROWS", 3)
    admit.run(config, tmp_path / "many", load_plugins())
    one, many = (corpus.read_corpus(tmp_path / run / "admit" / "corpus.parquet") for run in ("one", "many"))
    assert one == many and len(one) == 40
    assert not list((tmp_path / "many" / "admit").glob(".kiln-tmp*"))


def test_every_row_has_its_place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line, offset and length of each outcome lead back to the row's own bytes, whatever the cuts."""
    monkeypatch.setattr(pipeline, "RANGE_BYTES", 100)
    data = content(40)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(data)
    admit.run(config_for(model, rows), tmp_path / "run", load_plugins())
    lines = data.split(b"\n")
    kept = corpus.read_corpus(tmp_path / "run" / "admit" / "corpus.parquet")
    rejected = [json.loads(line) for line in (tmp_path / "run" / "admit" / "rejected.jsonl").read_bytes().splitlines()]
    assert sorted([*(r.row_index for r in kept), *(r["row_index"] for r in rejected)]) == list(
        range(1, len(kept) + len(rejected) + 1)
    )
    assert [lines[found.line - 1] for found in kept] == [
        line for line in lines if 0 < len(line.strip()) < 600 and line[:2] != b"{b"
    ]
    for found in rejected:
        assert data[found["offset"] : found["offset"] + found["length"]].rstrip(b"\n") == lines[found["line"] - 1]


def test_places_in_packed_files_and_arrays(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(content(10)))
    admit.run(config_for(model, packed), tmp_path / "gz", load_plugins())
    array = tmp_path / "rows.json"
    array.write_bytes(b"[\n" + b",\n".join(row(number) for number in range(5)) + b"\n]")
    admit.run(config_for(model, array), tmp_path / "array", load_plugins())
    assert [r.line for r in corpus.read_corpus(tmp_path / "gz/admit/corpus.parquet")][:2] == [1, 6]
    assert [r.line for r in corpus.read_corpus(tmp_path / "array/admit/corpus.parquet")] == [1, 2, 3, 4, 5]


def test_rows_over_the_cap_are_counted_with_their_lengths(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join([row(1), row(2, 300), row(3, 200), row(4)]))
    result = admit.run(config_for(model, rows, max_tokens=150), tmp_path / "run", load_plugins())
    counts = result.manifest.counts["corpus"]
    lengths = counts["over_length_tokens"]
    assert counts["reasons"]["over_length"] == 2 and len(lengths) == 2 and lengths[0] > lengths[1] > 150
    rejected = [json.loads(line) for line in (tmp_path / "run/admit/rejected.jsonl").read_bytes().splitlines()]
    assert [found["tokens"] for found in rejected] == lengths
    told = admit.account(result, tmp_path / "run")
    assert f"over_length: {lengths[0]:,}, {lengths[1]:,} tokens, at most 150" in told


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(content(10))
    judge = pipeline.judge_range

    def judge_and_append(*arguments: Any) -> bytes:
        with rows.open("ab") as stream:
            stream.write(b"\n")
        return judge(*arguments)

    monkeypatch.setattr(pipeline, "judge_range", judge_and_append)
    with pytest.raises(KilnError, match="changed while it was read") as caught:
        admit.run(config_for(model, rows), tmp_path / "run", load_plugins())
    assert caught.value.code == "KLN207" and not (tmp_path / "run" / "admit_manifest.json").exists()


def test_strict_refuses_fields_that_change_nothing(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(row(1)[:-1] + b', "source": "web", "id": 3}\n' + row(2))
    lenient = admit.run(config_for(model, rows), tmp_path / "lenient", load_plugins())
    assert lenient.manifest.counts["corpus"]["ignored_fields"] == {"id": 1, "source": 1}
    strict = admit.run(config_for(model, rows, strict=True), tmp_path / "strict", load_plugins())
    assert strict.manifest.counts["corpus"]["reasons"]["invalid_json"] == 1
    (found,) = [json.loads(line) for line in (tmp_path / "strict/admit/rejected.jsonl").read_bytes().splitlines()]
    assert found["detail"] == "unknown_field: id, source: changes nothing, and [admit] strict is set"
