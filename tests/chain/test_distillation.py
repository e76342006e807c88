"""Distillation as a chain: a scored corpus admitted, trained, cut anywhere, resumed, refused, verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cut_runs import (
    FRESH,
    KINDS,
    RUN,
    STEPS,
    End,
    cut_in_process,
    end_of,
    go_on,
    plan_of,
    require_cuts_end_equal,
    require_equal_runs,
    train_in_process,
)
from kiln_stages.distilling.identity import TeacherIdentity
from kiln_stages.distilling.rows import ScoredRows
from kiln_stages.training.checkpoint import checkpoint_name, list_checkpoints, read_checkpoint_manifest
from kiln_stages.training.kinds import OPD
from kiln_stages.training.loop import StepRecord
from kiln_stages.training.scored_rows import ScoredTrainRows
from kiln_stages.training.trainer import Trainer, train_adapter
from safetensors.numpy import load_file, save_file
from scored_corpus import ALIAS, register_teacher
from scored_run import TEACHER_SEED, forty_steps, scored_run
from tiny_model import Kiln
from transformers import AutoModelForCausalLM, AutoTokenizer

from kiln_cli import KilnError
from kiln_cli.manifests import document, read_receipt
from kiln_cli.receipts import EchoBlock, OpdBlock, TrainReceipt

ROWS = 10


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forty_steps(tmp_path_factory.mktemp("opd") / "project", "muon")


@pytest.fixture(scope="module")
def finished(admitted: Path) -> Path:
    project = Path(shutil.copytree(admitted, admitted.parent / "finished"))
    train_in_process(project)
    return project


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def receipt_of(project: Path) -> TrainReceipt:
    return read_receipt(project / RUN / "train_receipt.json")


def log_of(project: Path) -> list[dict[str, Any]]:
    text = (project / RUN / "train" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_receipt_tells_of_teacher_losses_echo_and_alignment(finished: Path) -> None:
    receipt, log = receipt_of(finished), log_of(finished)
    opd, echo = receipt.opd, receipt.echo
    assert isinstance(opd, OpdBlock) and isinstance(echo, EchoBlock)
    corpus = finished / "teacher.jsonl"
    assert receipt.training_data == {
        "path": "teacher.jsonl",
        "sha256": f"sha256:{_sha256(corpus)}",
        "source": "jsonl_off_policy_opd_teacher",
    }
    assert receipt.hyperparameters["mode"] == "opd" and receipt.hyperparameters["shuffle"] == "identity"
    assert (opd.training_mode, opd.objective, opd.loss_granularity) == ("off_policy", "reverse_kl", "teacher_top_k")
    assert (opd.teacher_id, opd.top_k, opd.samples_per_prompt) == (ALIAS, 16, 1)
    identity = msgspec.convert(opd.teacher_identity, TeacherIdentity)
    assert opd.teacher_content_revision == identity.content_revision()
    assert corpus.read_bytes().splitlines()[0] == identity.manifest_line()
    assert (opd.initial_opd_loss, opd.final_opd_loss) == tuple(log[at]["metrics"]["reverse_kl"] for at in (0, -1))
    assert opd.final_opd_loss is not None and opd.initial_opd_loss is not None
    assert opd.final_opd_loss < opd.initial_opd_loss
    assert opd.alignment.proven == opd.alignment.of == opd.action_tokens // 4
    measured = [step["metrics"]["env_ce"] for step in log if "env_ce" in step["metrics"]]
    assert echo == EchoBlock(
        enabled=True,
        lambda_=0.05,
        env_mask_mode="full_obs",
        warning_filter=True,
        initial_env_ce=measured[0],
        final_env_ce=measured[-1],
    )
    assert (opd.echo_combined, opd.echo_lambda) == (True, 0.05)
    assert receipt.data.examples_read == ROWS and receipt.data.examples_filtered == 0
    assert receipt.data.examples_trained == receipt.steps == STEPS
    assert receipt.execution is not None and receipt.execution["head_columns"]["used"]


def test_token_counts_are_those_of_the_rows_times_the_epochs(finished: Path) -> None:
    rows, counts = list(ScoredRows(finished / RUN / "admit" / "corpus.parquet")), receipt_of(finished).token_counts
    action = 4 * sum(len(row.action_targets) for row in rows)
    after, before = (4 * sum(numbers) for numbers in _observed(rows))
    assert before > after > 0
    assert counts == {
        "action_tokens": action,
        "context_tokens": 4 * sum(len(row.input_ids) for row in rows) - action - after,
        "env_tokens": after,
        "env_tokens_after_warning_filter": after,
        "env_tokens_before_warning_filter": before,
        "warning_tokens_filtered": before - after,
    }
    log = log_of(finished)
    assert sum(step["counts"].get("env_tokens", 0) for step in log) == after
    assert sum(step["counts"].get("env_tokens_before_filter", 0) for step in log) == before


def _observed(rows: list[Any]) -> tuple[list[int], list[int]]:
    return [len(row.observation_targets) for row in rows], [row.observation_tokens for row in rows]


def test_one_candidate_one_step_in_the_order_of_the_file(finished: Path) -> None:
    assert [step["row_index"] for step in log_of(finished)] == 4 * list(range(1, ROWS + 1))
    checkpoints = list_checkpoints(finished / RUN / "train")
    assert [step for step, _ in checkpoints] == [15, 30]
    manifest, _ = read_checkpoint_manifest(checkpoints[0][1])
    assert (manifest.training_kind, manifest.checkpoint_id) == ("opd", "opd-step-00000015")
    assert manifest.data.source_kind == "inline-off-policy-opd-candidate-order-v1"
    assert manifest.data.content_sha256 == _sha256(finished / "teacher.jsonl")
    assert manifest.data.item_count == ROWS and manifest.progress.total_steps == STEPS
    assert manifest.progress.data_order == list(range(ROWS))
    assert set(manifest.rng_states) == {"lora-init"}
    assert (checkpoints[0][1] / "opd_loop_state.json").exists()


def test_every_claim_holds_and_neither_id_nor_metadata_is_in_an_artifact(finished: Path, kiln: Kiln) -> None:
    for options in ((), ("--deep",)):
        done = kiln("verify-receipt", finished / RUN, "--require-all", *options)
        assert done.code == 0, done.out
    assert "opd and echo tell what the loss log says" in done.out
    assert "targets, scores and counts are those that the scored corpus gives" in done.out
    assert (
        b"row-3" in (finished / "teacher.jsonl").read_bytes()
        and b"private" in (finished / "teacher.jsonl").read_bytes()
    )
    for path in (finished / RUN).rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"row-3" not in data and b"private" not in data, path


def test_the_other_commands_tell_of_it_or_refuse_by_name(finished: Path, kiln: Kiln) -> None:
    run = finished / RUN
    assert "finished" in kiln("status", run).out
    assert "tokens trained" in kiln("report", run).out
    assert "rows alike                10" in kiln("diff", run, run).out
    assert kiln("generate", run, "--prompt", "hello", "--max-new-tokens", "2").code == 0
    checkpoint = next((run / "train").glob("*.kiln-checkpoint"))
    for path in (run / "train_receipt.json", run / "admit" / "scored_ingestion.json", checkpoint):
        assert kiln("validate", path).code == 0, path
    for words in (("inspect", run, "1"), ("why", run, "1"), ("export", run, "--layout", "hf")):
        refused = kiln(*words)
        assert refused.code == 2 and "KLN211" in refused.err and "for a scored corpus is not built" in refused.err


@pytest.mark.parametrize(("row", "before"), [(1, "city number 0 today?"), (4, "Rain, 3 degrees.")])
def test_an_answer_is_generated_for_a_scored_example(row: int, before: str, finished: Path, kiln: Kiln) -> None:
    """After the row's own tokens; of a trajectory its last action is the answer."""
    done = kiln("generate", finished / RUN, "--row", str(row), "--max-new-tokens", "3", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    given = json.loads((finished / "teacher.jsonl").read_bytes().splitlines()[row])
    assert found["expected"] == given["teacher_response"]
    assert before in found["prompt"] and found["prompt"].endswith("assistant\n")
    scored = ScoredRows(finished / RUN / "admit" / "corpus.parquet")[row - 1]
    start = max(at for at in scored.action_targets if at - 1 not in scored.action_targets)
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    base = AutoModelForCausalLM.from_pretrained(finished / "model")
    out = base.generate(input_ids=torch.tensor([scored.input_ids[:start]]), max_new_tokens=3, do_sample=False)
    assert found["base"] == tokenizer.decode(out[0, start:], skip_special_tokens=True)
    assert found["adapter"] != found["base"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--row", "11"), "corpus.parquet has no row 11"),
        (("--row", "1", "--split", "heldout"), "--split names one of: corpus"),
    ],
)
def test_a_scored_example_that_is_not_there_is_told(
    words: tuple[str, ...], told: str, finished: Path, kiln: Kiln
) -> None:
    done = kiln("generate", finished / RUN, *words)
    assert done.code == 2 and told in done.err, done.err


