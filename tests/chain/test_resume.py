"""A training cut anywhere and resumed ends in the same bytes; one that would not is refused, with every reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kiln_stages.training.checkpoint import checkpoint_name, list_checkpoints
from safetensors.numpy import load_file, save_file
from tiny_model import RUN, Kiln, Outcome

from kiln_cli.manifests import document

Copy = Callable[..., Path]
STEPS = 26
INTERVAL = 5
KILLS = (7, 13, 22)
RESULTS = ("train/metrics.jsonl", "train/adapter/adapter_model.safetensors", "train/adapter/adapter_config.json")


class Cut(NamedTuple):
    """A training in a process of its own that a signal ended, and the process that resumed it."""

    run: Path
    code: int  # of the training
    err: str
    lines: int  # of the loss log when the training was gone
    checkpoint: int  # the newest one then
    receipt: bool  # whether there was one then
    resumed: Outcome | None  # SIGINT stops as SIGTERM does, and is not resumed here


def cut(project: Path, after_step: int, number: signal.Signals, kiln_process: Kiln) -> Cut:
    run = project / RUN
    log = run / "train" / "metrics.jsonl"
    command = [sys.executable, "-m", "kiln_cli.app", "train", str(project / "kiln.toml"), "--out", str(run)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as training:
        deadline = time.monotonic() + 100
        while committed(log) < after_step:
            assert training.poll() is None and time.monotonic() < deadline, "the training ended by itself"
            time.sleep(0.001)
        os.kill(training.pid, number)
        _, err = training.communicate(timeout=60)
    newest = list_checkpoints(run / "train")[-1][0]
    before = committed(log), newest, (run / "train_receipt.json").exists()
    resumed = kiln_process("resume", run) if number != signal.SIGINT else None
    return Cut(run, training.returncode, err, *before, resumed)


def committed(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.fixture(scope="module")
def cuts(admitted: Path, tmp_path_factory: pytest.TempPathFactory, kiln_process: Kiln) -> dict[str, Cut]:
    """Trainings that die in different ways, two at a time, each resumed in a fresh process."""
    wanted = {f"SIGKILL {step}": (step, signal.SIGKILL) for step in KILLS}
    wanted |= {"SIGTERM": (8, signal.SIGTERM), "SIGINT": (17, signal.SIGINT)}
    root = tmp_path_factory.mktemp("cuts")
    with ThreadPoolExecutor(2) as pool:
        futures = {}
        for name, (step, number) in wanted.items():
            project = root / name.replace(" ", "-")
            shutil.copytree(admitted, project, symlinks=True)
            futures[name] = pool.submit(cut, project, step, number, kiln_process)
        return {name: future.result() for name, future in futures.items()}


def equals_uncut(run: Path, finished: Path) -> None:
    for name in RESULTS:
        assert (run / name).read_bytes() == (finished / RUN / name).read_bytes(), name
    mine, whole = receipt_of(run), receipt_of(finished / RUN)
    for key in ("adapters", "loss_log_sha256", "held_out", "data", "token_counts", "steps", "content_sha256"):
        assert mine[key] == whole[key], key


def receipt_of(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "train_receipt.json").read_bytes())
    return value


@pytest.mark.parametrize("step", KILLS)
def test_a_killed_training_resumed_by_a_fresh_process_equals_the_uncut_one(
    cuts: dict[str, Cut], finished: Path, kiln: Kiln, step: int
) -> None:
    done = cuts[f"SIGKILL {step}"]
    assert done.code == -signal.SIGKILL and not done.receipt
    assert done.checkpoint in (step // INTERVAL * INTERVAL, (step // INTERVAL + 1) * INTERVAL)
    assert done.checkpoint <= done.lines < STEPS
    assert done.resumed is not None and done.resumed.code == 0, done
    assert f"after step {done.checkpoint}" in done.resumed.err
    assert receipt_of(done.run)["produced"]["steps_in_last_process"] == STEPS - done.checkpoint
    equals_uncut(done.run, finished)
    assert kiln("verify-receipt", done.run, "--require-all").code == 0


def test_nothing_unfinished_is_left_behind_a_kill(cuts: dict[str, Cut], finished: Path) -> None:
    wanted = {path.relative_to(finished / RUN).as_posix() for path in (finished / RUN).rglob("*")}
    for step in KILLS:
        run = cuts[f"SIGKILL {step}"].run
        assert {path.relative_to(run).as_posix() for path in run.rglob("*")} == wanted


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_settles_the_step_publishes_a_checkpoint_and_resume_equals_the_uncut_run(
    cuts: dict[str, Cut], finished: Path, name: str, code: int
) -> None:
    done = cuts[name]
    assert done.code == code, done.err
    assert done.receipt, "a failed one, with the reason cancelled"
    assert done.lines == done.checkpoint, "the step is settled: what is logged is in the checkpoint"
    assert f"after step {done.checkpoint}" in done.err and "next: kiln resume" in done.err
    if done.resumed is not None:
        assert done.resumed.code == 0, done.resumed.err
        equals_uncut(done.run, finished)


@pytest.fixture
def unfinished(finished: Path, copy_of: Copy) -> Path:
    """What SIGKILL leaves behind step 22: checkpoints up to 20, 22 lines and a half, no adapter, no receipt."""
    project = copy_of(finished)
    run = project / RUN
    (run / "train_receipt.json").unlink()
    shutil.rmtree(run / "train" / "adapter")
    shutil.rmtree(run / "train" / checkpoint_name("tiny", 25))
    log = run / "train" / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:22]) + lines[22][:31])
    return project


def test_the_log_goes_on_at_the_step_behind_the_checkpoint(unfinished: Path, finished: Path, kiln: Kiln) -> None:
    """Lines of the first process carry a mark: those that keep it are the ones that were not trained again."""
    log = unfinished / RUN / "train" / "metrics.jsonl"
    marked = [line.replace(b'"tokens":', b'"marked":1,"tokens":') for line in log.read_bytes().splitlines()]
    log.write_bytes(b"".join(line + b"\n" for line in marked[:22]))
    done = kiln("resume", unfinished / RUN)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert ["marked" in line for line in lines] == [True] * 20 + [False] * 6
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert receipt_of(unfinished / RUN)["loss_log_sha256"] == receipt_of(finished / RUN)["loss_log_sha256"]


def _zero_the_momentum(run: Path, step: int) -> None:
    """Edits the optimizer's state and makes the manifest's size and hash right again."""
    checkpoint = run / "train" / checkpoint_name("tiny", step)
    for path in checkpoint.iterdir():
        path.chmod(0o644)
    state = checkpoint / "optimizer.safetensors"
    tensors = {name: tensor * 0 for name, tensor in load_file(state).items()}
    assert tensors
    save_file(tensors, state, metadata={"format": "pt"})
    path = checkpoint / "checkpoint_manifest.json"
    manifest = json.loads(path.read_bytes())
    data = state.read_bytes()
    manifest["files"][state.name] |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_bytes(document(manifest))


def test_the_optimizer_state_matters_a_zeroed_momentum_gives_another_adapter(
    unfinished: Path, finished: Path, kiln: Kiln
) -> None:
    _zero_the_momentum(unfinished / RUN, 20)
    done = kiln("resume", unfinished / RUN)
    assert done.code == 0, done.err
    mine, whole = receipt_of(unfinished / RUN), receipt_of(finished / RUN)
    assert mine["adapters"]["output"]["content_sha256"] != whole["adapters"]["output"]["content_sha256"]
    assert mine["loss_log_sha256"] != whole["loss_log_sha256"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def _halve(path: Path) -> None:
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[: len(data) // 2])


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the adapter": lambda at: _flip(at / "adapter.safetensors"),
    "a bit of the optimizer state": lambda at: _flip(at / "optimizer.safetensors"),
    "a bit of the loop state": lambda at: _flip(at / "sft_loop_state.json"),
    "half of the manifest": lambda at: _halve(at / "checkpoint_manifest.json"),
    "a file gone": lambda at: (at / "optimizer.safetensors").unlink(),
    "a file too many": lambda at: (at / "extra.json").write_text("{}"),
    "the mark of an unfinished one": lambda at: (at / ".incomplete").write_text(at.name),
    "no manifest": lambda at: (at / "checkpoint_manifest.json").unlink(),
    "a link for a file": lambda at: _link(at / "adapter.safetensors"),
    "a link for the directory": _link,
    "another step's name": lambda at: at.rename(at.with_name(checkpoint_name("tiny", 21))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(unfinished: Path, kiln: Kiln, damage: str) -> None:
    DAMAGES[damage](unfinished / RUN / "train" / checkpoint_name("tiny", 20))
    log = (unfinished / RUN / "train" / "metrics.jsonl").read_bytes()
    done = kiln("resume", unfinished / RUN)
    assert done.code == 2, done.err
    assert "KLN215" in done.err
    assert not (unfinished / RUN / "train_receipt.json").exists()
    assert (unfinished / RUN / "train" / "metrics.jsonl").read_bytes() == log, "a refusal changes nothing"


def test_a_changed_manifest_is_refused_as_damaged_or_as_bound_to_something_else(unfinished: Path, kiln: Kiln) -> None:
    """Ten bits, one in each tenth of the file; the time it was made binds nothing and is left out."""
    path = unfinished / RUN / "train" / checkpoint_name("tiny", 20) / "checkpoint_manifest.json"
    data = path.read_bytes()
    path.chmod(0o644)
    for place in range(10):
        offset = (2 * place + 1) * len(data) // 20
        line_start = data.rfind(b"\n", 0, offset) + 1
        if b"created_at" in data[line_start : data.find(b"\n", offset)]:
            continue
        changed = bytearray(data)
        changed[offset] ^= 1
        path.write_bytes(changed)
        done = kiln("resume", unfinished / RUN)
        assert done.code == 2 and ("KLN215" in done.err or "KLN209" in done.err), f"byte {offset}: {done}"
    path.write_bytes(data)
    assert kiln("resume", unfinished / RUN).code == 0


def _set(run: Path, *changes: tuple[str, str]) -> None:
    path = run / "config.resolved.toml"
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


# What is changed in the run's config, and what the table must show: (name, then, now).
Row = tuple[str, str, str]
CHANGES: dict[str, tuple[tuple[str, str], list[Row]]] = {
    "seed": (("seed = 42", "seed = 43"), [("config.seed", '"42"', '"43"')]),
    "learning rate": (("learning_rate = 0.01", "learning_rate = 0.02"), [("learning_rate", "0.01", "0.02")]),
    "epochs": (("epochs = 2", "epochs = 3"), [("epochs", "2", "3"), ("total_steps", "26", "39")]),
    "rank": (("lora_rank = 2", "lora_rank = 4"), [("lora_rank", "2", "4")]),
    "threads": (("threads = 1", "threads = 2"), [("threads_intra_op", "1", "2")]),
    "interval": (("checkpoint_interval = 5", "checkpoint_interval = 6"), [("checkpoint_interval", "5", "6")]),
}


def _differences(done: Outcome, *rows: Row) -> None:
    assert done.code == 2, done.err
    assert done.err.count("KLN209") == 1
    lines = [line.split() for line in done.err.splitlines()]
    for name, then, now in rows:
        found = [cells for cells in lines if cells and cells[0].endswith(name) and cells[1:] == [then, now]]
        assert found, f"{name} {then} {now} is not in\n{done.err}"


@pytest.mark.parametrize("name", CHANGES)
def test_resume_under_a_changed_setting_is_refused_with_both_values(unfinished: Path, kiln: Kiln, name: str) -> None:
    change, rows = CHANGES[name]
    _set(unfinished / RUN, change)
    _differences(kiln("resume", unfinished / RUN), *rows)


def test_all_differences_are_in_one_table(unfinished: Path, kiln: Kiln) -> None:
    _set(unfinished / RUN, *(change for change, _ in CHANGES.values()))
    _differences(kiln("resume", unfinished / RUN), *(row for _, rows in CHANGES.values() for row in rows))


def test_resume_on_another_corpus_is_refused(unfinished: Path, kiln: Kiln) -> None:
    run = unfinished / RUN
    bound = json.loads((run / "train" / checkpoint_name("tiny", 20) / "checkpoint_manifest.json").read_bytes())
    for stage in ("prepare", "admit"):
        done = kiln(stage, unfinished / "kiln.toml", "--out", run, "--set", "data.n_train=15")
        assert done.code == 0, done.err
    kept = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())["kept_corpus_sha256"]
    done = kiln("resume", run)
    assert done.code == 2 and "KLN209" in done.err, done.err
    assert bound["data"]["content_sha256"] in done.err and kept.removeprefix("sha256:") in done.err
    assert "ingestion" in done.err, "rejected rows and policy are bound too"


def test_resume_under_other_base_weights_is_refused(finished: Path, unfinished: Path, kiln: Kiln) -> None:
    real = (unfinished / "model").resolve()
    (unfinished / "model").unlink()
    shutil.copytree(real, unfinished / "model")
    weights = unfinished / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, weights, metadata={"format": "pt"})
    done = kiln("resume", unfinished / RUN)
    assert done.code == 2 and "KLN209" in done.err, done.err
    assert "base_model_weights_sha256" in done.err


def test_renamed_base_weights_are_the_same(unfinished: Path, finished: Path, kiln: Kiln) -> None:
    """Base weights are bound by content: where the directory lies is not part of them."""
    real = (unfinished / "model").resolve()
    (unfinished / "model").unlink()
    shutil.copytree(real, unfinished / "model")
    done = kiln("resume", unfinished / RUN)
    assert done.code == 0, done.err
    equals_uncut(unfinished / RUN, finished)


PLUGIN = """
import kiln_cli

