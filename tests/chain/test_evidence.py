"""Evidence that is changed anywhere no longer verifies, and ``kiln verify-receipt`` says which claim fails."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tiny_model import RUN, Kiln

from kiln_cli.identity import Domain, canonical_json, corpus_sha256, domain_json_sha256
from kiln_cli.manifests import document
from kiln_cli.receipts import TrainReceipt

FIRST_CHECKPOINT = "run/train/tiny-checkpoint-step-00000005.kiln-checkpoint"


class Verdict(NamedTuple):
    code: int
    failing: list[str]
    unchecked: list[str]


def verify(kiln: Kiln, run: Path, *options: str) -> Verdict:
    done = kiln("verify-receipt", run, "--json", *options)
    claims = json.loads(done.out)["claims"]
    failing = [claim["name"] for claim in claims if claim["status"] == "fails"]
    return Verdict(done.code, failing, [claim["name"] for claim in claims if claim["status"] == "not checkable here"])


def flip(path: Path, offset: int | None = None, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= mask
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture
def mine(finished: Path, copy_of: Callable[..., Path]) -> Path:
    """A finished project with a model of its own, to be damaged."""
    return copy_of(finished, own_model=True)


def test_an_untouched_copy_verifies_in_every_claim(mine: Path, kiln: Kiln) -> None:
    assert verify(kiln, mine / RUN, "--require-all") == Verdict(0, [], [])
    assert verify(kiln, mine / RUN / "train_receipt.json") == Verdict(0, [], [])


# File of the project, and what the name of the failing claim must hold.
DAMAGES = [
    ("run/data/train.jsonl", "data/train.jsonl"),
    ("run/data/validation.jsonl", "data/validation.jsonl"),
    ("run/data/test.jsonl", "data/test.jsonl"),
    ("run/data/rejected.jsonl", "data/rejected.jsonl"),
    ("run/data/drop_summary.json", "data/drop_summary.json"),
    ("run/admit/corpus.parquet", "admit/corpus.parquet"),
    ("run/admit/heldout.parquet", "admit/heldout.parquet"),
    ("run/admit/sft_ingestion.json", "admit/sft_ingestion.json"),
    ("run/admit/heldout_ingestion.json", "admit/heldout_ingestion.json"),
    ("run/admit/rejected.jsonl", "admit/rejected.jsonl"),
    ("run/train/adapter/adapter_model.safetensors", "adapter_model.safetensors"),
    ("run/train/adapter/adapter_config.json", "adapter_config.json"),
    ("run/train/adapter/README.md", "README.md"),
    ("run/train/adapter/chat_template.jinja", "chat_template.jinja"),
    ("run/train/adapter/tokenizer.json", "adapter/tokenizer.json"),
    ("run/train/adapter/tokenizer_config.json", "tokenizer_config.json"),
    ("run/train/metrics.jsonl", "metrics.jsonl"),
    ("run/train/loss.svg", "loss.svg"),
    ("run/config.resolved.toml", "config.resolved.toml"),
    ("run/data_manifest.json", "data_manifest.json"),
    ("run/admit_manifest.json", "admit_manifest.json"),
    ("run/train_receipt.json", "receipt"),
    (f"{FIRST_CHECKPOINT}/checkpoint_manifest.json", "checkpoint-step-00000005"),
    (f"{FIRST_CHECKPOINT}/adapter.safetensors", "checkpoint-step-00000005"),
    (f"{FIRST_CHECKPOINT}/optimizer.safetensors", "checkpoint-step-00000005"),
    (f"{FIRST_CHECKPOINT}/sft_loop_state.json", "checkpoint-step-00000005"),
    ("raw.jsonl", "raw.jsonl"),
    ("model/model.safetensors", "base model"),
    ("model/tokenizer.json", "tokenizer"),
    ("model/chat_template.jinja", "tokenizer"),
]


@pytest.mark.parametrize(("name", "claim"), DAMAGES, ids=[name for name, _ in DAMAGES])
def test_one_changed_byte_fails_the_claim_about_that_file(mine: Path, kiln: Kiln, name: str, claim: str) -> None:
    flip(mine / name)
    verdict = verify(kiln, mine / RUN)
    assert verdict.code == 1
    assert any(claim in failing for failing in verdict.failing), verdict.failing


@pytest.mark.parametrize("name", [name for name, _ in DAMAGES if name.startswith("run/")])
def test_a_file_cut_short_or_grown_fails(mine: Path, kiln: Kiln, name: str) -> None:
    path = mine / name
    data = path.read_bytes()
    path.chmod(0o644)
    for changed in (data[:-1], data + b"\n", b""):
        path.write_bytes(changed)
        if name.endswith(".toml") and changed.strip() == data.strip():
            continue  # line feeds at the end of a config are no setting
        assert verify(kiln, mine / RUN).code == 1, len(changed) - len(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [("n_train = 16", "n_train = 17"), ("max_tokens = 192", "max_tokens = 193"), ("lora_rank = 2", "lora_rank = 3")],
    ids=["data", "admit", "train"],
)
def test_each_section_of_the_config_is_held(mine: Path, kiln: Kiln, old: str, new: str) -> None:
    path = mine / RUN / "config.resolved.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    verdict = verify(kiln, mine / RUN)
    assert verdict.code == 1
    assert any("config.resolved.toml" in name for name in verdict.failing)


@pytest.mark.parametrize(
    ("name", "claim"), [("model", "base model"), ("raw.jsonl", "raw.jsonl"), ("run/data/test.jsonl", "data/test.jsonl")]
)
def test_what_is_not_here_is_not_checkable_and_fails_only_where_all_is_required(
    mine: Path, kiln: Kiln, name: str, claim: str
) -> None:
    (mine / name).rename(mine / "elsewhere")
    verdict = verify(kiln, mine / RUN)
    assert (verdict.code, verdict.failing) == (0, [])
    assert any(claim in unchecked for unchecked in verdict.unchecked)
    strict = verify(kiln, mine / RUN, "--require-all")
    assert strict == verdict._replace(code=1)


def test_the_text_form_has_one_line_a_claim_and_names_the_failing_one(mine: Path, kiln: Kiln) -> None:
    flip(mine / RUN / "data" / "test.jsonl")
    shutil.rmtree(mine / "model")
    done = kiln("verify-receipt", mine / RUN)
    lines = done.out.splitlines()
    assert done.code == 1
    assert any(line.startswith("FAIL") and "data/test.jsonl" in line and "expected" in line for line in lines)
    assert any("base model" in line and "not here" in line for line in lines)
    assert "KLN103" in done.err and "data/test.jsonl" in done.err


Edit = Callable[[dict[str, Any]], None]


def _reseal(run: Path, edit: Edit) -> None:
    """Edits the receipt and makes its own two digests right again, as a forger would."""
    path = run / "train_receipt.json"
    value = json.loads(path.read_bytes())
    edit(value)
    receipt = msgspec.convert(value, TrainReceipt)
    receipt.seal()
    path.write_bytes(document(receipt))


def test_resealing_alone_changes_nothing(mine: Path, kiln: Kiln) -> None:
    before = (mine / RUN / "train_receipt.json").read_bytes()
    _reseal(mine / RUN, lambda receipt: None)
    assert (mine / RUN / "train_receipt.json").read_bytes() == before


def put(path: str, value: Any) -> Edit:
    """Sets a value by dotted path; a callable value gets the old one."""

    def edit(receipt: dict[str, Any]) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("|")]
        target: Any = receipt
        for part in parents:
            target = target[part]
        new = value(target[last]) if callable(value) else value
        assert target[last] != new
        target[last] = new

    return edit


def both(*edits: Edit) -> Edit:
    def edit(receipt: dict[str, Any]) -> None:
        for one in edits:
            one(receipt)

    return edit


def _forget_a_kept_row(receipt: dict[str, Any]) -> None:
    """One row fewer, and every sum that follows from it."""
    ingestion = receipt["data"]["sft_ingestion"]
    del ingestion["kept_row_hashes"][0]
    ingestion["rows_read"] -= 1
    ingestion["rows_kept"] -= 1
    ingestion["kept_corpus_sha256"] = corpus_sha256(ingestion["kept_row_hashes"])
    receipt["training_data"]["sha256"] = ingestion["kept_corpus_sha256"]
    receipt["data"]["examples_read"] -= 1
    receipt["data"]["examples_trained"] -= 2
    receipt["steps"] -= 2


def _exchange_a_kept_row(receipt: dict[str, Any]) -> None:
    ingestion = receipt["data"]["sft_ingestion"]
    ingestion["kept_row_hashes"][0] = OTHER
    ingestion["kept_corpus_sha256"] = corpus_sha256(ingestion["kept_row_hashes"])
    receipt["training_data"]["sha256"] = ingestion["kept_corpus_sha256"]


def _reorder_kept_rows(receipt: dict[str, Any]) -> None:
    ingestion = receipt["data"]["sft_ingestion"]
    ingestion["kept_row_hashes"].reverse()
    ingestion["kept_corpus_sha256"] = corpus_sha256(ingestion["kept_row_hashes"])
    receipt["training_data"]["sha256"] = ingestion["kept_corpus_sha256"]


def _invent_a_rejected_row(receipt: dict[str, Any]) -> None:
    ingestion = receipt["data"]["sft_ingestion"]
    ingestion["rows_read"] += 1
    ingestion["rows_rejected"] += 1
    row = {"reason": "invalid_json", "row_index": ingestion["rows_read"], "row_sha256": OTHER}
    ingestion["rejected_rows"].append(row)
    receipt["data"]["examples_read"] += 1
    receipt["data"]["examples_filtered"] += 1


def _another_rate(receipt: dict[str, Any]) -> None:
    """Another learning rate wherever the receipt says it, under a config digest to match."""
    receipt["config"]["train"]["learning_rate"] = 0.5
    receipt["hyperparameters"]["learning_rate"] = 0.5
    sections = {name: receipt["config"][name] for name in ("project", "model", "train")}
    receipt["config_sha256"] = domain_json_sha256(Domain.CONFIG, sections)


def _another_policy(receipt: dict[str, Any]) -> None:
    receipt["config"]["admit"]["invalid_row_policy"] = "fail"
    receipt["data"]["sft_ingestion"]["invalid_row_policy"] = "fail"


def _three_epochs(receipt: dict[str, Any]) -> None:
    rows = receipt["data"]["sft_ingestion"]["rows_kept"]
    receipt["hyperparameters"]["epochs"] = receipt["config"]["train"]["epochs"] = 3
    receipt["data"]["examples_trained"] = receipt["steps"] = 3 * rows


OTHER = "sha256:" + "5" * 64
OTHER_HEX = "5" * 64
EDITS: dict[str, Edit] = {
    "adapter_name": put("adapter_name", "other"),
    "adapters.output.adapter_model_bytes": put("adapters|output|adapter_model_bytes", 7),
    "adapters.output.adapter_model_sha256": put("adapters|output|adapter_model_sha256", OTHER_HEX),
    "adapters.output.content_sha256": put("adapters|output|content_sha256", OTHER),
    "adapters.output.path": put("adapters|output|path", "elsewhere"),
    "checkpoints: digest": put("checkpoints|0|manifest_sha256", OTHER_HEX),
    "checkpoints: step": put("checkpoints|0|step", 6),
    "config.train.learning_rate": put("config|train|learning_rate", 0.5),
    "config.data.n_train": put("config|data|n_train", 17),
    "config.admit.max_tokens": put("config|admit|max_tokens", 17),
    "config, rate and digest": _another_rate,
    "config_sha256": put("config_sha256", OTHER),
    "data.examples_read": put("data|examples_read", 99),
    "data.examples_filtered": put("data|examples_filtered", 0),
    "data.examples_trained": put("data|examples_trained", 27),
    "data.examples_trained and steps": both(put("data|examples_trained", 27), put("steps", 27)),
    "epochs and all that follows": _three_epochs,
    "ingestion: a kept row forgotten": _forget_a_kept_row,
    "ingestion: a kept row exchanged": _exchange_a_kept_row,
    "ingestion: kept rows in another order": _reorder_kept_rows,
    "ingestion: a rejected row invented": _invent_a_rejected_row,
    "ingestion: reason": put("data|sft_ingestion|rejected_rows|0|reason", "invalid_role"),
    "ingestion: policy": _another_policy,
    "ingestion: rows_read": put("data|sft_ingestion|rows_read", 17),
    "execution.torch": put("execution|torch", "1.0"),
    "execution.threads_intra_op": put("execution|threads_intra_op", 64),
    "execution.precision": put("execution|precision|parameter_dtype", "bfloat16"),
    "failure_reason of a success": put("failure_reason", "nan_loss"),
    "held_out.rows": put("held_out|rows", 5),
    "held_out.supervised_tokens": put("held_out|supervised_tokens", 1),
    "hyperparameters.alpha": put("hyperparameters|alpha", 2.0),
    "hyperparameters.alpha_over_rank": put("hyperparameters|alpha_over_rank", 1.0),
    "hyperparameters.epochs": put("hyperparameters|epochs", 3),
    "hyperparameters.learning_rate": put("hyperparameters|learning_rate", 0.5),
    "hyperparameters.loss": put("hyperparameters|loss", "other"),
    "hyperparameters.mode": put("hyperparameters|mode", "opd"),
    "hyperparameters.optimizer": put("hyperparameters|optimizer|kind", "sgd"),
    "hyperparameters.optimizer.effective": put("hyperparameters|optimizer|effective|momentum", 0.5),
    "hyperparameters.profile": put("hyperparameters|profile", "other"),
    "hyperparameters.rank": put("hyperparameters|rank", 4),
    "hyperparameters.seed": put("hyperparameters|seed", "43"),
    "hyperparameters.target_modules": put("hyperparameters|target_modules", ["q_proj"]),
    "inputs: digest": put("inputs|0|sha256", OTHER_HEX),
    "inputs: one gone": put("inputs", lambda inputs: inputs[1:]),
    "kiln.package_version": put("kiln|package_version", "9.9.9"),
    "loss_log_sha256": put("loss_log_sha256", OTHER),
    "model.base_weight_shards.sha256": put("model|base_weight_shards|sha256", OTHER),
    "model.base_weight_shards.shards": put("model|base_weight_shards|shards|0|sha256", OTHER),
    "model.base_weight_shards.total_bytes": put("model|base_weight_shards|total_bytes", 1),
    "model.config_sha256": put("model|config_sha256", OTHER),
    "model.id": put("model|id", "other"),
    "outputs: digest": put("outputs|0|sha256", OTHER_HEX),
    "outputs: the adapter gone": put("outputs", lambda outputs: [outputs[0], outputs[2]]),
    "outputs: none": put("outputs", []),
    "plugins: version": put("plugins|0|version", "9.9.9"),
    "plugins: one more": put("plugins", lambda plugins: [*plugins, {**plugins[0], "distribution": "ghost"}]),
    "lora_delta_norms": put("lora_delta_norms|0|b_l2_max", 1e-3),
    "lora_delta_norms: one gone": put("lora_delta_norms", lambda norms: norms[1:]),
    "lora_grad_norms: samples": put("lora_grad_norms|0|sample_count", 1),
    "lora_grad_norms: order": put("lora_grad_norms|0|min", 1e9),
    "execution_provenance: digest": put("execution_provenance|provenance_sha256", OTHER),
    "execution_provenance: build": put("execution_provenance|build|torch", "1.0"),
    "execution_provenance: none": put("execution_provenance", None),
    "produced.at": put("produced|at", "yesterday"),
    "precision blank": put("execution|precision|gradient_dtype", " "),
    "tokenizer.chat_template_sha256": put("tokenizer|chat_template_sha256", OTHER),
    "tokenizer.tokenizer_config_sha256": put("tokenizer|tokenizer_config_sha256", OTHER),
    "tokenizer.training_chat_template_sha256": put("tokenizer|training_chat_template_sha256", OTHER),
    "status, reason and no message": both(put("status", "failed"), put("failure_reason", "nan_loss")),
    "previous": put("previous|content_sha256", OTHER),
    "status": put("status", "failed"),
    "steps": put("steps", 27),
    "tokenizer.files": put("tokenizer|files|tokenizer.json", OTHER_HEX),
    "tokenizer.template": put("tokenizer|template|sha256", OTHER),
    "token_counts.action_tokens": put("token_counts|action_tokens", 1),
    "token_counts.context_tokens": put("token_counts|context_tokens", 1),
    "training_data.path": put("training_data|path", "data/test.jsonl"),
    "training_data.sha256": put("training_data|sha256", OTHER),
    "training_data.source": put("training_data|source", "inline"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_receipt_edited_and_resealed_fails_by_another_claim(mine: Path, kiln: Kiln, name: str) -> None:
    _reseal(mine / RUN, EDITS[name])
    verdict = verify(kiln, mine / RUN)
    assert verdict.code == 1, f"nothing contradicts the edited {name}"
    assert not any(own in failing for own in ("receipt_sha256", "content_sha256 covers") for failing in verdict.failing)


def test_an_edit_without_resealing_fails_both_digests_of_the_receipt(mine: Path, kiln: Kiln) -> None:
    path = mine / RUN / "train_receipt.json"
    receipt = json.loads(path.read_bytes())
    receipt["steps"] += 1
    path.write_bytes(document(receipt))
    failing = verify(kiln, mine / RUN).failing
    assert any("receipt_sha256" in name for name in failing)
    assert any("content_sha256" in name for name in failing)


@pytest.mark.parametrize(
    "edit", [put("receipt_type", "kiln_train_receipt_of_tomorrow"), put("schema_version", 2)], ids=["type", "version"]
)
def test_an_unknown_receipt_schema_fails(mine: Path, kiln: Kiln, edit: Edit) -> None:
    _reseal(mine / RUN, edit)
    assert verify(kiln, mine / RUN).code == 1


def test_an_unknown_field_fails(mine: Path, kiln: Kiln) -> None:
    path = mine / RUN / "train_receipt.json"
    path.write_bytes(document(json.loads(path.read_bytes()) | {"stowaway": 1}))
    assert verify(kiln, mine / RUN).code == 1


def test_the_evidence_of_another_run_fails(
    mine: Path, finished: Path, copy_of: Callable[..., Path], kiln: Kiln
) -> None:
    """A whole, sound data stage of other rows does not fit under this receipt."""
    other = copy_of(finished, "other")
    config = (other / "kiln.toml").read_text(encoding="utf-8").replace("seed = 42", "seed = 43")
    (other / "kiln.toml").write_text(config, encoding="utf-8")
    assert kiln("prepare", other / "kiln.toml", "--out", other / RUN).code == 0
    for name in ("data", "data_manifest.json"):
        target = mine / RUN / name
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(other / RUN / name, target)
        else:
            shutil.copy(other / RUN / name, target)
    verdict = verify(kiln, mine / RUN)
    assert verdict.code == 1
    assert any("data_manifest.json" in name for name in verdict.failing)


@pytest.mark.parametrize("name", ["data_manifest.json", "admit_manifest.json", "train_receipt.json"])
def test_times_are_covered_too(mine: Path, kiln: Kiln, name: str) -> None:
    """What two runs are not compared by is still evidence: no byte of a document is outside every digest."""
    path = mine / RUN / name
    value = json.loads(path.read_bytes())
    value["produced"]["at"] = "2001-01-01T00:00:00Z"
    path.write_bytes(document(value))
    verdict = verify(kiln, mine / RUN)
    assert verdict.code == 1
    assert any(name in failing or "receipt_sha256" in failing for failing in verdict.failing)


@pytest.mark.parametrize("stage", ["data", "admit"])
def test_a_manifest_that_names_another_stage_is_a_failing_claim(stage: str, mine: Path, kiln: Kiln) -> None:
    path = mine / RUN / f"{stage}_manifest.json"
    for other in ("train", "a`mit", ""):
        path.write_bytes(document(json.loads(path.read_bytes()) | {"stage": other}))
        verdict = verify(kiln, mine / RUN)
        assert verdict.code == 1
        assert f"{path.name} is a sound manifest" in verdict.failing


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where every key and every value of a document lies; of a list its first element."""
    pairs = value.items() if isinstance(value, dict) else [(0, value[0])] if isinstance(value, list) and value else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from places(inner, (*at, key))


