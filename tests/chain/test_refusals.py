"""What is refused, with which exit code, and what the message says: both values, and the next thing to do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_model import RUN, Kiln, Outcome

Copy = Callable[..., Path]
HOLDER = """
import sys, time
from pathlib import Path
from kiln_cli.files import run_lock
with run_lock(Path(sys.argv[1]), "kiln train"):
    print("held", flush=True)
    time.sleep(60)
"""


def train(kiln: Kiln, project: Path, *options: str) -> Outcome:
    return kiln("train", project / "kiln.toml", "--out", project / RUN, *options)


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def hint_of(done: Outcome) -> str:
    (hint,) = [line for line in done.err.splitlines() if line.startswith("hint: ")]
    return hint


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_missing_model_is_exit_3_with_a_one_line_fix(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    (project / "model").unlink()
    done = train(kiln, project)
    assert done.code == 3
    assert "KLN302" in done.err and "model" in done.err
    assert "fixtures/fetch_model.py" in hint_of(done)
    assert not (project / RUN / "train").exists()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_model_without_a_file_is_exit_3(admitted: Path, copy_of: Copy, kiln: Kiln, missing: str) -> None:
    project = copy_of(admitted, own_model=True)
    (project / "model" / missing).unlink()
    done = train(kiln, project)
    assert done.code == 3, done.err
    assert "KLN302" in done.err
    assert hint_of(done)


def test_admit_without_a_model_is_exit_3(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    (project / "model").unlink()
    done = kiln("admit", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 3
    assert "KLN302" in done.err and "fixtures/fetch_model.py" in hint_of(done)


def test_a_corpus_changed_since_admission_is_refused_before_a_model_is_loaded(
    admitted: Path, copy_of: Copy, kiln: Kiln
) -> None:
    """The weights are no weights here: had anything loaded them first, the error would be about them."""
    project = copy_of(admitted, own_model=True)
    (project / "model" / "model.safetensors").write_bytes(b"no weights")
    corpus = project / RUN / "admit" / "corpus.parquet"
    vouched = sha256(corpus)
    data = bytearray(corpus.read_bytes())
    data[len(data) // 2] ^= 1
    corpus.write_bytes(data)
    done = train(kiln, project)
    assert done.code == 2, done.err
    assert "KLN207" in done.err
    assert "corpus.parquet" in done.err
    assert vouched in done.err and sha256(corpus) in done.err
    assert not (project / RUN / "train").exists()


def test_a_changed_corpus_is_refused_where_there_is_no_model_at_all(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    (project / "model").unlink()
    (project / RUN / "admit" / "corpus.parquet").write_bytes(b"PAR1")
    done = train(kiln, project)
    assert done.code == 2
    assert "KLN207" in done.err


def test_an_ingestion_receipt_edited_by_hand_is_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    edit(project / RUN / "admit" / "sft_ingestion.json", ('"dataset_path"', '"inline"'))
    done = train(kiln, project)
    assert done.code == 2
    assert "KLN207" in done.err and "sft_ingestion.json" in done.err


def test_a_split_changed_since_prepare_is_refused_by_admit(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    split = project / RUN / "data" / "train.jsonl"
    vouched = sha256(split)
    split.write_bytes(split.read_bytes() + split.read_bytes().splitlines(keepends=True)[0])
    done = kiln("admit", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 2
    assert "KLN207" in done.err and vouched in done.err and sha256(split) in done.err


@pytest.mark.parametrize("stage", ["admit", "train"])
def test_a_stage_before_its_time_names_the_one_to_run(project: Path, kiln: Kiln, stage: str) -> None:
    done = kiln(stage, project / "kiln.toml", "--out", project / RUN)
    assert done.code == 2
    assert "KLN206" in done.err
    assert f"kiln {'prepare' if stage == 'admit' else 'admit'}" in hint_of(done)


def test_a_config_with_four_faults_reports_four(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    edit(
        project / "kiln.toml",
        ("epochs = 2", 'epochs = "two"'),
        ("lora_rank = 2", "lora_rnk = 2"),
        ("n_train = 16", "n_train = 0"),
        ("seed = 42", "seed = -1"),
    )
    done = train(kiln, project)
    assert done.code == 2
    assert "KLN203" in done.err and "4 faults" in done.err
    text = (project / "kiln.toml").read_text(encoding="utf-8").splitlines()
    for key in ("epochs", "lora_rnk", "n_train", "seed"):
        number = next(place for place, line in enumerate(text, start=1) if line.startswith(f"{key} ="))
        assert f"kiln.toml:{number}: " in done.err, key
    assert "'lora_rank'" in done.err, "an unknown key names the near one"


@pytest.mark.parametrize(
    "key", ["batch_size = 4", "warmup_steps = 10", "max_grad_norm = 1.0", "lora_dropout = 0.1", "packing = true"]
)
def test_keys_of_general_trainers_are_refused_by_name(admitted: Path, copy_of: Copy, kiln: Kiln, key: str) -> None:
    project = copy_of(admitted)
    edit(project / "kiln.toml", ("epochs = 2", f"epochs = 2\n{key}"))
    done = train(kiln, project)
    assert done.code == 2
    assert f"train.{key.split()[0]} is refused" in done.err


def test_another_config_is_refused_with_both_digests_and_fresh_moves_the_old_one_aside(
    finished: Path, copy_of: Copy, kiln: Kiln
) -> None:
    project = copy_of(finished)
    run = project / RUN
    before = _files(run / "train")
    old = (run / "train_receipt.json").read_bytes()
    change = "train.epochs=1"
    done = train(kiln, project, "--set", change)
    assert done.code == 2
    assert "KLN208" in done.err and "--fresh" in hint_of(done)
    digests = {word.strip(":,") for word in done.err.split() if word.startswith("sha256:")}
    assert len(digests) == 2, done.err
    assert _files(run / "train") == before, "a refusal changes nothing"
    assert (run / "train_receipt.json").read_bytes() == old

    done = train(kiln, project, "--set", change, "--fresh")
    assert done.code == 0, done.err
    (aside,) = [path for path in run.iterdir() if path.name.startswith("train.")]
    digest8 = aside.name.removeprefix("train.")
    assert len(digest8) == 8 and int(digest8, 16) >= 0
    kept = _files(aside)
    assert {name: kept[name] for name in before} == before
    assert kept["train_receipt.json"] == old
    assert (run / "train_receipt.json").read_bytes() != old
    assert kiln("verify-receipt", run).code == 0


def test_another_corpus_is_refused_with_both_digests(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(finished)
    edit(project / "kiln.toml", ("n_train = 16", "n_train = 15"))
    for stage in ("prepare", "admit"):
        assert kiln(stage, project / "kiln.toml", "--out", project / RUN).code == 0
    before = _files(project / RUN / "train")
    done = train(kiln, project)
    assert done.code == 2
    assert "KLN208" in done.err and "corpus" in done.err
    assert len({word.strip(":,") for word in done.err.split() if word.startswith("sha256:")}) == 2
    assert _files(project / RUN / "train") == before


def _files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def _held_by_another_process(run: Path) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            yield holder.pid
        finally:
            holder.kill()


def test_a_second_process_on_a_locked_run_is_exit_4_and_names_the_holder(
    admitted: Path, copy_of: Copy, kiln: Kiln
) -> None:
    project = copy_of(admitted)
    with _held_by_another_process(project / RUN) as pid:
        for arguments in (
            ("train", project / "kiln.toml", "--out", project / RUN),
            ("prepare", project / "kiln.toml", "--out", project / RUN),
            ("admit", project / "kiln.toml", "--out", project / RUN),
            ("resume", project / RUN),
        ):
            done = kiln(*arguments)
            assert done.code == 4, done.err
            assert "KLN401" in done.err
            assert "`kiln train`" in done.err and f"pid {pid}" in done.err
    assert kiln("prepare", project / "kiln.toml", "--out", project / RUN).code == 0, "the lock dies with its holder"


NAMES = [
    ("prepare", 'source = "xlam"', 'source = "xlamm"', "source", "'xlamm'", "'xlam'"),
    ("admit", 'invalid_row_policy = "skip"', 'template = "chatlm"', "template", "'chatlm'", "'chatml'"),
    ("train", 'adapter = "tiny"', 'loss = "cross_entrpy"', "loss", "'cross_entrpy'", "'cross_entropy'"),
]


@pytest.mark.parametrize(("stage", "old", "new", "kind", "wrong", "near"), NAMES, ids=[row[3] for row in NAMES])
def test_an_unknown_name_is_exit_2_with_the_near_one(
    admitted: Path, copy_of: Copy, kiln: Kiln, stage: str, old: str, new: str, kind: str, wrong: str, near: str
) -> None:
    project = copy_of(admitted)
    edit(project / "kiln.toml", (old, new))
    done = kiln(stage, project / "kiln.toml", "--out", project / RUN)
    assert done.code == 2, done.err
    assert "KLN212" in done.err and kind in done.err
    assert wrong in done.err.splitlines()[0]
    assert near in hint_of(done)
    assert not (project / RUN / "train").exists()


def test_too_few_rows_is_exit_2_with_the_funnel_and_writes_nothing(project: Path, kiln: Kiln) -> None:
    edit(project / "kiln.toml", ("n_train = 16", "n_train = 100"))
    done = kiln("prepare", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 2
    assert "KLN205" in done.err and "duplicate_query" in done.err and "110" in done.err and "30" in done.err
    assert {path.name for path in (project / RUN).rglob("*") if path.is_file()} <= {".kiln.lock"}


def test_one_bad_row_under_fail_is_exit_1_and_writes_no_manifest(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    (project / RUN / "admit_manifest.json").unlink()
    edit(project / "kiln.toml", ('invalid_row_policy = "skip"', 'invalid_row_policy = "fail"'))
    done = kiln("admit", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 1
    assert "KLN101" in done.err and "over_length" in done.err and "sha256:" in done.err
    assert not (project / RUN / "admit_manifest.json").exists()


def test_no_row_kept_is_exit_1_under_skip(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    edit(project / "kiln.toml", ("max_tokens = 192", "max_tokens = 3"))
    done = kiln("admit", project / "kiln.toml", "--out", project / RUN)
    assert done.code == 1
    assert "KLN102" in done.err and "over_length" in done.err
