"""Writing and reading JSON documents of evidence, and the run directory they lie in.

A document is sorted JSON with two spaces of indent and a line feed at the end; reading demands exactly those bytes, so
no byte of it is outside what its digests cover.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, hash_file, read_bounded, write_file
from kiln_cli.identity import Domain, canonical_json, domain_json_sha256
from kiln_cli.receipts import (
    INGESTION_SCHEMA,
    RECEIPT_TYPE,
    RECEIPT_VERSION,
    FileRef,
    IngestionReceipt,
    ManifestRef,
    TrainReceipt,
)
from kiln_cli.stage_manifests import MANIFEST_NAMES, MANIFEST_SCHEMA, AdmitManifest, Produced, StageManifest
from kiln_cli.text import printable

DOCUMENT_LIMIT = 256 * 1024 * 1024
RECEIPT_NAME = "train_receipt.json"

T = TypeVar("T")
Manifest = TypeVar("Manifest", bound=StageManifest)


def document(value: Any) -> bytes:
    """The bytes of an evidence document."""
    return msgspec.json.format(canonical_json(value), indent=2) + b"\n"


def read_document(path: Path, kind: type[T], schema: str, field: str = "schema") -> T:
    """Reads a document strictly. Raises KilnError KLN206 for damage, another schema, or bytes not in canonical form."""
    data = read_bounded(path, DOCUMENT_LIMIT)
    try:
        value = strict_json.parse_object(data)
    except strict_json.JsonFault as fault:
        raise damaged(path, fault.detail) from None
    if value.get(field) != schema:
        raise damaged(path, f"{field} is {printable(repr(value.get(field)))}, expected {schema!r}")
    try:
        result = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise damaged(path, str(error)) from None
    if not document(value) == data == document(result):  # a field left out, or 1.0 for 1, would not be in a digest
        raise damaged(path, "its bytes are not in canonical form")
    return result


def read_ingestion(path: Path) -> IngestionReceipt:
    """An ingestion receipt that agrees with itself. Raises KilnError KLN206 with the first fault it has."""
    receipt = read_document(path, IngestionReceipt, INGESTION_SCHEMA)
    if fault := next(receipt.faults(), None):
        raise damaged(path, fault)
    return receipt


def damaged(path: Path, detail: str) -> KilnError:
    hint = "run the stage that writes it again"
    if path.name == RECEIPT_NAME:
        hint = (
            f"`kiln resume {printable(path.parent)}` writes it anew from a checkpoint, `kiln train --fresh` from none"
        )
    return KilnError("KLN206", f"{printable(path)}: {printable(detail)}", hint=hint)


def reference(
    written: AtomicFile, run: Path, kind: str, *, schema: str | None = None, rows: int | None = None
) -> FileRef:
    """How a manifest names a file that was just written into the run."""
    return FileRef(
        path=written.path.relative_to(run).as_posix(),
        base="run",
        kind=kind,
        schema=schema,
        sha256=written.sha256,
        bytes=written.size,
        rows=rows,
    )


def manifest_path(run: Path, stage: str) -> Path:
    return run / MANIFEST_NAMES[stage]


def write_manifest(run: Path, manifest: StageManifest, started: float, base_dir: Path) -> AtomicFile:
    """Completes and writes a stage's manifest, the last file of the stage.

    Where the run already holds a manifest of equal content, that one stays as it is, times included: an unchanged stage
    makes nothing after it run again.
    """
    manifest.content_sha256 = content_sha256(manifest)
    path = manifest_path(run, manifest.stage)
    previous = _read_if_sound(path, type(manifest))
    if previous is not None and previous.content_sha256 == manifest.content_sha256:
        manifest.produced = previous.produced
    else:
        manifest.produced = Produced(
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            seconds=round(time.monotonic() - started, 3),
            base_dir=relative_base(run, base_dir),
        )
    return write_file(path, document(manifest))


def content_sha256(manifest: StageManifest) -> str:
    value = msgspec.to_builtins(manifest)
    del value["produced"], value["content_sha256"]
    return domain_json_sha256(Domain.MANIFEST_CONTENT, value)


def read_manifest(run: Path, kind: type[Manifest]) -> Manifest:
    """A stage's manifest, checked against its own digest. Raises KilnError KLN206 with the command that makes one."""
    path = manifest_path(run, kind.STAGE)
    if not path.exists():
        raise KilnError(
            "KLN206",
            f"{printable(path)} is missing",
            hint=f"run `kiln {kind.STAGE} CONFIG --out {printable(run)}` first",
        )
    manifest = parse_manifest(path, kind)
    if manifest.content_sha256 != content_sha256(manifest):
        raise damaged(path, f"content_sha256 is {manifest.content_sha256}, expected {content_sha256(manifest)}")
    return manifest


