"""Whether a data set is what its rows make of it: everything is made again of ``data.jsonl`` and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import open_input
from kiln_cli.identity import canonical_json, is_hash
from kiln_cli.text import printable
from kiln_stages.datasets.building import Built, build, file_identity, identity_of, split_manifest
from kiln_stages.datasets.entry import (
    DATA,
    IDENTITY,
    MANIFEST,
    SPLIT,
    SPLIT_FILES,
    FileIdentity,
    Settings,
    SplitManifest,
    SplitRow,
    directory_of,
    read_identity,
    read_settings,
    read_split,
)
from kiln_stages.datasets.partition import partition

SHOWN = 5  # rows of one file that are named; the rest are counted


class Difference(msgspec.Struct, frozen=True):
    """``file`` is not what ``data.jsonl`` and ``manifest.json`` give: ``detail`` has both values."""

    file: str
    detail: str


class Verified(NamedTuple):
    """``rows``: those of ``data.jsonl`` that everything was made of; 0 where nothing could be."""

    rows: int
    differences: list[Difference]


def verify(registry: Path, name: str) -> list[Difference]:
    """Every difference, none for a sound data set. Raises KilnError KLN212 for an unknown name.

    Writes nothing and takes no lock: while another process changes the data set, it differs.
    """
    return verify_directory(directory_of(registry, name)).differences


def verify_directory(directory: Path) -> Verified:
    """As :func:`verify`, of a data set by its directory."""
    try:
        settings = read_settings(directory)
    except KilnError as error:
        return Verified(0, [Difference(MANIFEST, error.message)])
    try:
        with open_input(directory / DATA) as data:
            built = build(data, settings)
            expected = {split: _identity(built.lines(data, split)) for split in SPLIT_FILES}
    except KilnError as error:
        return Verified(0, [Difference(DATA, error.message)])
    differences = [
        *_of_split(directory, built.manifest),
        *(each for split, file in SPLIT_FILES.items() for each in _of_lines(directory, file, expected[split])),
        *_of_identity(directory, settings, built),
    ]
    return Verified(len(built.rows), differences)


def split_faults(split: SplitManifest) -> Iterator[str]:
    """What of a split.json does not follow from its own rows and settings; nothing for a sound one."""
    if fault := split.config.fault():
        yield f"config: {fault}"
        return
    hashes = [text for row in split.rows for text in (row.content_sha256, row.normalized_sha256)]
    if (odd := next((text for text in hashes if not is_hash(text)), None)) is not None:
        yield f"{printable(odd)} is no hash"
        return
    keys = [row.keys() for row in split.rows]
    expected = split_manifest(split.dataset_name, keys, partition(keys, split.config), split.config)
    yield from _against(split, expected)


def _of_split(directory: Path, expected: SplitManifest) -> Iterator[Difference]:
    try:
        found = read_split(directory / SPLIT)
    except KilnError as error:
        yield Difference(SPLIT, error.message)
        return
    yield from (Difference(SPLIT, detail) for detail in _against(found, expected))


def _against(found: SplitManifest, expected: SplitManifest) -> Iterator[str]:
    """Field by field; of the rows the first few that differ."""
    left, right = ({**msgspec.to_builtins(each), "rows": len(each.rows)} for each in (found, expected))
    yield from _fields(left, right)
    rows = [
        f"row {number}: {detail}"
        for number, (one, other) in enumerate(zip(found.rows, expected.rows, strict=False), start=1)
        for detail in _row(one, other)
    ]
    yield from rows[:SHOWN]
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN} more differences of rows"


def _row(found: SplitRow, expected: SplitRow) -> Iterable[str]:
    return () if found == expected else _fields(msgspec.to_builtins(found), msgspec.to_builtins(expected))


def _of_lines(directory: Path, name: str, expected: FileIdentity) -> Iterator[Difference]:
    try:
        found = file_identity(directory / name)
    except KilnError as error:
        yield Difference(name, error.message)
        return
    if found != expected:
        yield Difference(
            name,
            f"sha256 is {found.sha256} ({found.bytes} bytes), the rows of {DATA} give {expected.sha256} "
            f"({expected.bytes} bytes)",
        )


def _of_identity(directory: Path, settings: Settings, built: Built) -> Iterator[Difference]:
    """Its claims against the rows, and its digests against the files as they are."""
    try:
        found = read_identity(directory)
    except KilnError as error:
        yield Difference(IDENTITY, error.message)
        return
    expected = identity_of(settings, built, found.files)
    yield from (
        Difference(IDENTITY, detail) for detail in _fields(msgspec.to_builtins(found), msgspec.to_builtins(expected))
    )
    for name in (DATA, MANIFEST, SPLIT, *SPLIT_FILES.values()):
        vouched = found.files.get(name)
        if vouched is None:
            yield Difference(IDENTITY, f"files has no {name}")
        elif (directory / name).exists() and (there := file_identity(directory / name)) != vouched:
            yield Difference(
                IDENTITY, f"{name} has sha256 {there.sha256} ({there.bytes} bytes), vouched for is {vouched.sha256}"
            )


def _fields(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    for name in [*found, *(name for name in expected if name not in found)]:
        left, right = found.get(name, "absent"), expected.get(name, "absent")
        if left != right:
            yield f"{printable(name)} is {_shown(left)}, the rows give {_shown(right)}"


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else canonical_json(value).decode("utf-8"))


def _identity(blocks: Iterable[bytes]) -> FileIdentity:
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
    return FileIdentity(sha256=digest.hexdigest(), bytes=size)
