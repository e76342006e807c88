"""No message speaks of "1 rows": commands on files and runs that have one of a thing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scored_corpus import ALIAS, TOP_K, Scorer, corpus, register_teacher, teacher_identity
from tiny_model import CONFIG, TOOLS, Kiln, write_project

# "1 rows", "1 older checkpoints". Not what ends alike and is no plural: "row 1 is", "1 loss".
NO_NOUN = "is|was|has|does|differs|gives|names|holds|stands|says|comes|lies|times|less|loss|class"
ONE_OF_MANY = re.compile(rf"(?<![\d.,:/#=-])\b1 (?:[a-z]+ )?(?!(?:{NO_NOUN})\b)[a-z]{{2,}}s\b")
CALL = [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
RAW = {"id": 1, "query": "What is the weather in Oslo?", "tools": json.dumps(TOOLS), "answers": json.dumps(CALL)}
CHAT = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}], "extra": 1}

Say = Callable[..., str]


@pytest.fixture
def say(kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """``say(code, *arguments)``: what a command tells in ``tmp_path``, in which no one thing is many."""
    monkeypatch.chdir(tmp_path)

    def call(code: int, *arguments: str) -> str:
        done = kiln(*arguments)
        assert done.code == code, (arguments, done.err)
        return hear(done.out + done.err)

    return call


def hear(text: str) -> str:
    assert [line for line in text.splitlines() if ONE_OF_MANY.search(line)] == []
    return text


def write(name: str, *rows: Any) -> str:
    Path(name).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return name


@pytest.mark.parametrize("text", ["  1 rows", "in 1 files", "removed: 1 older checkpoints", "0 kept, 1 rows, 2"])
def test_what_is_looked_for(text: str) -> None:
    assert ONE_OF_MANY.search(text)


@pytest.mark.parametrize(
    "text", ["1 row", "11 rows", "row 1 is", "0.1 steps", "1,001 rows", ", row 1 has", "the 1 loss"]
)
def test_what_is_not(text: str) -> None:
    assert not ONE_OF_MANY.search(text)


def test_files(say: Say, tiny_model: Path) -> None:
    model = str(tiny_model)
    rows, broken = write("rows.jsonl", "", CHAT), write("broken.jsonl", {"messages": []})
    say(0, "validate", rows)
    say(0, "validate", write("raw.jsonl", {**RAW, "more": 1}))
    assert "1 character, at least 10" in say(1, "validate", write("short.jsonl", {**RAW, "query": "a"}))
    say(1, "validate", broken, "--kind", "sft")
    say(1, "validate", write("blank.jsonl", ""))
    assert "ignored field extra: 1 row\n" in say(0, "admit", "--file", rows, "--model", model, "--out", "run")
    say(0, "admit", "--file", rows, "--model", model, "--out", "run")
    say(1, "admit", "--file", broken, "--model", model, "--out", "broken")
    say(1, "admit", "--file", rows, "--model", model, "--out", "other", "--held-out", rows)
    say(0, "inspect", "run", "1")
    say(0, "why", "run", "row:1")
    say(0, "export", "run", "--layout", "hf", "--out", "exported")
    hear(Path("exported/README.md").read_text())
    say(1, "leak", rows, write("others.jsonl", CHAT))


def test_data_sets_and_corrections(say: Say) -> None:
    say(0, "dataset", "add", "one", write("rows.jsonl", "", CHAT))
    for action in ("list", "show", "split", "verify"):
        say(0, "dataset", action, *(["one"] if action != "list" else []))
    correction = {"request_id": "r", "user": "a", "original": "b", "ideal": "c"}
    say(0, "corrections", "add", "--file", write("given.jsonl", correction))
    say(2, "corrections", "add", "--file", write("broken.jsonl", {"request_id": "s"}))
    say(0, "corrections", "list")


def test_a_run(say: Say, tmp_path: Path, tiny_model: Path) -> None:
    config = str(write_project(tmp_path, tiny_model, config=re.sub(r"n_(\w+) = \d+", r"n_\1 = 1", CONFIG)))
    names = ("Oslo", "Rome", "Bern")
    rows = [{**RAW, "id": at, "query": f"What is the weather in {name}?"} for at, name in enumerate(names)]
    answers = json.dumps([{**CALL[0], "more": 1}])
    write("raw.jsonl", {**rows[0], "answers": answers}, *rows[1:], {**RAW, "id": 9, "query": "a"})
    run = ["--out", "run"]
    assert "more: 1 row\n" in say(0, "prepare", config, *run)
    say(0, "admit", config, *run)
    say(0, "train", config, *run, "--dry-run")
    say(0, "train", config, *run, "--set", "train.checkpoint_interval=1")
    for command in ("status", "report", "verify-receipt", "resume"):
        say(0, command, "run")
    say(0, "verify-receipt", "run", "--deep")
    say(0, "diff", "run", "run")
    assert "1 loss, " in say(0, "resume", "run", "--prove", "1")
    say(2, "resume", "run", "--prove", "2")
    for name in ("adapter/README.md", "loss.svg"):
        hear((Path("run/train") / name).read_text())


def test_a_distillation(say: Say, tiny_model: Path) -> None:
    identity, scorer = teacher_identity(tiny_model, max_top_k=TOP_K + 1), Scorer(tiny_model)
    row = scorer.example(more=1, top_k=TOP_K)
    entry = row["teacher_tokens"][0]
    entry["top_logprobs"].append({"token_id": 1, "logprob": -99.0})
    row["teacher_tokens"][1]["top_logprobs"][-1]["logprob"] = -100
    register_teacher(Path(".kiln"), identity)
    Path("corpus.jsonl").write_bytes(corpus(identity, [row, b""]))
    text = say(0, "admit", "--file", "corpus.jsonl", "--teacher", ALIAS, "--model", str(tiny_model), "--out", "run")
    for part in ("ignored field more: 1 example", "1 candidate stands behind", "1 score is -100", "1 blank line"):
        assert part in text
    say(0, "validate", "corpus.jsonl")