def damaged(value: Any, place: tuple[str | int, ...]) -> Iterator[Any]:
    """The document with a value of another type there, a number below zero where it was none, and the value under
    another key."""
    *outer, key = place
    if isinstance(functools.reduce(lambda inner, step: inner[step], place, value), int | float):
        yield next(beyond_bounds(value, place))
    for rename in (False, True) if isinstance(key, str) else (False,):
        changed = copy.deepcopy(value)
        holder = functools.reduce(lambda inner, step: inner[step], outer, changed)
        old = holder[key]
        if rename:
            holder[f"{key}`"] = holder.pop(key)
        else:
            holder[key] = ["of", "another", "type"] if isinstance(old, str | None) else None
        yield changed


DOCUMENTS = ("train_receipt.json", "admit_manifest.json", "data_manifest.json", "admit/sft_ingestion.json")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_damaged_in_any_field_is_a_failing_claim(name: str, mine: Path, kiln: Kiln) -> None:
    """What it then lacks is told by a claim, never by an error of the command."""
    path = mine / RUN / name
    value = json.loads(path.read_bytes())
    faults = []
    for place in places(value):
        for changed in damaged(value, place):
            path.write_bytes(document(changed))
            done = kiln("verify-receipt", mine / RUN)
            if (done.code, "FAIL" in done.out) != (1, True):
                faults.append(f"{place}: exit {done.code}: {done.err}")
    assert not faults, "\n".join(faults)


