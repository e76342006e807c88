"""What a training left under ``train/``, against its receipt: the adapter, the loss log, and every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.files import hash_file, read_bounded
from kiln_cli.receipts import CheckpointRef, TrainReceipt
from kiln_cli.text import printable
from kiln_stages.evidence.claims import Claim, Unavailable, check_file, claim, compare, differ, require
from kiln_stages.evidence.digests import Digest
from kiln_stages.evidence.model_card import FORMAT, adapter_card
from kiln_stages.evidence.receipt_claims import ADAPTER_CONFIG, ADAPTER_MODEL, CARD, LOSS_CURVE, LOSS_LOG, binding
from kiln_stages.training.base_adapter import CONFIG as BASE_CONFIG
from kiln_stages.training.base_adapter import MODEL as BASE_MODEL
from kiln_stages.training.base_adapter import read_base_adapter
from kiln_stages.training.checkpoint import MANIFEST, NAME, list_checkpoints, load_checkpoint, read_checkpoint_manifest
from kiln_stages.training.checkpoint_manifest import differences
from kiln_stages.training.lora_norms import delta_norms
from kiln_stages.training.loss_curve import CURVE_MARK, loss_curve
from kiln_stages.training.metrics import Step, loss_log_sha256, read_steps
from kiln_stages.training.tensors import StoredTensor, adapter_content_sha256, read_tensors
from kiln_stages.workers import available

CHECKPOINTS_AT_ONCE = 4  # each is held in memory while it is checked
ADAPTER_LIMIT = 1 << 40
NORM_SLACK = 1e-9  # relative
DOCUMENT_LIMIT = 1 << 24


def output_claims(run: Path, receipt: TrainReceipt, digest: Digest = hash_file) -> Iterator[Claim]:
    for ref in receipt.outputs:
        yield claim(f"{printable(ref.path)} has its digest", partial(check_file, ref, run / ref.path, digest))
    if receipt.status == "success":
        yield claim("adapter tensors have their content digest and norms", partial(_check_adapter, run, receipt))
        yield claim("adapter_config.json says what the receipt says", partial(_check_adapter_config, run, receipt))
        yield claim(
            "the adapter was trained: it has tensors, and a LoRA-B that is not zero", partial(_check_trained, run)
        )
    if receipt.adapters.get("base") is not None:
        yield claim("the base adapter is the one begun with", partial(_check_base_adapter, run, receipt))
    if CARD in [ref.path for ref in receipt.outputs]:  # a training that failed has none
        yield claim("the adapter's README.md is the card of this receipt", partial(_check_card, run, receipt))
    if LOSS_CURVE in [ref.path for ref in receipt.outputs]:
        yield claim("the loss curve is that of the loss log", partial(_check_loss_curve, run, receipt))
    if receipt.loss_log_sha256 is not None:
        yield claim("the loss log is the one of the receipt", partial(_check_loss_log, run, receipt))
    elif not (run / "train").exists():
        return  # it failed before anything was written
    yield claim("train/training.json began this training", partial(_check_training, run, receipt))
    yield claim("no other checkpoint lies in train/", partial(_check_no_others, run, receipt))
    with ThreadPoolExecutor(min(available(), CHECKPOINTS_AT_ONCE)) as pool:
        for claims in pool.map(lambda each: list(_checkpoint_claims(run, receipt, each)), receipt.checkpoints):
            yield from claims


def _checkpoint_claims(run: Path, receipt: TrainReceipt, checkpoint: CheckpointRef) -> Iterator[Claim]:
    name = printable(checkpoint.name)
    if NAME.match(checkpoint.name) is None:  # a path, perhaps
        yield Claim(f"{name} is a checkpoint", "fails", "it is no name of a checkpoint")
        return
    path = run / "train" / checkpoint.name
    yield claim(f"{name} is the published one", partial(_check_published, path, checkpoint))
    yield claim(
        f"{name} holds the files of its manifest and the losses of the loss log", partial(_check_files, run, path)
    )
    yield claim(f"{name} is bound to what the receipt says", partial(_check_bound, path, receipt))


def _check_adapter(run: Path, receipt: TrainReceipt) -> str:
    output: dict[str, Any] = receipt.adapters["output"] or {}
    path = require(run / ADAPTER_MODEL)
    tensors = read_tensors(read_bounded(path, ADAPTER_LIMIT), path.name)
    found = adapter_content_sha256(tensors)
    return differ("content_sha256", found, output.get("content_sha256")) or _check_norms(receipt, tensors)


def _check_norms(receipt: TrainReceipt, tensors: list[StoredTensor]) -> str:
    """The norms of the adapter, computed again. Another release of polars may sum in another order."""
    derived = delta_norms(tensors, receipt.hyperparameters["alpha_over_rank"])
    if text := differ("modules", [n.module for n in receipt.lora_delta_norms], [n.module for n in derived]):
        return text
    for said, found in zip(receipt.lora_delta_norms, derived, strict=True):
        for name in said.__struct_fields__[1:]:
            here, there = getattr(said, name), getattr(found, name)
            if not math.isclose(here, there, rel_tol=NORM_SLACK):
                return f"{name} of {printable(said.module)} is {here}, the tensors give {there}"
    return ""


def _check_trained(run: Path) -> str:
    path = require(run / ADAPTER_MODEL)
    tensors = read_tensors(read_bounded(path, ADAPTER_LIMIT), path.name)
    if any(tensor.name.endswith(".lora_B.weight") and any(tensor.data) for tensor in tensors):
        return ""
    return "every LoRA-B is zero: it computes what the base model does" if tensors else "it holds no tensor"


def _check_base_adapter(run: Path, receipt: TrainReceipt) -> str:
    expected = receipt.adapters["base"]
    directory = run / str(receipt.produced.get("base_dir", ".")) / str(expected["path"])
    for name in (BASE_CONFIG, BASE_MODEL):
        require(directory / name)
    found = read_base_adapter(directory, expected["path"]).in_receipt()
    return compare("adapters.base", found | {"receipt": expected["receipt"]}, expected)


def _check_adapter_config(run: Path, receipt: TrainReceipt) -> str:
    parameters = receipt.hyperparameters
    expected = {
        "base_model_name_or_path": receipt.model["id"],
        "lora_alpha": parameters["alpha"],
        "r": parameters["rank"],
        "target_modules": parameters["target_modules"],
    }
    found = _read_object(run / ADAPTER_CONFIG)
    return compare("adapter_config", {key: found.get(key) for key in expected}, expected)


def _check_card(run: Path, receipt: TrainReceipt) -> str:
    path = require(run / CARD)
    return _compare_text(path, f"\n# {FORMAT}\n", lambda: adapter_card(receipt, read_steps(require(run / LOSS_LOG))))


def _check_loss_curve(run: Path, receipt: TrainReceipt) -> str:
    path, held = require(run / LOSS_CURVE), receipt.held_out
    rows, after = receipt.data.examples_kept, None if held is None else (receipt.steps, held.loss_after)
    return _compare_text(path, CURVE_MARK, lambda: loss_curve(require(run / LOSS_LOG).parent, rows, after) or b"")


def _compare_text(path: Path, mark: str, make: Callable[[], bytes]) -> str:
    """A text for people against the same made again of the evidence: it cannot say anything else. ``mark`` stands in
    those that this version of kiln makes."""
    found = read_bounded(path, DOCUMENT_LIMIT)
    if mark.encode() not in found:
        raise Unavailable(f"{path.name} is not of the form that this kiln makes ({mark.strip()})")
    pairs = zip_longest(found.decode().split("\n"), make().decode().split("\n"))
    texts = (differ(f"line {number}", *pair) for number, pair in enumerate(pairs, start=1))
    return next(filter(None, texts), "")


def _check_loss_log(run: Path, receipt: TrainReceipt) -> str:
    steps = read_steps(require(run / LOSS_LOG))
    last = steps[-1].step if steps else 0
    gap = next((place for place, step in enumerate(steps, start=1) if step.step != place), None)
    faults = [
        differ("sha256", loss_log_sha256(steps), receipt.loss_log_sha256),
        differ("last step", last, receipt.steps),
        "" if gap is None else f"line {gap} is of step {steps[gap - 1].step}, expected {gap}",
    ]
    return "; ".join(filter(None, faults))


def _check_training(run: Path, receipt: TrainReceipt) -> str:
    found, held = _read_object(run / "train" / "training.json"), receipt.held_out
    before = found["held_out_before"]
    if receipt.status == "failed":  # it holds no held-out loss, which is a pair
        held_before = before
    else:
        # rows, supervised tokens, the mean over rows (which the receipt leaves out), the mean over tokens
        held_before = held and [held.rows, held.supervised_tokens, before and before[2], held.loss_before]
    expected = {
        "adapter": receipt.adapter_name,
        "base_adapter_sha256": receipt.adapters["base"] and receipt.adapters["base"]["content_sha256"],
        "base_model_sha256": receipt.model["base_weight_shards"]["sha256"],
        "model_config_sha256": receipt.model["config_sha256"],
        "config_sha256": receipt.config_sha256,
        "corpus_sha256": receipt.previous.content_sha256,
        "schema": "kiln.training.v1",
        "held_out_before": held_before,
    }
    digest = receipt.produced.get("training_sha256")  # None: it failed before it wrote the file
    faults = [compare("training", found, expected)]
    if receipt.status == "success" or digest is not None:
        faults.append(differ("sha256", hash_file(run / "train" / "training.json")[0], digest))
    return "; ".join(filter(None, faults))


def _check_no_others(run: Path, receipt: TrainReceipt) -> str:
    named = {checkpoint.name for checkpoint in receipt.checkpoints}
    others = [path.name for _, path in list_checkpoints(require(run / "train")) if path.name not in named]
    return f"the receipt does not name {printable(', '.join(others))}" if others else ""


def _check_published(path: Path, checkpoint: CheckpointRef) -> str:
    return differ("sha256", hash_file(require(path / MANIFEST))[0], checkpoint.manifest_sha256)


def _check_files(run: Path, path: Path) -> str:
    """Exact set, sizes, digests, tensors and loop state; then the loop state's losses against the log's."""
    history = load_checkpoint(require(path)).loop.loss_history
    log = read_steps(require(run / LOSS_LOG))[: len(history)]
    if log == [Step(step, loss) for step, loss in enumerate(history, start=1)]:
        return ""
    pairs = zip(history, log, strict=False)
    place = next((place for place, (loss, step) in enumerate(pairs) if loss != step.loss), len(log))
    there = log[place].loss if place < len(log) else "not there"
    return f"step {place + 1} has loss {history[place]}, in the loss log it is {there}"


def _check_bound(path: Path, receipt: TrainReceipt) -> str:
    found = differences(binding(receipt), read_checkpoint_manifest(require(path))[0])
    return "; ".join(
        f"{printable(what)} is {printable(there)}, the receipt says {printable(here)}" for what, there, here in found
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return strict_json.parse_object(read_bounded(require(path), DOCUMENT_LIMIT))
    except strict_json.JsonFault as fault:
        raise msgspec.ValidationError(fault.detail) from None
