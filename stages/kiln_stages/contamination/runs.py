"""The rows of a run and of its receipts, split by split.

A receipt holds hashes alone, and they are enough to find the same conversation again. Where the run that wrote it is
still around it, and its files are what its manifest says, the rows themselves are read: then every rule can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file, open_input
from kiln_cli.manifests import locate, manifest_path, read_ingestion, read_manifest, require_unchanged
from kiln_cli.receipts import IngestionReceipt, TrainReceipt
from kiln_cli.stage_manifests import MANIFEST_NAMES, AdmitManifest, PrepareManifest
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import chat_rows, prepared_rows
from kiln_stages.admitting.inputs import KEPT_ROWS, SPLITS
from kiln_stages.admitting.prepared_rows import ToolsMode
from kiln_stages.admitting.tally import RECEIPTS
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.row_sets import KeyedFile, Role, RowSet, hashed_set, kept_only, read_set
from kiln_stages.reading.mapping import mapped_source
from kiln_stages.reading.sources import open_rows
from kiln_stages.reading.transports import Plain, open_plain, spool_records

# A run's splits: where admission's evidence has them, and what the run uses them for.
RUN_SPLITS: dict[str, tuple[str | None, Role]] = {
    "train": ("corpus", "trained"),
    "validation": ("heldout", "held out"),
    "test": (None, "held out"),
}
# What rows that cannot be read again are refused with: then their hashes stand for them.
_NOT_HERE = ("KLN202", "KLN203", "KLN204", "KLN206", "KLN207", "KLN210", "KLN212", "KLN301")


def run_exists(path: Path) -> bool:
    return any(manifest_path(path, stage).exists() for stage in MANIFEST_NAMES)


def run_sets(name: str, run: Path, wanted: str | None, reader: Reader) -> Iterator[RowSet]:
    """The splits of a run, or the wanted one. A run whose rows come from a file has one, and uses it for nothing known.

    Raises KilnError KLN204 for a split that it has not, KLN206/207 where its evidence is damaged.
    """
    admit = read_manifest(run, AdmitManifest) if manifest_path(run, "admit").exists() else None
    if admit is not None and admit.previous is None:
        if wanted not in (None, "train"):
            raise KilnError("KLN204", f"{name} has no split {wanted!r}: its rows come from a file", hint="name the run")
        if any(ref.path == RECEIPTS["corpus"] for ref in admit.outputs):
            yield _admitted_set(name, run, admit, "corpus", _receipt_of(run, admit, "corpus"), reader)
        else:
            yield _scored_set(name, run, admit, reader)
        return
    prepare = read_manifest(run, PrepareManifest)
    for split, (admitted, role) in RUN_SPLITS.items():
        if wanted in (None, split):
            if admit is not None and admitted is not None:
                receipt = _receipt_of(run, admit, admitted)
                found = _admitted_set(f"{name}:{split}", run, admit, admitted, receipt, reader)
            else:
                found = _prepared_set(f"{name}:{split}", run, prepare, admit, f"data/{split}.jsonl", reader)
            yield msgspec.structs.replace(found, owner=str(run.resolve()), role=role)


def receipt_set(name: str, path: Path, document: IngestionReceipt | TrainReceipt, reader: Reader) -> RowSet:
    """The kept rows of a receipt."""
    if isinstance(document, TrainReceipt) and not isinstance(document.data.sft_ingestion, IngestionReceipt):
        raise KilnError(
            "KLN204",
            f"{name} is the receipt of a distillation: scored rows have no hashes of conversations",
            hint="name the conversations that were scored",
        )
    receipt = document if isinstance(document, IngestionReceipt) else document.data.conversations()
    sha256, size = hash_file(path)
    run, split = _run_of(path, document, sha256)
    if run is None:
        return hashed_set(name, receipt, sha256, size, "the run that wrote it is not around it")
    found = _admitted_set(name, run, read_manifest(run, AdmitManifest), split, receipt, reader)
    return msgspec.structs.replace(found, sha256=sha256, size=size)


def _run_of(path: Path, document: IngestionReceipt | TrainReceipt, sha256: str) -> tuple[Path | None, str]:
    """The run around a receipt, if its manifest vouches for it, and the split of the receipt's rows."""
    if isinstance(document, TrainReceipt):
        run = path.absolute().parent
        here = manifest_path(run, "admit").exists()
        same = here and read_manifest(run, AdmitManifest).content_sha256 == document.previous.content_sha256
        return (run if same else None), "corpus"
    run = path.absolute().parent.parent
    for split, name in RECEIPTS.items():
        if run / name == path.absolute() and manifest_path(run, "admit").exists():
            return (run if read_manifest(run, AdmitManifest).output(name).sha256 == sha256 else None), split
    return None, "corpus"


