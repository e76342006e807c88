"""The rows of raw files again, numbered and named as prepare did; they are read, never trusted to be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import msgspec

from kiln_cli.config import DataConfig, DatasetConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.lines import LineReader
from kiln_cli.manifests import locate
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import FileRef
from kiln_cli.records import Record
from kiln_cli.stage_manifests import PrepareManifest, RawDataset
from kiln_stages.preparing.screening import POSITIONAL, Screen, raw_sha256
from kiln_stages.reading.sources import STDIN, json_lines, open_rows
from kiln_stages.reading.transports import Plain


class RawRow:
    """A row of a raw file. ``hashes``: of its bytes, and of the chat row that admission made of it, if that is asked
    for."""

    def __init__(self, file: RawFile, record: Record, chat_hash: ChatHash | None = None) -> None:
        self.file = file
        self.record = record
        self.path = file.path
        self.row_index = record.row_index
        self.line, self.offset, self.length = record.line, record.offset, record.length
        if file.plain is not None and file.plain.places is not None:
            self.line, self.offset, self.length = (column[record.row_index - 1] for column in file.plain.places)
        self._chat_hash = chat_hash

    @property
    def key(self) -> tuple[str, int]:
        """What ``data/rejected.jsonl`` knows the row by."""
        return self.file.language, self.row_index

    @cached_property
    def sha256(self) -> str | None:
        return raw_sha256(self.record)

    @cached_property
    def example_id(self) -> str | None:
        """The id that prepare gave the row, whether it kept it or not; None for a row without a sound one."""
        assert self.file.screen is not None
        found = self.file.screen.identify(self.record)
        return f"{self.file.dataset_id}:{self.row_index}" if found == POSITIONAL else found

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        chat = self._chat_hash(self) if self._chat_hash is not None else None
        return tuple(text for text in (self.sha256, chat) if text is not None)


ChatHash = Callable[[RawRow], str | None]


class RawFile(msgspec.Struct, frozen=True, kw_only=True):
    """A raw file that prepare read, opened again. ``fault`` says why its rows cannot be read, "" where they can."""

    path: str
    language: str
    dataset_id: str
    fault: str = ""
    plain: Plain | None = None
    screen: Screen | None = None

    def rows(self, chat_hash: ChatHash | None = None) -> Iterator[RawRow]:
        """Every row in order; none where the file has a fault."""
        if self.plain is not None:
            self.plain.stream.seek(0)
            lines = LineReader(self.plain.stream, hashed=False)
            for record in json_lines(lines, elements=self.plain.elements):
                yield RawRow(self, record, chat_hash)


def open_raw_files(run: Path, prepare: PrepareManifest, plugins: Plugins, stack: ExitStack) -> list[RawFile]:
    """The raw files of a run, root first. One that is gone or is not what prepare read has its ``fault`` set."""
    pairs = zip(prepare.inputs, prepare.details.datasets, strict=True)
    return [_open(ref, entry, locate(ref, run, prepare), plugins, run, stack) for ref, entry in pairs]


def _open(ref: FileRef, entry: RawDataset, path: Path, plugins: Plugins, scratch: Path, stack: ExitStack) -> RawFile:
    named = RawFile(path=ref.path, language=entry.language, dataset_id=entry.dataset_id)
    if ref.path == STDIN:
        return msgspec.structs.replace(named, fault="it was standard input, which is not kept")
    try:
        plain, choice = stack.enter_context(open_rows(path, entry.source, plugins.sources, "tool_calls", scratch))
        sha256 = plain.sha256 or hash_file(path)[0]
    except KilnError as error:
        return msgspec.structs.replace(named, fault=error.message)
    if sha256 != ref.sha256:
        fault = f"it changed after prepare read it: sha256 is {sha256}, expected {ref.sha256}"
        return msgspec.structs.replace(named, fault=fault)
    dataset = DatasetConfig(language=named.language, path=ref.path, id=named.dataset_id)
    screen = Screen(dataset, choice.source, (), DataConfig())
    return msgspec.structs.replace(named, plain=plain, screen=screen)
