"""What is made of a data set's ``data.jsonl`` and ``manifest.json``: the split, its files, and the identity of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import UNSET

from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, hash_file, open_input, write_file
from kiln_cli.identity import Domain, corpus_sha256
from kiln_cli.lines import BOM, TRIMMED
from kiln_cli.manifests import document
from kiln_cli.text import printable
from kiln_stages.datasets.entry import (
    DATA,
    IDENTITY,
    MANIFEST,
    SPLIT,
    SPLIT_FILES,
    VOUCHED,
    DatasetIdentity,
    FileIdentity,
    Settings,
    SplitManifest,
    SplitRow,
)
from kiln_stages.datasets.partition import SPLITS, Component, RowKeys, Split, SplitConfig, partition
from kiln_stages.datasets.rows import Row, lines_of, read_rows
from kiln_stages.reading.ranges import read_text


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of data.jsonl in order, their components, and the split manifest that follows from them."""

    rows: list[Row]
    components: list[Component]
    manifest: SplitManifest

    def lines(self, data: BinaryIO, split: Split) -> Iterator[bytes]:
        """The file of a split, block by block: its rows in the order of data.jsonl, byte for byte but for white space
        at their ends."""
        placed = zip(self.rows, self.manifest.rows, strict=True)
        return lines_of(_row_bytes(data, row) for row, entry in placed if entry.split == split)


def build(data: BinaryIO, settings: Settings) -> Built:
    """Raises KilnError KLN107 for no rows, KLN206 for a row above the cap."""
    config = settings.split
    group_by = config.group_by if isinstance(config.group_by, str) else None
    rows = read_rows(data, group_by, DATA)
    if not rows:
        raise KilnError("KLN107", f"data set {printable(settings.dataset_name)} holds no rows", hint="add some")
    keys = [row.keys for row in rows]
    components = partition(keys, config)
    return Built(
        rows=rows,
        components=components,
        manifest=split_manifest(settings.dataset_name, keys, components, config),
    )


def split_manifest(
    name: str, keys: Sequence[RowKeys], components: Iterable[Component], config: SplitConfig
) -> SplitManifest:
    """What ``split.json`` says of rows in their order, under a partition of them."""
    counts: dict[str, int] = {"components": 0, "rows": len(keys), **dict.fromkeys(map(str, SPLITS), 0)}
    splits: dict[int, Split] = {}
    for component in components:
        counts["components"] += 1
        counts[component.split] += len(component.rows)
        splits.update(dict.fromkeys(component.rows, component.split))
    return SplitManifest(
        dataset_name=name,
        corpus_sha256=corpus_sha256((row.content_sha256 for row in keys), Domain.DATASET_CORPUS),
        normalized_corpus_sha256=corpus_sha256(
            (row.normalized_sha256 for row in keys), Domain.DATASET_NORMALIZED_CORPUS
        ),
        config=config,
        counts=counts,
        rows=[_split_row(number, row, splits[number]) for number, row in enumerate(keys)],
    )


def rebuild(directory: Path, settings: Settings) -> tuple[Built, DatasetIdentity]:
    """Writes all that follows from data.jsonl, ``identity.json`` last: it is the commit record. Needs the lock.

    Raises KilnError as :func:`build` does, KLN402 where the disk refuses.
    """
    with open_input(directory / DATA) as data:
        built = build(data, settings)
        write_file(directory / MANIFEST, document(settings))
        for split, name in SPLIT_FILES.items():
            with AtomicFile(directory / name) as out:
                for block in built.lines(data, split):
                    out.write(block)
    write_file(directory / SPLIT, built.manifest.canonical())
    identity = identity_of(settings, built, {name: file_identity(directory / name) for name in VOUCHED})
    write_file(directory / IDENTITY, document(identity))
    return built, identity


def file_identity(path: Path) -> FileIdentity:
    sha256, size = hash_file(path)
    return FileIdentity(sha256=sha256, bytes=size)


def identity_of(settings: Settings, built: Built, files: dict[str, FileIdentity]) -> DatasetIdentity:
    manifest = built.manifest
    return DatasetIdentity(
        dataset_name=settings.dataset_name,
        format=settings.format,
        rows=len(built.rows),
        malformed_rows=sum(row.malformed for row in built.rows),
        split_rows={split: manifest.counts[split] for split in SPLITS},
        corpus_sha256=manifest.corpus_sha256,
        normalized_corpus_sha256=manifest.normalized_corpus_sha256,
        split_manifest_sha256=manifest.sha256(),
        files=files,
    )


def _split_row(number: int, keys: RowKeys, split: Split) -> SplitRow:
    return SplitRow(
        row_number=number + 1,
        content_sha256=keys.content_sha256,
        normalized_sha256=keys.normalized_sha256,
        split=split,
        group_id=UNSET if keys.group_id is None else keys.group_id,
        session_id=UNSET if keys.session_id is None else keys.session_id,
        group_by_sha256=UNSET if keys.group_by_sha256 is None else keys.group_by_sha256,
    )


def _row_bytes(data: BinaryIO, row: Row) -> bytes:
    line = read_text(data, row.offset, row.length)
    return (line.removeprefix(BOM) if row.offset == 0 else line).strip(TRIMMED)