def _receipt_of(run: Path, admit: AdmitManifest, split: str) -> IngestionReceipt:
    require_unchanged(admit.output(RECEIPTS[split]), run / RECEIPTS[split], "admit_manifest.json")
    return read_ingestion(run / RECEIPTS[split])


def _prepared_set(
    name: str, run: Path, prepare: PrepareManifest, admit: AdmitManifest | None, path: str, reader: Reader
) -> RowSet:
    """A split that was prepared and not admitted: every row of it."""
    ref = prepare.output(path)
    require_unchanged(ref, run / path, "data_manifest.json")
    mode: ToolsMode = "native" if admit is None else admit.details.tools.mode
    with open_input(run / path) as stream:
        plain = Plain(stream=stream, size=ref.bytes, packing="lines", elements=False, sha256=None)
        return read_set(name, KeyedFile(plain, partial(prepared_rows, mode=mode), reader.near))


def _admitted_set(
    name: str, run: Path, admit: AdmitManifest, split: str, receipt: IngestionReceipt, reader: Reader
) -> RowSet:
    """The kept rows of an admission: read where they are what its manifest says, else by hash."""
    try:
        rows = _rows_again(name, run, admit, split, reader)
    except KilnError as error:
        if error.code not in _NOT_HERE:
            raise
        kept, why = None, error.message
    else:
        kept, why = kept_only(rows, receipt), "its rows are read in another way now"
    if kept is not None:
        return kept
    ref = admit.output(RECEIPTS[split])
    return hashed_set(name, receipt, ref.sha256, ref.bytes, printable(why))


def _scored_set(name: str, run: Path, admit: AdmitManifest, reader: Reader) -> RowSet:
    """The prompts of a corpus that a teacher scored, which is admitted whole; its receipt holds no hash of a row."""
    ref = admit.inputs[0]
    path = locate(ref, run, admit)
    require_unchanged(ref, path, "admit_manifest.json")
    with open_rows(path, "messages", reader.plugins.sources, "chat", reader.scratch) as (plain, choice):
        return read_set(name, KeyedFile(plain, partial(chat_rows, source=choice.source), reader.near))


def _rows_again(name: str, run: Path, admit: AdmitManifest, split: str, reader: Reader) -> RowSet:
    """All rows that admission read for a split. Raises KilnError where they cannot be had as they were."""
    if admit.previous is not None:
        return _prepared_set(name, run, read_manifest(run, PrepareManifest), admit, SPLITS[split], reader)
    rows = admit.details.rows
    ref = admit.inputs[0]
    settings = load_config(run / "config.resolved.toml").run.admit
    source = mapped_source(settings.map) if settings.map else reader.plugins.sources.get(rows.shape or "")
    with ExitStack() as stack:
        plain = stack.enter_context(open_plain(locate(ref, run, admit), reader.scratch))
        if ref.path == KEPT_ROWS:
            plain = msgspec.structs.replace(plain, elements=rows.elements)
        elif source.read is not None:
            plain = stack.enter_context(spool_records(source, plain, reader.scratch))
        found = read_set(
            name, KeyedFile(plain, partial(chat_rows, source=source, compat=settings.compat == "kiln"), reader.near)
        )
    if found.sha256 != ref.sha256:
        raise KilnError("KLN207", f"{printable(ref.path)} changed after admit_manifest.json vouched for it")
    return found
