"""The loop of corrections on the tiny model: added, admitted, trained, marked; and all that must leave no mark."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kiln_stages.correcting import marking
from kiln_stages.training import loop
from kiln_stages.training.loop import StepRecord
from tiny_model import Kiln

from kiln_cli import KilnError
from kiln_cli.files import run_lock

CONFIG = """schema = "kiln.config.v1"
[model]
path = "model"
id = "tiny-llama"
[admit]
control_tokens = "reject"
invalid_row_policy = "{policy}"
[train]
adapter = "{adapter}"
epochs = 2
lora_rank = 2
lora_alpha = 4.0
learning_rate = 0.01
threads = 1
"""
STORE = Path(".kiln/corrections/data.jsonl")
GOOD, BAD = ("r1", "r2", "r4"), "r3"


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Path:
    """A config, and a store with three good corrections and one whose text holds a control token."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "model").symlink_to(tiny_model, target_is_directory=True)
    write_config(root)
    lines = [
        {"request_id": name, "user": f"What is the weather in {name}?", "original": "no", "ideal": f"city {name}"}
        for name in (*GOOD, BAD)
    ]
    lines[-1]["ideal"] = "Ignore <|im_end|> in this text."
    (root / "given.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = kiln("corrections", "add", "--file", root / "given.jsonl", "--registry", root / ".kiln")
    assert done.code == 0, done.err
    assert "corrections: 4 added, 0 changed, 0 unchanged" in done.err
    return root


def write_config(root: Path, policy: str = "skip", adapter: str = "support-bot") -> None:
    (root / "kiln.toml").write_text(CONFIG.format(policy=policy, adapter=adapter))


def stored(root: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (root / STORE).read_bytes().splitlines()]
    return {line["request_id"]: line for line in lines}


def marks(root: Path) -> dict[str, str | None]:
    return {name: line.get("trained_into") for name, line in stored(root).items()}


def states(root: Path, kiln: Kiln) -> dict[str, str]:
    done = kiln("corrections", "list", "--registry", root / ".kiln", "--json")
    return {line["correction"]["request_id"]: line["state"] for line in json.loads(done.out)["lines"]}


def admit(root: Path, kiln: Kiln, run: str = "run") -> None:
    done = kiln("corrections", "admit", root / "kiln.toml", "--out", root / run)
    assert done.code == 0, done.err


def train(root: Path, kiln: Kiln, run: str = "run") -> str:
    done = kiln("train", root / run / "config.resolved.toml", "--out", root / run)
    assert done.code == 0, done.err
    return done.err


UNMARKED = dict.fromkeys((*GOOD, BAD))
TRAINED: dict[str, str | None] = dict.fromkeys(GOOD, "support-bot") | {BAD: None}


def test_the_loop(project: Path, kiln: Kiln) -> None:
    before = stored(project)
    admit(project, kiln)
    run = project / "run"
    receipt = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    assert (receipt["source"], receipt["source_locator"]) == ("corrections", "corrections:active")
    assert (receipt["rows_read"], receipt["rows_kept"], receipt["rows_rejected"]) == (4, 3, 1)
    rows = [json.loads(line) for line in (run / "admit" / "rows.jsonl").read_bytes().splitlines()]
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        [before[name]["user"], before[name]["ideal"]] for name in (BAD, *reversed(GOOD))
    ], "in the order of the store, whose newest stands first"
    kept = [json.loads(line) for line in (run / "admit" / "corrections.jsonl").read_bytes().splitlines()]
    assert [(row["request_id"], row["kept"]) for row in kept] == [
        (BAD, False),
        ("r4", True),
        ("r2", True),
        ("r1", True),
    ]
    assert [row["row_sha256"] for row in kept[1:]] == receipt["kept_row_hashes"]
    assert marks(project) == UNMARKED, "admission marks nothing"
    assert f"example id  {BAD}\n" in kiln("inspect", run, BAD).out
    assert "kept" in kiln("why", run, "r4").out

    told = train(project, kiln)
    assert "corrections: 3 marked as trained into support-bot, 1 rejected and still active" in told
    assert marks(project) == TRAINED
    after = stored(project)
    assert after[BAD] == before[BAD]
    for name in GOOD:
        marker = {key: after[name].pop(key) for key in ("trained_into", "trained_at", "trained_row_sha256")}
        assert after[name] == before[name]
        assert marker["trained_row_sha256"] in receipt["kept_row_hashes"]
        assert marker["trained_at"].endswith("Z") and len(marker["trained_at"]) == 20
    assert states(project, kiln) == dict.fromkeys(GOOD, "trained") | {BAD: "active"}
    status = kiln("status", run).out
    assert "corrections:" in status and "3 marked as trained into support-bot, 1 rejected" in status
    assert kiln("verify-receipt", run, "--require-all", "--deep").code == 0

    second = kiln("corrections", "admit", project / "kiln.toml", "--out", project / "second")
    assert second.code == 1 and "KLN102" in second.err, "the rejected one is still there, and no other"
    fixed = kiln("corrections", "add", "--request-id", BAD, "--ideal", "no", "--registry", project / ".kiln")
    assert "not to be trained on: r3: ideal is the original" in fixed.err
    third = kiln("corrections", "admit", project / "kiln.toml", "--out", project / "second")
    assert third.code == 1 and "KLN107" in third.err and "no active correction (3 trained, 1 unfit)" in third.err
    assert not (project / "second" / "admit_manifest.json").exists()


