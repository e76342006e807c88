"""A named data set as it lies in a registry, and how it is read: whole and unchanged, or not at all.

``<registry>/datasets/<name>/`` holds ``data.jsonl``, which is the truth, and ``manifest.json``, the settings. All else
is made of these two. ``identity.json`` is written last and vouches for the bytes of every other file, so what a killed
process leaves half done is seen as that.
"""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kiln_cli.errors import KilnError
from kiln_cli.files import NAME_PATTERN, hash_file, lock_holder, open_input, read_bounded, require_name
from kiln_cli.identity import canonical_parsed, sha256_hex
from kiln_cli.manifests import read_document
from kiln_cli.text import printable
from kiln_stages.datasets.partition import SPLITS, RowKeys, Split, SplitConfig

FOLDER = "datasets"
MANIFEST_SCHEMA = "kiln-cli.dataset.v1"
IDENTITY_SCHEMA = "kiln-cli.dataset-identity.v1"
SPLIT_SCHEMA = "kiln.dataset-split.v1"
DATA, MANIFEST, SPLIT, IDENTITY = "data.jsonl", "manifest.json", "split.json", "identity.json"
SPLIT_FILES: dict[Split, str] = {split: f"{split}.jsonl" for split in SPLITS}
# What identity.json vouches for.
VOUCHED = (DATA, MANIFEST, SPLIT, *SPLIT_FILES.values())
SPLIT_LIMIT = 4 * 1024 * 1024 * 1024

T = TypeVar("T")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``manifest.json``: what a person chose. ``source``: the shape of the rows; ``map``: the fields of another one."""

    schema: str = MANIFEST_SCHEMA
    dataset_name: str
    format: Literal["sft_chat"] = "sft_chat"
    source: str
    map: dict[str, str] = {}
    split: SplitConfig = SplitConfig()


class FileIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: str
    bytes: int


class DatasetIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``identity.json``: what the rows are, and the bytes of every file. ``malformed_rows``: those that are no JSON."""

    schema: str = IDENTITY_SCHEMA
    dataset_name: str
    format: str
    rows: int
    malformed_rows: int
    split_rows: dict[Split, int]
    corpus_sha256: str
    normalized_corpus_sha256: str
    split_manifest_sha256: str
    files: dict[str, FileIdentity]


class SplitRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``row_number`` counts the rows of data.jsonl from 1, blank lines not counted."""

    row_number: int
    content_sha256: str
    normalized_sha256: str
    split: Split
    group_id: str | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    group_by_sha256: str | UnsetType = UNSET

    def keys(self) -> RowKeys:
        return RowKeys(
            content_sha256=self.content_sha256,
            normalized_sha256=self.normalized_sha256,
            group_id=_if_set(self.group_id),
            session_id=_if_set(self.session_id),
            group_by_sha256=_if_set(self.group_by_sha256),
        )


def _if_set(text: str | UnsetType) -> str | None:
    return text if isinstance(text, str) else None


class SplitManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``split.json``, ``kiln.dataset-split.v1``: canonical JSON without a line end, so that its digest is that of its
    bytes. ``counts``: rows of each split, of all, and components."""

    schema: str = SPLIT_SCHEMA
    dataset_name: str
    corpus_sha256: str
    normalized_corpus_sha256: str
    config: SplitConfig
    counts: dict[str, int]
    rows: list[SplitRow]

    def canonical(self) -> bytes:
        return canonical_parsed(self)  # texts and whole numbers alone

    def sha256(self) -> str:
        return "sha256:" + sha256_hex(self.canonical())


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A data set that is whole: every file is the one that ``identity`` vouches for."""

    directory: Path
    settings: Settings
    identity: DatasetIdentity
    split: SplitManifest


def folder(registry: Path) -> Path:
    return registry / FOLDER


def names(registry: Path) -> list[str]:
    """The data sets of a registry, whole or not."""
    if not folder(registry).is_dir():
        return []
    found = (path for path in folder(registry).iterdir() if path.is_dir() and NAME_PATTERN.match(path.name))
    return sorted(path.name for path in found)


def directory_of(registry: Path, name: str) -> Path:
    """Where a data set lies. Raises KilnError KLN201 for what is no name, KLN212 where there is none of this name."""
    require_name(name, "data set")
    path = folder(registry) / name
    if not path.is_dir():
        there = names(registry)
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KilnError(
            "KLN212",
            f"{printable(registry)} has no data set {printable(name)!r}; there are: {', '.join(there) or 'none'}",
            hint=f"{hint}`kiln dataset add NAME FILE` makes one; --registry names another registry",
        )
    return path


def read_entry(registry: Path, name: str) -> Entry:
    """A data set, checked against its identity to the byte.

    Raises KilnError as :func:`directory_of` does, KLN206 where it is half written or damaged, KLN207 where a file
    changed after the last split, KLN401 where that may be because another process is changing it.
    """
    directory = directory_of(registry, name)
    try:
        return _read_entry(directory)
    except KilnError as error:
        if (holder := lock_holder(folder(registry))) is None:
            raise
        raise KilnError(
            "KLN401",
            f"data set {printable(name)!r}, or one beside it, is being changed by `{printable(holder.command)}` "
            f"(pid {holder.pid}, since {printable(holder.since)}): {error.message}",
            hint="wait for it to end",
        ) from None


def _read_entry(directory: Path) -> Entry:
    identity = read_identity(directory)
    require_vouched(directory, identity)
    split, settings = read_split(directory / SPLIT), read_settings(directory)
    facts = {
        "dataset_name": (identity.dataset_name, settings.dataset_name),
        "split_manifest_sha256": (identity.split_manifest_sha256, split.sha256()),
        "corpus_sha256": (identity.corpus_sha256, split.corpus_sha256),
        "normalized_corpus_sha256": (identity.normalized_corpus_sha256, split.normalized_corpus_sha256),
        "rows": (identity.rows, len(split.rows)),
        "split_rows": (identity.split_rows, {each: split.counts.get(each) for each in SPLITS}),
    }
    for name, (found, expected) in facts.items():
        if found != expected:
            raise damaged(
                directory / IDENTITY,
                f"{name} is {printable(found)}, the other files have {printable(expected)}",
            )
    return Entry(directory=directory, settings=settings, identity=identity, split=split)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list. ``state``: "whole" by the sizes of its files, which are looked at and not read;
    "unreadable" where the system does not let them be looked at."""

    name: str
    rows: int
    split_rows: dict[Split, int]
    state: Literal["whole", "changed", "half written", "unreadable"]


def summary(registry: Path, name: str) -> Summary:
    """A data set at a glance; one that cannot be read is listed as that."""
    directory = directory_of(registry, name)
    try:
        identity = read_identity(directory)
        sizes = {file: (directory / file).stat().st_size for file in VOUCHED}
    except (KilnError, FileNotFoundError, PermissionError) as error:
        refused = isinstance(error, PermissionError) or (isinstance(error, KilnError) and error.code == "KLN204")
        return Summary(name=name, rows=0, split_rows={}, state="unreadable" if refused else "half written")
    whole = sizes == {file: identity.files[file].bytes for file in VOUCHED if file in identity.files}
    return Summary(name=name, rows=identity.rows, split_rows=identity.split_rows, state="whole" if whole else "changed")


def read_settings(directory: Path) -> Settings:
    """Raises KilnError KLN206 where there are none, or they are of a data set of another name."""
    path = directory / MANIFEST
    settings = _read(path, Settings, MANIFEST_SCHEMA)
    fault = settings.split.fault()
    if settings.dataset_name != directory.name:
        fault = f"dataset_name is {settings.dataset_name!r}, and the directory is {directory.name!r}"
    if fault:
        raise KilnError("KLN206", f"{printable(path)}: {printable(fault)}", hint="give the directory its name back")
    return settings