def _sha256(path: Path) -> str:
    from kiln_cli.files import hash_file

    return hash_file(path)[0]


# Cuts.


@pytest.mark.parametrize("optimizer", KINDS)
def test_forty_cuts_each_gone_on_with_to_the_end(optimizer: str, tmp_path: Path) -> None:
    """Behind the last step there is no checkpoint: a run that is cut there does its last step again."""
    plan, whole = plan_of(forty_steps(tmp_path / "project", optimizer, STEPS)), tmp_path / "whole"
    trainer = Trainer(plan)

    def publish(record: StepRecord) -> None:
        if record.step < STEPS:
            trainer.publish_checkpoint(whole)

    train_adapter(trainer, whole, on_step=publish)
    end: End = end_of(trainer, whole)
    log = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step in range(1, STEPS + 1):
        directory, name = tmp_path / str(step), checkpoint_name("tiny", min(step, STEPS - 1))
        shutil.copytree(whole / name, directory / name)
        (directory / "metrics.jsonl").write_bytes(b"".join(log[:step]))
        assert go_on(plan, directory) == end, f"cut behind step {step}"


@pytest.mark.parametrize("optimizer", KINDS)
def test_cuts_resumed_by_fresh_processes_equal_the_uncut_run(optimizer: str, tmp_path: Path) -> None:
    require_cuts_end_equal(forty_steps(tmp_path / "admitted", optimizer), tmp_path, FRESH[optimizer])


