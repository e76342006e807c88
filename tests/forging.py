"""A forger's work: after a file of a run was changed, every digest behind it is made right again, up to the receipt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from kiln_stages.admitting.corpus import AdmittedRow, admitted_sha256, read_corpus, write_corpus
from kiln_stages.evidence.model_card import adapter_card
from kiln_stages.evidence.receipt_claims import CARD, LOSS_LOG
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.metrics import read_steps

from kiln_cli.files import hash_file
from kiln_cli.manifests import content_sha256, document
from kiln_cli.receipts import TrainReceipt
from kiln_cli.stage_manifests import MANIFEST_NAMES, MANIFESTS, AdmitManifest


def forge_labels(run: Path, place: int) -> AdmittedRow:
    """One token of one row of the corpus is no longer trained on; spans, labels and all digests agree on it."""
    path = run / "admit" / "corpus.parquet"
    rows = read_corpus(path)
    (start, end), *rest = rows[place].label_spans
    rows[place] = msgspec.structs.replace(rows[place], label_spans=[(start + 1, end), *rest])
    write_corpus(path, rows)
    rebuild_chain(run)
    return rows[place]


def rebuild_chain(run: Path) -> None:
    """Makes manifests, checkpoints, ``training.json`` and the receipt agree with the files that lie in the run."""
    content: dict[str, str] = {}
    for kind in MANIFESTS:
        name = MANIFEST_NAMES[kind.STAGE]
        manifest = msgspec.json.decode((run / name).read_bytes(), type=kind)
        manifest.outputs = [_fresh(run, ref) for ref in manifest.outputs]
        manifest.inputs = [_fresh(run, ref) if ref.base == "run" else ref for ref in manifest.inputs]
        if manifest.previous is not None:
            manifest.previous = msgspec.structs.replace(manifest.previous, content_sha256=content["prepare"])
        if isinstance(manifest, AdmitManifest):
            _recount(run, manifest)
        manifest.content_sha256 = content[kind.STAGE] = content_sha256(manifest)
        (run / name).write_bytes(document(manifest))
    _edit(run / "train" / "training.json", lambda value: value.update(corpus_sha256=content["admit"]))
    _rebuild_receipt(run, content["admit"])


def _rebuild_receipt(run: Path, admit_content: str) -> None:
    receipt = msgspec.json.decode((run / "train_receipt.json").read_bytes(), type=TrainReceipt)
    rows, epochs = read_corpus(run / "admit" / "corpus.parquet"), receipt.hyperparameters["epochs"]
    supervised = sum(row.supervised for row in rows)
    tokens = sum(len(row.input_ids) for row in rows)
    receipt.token_counts["action_tokens"] = supervised * epochs
    receipt.token_counts["context_tokens"] = (tokens - supervised) * epochs
    receipt.inputs = [_fresh(run, ref) for ref in receipt.inputs]
    receipt.previous = msgspec.structs.replace(receipt.previous, content_sha256=admit_content)
    receipt.produced["manifest_files"] = {name: hash_file(run / name)[0] for name in MANIFEST_NAMES.values()}
    receipt.produced["training_sha256"] = hash_file(run / "train" / "training.json")[0]
    digests = {}
    for _, path in list_checkpoints(run / "train"):
        manifest = path / "checkpoint_manifest.json"
        _edit(manifest, lambda value: value["auxiliary_state"].update(admit_content_sha256=admit_content))
        digests[path.name] = hash_file(manifest)[0]
    receipt.checkpoints = [
        msgspec.structs.replace(each, manifest_sha256=digests[each.name]) for each in receipt.checkpoints
    ]
    (run / CARD).write_bytes(adapter_card(receipt, read_steps(run / LOSS_LOG)))
    receipt.outputs = [_fresh(run, ref) for ref in receipt.outputs]
    receipt.seal()
    (run / "train_receipt.json").write_bytes(document(receipt))


def _recount(run: Path, manifest: AdmitManifest) -> None:
    for split in manifest.details.admitted_sha256:
        rows = read_corpus(run / "admit" / f"{split}.parquet")
        manifest.details.admitted_sha256[split] = admitted_sha256(rows)
        manifest.counts[split]["supervised_tokens"] = sum(row.supervised for row in rows)


def _fresh(run: Path, ref: Any) -> Any:
    sha256, size = hash_file(run / ref.path)
    return msgspec.structs.replace(ref, sha256=sha256, bytes=size)


def _edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    path.chmod(0o644)
    path.write_bytes(document(value))