@kiln_cli.hookimpl
def kiln_templates():
    return [kiln_cli.Template(name="spare", doc="never used", source="{{ messages }}")]
"""


def _install(site: Path, version: str) -> None:
    """A distribution as pip leaves it: a module, and metadata with an entry point."""
    shutil.rmtree(site, ignore_errors=True)
    info = site / f"kiln_plugin_spare-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "kiln_plugin_spare.py").write_text(PLUGIN, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kiln-plugin-spare\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[kiln_cli.plugins]\nspare = kiln_plugin_spare\n")


def test_resume_under_another_version_of_a_plugin_is_refused(
    project: Path, kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    _install(site, "1.0")
    monkeypatch.syspath_prepend(site)
    run = project / RUN
    for stage in ("prepare", "admit", "train"):
        done = kiln(stage, project / "kiln.toml", "--out", run, "--set", "train.epochs=1")
        assert done.code == 0, done.err
    (run / "train_receipt.json").unlink()
    _install(site, "1.1")
    _differences(kiln("resume", run), ("plugins.kiln-plugin-spare", '"1.0"', '"1.1"'))
    monkeypatch.setenv("KILN_PLUGINS", "none")
    _differences(kiln("resume", run), ("plugins.kiln-plugin-spare", '"1.0"', "(absent)"))
    monkeypatch.delenv("KILN_PLUGINS")
    _install(site, "1.0")
    assert kiln("resume", run).code == 0


def test_an_older_checkpoint_beside_later_ones_is_refused_with_a_way_on(unfinished: Path, kiln: Kiln) -> None:
    done = kiln("resume", unfinished / RUN, "--checkpoint", checkpoint_name("tiny", 10))
    assert done.code == 2
    assert "KLN215" in done.err and "hint: " in done.err


def test_an_older_checkpoint_alone_equals_the_uncut_run(unfinished: Path, finished: Path, kiln: Kiln) -> None:
    for step in (10, 15, 20):
        shutil.rmtree(unfinished / RUN / "train" / checkpoint_name("tiny", step))
    done = kiln("resume", unfinished / RUN, "--checkpoint", checkpoint_name("tiny", 5))
    assert done.code == 0, done.err
    equals_uncut(unfinished / RUN, finished)


def test_resume_of_a_finished_run_changes_nothing(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(finished)
    before = {path: path.read_bytes() for path in (project / RUN).rglob("*.json*")}
    done = kiln("resume", project / RUN)
    assert done.code == 0, done.err
    assert {path: path.read_bytes() for path in (project / RUN).rglob("*.json*")} == before


def test_resume_where_nothing_was_trained_is_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    done = kiln("resume", project / RUN)
    assert done.code == 2
    assert "KLN215" in done.err