def read_identity(directory: Path) -> DatasetIdentity:
    """Raises KilnError KLN206 where there is none: it is written last, so the data set is half written."""
    return _read(directory / IDENTITY, DatasetIdentity, IDENTITY_SCHEMA)


def is_dataset(directory: Path) -> bool:
    """Whether a directory is one of a data set, by its settings."""
    try:
        read_document(directory / MANIFEST, Settings, MANIFEST_SCHEMA)
    except KilnError:
        return False
    return True


def is_split(path: Path) -> bool:
    """Whether a file is a split.json, by its last key."""
    mark = b'"schema":"' + SPLIT_SCHEMA.encode("ascii") + b'"}'
    with open_input(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - len(mark)))
        return stream.read() == mark


def read_split(path: Path) -> SplitManifest:
    """A split.json. Raises KilnError KLN204 or KLN206 for one that is missing, damaged or not in canonical form."""
    data = read_bounded(path, SPLIT_LIMIT)
    try:
        split = msgspec.json.decode(data, type=SplitManifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if split.schema != SPLIT_SCHEMA:
        raise damaged(path, f"schema is {split.schema!r}, expected {SPLIT_SCHEMA!r}")
    if split.canonical() != data:  # so no key stands twice, and none was left out
        raise damaged(path, "its bytes are not in canonical form")
    return split


def require_vouched(directory: Path, identity: DatasetIdentity) -> None:
    """Raises KilnError KLN206 where a file is missing, KLN207 where one is not what the identity says."""
    for name in VOUCHED:
        path, expected = directory / name, identity.files.get(name)
        if not path.exists() or expected is None:
            raise half_written(directory, f"{name} is missing")
        sha256, size = hash_file(path)
        if (sha256, size) != (expected.sha256, expected.bytes):
            raise KilnError(
                "KLN207",
                f"{printable(path)} changed after the last split, or an add was cut short: sha256 is {sha256} "
                f"({size} bytes), identity.json has {expected.sha256} ({expected.bytes} bytes)",
                hint=f"`{remedy(directory)}` splits data.jsonl as it is now; to undo a change, restore the file",
            )


def half_written(directory: Path, detail: str) -> KilnError:
    """The error of a data set that a killed process left, or that lost a file."""
    return KilnError("KLN206", f"data set {printable(directory)} is half written: {detail}", hint=way_out(directory))


def damaged(path: Path, detail: str) -> KilnError:
    """The error of a file of a data set that is not in the form in which it was written."""
    return KilnError("KLN206", f"{printable(path)}: {printable(detail)}", hint=way_out(path.parent, path.name))


def way_out(directory: Path, broken: str = "") -> str:
    """How a data set that is not whole becomes so; ``broken``: a file of it that is there and cannot be used."""
    if broken == MANIFEST:
        return f"restore {MANIFEST}, or `kiln dataset remove` the data set"
    if not (directory / DATA).exists():
        return "`kiln dataset add` the rows again"
    if not (directory / MANIFEST).exists():
        return f"restore {MANIFEST}, or `kiln dataset remove` the data set"
    return f"`{remedy(directory)}` makes it anew of {DATA}; `kiln dataset remove` drops it"


def remedy(directory: Path) -> str:
    """The command that makes a data set anew, as a shell takes it."""
    return f"kiln dataset split {directory.name} --registry {printable(shlex.quote(str(directory.parent.parent)))}"


def _read(path: Path, kind: type[T], schema: str) -> T:
    if not path.exists():
        raise half_written(path.parent, f"{path.name} is missing")
    try:
        return read_document(path, kind, schema)
    except KilnError as error:
        if error.code != "KLN206":
            raise
        raise KilnError("KLN206", error.message, hint=way_out(path.parent, path.name)) from None


def provenance(entry: Entry, split: Split) -> dict[str, Any]:
    """What an admission says of where its rows come from."""
    return {
        "dataset": entry.settings.dataset_name,
        "split": split,
        "dataset_corpus_sha256": entry.identity.corpus_sha256,
        "split_manifest_sha256": entry.identity.split_manifest_sha256,
    }