def test_the_long_form_and_the_request_give_the_same_rows(project: Path, kiln: Kiln) -> None:
    admit(project, kiln, "short")
    option = ["--dataset", "corrections:active"]
    assert kiln("admit", project / "kiln.toml", *option, "--out", project / "long").code == 0
    request = project / "request.json"
    request.write_text(json.dumps({"dataset": "corrections:active", "config": {"invalid_row_policy": "skip"}}))
    model = ["--model", project / "model", "--set", "admit.control_tokens=reject"]
    assert kiln("admit", request, *model, "--out", project / "asked").code == 0
    found = {(project / run / "admit" / "sft_ingestion.json").read_bytes() for run in ("short", "long", "asked")}
    assert len(found) == 1
    file = ["--file", project / "short" / "admit" / "rows.jsonl"]
    assert kiln("admit", project / "kiln.toml", *file, "--out", project / "file").code == 0
    (asked,), read = (
        (json.loads(text) for text in found),
        json.loads((project / "file" / "admit" / "sft_ingestion.json").read_bytes()),
    )
    assert asked["kept_corpus_sha256"] == read["kept_corpus_sha256"], "a row through another source is the same row"


def test_a_request_with_rows_of_its_own_is_refused(project: Path, kiln: Kiln) -> None:
    request = project / "request.json"
    request.write_text(json.dumps({"examples": [], "config": {}}))
    done = kiln("corrections", "admit", request, "--model", project / "model", "--out", project / "run")
    assert done.code == 2 and "examples and admit.dataset exclude each other" in done.err


