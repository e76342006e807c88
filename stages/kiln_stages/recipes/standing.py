"""How far each step of a recipe is, by the evidence that lies in its run directory: nothing else is kept about it.

So a run that ``kiln admit``, ``kiln train`` and ``kiln resume`` made, by hand or by Make, counts like one that the
recipe made. Torch is not needed to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import RECEIPT_NAME, manifest_path, read_manifest, read_receipt
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import FileRef, TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_stages.admitting.contract import load_terms
from kiln_stages.contamination.held_out import open_held_out_again
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.binding import pinned_teacher
from kiln_stages.exported_file import ExportedFile
from kiln_stages.reading.transports import open_plain
from kiln_stages.recipes.placing import Merging, Placed, Training
from kiln_stages.recipes.record import MergeRecord, read_merge
from kiln_stages.training.base_adapter import read_base_adapter, with_its_receipt
from kiln_stages.training.tensors import base_model_sha256, model_config_sha256, weight_shards
from kiln_stages.training.training_file import read_training

# waits: begun or done on a base adapter whose step is not done, so that nobody can tell whether it is the same one.
State = Literal["done", "unfinished", "admitted", "to do", "waits", "changed"]
ABSENT = "absent"


class Changed(NamedTuple):
    """Something that a begun step depends on and that is another now."""

    what: str
    then: str
    now: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """``receipt``: of a training that is done; ``record``: of a merge that is done."""

    state: State
    changes: list[Changed] = []
    receipt: TrainReceipt | None = None
    record: MergeRecord | None = None
    rows_kept: int | None = None


class _Base(NamedTuple):
    """An adapter to begin with: its tensors, and the receipt of the training that made it where there is one."""

    content_sha256: str
    receipt_sha256: str | None


class Standings:
    """Looks at steps. What they share, the files of the base model, is hashed once."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._models: dict[Path, tuple[str, str]] = {}

    def all(self, placed: Iterable[Placed]) -> dict[str, Standing]:
        """By name, in order. Raises KilnError as the files of a step do that are damaged, KLN302 for the model's."""
        found: dict[str, Standing] = {}
        for step in placed:
            found[step.step.name] = self.of(step, found)
        return found

    def of(self, placed: Placed, before: dict[str, Standing]) -> Standing:
        """One step, the standings of the steps ``before`` it being known."""
        if isinstance(placed, Merging):
            return _of_merging(placed, before[placed.step.of].receipt)
        return self._of_training(placed, before)

    def _of_training(self, training: Training, before: dict[str, Standing]) -> Standing:
        config, run = training.config, training.run
        admit = read_manifest(run, AdmitManifest) if manifest_path(run, "admit").exists() else None
        begun = read_training(run / "train")
        receipt = read_receipt(run / RECEIPT_NAME) if (run / RECEIPT_NAME).exists() else None
        if receipt is not None and receipt.status != "success":
            receipt = None  # how far a failed attempt came is in train/
        if admit is None and begun is None and receipt is None:
            return Standing(state="to do")
        changes = self._admission_changes(training, admit)
        kept = None if admit is None else int(admit.counts["corpus"]["rows_kept"])
        if begun is None and receipt is None:
            return Standing(state="to do") if changes else Standing(state="admitted", rows_kept=kept)
        weights, model_config = self._model(config)
        base = _base(training, before)
        if begun is not None:
            changes += _differing(
                ("training settings", begun.config_sha256, config.sha256(*TRAIN_SECTIONS)),
                ("admitted rows", begun.corpus_sha256, admit.content_sha256 if admit else ABSENT),
                ("base model", begun.base_model_sha256, weights),
                ("model config.json", begun.model_config_sha256, model_config),
            )
        else:
            changes.append(Changed("train/training.json", ABSENT, "of this step"))
        if base != "unknown":
            changes += _base_changes(begun.base_adapter_sha256 if begun else None, receipt, base)
        if changes:
            return Standing(state="changed", changes=changes)
        if base == "unknown":
            return Standing(state="waits", rows_kept=kept)
        if receipt is None or not _outputs_are_there(receipt.outputs, run):
            return Standing(state="unfinished", rows_kept=kept)
        return Standing(state="done", receipt=receipt, rows_kept=kept)

    def _admission_changes(self, training: Training, admit: AdmitManifest | None) -> list[Changed]:
        if admit is None:
            return [Changed("admit_manifest.json", ABSENT, "of this step")]
        files, choice = load_terms(training.config, self._plugins)
        found = _differing(
            ("settings of admission", admit.config_sha256, training.config.sha256(*admit.details.config_sections)),
            ("chat template", admit.details.template.sha256, choice.sha256),
            ("tokenizer files", admit.details.tokenizer, files.file_digests()),
        )
        if not training.keeps_its_rows:
            found += _differing(("rows", [ref.sha256 for ref in admit.inputs], [_rows_sha256(training)]))
        if training.step.kind == "opd" and (scored := scored_corpus(admit)) is not None:
            pinned = pinned_teacher(training.config).content_revision
            found += _differing(("teacher's revision", scored.teacher.content_revision, pinned))
        return found or self._held_out_changes(training, admit)

    def _held_out_changes(self, training: Training, admit: AdmitManifest) -> list[Changed]:
        """Rows that no row of the step may meet; with others, other rows of the step might be refused."""
        try:
            open_held_out_again(training.config, training.run, self._plugins, admit)
        except KilnError as error:
            if error.code != "KLN207":
                raise
            return [Changed("held-out rows", "as they were admitted against", error.message)]
        return []

    def _model(self, config: LoadedConfig) -> tuple[str, str]:
        directory = config.model_dir()
        if directory not in self._models:
            self._models[directory] = base_model_sha256(weight_shards(directory)), model_config_sha256(directory)
        return self._models[directory]