def test_numbers_beyond_1e16_are_read_as_others_are(admitted: Path, copy_of: Callable[..., Path], kiln: Kiln) -> None:
    project = copy_of(admitted)
    config = project / "kiln.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("learning_rate = 0.01", "learning_rate = 1e30"))
    assert kiln("train", config, "--out", project / RUN).code == 1, "its losses are no numbers any more"
    assert b"1e+30" in (project / RUN / "train_receipt.json").read_bytes()
    assert verify(kiln, project / RUN, "--require-all") == Verdict(0, [], [])
    for command in ("status", "validate"):
        done = kiln(command, project / RUN)
        assert done.code == 0, done.err


@pytest.mark.parametrize("command", ["status", "report", "validate", "diff"])
def test_no_command_believes_a_receipt_damaged_in_a_field(command: str, mine: Path, kiln: Kiln) -> None:
    path = mine / RUN / "train_receipt.json"
    value = json.loads(path.read_bytes())
    for place in (place for place in places(value) if len(place) == 1):
        for changed in damaged(value, place):
            path.write_bytes(document(changed))
            done = kiln(command, *[mine / RUN] * (2 if command == "diff" else 1))
            assert done.code in (1, 2), (place, done.err)
            assert "train_receipt.json" in done.out + done.err


# Parts of a checkpoint that resume and the receipt hold against something else; by itself they may say anything.
BOUND = {"auxiliary_state", "effective_config", "hyperparameters", "precision_policy", "state"}