def parse_manifest(path: Path, kind: type[Manifest]) -> Manifest:
    """A manifest of this stage as written, its digest not checked. Raises KilnError KLN206 as read_document does, and
    where it is of another stage."""
    manifest = read_document(path, kind, MANIFEST_SCHEMA)
    if manifest.stage != kind.STAGE:
        raise damaged(path, f"stage is {printable(repr(manifest.stage))}, expected {kind.STAGE!r}")
    return manifest


def manifest_reference(run: Path, kind: type[StageManifest]) -> ManifestRef:
    """How the next stage's evidence names this one."""
    return ManifestRef(path=MANIFEST_NAMES[kind.STAGE], content_sha256=read_manifest(run, kind).content_sha256)


def manifest_files(run: Path, admit: AdmitManifest) -> dict[str, str]:
    """SHA-256 (hex) of each manifest under a training, times included, by file name."""
    names = [MANIFEST_NAMES["admit"], *([admit.previous.path] if admit.previous is not None else [])]
    return {name: hash_file(run / name)[0] for name in names}


def read_receipt(path: Path) -> TrainReceipt:
    """A train receipt, checked against its own digest; its other claims are verify-receipt's to check.

    Raises KilnError KLN206 with both digests where a field was changed.
    """
    receipt = parse_receipt(path)
    if receipt.receipt_sha256 != (found := receipt.whole_digest()):
        raise damaged(path, f"receipt_sha256 is {receipt.receipt_sha256}, expected {found}")
    return receipt


def parse_receipt(path: Path) -> TrainReceipt:
    """A train receipt as written, its digest not checked. Raises KilnError KLN206."""
    if not path.exists():
        raise KilnError("KLN206", f"{printable(path)} is missing", hint="run `kiln train CONFIG --out RUN` first")
    receipt = read_document(path, TrainReceipt, RECEIPT_TYPE, field="receipt_type")
    if receipt.schema_version != RECEIPT_VERSION:
        raise damaged(path, f"schema_version is {receipt.schema_version}, expected {RECEIPT_VERSION}")
    return receipt


def read_successful_receipt(path: Path) -> TrainReceipt:
    """As :func:`read_receipt`; KilnError KLN206 with the reason where it is the receipt of a training that failed."""
    receipt = read_receipt(path)
    if receipt.status != "success":
        reason = f"{receipt.failure_reason}: {receipt.failure_message}"
        raise KilnError(
            "KLN206",
            f"{printable(path)} is of a training that failed: {printable(reason)}",
            hint=f"`kiln resume {printable(path.parent)}` goes on from a checkpoint; `kiln train` begins again",
        )
    return receipt


def locate(ref: FileRef, run: Path, manifest: StageManifest) -> Path:
    """Where a referenced file should lie."""
    if ref.base == "run":
        return run / ref.path
    return Path(os.path.normpath(run / manifest.base_dir() / ref.path))


def require_unchanged(ref: FileRef, path: Path, vouched_by: str) -> None:
    """Raises KilnError KLN207 with both digests where a file is not what a manifest says."""
    sha256, size = hash_file(path)
    if (sha256, size) != (ref.sha256, ref.bytes):
        raise KilnError(
            "KLN207",
            f"{printable(path)} changed after {vouched_by} vouched for it: "
            f"sha256 is {sha256} ({size} bytes), expected {ref.sha256} ({ref.bytes} bytes)",
            hint="run the stages from this file on again",
        )


def relative_base(run: Path, base_dir: Path) -> str:
    """The directory that locators count from, relative to the run directory, so that no machine's path is stored."""
    return Path(os.path.relpath(base_dir.resolve(), run.resolve())).as_posix()


def nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _read_if_sound(path: Path, kind: type[Manifest]) -> Manifest | None:
    if not path.exists():
        return None
    try:
        return parse_manifest(path, kind)
    except KilnError:
        return None  # damaged: it is about to be replaced