@pytest.mark.parametrize("step", [1, 23, 40])
def test_a_signal_settles_the_candidate_and_a_fresh_process_resumes_to_the_same_bytes(
    step: int, admitted: Path, finished: Path, tmp_path: Path, kiln_process: Kiln
) -> None:
    project = cut_in_process(admitted, tmp_path / "cut", step)
    if step < STEPS:
        receipt = receipt_of(project)
        assert receipt.failure_reason == "cancelled" and receipt.steps == step
        assert isinstance(receipt.opd, OpdBlock) and receipt.opd.final_opd_loss is not None
        assert list_checkpoints(project / RUN / "train")[-1][0] == step
    done = kiln_process("resume", project / RUN)
    assert done.code == 0, done.err
    require_equal_runs(project, finished)
    assert kiln_process("verify-receipt", project / RUN, "--require-all").code == 0


def test_the_steps_before_a_checkpoint_can_be_proven(copy: Path, kiln: Kiln) -> None:
    done = kiln("resume", copy / RUN, "--prove", "10", "--checkpoint", checkpoint_name("tiny", 30))
    assert done.code == 0 and "bit for bit" in done.err, done.err


# Refusals to resume, one thing at a time.

Change = Callable[[Path, pytest.MonkeyPatch], None]


def setting(old: str, new: str) -> Change:
    """Edits the run's own config."""

    def change(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = project / RUN / "config.resolved.toml"
        text = path.read_text()
        assert text.count(old) == 1, f"{old} in\n{text}"
        path.write_text(text.replace(old, new))

    return change


def moved_corpus(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "teacher.jsonl").rename(project / "other.jsonl")
    setting('file = "teacher.jsonl"', 'file = "other.jsonl"')(project, monkeypatch)


def reformatted_corpus(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was trained on already, with a space more: it means the same, and its bytes are others."""
    path = project / "teacher.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] += b" "
    path.write_bytes(b"\n".join(lines))


def other_alias(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (project / "teacher.jsonl").read_bytes().splitlines()[0]
    identity = msgspec.convert(json.loads(line)["teacher_identity"], TeacherIdentity)
    register_teacher(project / ".kiln", identity, "another")
    setting(f'teacher = "{ALIAS}"', 'teacher = "another"')(project, monkeypatch)


def replaced_teacher(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (project / "teacher.jsonl").read_bytes().splitlines()[0]
    identity = msgspec.convert(json.loads(line)["teacher_identity"], TeacherIdentity)
    register_teacher(project / ".kiln", msgspec.structs.replace(identity, inference_config_sha256="e" * 64))


def weights(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})


def tokenizer(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "model" / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")


def backend(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "0.0.1")


def columns(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another way to the same logits: it may sum in another order."""
    from kiln_stages.training.head import ColumnsProbe, OutputHead

    def refuse(self: OutputHead, *_: object) -> None:
        self.columns = ColumnsProbe(used=False, relative=None, why="a test says so")

    monkeypatch.setattr(OutputHead, "prove_columns", refuse)


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "path": (moved_corpus, ["bound.ingestion.source_locator", '"teacher.jsonl"', '"other.jsonl"']),
    "corpus bytes": (reformatted_corpus, ["data.content_sha256", "bound.ingestion.source_sha256"]),
    "teacher alias": (other_alias, ["bound.ingestion.teacher_alias", f'"{ALIAS}"', '"another"']),
    "content revision": (replaced_teacher, ["bound.ingestion.teacher_content_revision"]),
    "adapter name": (setting('adapter = "tiny"', 'adapter = "other"'), ["adapter_name", '"tiny"', '"other"']),
    "epochs": (setting("epochs = 4", "epochs = 5"), ["config.epochs", "total_steps"]),
    "echo": (setting("lambda = 0.05", "lambda = 0.5"), ["config.distill.echo.lambda", "0.05", "0.5"]),
    "tail bucket": (setting("tail_bucket = false", "tail_bucket = true"), ["config.distill.tail_bucket"]),
    "base weights": (weights, ["bound.base_model_weights_sha256"]),
    "tokenizer": (tokenizer, ["bound.tokenizer.tokenizer_config.json"]),
    "backend": (backend, ["bound.execution.torch"]),
    "precision": (setting('dtype = "float32"', 'dtype = "bfloat16"'), ["precision.parameter_dtype", "config.dtype"]),
    "optimizer": (
        setting('optimizer]\nkind = "muon"', 'optimizer]\nkind = "muon"\nmomentum = 0.9'),
        ["config.optimizer.momentum", "optimizer.momentum"],
    ),
    "rng": (setting("seed = 42", "seed = 43"), ["rng.lora-init", "config.seed"]),
    "columns of the head": (columns, ["bound.head_columns", "true", "false"]),
}


@pytest.fixture(scope="module")
def cut(admitted: Path) -> Path:
    return cut_in_process(admitted, admitted.parent / "cut", 20)


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_refuses_resume_by_name_with_both_values(
    name: str, cut: Path, tmp_path: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Path(shutil.copytree(cut, tmp_path / "copy"))
    change, words = CHANGES[name]
    change(project, monkeypatch)
    refused = kiln("resume", project / RUN)
    assert refused.code == 2 and "KLN209" in refused.err, refused.err
    for word in words:
        assert word in refused.err, f"{word} is not in\n{refused.err}"
    assert len(log_of(project)) == 20


def test_a_cursor_of_another_step_and_another_order_are_no_checkpoint(cut: Path, tmp_path: Path, kiln: Kiln) -> None:
    for number, (part, value) in enumerate((("cursor_in_epoch", 3), ("data_order", list(reversed(range(ROWS)))))):
        project = Path(shutil.copytree(cut, tmp_path / str(number)))
        path = list_checkpoints(project / RUN / "train")[-1][1] / "checkpoint_manifest.json"
        manifest = json.loads(path.read_bytes())
        manifest["progress"][part] = value
        path.chmod(0o644)
        path.write_bytes(document(manifest))
        refused = kiln("resume", project / RUN)
        assert refused.code == 2 and "KLN215" in refused.err
        assert ("imply another step" if number == 0 else "not the order of the file") in refused.err


# Settings.


def trained(directory: Path, rows: int = 2, **settings: Any) -> TrainReceipt:
    scored_run(directory, rows, **{"train": "", **settings})
    train_in_process(directory)
    return receipt_of(directory)


def test_scored_rows_train_one_epoch_with_a_checkpoint_every_25_candidates(tmp_path: Path) -> None:
    receipt = trained(tmp_path / "project", 27)
    assert receipt.steps == 27 and [each.step for each in receipt.checkpoints] == [25]


@pytest.mark.parametrize(
    ("distill", "rows", "reason", "factor"),
    [
        ("", 2, "not_configured", None),
        ("[distill.echo]\nlambda = 0.0\nenv_mask_mode = 'full_obs'", 2, "lambda_is_zero", 0.0),
        ("[distill.echo]\nlambda = 0.5", 1, "no_observation_tokens", 0.5),
    ],
)
def test_echo_that_adds_nothing_is_reported_as_not_enabled(
    distill: str, rows: int, reason: str, factor: float | None, tmp_path: Path, kiln: Kiln
) -> None:
    receipt = trained(tmp_path / "project", rows, distill=distill)
    echo, opd = receipt.echo, receipt.opd
    assert isinstance(echo, EchoBlock) and isinstance(opd, OpdBlock)
    assert (echo.enabled, echo.dropped_reason, echo.lambda_, echo.final_env_ce) == (False, reason, factor, None)
    assert (opd.echo_combined, opd.env_tokens, receipt.token_counts["env_tokens"]) == (False, 0, 0)
    assert all(step["loss"] == step["metrics"]["reverse_kl"] for step in log_of(tmp_path / "project"))
    assert kiln("verify-receipt", tmp_path / "project" / RUN, "--require-all").code == 0


def test_options_beside_the_contract_are_named_in_the_receipt(tmp_path: Path, kiln: Kiln) -> None:
    receipt = trained(tmp_path / "project", distill="tail_bucket = true\ncoverage = true")
    opd, log = receipt.opd, log_of(tmp_path / "project")
    assert isinstance(opd, OpdBlock) and opd.tail_bucket and opd.coverage is not None
    for name in ("teacher_mass_top_k", "student_mass_outside"):
        assert getattr(opd.coverage, name) == (log[0]["metrics"][name], log[-1]["metrics"][name])
    assert 0 < opd.coverage.teacher_mass_top_k[0] <= 1 and 0 < opd.coverage.student_mass_outside[0] < 1
    assert kiln("verify-receipt", tmp_path / "project" / RUN, "--require-all").code == 0


def test_smoke_test_anomaly_detection_and_a_base_adapter_work_here_too(finished: Path, tmp_path: Path) -> None:
    base = finished / RUN / "train" / "adapter"
    extras = f"adapter_smoke_test = true\ndetect_anomaly = true\nbase_adapter = '{base}'\ngrad_checkpoint_segments = 2"
    receipt = trained(tmp_path / "project", train=extras)
    opd = receipt.opd
    assert receipt.adapter_smoke_test is not None and receipt.adapters["base"]["receipt"] is not None
    assert isinstance(opd, OpdBlock) and opd.initial_opd_loss is not None
    first = receipt_of(finished).opd
    assert isinstance(first, OpdBlock) and first.initial_opd_loss is not None
    assert opd.initial_opd_loss < first.initial_opd_loss / 2, "it begins where the other distillation ended"


def test_a_diverging_distillation_stops_and_leaves_a_receipt(tmp_path: Path, kiln: Kiln) -> None:
    scored_run(tmp_path / "project", 2, train="epochs = 5\noptimizer = 'sgd'")
    done = kiln(
        "train",
        tmp_path / "project" / "kiln.toml",
        "--out",
        tmp_path / "project" / RUN,
        "--set",
        "train.learning_rate=1e9",
    )
    assert done.code == 1 and "KLN104" in done.err
    receipt = receipt_of(tmp_path / "project")
    assert receipt.status == "failed" and isinstance(receipt.opd, OpdBlock)


def test_a_dry_run_tells_steps_and_memory(admitted: Path, kiln: Kiln) -> None:
    done = kiln("train", admitted / "kiln.toml", "--out", admitted / RUN, "--dry-run", "--json")
    assert done.code == 0 and json.loads(done.out)["steps"] == STEPS, done.err
    assert not (admitted / RUN / "train").exists()


def test_a_loss_that_the_rows_are_not_for_is_refused(admitted: Path, finished: Path, kiln: Kiln) -> None:
    done = kiln("train", admitted / "kiln.toml", "--out", admitted / RUN, "--set", "train.loss=cross_entropy")
    assert done.code == 2 and "is not for a scored example: it reads nothing of the teacher's scores" in done.err


def test_teacher_is_the_base_itself_and_the_first_step_has_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scored_run.TEACHER_SEED", 7)
    receipt = trained(tmp_path / "project", train="epochs = 1")
    assert TEACHER_SEED != 7 and isinstance(receipt.opd, OpdBlock)
    assert receipt.opd.initial_opd_loss is not None and abs(receipt.opd.initial_opd_loss) <= 1e-6


def test_scores_that_are_shifted_by_one_raise_the_divergence_visibly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids cannot tell here: the tokens are right, and their scores are those of the next position."""
    monkeypatch.setattr("scored_run.TEACHER_SEED", 7)
    receipt = trained(tmp_path / "project", shift=1)
    assert isinstance(receipt.opd, OpdBlock) and receipt.opd.initial_opd_loss is not None
    assert receipt.opd.initial_opd_loss > 0.01


def test_the_reverse_kl_on_held_out_rows_is_measured_before_and_after(tmp_path: Path, kiln: Kiln) -> None:
    project = tmp_path / "project"
    receipt = trained(project, 6, train="epochs = 4\nheldout_interval = 8", held_out=range(20, 23))
    held = receipt.held_out
    rows = list(ScoredRows(project / RUN / "admit" / "heldout.parquet"))
    assert held is not None and held.rows == len(rows) == 3
    assert held.supervised_tokens == sum(len(row.action_targets) for row in rows)
    assert 0 < held.loss_after < held.loss_before
    assert [line["step"] for line in log_of(project) if "held_out" in line] == [8, 16]
    for options in ((), ("--deep",)):
        done = kiln("verify-receipt", project / RUN, "--require-all", *options)
        assert done.code == 0, done.out
    assert "held-out rows and tokens are those of admit/heldout.parquet" in done.out
    trainer = Trainer(plan_of(project))
    before = trainer.held_out(ScoredTrainRows(project / RUN / "admit" / "heldout.parquet", observed=False))
    assert before.mean_per_token == held.loss_before
    for page in (kiln("report", project / RUN).out, (project / RUN / "train" / "adapter" / "README.md").read_text()):
        assert "held-out reverse KL before" in page and "held-out loss" not in page
    given = json.loads((project / "held_out.jsonl").read_bytes().splitlines()[1])
    for words in ((), ("--split", "heldout")):
        done = kiln("generate", project / RUN, "--row", "1", "--max-new-tokens", "1", "--json", *words)
        assert given["messages"][0]["content"] in json.loads(done.out)["prompt"]


def test_a_held_out_example_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match=r"held_out.jsonl:3: .* as teacher.jsonl:2") as caught:
        scored_run(tmp_path / "project", 4, held_out=range(20, -1, -20))
    assert caught.value.code == "KLN109"
    assert not list((tmp_path / "project" / RUN / "admit").glob("*.parquet"))


# Forged receipts.


def forged(project: Path, edit: Callable[[dict[str, Any]], None], kiln: Kiln) -> str:
    path = project / RUN / "train_receipt.json"
    value = json.loads(path.read_bytes())
    edit(value)
    receipt = msgspec.convert(value, TrainReceipt)
    receipt.seal()
    path.write_bytes(document(receipt))
    done = kiln("verify-receipt", project / RUN)
    assert done.code == 1, done.out
    return done.out


def put(where: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(receipt: dict[str, Any]) -> None:
        *at, last = where.split("|")
        for key in at:
            receipt = receipt[key]
        receipt[last] = value

    return edit


FORGERIES = {
    "teacher": (put("opd|teacher_id", "another"), "opd.teacher_id is"),
    "revision": (put("opd|teacher_content_revision", "0" * 64), "opd.teacher_content_revision is"),
    "mode": (put("hyperparameters|mode", "sft"), "hyperparameters.mode is"),
    "alignment": (put("opd|alignment|proven", 1), "opd.alignment.proven is"),
    "alignment of the ingestion": (put("data|scored_ingestion|alignment|proven", 1), "alignment.proven is"),
    "first loss": (put("opd|initial_opd_loss", 9.0), "opd.initial_opd_loss is"),
    "last loss": (put("opd|final_opd_loss", 0.0), "opd.final_opd_loss is"),
    "action tokens": (put("opd|action_tokens", 5), "opd.action_tokens is"),
    "counts": (put("token_counts|env_tokens_before_warning_filter", 5), "env_tokens_before_warning_filter is"),
    "echo off": (put("echo|enabled", False), "echo.enabled is"),
    "echo lambda": (put("echo|lambda", 0.5), "echo.lambda is"),
    "env ce": (put("echo|final_env_ce", 0.0), "echo.final_env_ce is"),
    "tail bucket": (put("opd|tail_bucket", True), "opd.tail_bucket is"),
    "top_k": (put("opd|top_k", 32), "opd.top_k is"),
    "path": (put("training_data|path", "elsewhere.jsonl"), "training_data.path is"),
    "no blocks": (lambda receipt: receipt.pop("echo"), "opd and echo are not both there"),
    "shuffle": (put("hyperparameters|shuffle", "kiln-cli.epoch-order.v1"), "hyperparameters.shuffle is"),
    "columns": (put("execution|head_columns|used", False), "bound.head_columns is"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_part_of_the_receipt_fails_a_claim(name: str, copy: Path, kiln: Kiln) -> None:
    edit, text = FORGERIES[name]
    assert text in forged(copy, edit, kiln)


def test_blocks_of_a_distillation_are_refused_in_another_receipt(copy: Path, kiln: Kiln) -> None:
    """An ingestion receipt of conversations beside the blocks."""

    def edit(receipt: dict[str, Any]) -> None:
        del receipt["data"]["scored_ingestion"]

    assert "not exactly one of sft_ingestion and scored_ingestion" in forged(copy, edit, kiln)


def test_rows_without_an_action_token_are_no_step(admitted: Path, tmp_path: Path) -> None:
    """Admission refuses them, so that candidates and updates are the same number; a row that got past it stops here."""
    from kiln_stages.training.loop import supervised_positions

    row = plan_of(admitted).rows[0]._replace(label_spans=[])
    with pytest.raises(KilnError, match="name no supervised token") as caught:
        supervised_positions(row)
    assert caught.value.code == "KLN206" and OPD.row == "scored example"