@pytest.mark.parametrize("name", ["checkpoint_manifest.json", "sft_loop_state.json"])
def test_a_checkpoint_damaged_in_any_field_is_a_finding(name: str, mine: Path, kiln: Kiln) -> None:
    path = mine / FIRST_CHECKPOINT / name
    value = json.loads(path.read_bytes())
    for place in places(value):
        for changed in [*damaged(value, place), *beyond_bounds(value, place)]:
            path.chmod(0o644)
            path.write_bytes(document(changed))
            done = kiln("validate", path.parent)
            assert done.code in ((0, 1) if BOUND.intersection(place) else (1,)), (place, done.err)


def beyond_bounds(value: Any, place: tuple[str | int, ...]) -> Iterator[Any]:
    """The document with numbers there that no run can have."""
    *outer, key = place
    for number in (-1, 2**70):
        changed = copy.deepcopy(value)
        functools.reduce(lambda inner, step: inner[step], outer, changed)[key] = number
        yield changed


def test_the_provenance_digest_is_that_of_the_other_fields(finished: Path) -> None:
    """SHA-256 of the canonical JSON, without a domain."""
    receipt = json.loads((finished / RUN / "train_receipt.json").read_bytes())
    found = receipt["execution_provenance"]
    digest = found.pop("provenance_sha256")
    assert digest == "sha256:" + hashlib.sha256(canonical_json(found)).hexdigest()
    assert found["schema"] == "kiln.execution-provenance.v1"
    assert set(found) == {"schema", "backend", "build", "configuration", "kernels", "model", "precision"}
    parts = ("backend", "build", "configuration", "kernels")
    told = {name for part in parts for name in found[part]} | {"precision", "dtype"}
    assert set(receipt["execution"]) <= told, "no field of execution is left out"


def test_times_and_memory_of_a_training_are_outside_of_what_is_compared(finished: Path) -> None:
    receipt = msgspec.json.decode((finished / RUN / "train_receipt.json").read_bytes(), type=TrainReceipt)
    timings, runtime = receipt.produced["phase_timings"], receipt.produced["runtime"]
    assert set(timings) == {"tokenize_ms", "policy_forward_ms", "backward_ms", "optimizer_ms"}
    assert all(spent > 0 for spent in timings.values())
    assert sum(timings.values()) <= runtime["wall_clock_ms"] + 1
    assert runtime["peak_memory_mib"] > 10 and "peak_vram_mib" in runtime
    content, whole = receipt.content_digest(), receipt.whole_digest()
    receipt.produced = {}
    assert receipt.content_digest() == content and receipt.whole_digest() != whole
