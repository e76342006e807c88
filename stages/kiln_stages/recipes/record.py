"""What a recipe leaves beside its runs: a record of each merged model, and the manifest, written when all is done.

What a training leaves is in its own run directory; its receipt names the one of the step whose adapter it began with.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import FS, AtomicFile, write_file, writing
from kiln_cli.identity import Domain, domain_json_sha256
from kiln_cli.manifests import damaged, document, read_document
from kiln_stages.exported_file import ExportedFile

MANIFEST_NAME = "recipe_manifest.json"
MANIFEST_SCHEMA = "kiln.recipe-manifest.v1"
MERGE_SCHEMA = "kiln.recipe-merge.v1"


class MergeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``NAME.merge.json``: of which training the model in ``NAME/`` is, and its files. Written behind them."""

    schema: str = MERGE_SCHEMA
    step: str
    adapter_content_sha256: str
    receipt_content_sha256: str
    files: list[ExportedFile]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished step. ``step``: the training whose adapter it began with, or whose model it merged. The digests are
    of its own receipt and adapter; a merged model has those of that training, and its ``files``."""

    name: str
    kind: Literal["sft", "opd", "merge"]
    step: str | None
    adapter_content_sha256: str
    receipt_content_sha256: str
    files: list[ExportedFile] = []


class RecipeManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``recipe_manifest.json``: it is there if and only if every step is done. ``content_sha256`` leaves out
    ``produced`` and itself."""

    schema: str = MANIFEST_SCHEMA
    kiln_version: str
    recipe: str
    recipe_sha256: str
    steps: list[StepRecord]
    produced: dict[str, Any] = {}
    content_sha256: str = ""

    def content_digest(self) -> str:
        value = msgspec.to_builtins(self)
        del value["produced"], value["content_sha256"]
        return domain_json_sha256(Domain.MANIFEST_CONTENT, value)


def merge_path(target: Path) -> Path:
    """The record of the merged model in ``target``."""
    return target.with_name(f"{target.name}.merge.json")


def read_merge(target: Path) -> MergeRecord | None:
    """Raises KilnError KLN206 for a damaged one."""
    path = merge_path(target)
    return read_document(path, MergeRecord, MERGE_SCHEMA) if path.exists() else None


def read_recipe_manifest(out: Path) -> RecipeManifest | None:
    """Raises KilnError KLN206 for a damaged one."""
    path = out / MANIFEST_NAME
    if not path.exists():
        return None
    manifest = read_document(path, RecipeManifest, MANIFEST_SCHEMA)
    if (found := manifest.content_digest()) != manifest.content_sha256:
        raise damaged(path, f"content_sha256 is {manifest.content_sha256}, expected {found}")
    return manifest


def write_recipe_manifest(out: Path, manifest: RecipeManifest) -> AtomicFile:
    """Seals and writes it. One of equal content stays as it is, its time included."""
    manifest.content_sha256 = manifest.content_digest()
    try:
        previous = read_recipe_manifest(out)
    except KilnError:
        previous = None  # damaged: it is about to be replaced
    if previous is not None and previous.content_sha256 == manifest.content_sha256:
        manifest.produced = previous.produced
    else:
        manifest.produced = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return write_file(out / MANIFEST_NAME, document(manifest))


def forget_recipe_manifest(out: Path) -> None:
    """Before a step is made again: the manifest speaks of what was."""
    path = out / MANIFEST_NAME
    if path.exists():
        with writing(path):
            FS.unlink(path)
            FS.sync_directory(out)