def test_one_that_meets_a_held_out_row_stays_active(project: Path, kiln: Kiln) -> None:
    line = stored(project)["r2"]
    messages = [{"role": "user", "content": line["user"]}, {"role": "assistant", "content": line["ideal"]}]
    (project / "held.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    arguments = ["admit", project / "kiln.toml", "--dataset", "corrections:active", "--out", project / "run"]
    refused = kiln(*arguments, "--held-out", project / "held.jsonl")
    assert refused.code == 1 and "KLN109" in refused.err and "r2" in refused.err
    done = kiln(*arguments, "--held-out", project / "held.jsonl", "--drop-contaminated")
    assert done.code == 0, done.err
    assert "2 marked as trained into support-bot, 2 rejected and still active" in train(project, kiln)
    assert marks(project) == {"r1": "support-bot", "r2": None, BAD: None, "r4": "support-bot"}


def test_there_are_active_corrections_and_no_others(project: Path, kiln: Kiln) -> None:
    done = kiln("admit", project / "kiln.toml", "--dataset", "corrections:all", "--out", project / "run")
    assert done.code == 2 and "KLN212" in done.err and "it is corrections:active" in done.err


def test_a_registry_of_another_place(project: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".kiln").rename(project / "elsewhere")
    missing = kiln("corrections", "admit", project / "kiln.toml", "--out", project / "run")
    assert missing.code == 2 and "KLN204" in missing.err and "no store of corrections" in missing.err
    monkeypatch.chdir(project)
    done = kiln("corrections", "admit", "kiln.toml", "--registry", "elsewhere", "--out", "run")
    assert done.code == 0, done.err
    assert "3 marked" in train(project, kiln)
    assert 'registry = "elsewhere"' in (project / "run" / "config.resolved.toml").read_text()


def test_under_fail_the_correction_is_named(project: Path, kiln: Kiln) -> None:
    write_config(project, "fail")
    done = kiln("corrections", "admit", project / "kiln.toml", "--out", project / "run")
    assert done.code == 1
    assert "KLN101" in done.err and "row 1 (line 1, r3)" in done.err and "control_token_in_content" in done.err


@pytest.mark.parametrize("key", ["dataset_split=holdout", "source=sharegpt", 'map={user="q",assistant="a"}'])
def test_settings_that_corrections_do_not_have(project: Path, kiln: Kiln, key: str) -> None:
    done = kiln("corrections", "admit", project / "kiln.toml", "--set", f"admit.{key}", "--out", project / "run")
    assert done.code == 2 and "KLN203" in done.err and "corrections" in done.err


# --- cut, failed and cancelled trainings


def cut_at(step: int, error: BaseException | None) -> Any:
    """Ends the training at a step: by SIGTERM, or by an error."""

    def steps(*args: object, **kwargs: object) -> Iterator[StepRecord]:
        for record in loop.train(*args, **kwargs):  # type: ignore[arg-type]
            if record.step == step:
                if error is not None:
                    raise error
                os.kill(os.getpid(), signal.SIGTERM)
            yield record

    return patch("kiln_stages.training.trainer.train", steps)


def test_a_cancelled_training_marks_nothing_and_the_resumed_one_does(project: Path, kiln: Kiln) -> None:
    admit(project, kiln)
    before = (project / STORE).read_bytes()
    with cut_at(2, None):
        done = kiln("train", project / "run" / "config.resolved.toml", "--out", project / "run")
    assert done.code == 143
    assert json.loads((project / "run" / "train_receipt.json").read_bytes())["failure_reason"] == "cancelled"
    assert (project / STORE).read_bytes() == before
    resumed = kiln("resume", project / "run")
    assert resumed.code == 0, resumed.err
    assert "3 marked as trained into support-bot" in resumed.err
    assert marks(project) == TRAINED


@pytest.mark.parametrize("error", [KilnError("KLN104", "the loss is nan"), KeyboardInterrupt(), MemoryError()])
def test_a_failed_training_marks_nothing(project: Path, kiln: Kiln, error: BaseException) -> None:
    admit(project, kiln)
    before = (project / STORE).read_bytes()
    with cut_at(3, error):
        done = kiln("train", project / "run" / "config.resolved.toml", "--out", project / "run")
    assert done.code not in (0, 5)
    assert json.loads((project / "run" / "train_receipt.json").read_bytes())["status"] == "failed"
    assert (project / STORE).read_bytes() == before
    assert not (project / "run" / marking.MARKED).exists()


@pytest.mark.parametrize("dies", ["before", "between"])
def test_a_kill_between_receipt_and_mark_is_made_good_by_training_again(project: Path, kiln: Kiln, dies: str) -> None:
    """``before`` the store is written; ``between`` the store and the run's own note of it."""

    class Killed(BaseException):
        """What nothing catches."""

    def die(*_: object) -> None:
        raise Killed

    admit(project, kiln)
    name = "_mark" if dies == "before" else "write_file"
    with patch.object(marking, name, die), pytest.raises(Killed):
        kiln("train", project / "run" / "config.resolved.toml", "--out", project / "run")
    receipt = (project / "run" / "train_receipt.json").read_bytes()
    assert json.loads(receipt)["status"] == "success"
    assert marks(project) == (UNMARKED if dies == "before" else TRAINED)
    note = "its corrections are not marked: training again marks them"
    status = kiln("status", project / "run").out
    assert note in status and f"kiln train {project}/run/config.resolved.toml" in status
    between = re.sub(rb'"trained_at":"[^"]*"', b'"trained_at":"2020-01-01T00:00:00Z"', (project / STORE).read_bytes())
    (project / STORE).write_bytes(between)  # so that a time that is written anew is another one
    told = train(project, kiln)
    assert "unchanged: " in told and "3 marked as trained into support-bot" in told
    assert marks(project) == TRAINED
    assert dies == "before" or (project / STORE).read_bytes() == between
    assert (project / "run" / "train_receipt.json").read_bytes() == receipt, "a mark is no part of the evidence"
    assert note not in kiln("status", project / "run").out
    assert kiln("verify-receipt", project / "run", "--require-all").code == 0


# --- a store that changed meanwhile


def test_one_that_was_edited_or_removed_meanwhile_is_not_marked(project: Path, kiln: Kiln) -> None:
    admit(project, kiln)
    registry = ["--registry", project / ".kiln"]
    assert kiln("corrections", "add", "--request-id", "r1", "--ideal", "another text", *registry).code == 0
    lines = (project / STORE).read_bytes().splitlines(keepends=True)
    (project / STORE).write_bytes(b"".join(line for line in lines if b'"r2"' not in line))
    told = train(project, kiln)
    assert "1 marked as trained into support-bot" in told
    assert "1 edited since admission and so not marked (r1)" in told
    assert "1 not in the store any more (r2)" in told
    assert marks(project) == {BAD: None, "r4": "support-bot", "r1": None}
    assert states(project, kiln)["r1"] == "active", "its new text was trained into nothing yet"


def test_one_that_is_edited_afterwards_is_stale(project: Path, kiln: Kiln) -> None:
    admit(project, kiln)
    train(project, kiln)
    registry = ["--registry", project / ".kiln"]
    edited = kiln("corrections", "add", "--request-id", "r1", "--ideal", "another text", *registry)
    assert "trained on before, with other texts: r1; --retrain makes them active again" in edited.err
    assert states(project, kiln) == {BAD: "active", "r4": "trained", "r2": "trained", "r1": "stale"}
    assert "stale: edited after it was trained on" in kiln("corrections", "show", "r1", *registry).out
    assert kiln("corrections", "add", "--request-id", "r1", "--retrain", *registry).code == 0
    assert states(project, kiln)["r1"] == "active"
    assert "unchanged" in train(project, kiln)
    assert states(project, kiln)["r1"] == "active", "a finished training marks once"


def test_a_store_that_is_not_there_is_told_and_the_training_stands(project: Path, kiln: Kiln) -> None:
    admit(project, kiln)
    (project / ".kiln").rename(project / "moved")
    told = train(project, kiln)
    assert "kiln: warning: the training is complete, but its corrections are not marked: there is no store" in told
    assert not (project / ".kiln").exists()
    assert "its corrections are not marked" in kiln("status", project / "run").out
    (project / "moved").rename(project / ".kiln")
    assert "3 marked" in train(project, kiln)
    assert marks(project) == TRAINED


def test_a_store_that_is_held_or_cannot_be_written_is_told(
    project: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit(project, kiln)
    monkeypatch.setattr("kiln_stages.correcting.store.WAIT_SECONDS", 0.05)
    with run_lock((project / STORE).parent, "kiln corrections add"):
        told = train(project, kiln)
    assert "its corrections are not marked: " in told and "is in use by `kiln corrections add`" in told
    before = (project / STORE).read_bytes()

    def refuse(*_: object) -> None:
        raise KilnError("KLN402", "cannot write it: No space left on device", hint="free space")

    with patch("kiln_stages.correcting.store.write_file", refuse):
        told = train(project, kiln)
    assert "not marked: cannot write it: No space left on device; free space; then run `kiln train` again" in told
    assert (project / STORE).read_bytes() == before
    assert "3 marked" in train(project, kiln)


def test_a_second_training_of_the_same_texts_marks_them_anew(project: Path, kiln: Kiln) -> None:
    """Two runs admit the same corrections; the one that is complete last names itself."""
    admit(project, kiln, "one")
    write_config(project, adapter="other-bot")
    admit(project, kiln, "two")
    train(project, kiln, "one")
    assert marks(project)["r1"] == "support-bot"
    train(project, kiln, "two")
    assert marks(project)["r1"] == "other-bot"
    train(project, kiln, "one")
    assert marks(project)["r1"] == "other-bot"


def test_a_forged_list_of_corrections_is_refused(project: Path, kiln: Kiln) -> None:
    admit(project, kiln)
    path = project / "run" / "admit" / "corrections.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"r9"'))
    done = kiln("train", project / "run" / "config.resolved.toml", "--out", project / "run")
    assert done.code == 2 and "KLN207" in done.err and "admit/corrections.jsonl" in done.err


# --- what is shown


def test_the_list_shows_every_line_and_no_control_character(project: Path, kiln: Kiln) -> None:
    hostile = "a\x1b[31mred\u202e\x07"
    registry = ["--registry", project / ".kiln"]
    fields = ["--request-id", hostile, "--user", hostile, "--ideal", f"{hostile}\nb", "--agent", hostile]
    assert kiln("corrections", "add", *fields, *registry).code == 0
    store = project / STORE
    store.write_bytes(store.read_bytes() + b"\n{broken \x1b[31m}\n" + store.read_bytes().splitlines()[0] + b"\n")
    listed = kiln("corrections", "list", *registry)
    assert "5 active, 1 repeated, 1 malformed" in listed.err
    assert "malformed  line 7" in listed.out
    assert "line 1 has the same request id and counts" in listed.out
    shown = kiln("corrections", "show", hostile, *registry)
    assert "ideal:\n  a\\x1b[31mred\\u202e\\x07\n  b" in shown.out
    for text in (listed.out, listed.err, shown.out):
        assert all(line.isprintable() for line in text.split("\n")), text
    only = kiln("corrections", "list", "--state", "malformed", *registry, "--json")
    assert [line["line"] for line in json.loads(only.out)["lines"]] == [7]
    assert json.loads(only.out)["counts"]["active"] == 5
    admit(project, kiln)
    assert json.loads((project / "run" / "admit" / "sft_ingestion.json").read_bytes())["rows_read"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["add"], "KLN201", "nothing is given"),
        (["add", "--retrain"], "KLN201", "nothing is given"),
        (["add", "--user", "u"], "KLN201", "--request-id is missing"),
        (["add", "--file", "x", "--user", "u"], "KLN201", "exclude each other"),
        (["add", "--request-id", "new", "--user", "u"], "KLN204", "a new correction needs ideal"),
        (["add", "--request-id", "r", "--user", "\udcff", "--ideal", "i"], "KLN204", "user is no UTF-8"),
        (["show", "none"], "KLN106", "has no correction 'none'"),
        (["list", "--state", "odd"], "KLN201", "odd"),
    ],
)
def test_what_is_refused(project: Path, kiln: Kiln, arguments: list[str], code: str, why: str) -> None:
    before = (project / STORE).read_bytes()
    done = kiln("corrections", *arguments, "--registry", project / ".kiln")
    assert f"kiln: {code}: " in done.err and why in done.err
    assert (project / STORE).read_bytes() == before


def test_standard_input(project: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tmp_path / "piped.jsonl"
    rows.write_text('[{"request_id":"p1","user":"u","ideal":"i"},\n {"request_id":"p2","user":"u","ideal":"i"}]')
    with rows.open("rb") as stream:
        monkeypatch.setattr("sys.stdin", type("Piped", (), {"buffer": stream})())
        done = kiln("corrections", "add", "--file", "-", "--registry", project / ".kiln", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["added"] == ["p1", "p2"]
