"""``kiln admit --map``: rows of any shape are the rows of messages that they say, also when they are read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import Kiln

ROWS = [
    {"id": n, "prompt": f"question {n}", "completion": {"text": f"answer {n}", "stop": True}, "sys": "be brief"}
    for n in range(3)
]
MAP = ("--map", "user=/prompt", "--map", "assistant=completion.text", "--map", "system=sys")


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    said = (("system", row["sys"]), ("user", row["prompt"]), ("assistant", row["completion"]["text"]))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, rows in (("rows.jsonl", ROWS), ("messages.jsonl", [as_messages(row) for row in ROWS])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def receipt(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    return value


def test_a_mapped_file_is_the_rows_that_it_says(files: Path, tiny_model: Path, kiln: Kiln) -> None:
    plain = kiln("admit", "--file", files / "messages.jsonl", "--model", tiny_model, "--out", files / "plain")
    assert plain.code == 0, plain.err
    mapped = kiln("admit", "--file", files / "rows.jsonl", "--model", tiny_model, "--out", files / "run", *MAP)
    assert mapped.code == 0, mapped.err
    assert receipt(files / "run")["kept_row_hashes"] == receipt(files / "plain")["kept_row_hashes"]
    for field in ("completion.stop", "id"):
        assert f"ignored field {field}: 3 rows" in mapped.err


def test_a_file_that_no_source_knows_is_told_of_the_map(files: Path, tiny_model: Path, kiln: Kiln) -> None:
    done = kiln("admit", "--file", files / "rows.jsonl", "--model", tiny_model, "--out", files / "run")
    assert done.code == 2
    assert "KLN212" in done.err and "completion, id, prompt, sys" in done.err
    assert "--map user=" in done.err and "question_answer" in done.err


def test_the_config_of_the_run_maps_again(files: Path, tiny_model: Path, kiln: Kiln) -> None:
    options = ("--model", tiny_model, "--out", files / "run")
    assert kiln("admit", "--file", files / "rows.jsonl", *options, *MAP).code == 0
    before = (files / "run" / "admit_manifest.json").read_bytes()
    again = kiln("admit", files / "run" / "config.resolved.toml", "--out", files / "run")
    assert again.code == 0, again.err
    assert json.loads((files / "run" / "admit_manifest.json").read_bytes())["counts"] == json.loads(before)["counts"]
    assert kiln("inspect", files / "run", "1").code == 0


def test_a_row_without_a_mapped_field_has_its_reason(files: Path, tiny_model: Path, kiln: Kiln) -> None:
    with (files / "rows.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"prompt": "q", "sys": "s"}\n')
    options = ("--model", tiny_model, "--out", files / "run")
    refused = kiln("admit", "--file", files / "rows.jsonl", *options, *MAP)
    assert refused.code == 1
    assert "row 4 (line 4)" in refused.err
    assert "invalid_json: missing_field: expected a value at /completion/text, found nothing" in refused.err


@pytest.mark.parametrize(
    "options, parts",
    [
        (("--map", "prompt=/a"), ("'prompt'", "messages, tools, system, user, assistant")),
        (("--map", "user=/prompt"), ("assistant", "messages, tools, system, user, assistant")),
        (("--map", "user=/a", "--map", "user=/b"), ("twice", "'/a'", "'/b'")),
        (("--map", "user"), ("field=path",)),
        (("--source", "alpaca", *MAP), ("map", "source")),
    ],
)
def test_what_is_no_map_is_a_usage_error(
    files: Path, tiny_model: Path, kiln: Kiln, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    done = kiln("admit", "--file", files / "rows.jsonl", "--model", tiny_model, "--out", files / "run", *options)
    assert done.code == 2
    assert all(part in done.err for part in parts), done.err
    assert not (files / "run" / "admit_manifest.json").exists()