def _base(training: Training, before: dict[str, Standing]) -> _Base | Literal["unknown"] | None:
    """The adapter that the step begins with as it is now. Raises KilnError as the readers of a base adapter do."""
    if training.step.base is not None:
        receipt = before[training.step.base].receipt
        if receipt is None:
            return "unknown"
        return _Base(receipt.adapters["output"]["content_sha256"], receipt.content_digest())
    path = training.config.run.train.base_adapter
    if path is None:
        return None
    directory = training.config.resolve(path)
    found = with_its_receipt(read_base_adapter(directory, path), directory)
    return _Base(found.content_sha256, found.receipt.content_sha256 if found.receipt else None)


def _base_changes(begun: str | None, receipt: TrainReceipt | None, base: _Base | None) -> list[Changed]:
    """A receipt that is not there any more is no other one; then the tensors decide alone."""
    found = _differing(("base adapter", begun, base.content_sha256 if base else None))
    if receipt is not None and base is not None and base.receipt_sha256 is not None and not found:
        link = (receipt.adapters["base"] or {}).get("receipt") or {}
        found += _differing(("receipt of the base adapter", link.get("content_sha256"), base.receipt_sha256))
    return found


def _differing(*compared: tuple[str, object, object]) -> list[Changed]:
    return [Changed(what, str(then), str(now)) for what, then, now in compared if then != now]


def _rows_sha256(training: Training) -> str:
    """SHA-256 (hex) of the rows as admission would name them: of the copy in the run, or of the file as given."""
    given = training.rows()
    if given is not None and given.file is not None:
        return hash_file(given.file.path)[0]
    if given is not None:
        assert given.texts is not None, "rows of a recipe come from no stream"
        return sha256_hex(b"".join(text + b"\n" for text in given.texts))
    path = training.config.resolve(str(training.config.run.admit.file))
    if not path.is_dir():
        return hash_file(path)[0]
    with open_plain(path, training.run) as plain:
        return str(plain.sha256)


def _outputs_are_there(outputs: Iterable[FileRef | ExportedFile], directory: Path) -> bool:
    paths = {directory / ref.path: (ref.sha256, ref.bytes) for ref in outputs}
    return all(path.is_file() and hash_file(path) == expected for path, expected in paths.items())


def _of_merging(merging: Merging, receipt: TrainReceipt | None) -> Standing:
    record = read_merge(merging.target)
    if record is None:
        return Standing(state="unfinished" if merging.target.exists() else "to do")
    if receipt is None:
        return Standing(state="waits")
    changes = _differing(
        ("merged step", record.step, merging.step.of),
        ("receipt of the merged adapter", record.receipt_content_sha256, receipt.content_digest()),
    )
    if changes:
        return Standing(state="changed", changes=changes)
    if not _outputs_are_there(record.files, merging.target):
        return Standing(state="unfinished")
    return Standing(state="done", record=record)
