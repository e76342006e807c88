"""Which rows a run admits, and from where: the splits that prepare wrote, a file, or rows that were given.

A file that can be read again leaves its path; given rows (``given.py``) are copied into the run as
``admit/rows.jsonl``. Either way :func:`open_again` finds the same rows later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import UNSET

from kiln_cli.config import AdmitConfig, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Source
from kiln_cli.files import open_input
from kiln_cli.manifests import read_manifest, require_unchanged
from kiln_cli.plugins import Plugins
from kiln_cli.records import Record
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest, RowsRead
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Contract
from kiln_stages.admitting.given import Given, LinesFile
from kiln_stages.admitting.incoming import IncomingRow, chat_rows, prepared_rows
from kiln_stages.admitting.pipeline import RowsInput, input_reference
from kiln_stages.correcting.admitted import SOURCE, read_admitted
from kiln_stages.reading.mapping import mapped_source
from kiln_stages.reading.ranges import hash_stream
from kiln_stages.reading.sources import choose_source, open_rows
from kiln_stages.reading.transports import Plain, spool_records, spooled

KEPT_ROWS = "admit/rows.jsonl"
# The splits that are admitted, and what they become; test.jsonl is left for evaluation.
SPLITS = {"corpus": "data/train.jsonl", "heldout": "data/validation.jsonl"}


def open_inputs(
    config: LoadedConfig, out: Path, plugins: Plugins, contract: Contract, stack: ExitStack, given: Given | None = None
) -> list[RowsInput]:
    """The opened inputs of an admission. ``stack`` closes them.

    Raises KilnError: KLN206/207 where prepared rows are missing or changed, KLN204 for a file that cannot be read,
    KLN212 for one that no source fits.
    """
    settings = config.run.admit
    if given is not None:
        return [_handed_over(given, settings, plugins, out, stack)]
    if settings.file is not None:
        path = config.resolve(settings.file)
        plain, choice = stack.enter_context(open_rows(path, _wanted(settings), plugins.sources, "chat", out))
        return [_chat_input(settings, plain, choice.source, path=settings.file)]
    return _prepared(out, contract, stack)


def open_again(
    config: LoadedConfig, out: Path, plugins: Plugins, contract: Contract, manifest: AdmitManifest, stack: ExitStack
) -> list[RowsInput]:
    """The inputs of an admission that is done, opened again: the same files, read in the same shape.

    Raises KilnError as :func:`open_inputs` does, and KLN207 where a file is not what the manifest says.
    """
    rows = manifest.details.rows
    if rows.origin not in ("prepared", "file"):
        plain = stack.enter_context(_lines(out / KEPT_ROWS, elements=rows.elements))
        fields = rows.map or config.run.admit.map
        source = mapped_source(fields) if fields else plugins.sources.get(rows.shape or "")
        given = Given(
            None,
            source=rows.origin,
            locator=rows.locator or None,
            provenance=rows.provenance or None,
            ids=tuple(row.request_id for row in read_admitted(out)) if rows.origin == SOURCE else None,
            map=rows.map or {},
        )
        inputs = [_chat_input(config.run.admit, plain, source, path=KEPT_ROWS, base="run", given=given)]
    else:
        if config.run.admit.file is not None and not config.run.admit.map:
            config = config.replace("admit", source=rows.shape)
        inputs = open_inputs(config, out, plugins, contract, stack)
    for source_of_rows, expected in zip(inputs, manifest.inputs, strict=True):
        found = input_reference(source_of_rows, expected.rows)
        if found.sha256 != expected.sha256:
            raise KilnError(
                "KLN207",
                f"{printable(found.path)} changed after admit_manifest.json vouched for it: sha256 is {found.sha256} "
                f"({found.bytes} bytes), expected {expected.sha256} ({expected.bytes} bytes)",
                hint="restore the file, or run `kiln admit` again",
            )
    return inputs


def rows_details(inputs: list[RowsInput]) -> RowsRead:
    """What the manifest says of the rows, enough to open them again."""
    first = inputs[0]
    kind = "prepared" if first.ref is not None else "file" if first.given is None else first.given.source
    found = RowsRead(origin=kind, shape=first.shape, packing=first.plain.packing, elements=first.plain.elements)
    if first.given is None:
        return found
    return msgspec.structs.replace(
        found,
        locator=UNSET if first.given.locator is None else first.given.locator,
        provenance=UNSET if first.given.provenance is None else first.given.provenance,
        map=first.given.map or UNSET,
    )


def _prepared(out: Path, contract: Contract, stack: ExitStack) -> list[RowsInput]:
    manifest = read_manifest(out, PrepareManifest)
    found = []
    for split, name in SPLITS.items():
        ref = manifest.output(name)
        require_unchanged(ref, out / name, "data_manifest.json")
        stream = stack.enter_context(open_input(out / name))
        plain = Plain(stream=stream, size=ref.bytes, packing="lines", elements=False, sha256=None)
        found.append(
            RowsInput(
                split=split,
                receipt_source="dataset_path",
                locator=name,
                plain=plain,
                rows=partial(prepared_rows, mode=contract.prepared_mode),
                path=name,
                base="run",
                ref=ref,
            )
        )
    return found


def _handed_over(given: Given, settings: AdmitConfig, plugins: Plugins, out: Path, stack: ExitStack) -> RowsInput:
    """Standard input may be packed and in any shape; texts and files are lines. All become plain lines that can be
    kept."""
    if given.file is not None:
        plain = stack.enter_context(_lines(given.file.path))
        _require_vouched(plain, given.file)
        choice = choose_source(plain, printable(given.file.path), _shape(given, settings), plugins.sources, "chat")
    elif given.texts is None:
        plain, choice = stack.enter_context(open_rows(None, _wanted(settings), plugins.sources, "chat", out))
    else:
        stream = stack.enter_context(spooled((text + b"\n" for text in given.texts), out))
        plain = Plain(
            stream=stream, size=sum(len(t) + 1 for t in given.texts), packing="lines", elements=False, sha256=None
        )
        choice = choose_source(plain, "the rows", _shape(given, settings), plugins.sources, "chat")
        if choice.source.read is not None:
            plain = stack.enter_context(spool_records(choice.source, plain, out))
    plain = msgspec.structs.replace(plain, places=None)  # a row's place is the one in the copy
    return _chat_input(settings, plain, choice.source, path=KEPT_ROWS, base="run", given=given, handed_over=True)


@contextmanager
def _lines(path: Path, *, elements: bool = False) -> Iterator[Plain]:
    """A file that is known to hold lines: what its first row begins with says nothing about how it is packed."""
    with open_input(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        yield Plain(stream=stream, size=size, packing="lines", elements=elements, sha256=None)


def _require_vouched(plain: Plain, file: LinesFile) -> None:
    """Hashes what is open, so that the rows read are the rows vouched for."""
    if (sha256 := hash_stream(plain.stream, plain.size)) != file.sha256:
        raise KilnError(
            "KLN207",
            f"{printable(file.path)} changed: sha256 is {sha256}, expected {file.sha256}",
            hint="`kiln dataset split` makes it anew",
        )


def _shape(given: Given, settings: AdmitConfig) -> str | Source:
    """The source of given rows: their own where it is known, else that of the settings."""
    if given.map:
        return mapped_source(given.map)
    return given.shape if given.shape is not None else _wanted(settings)


def _wanted(settings: AdmitConfig) -> str | Source:
    """The source of the settings: by name, or made of the map. The public server has one, whatever it is given."""
    if settings.compat is not None:
        return "messages"
    return mapped_source(settings.map) if settings.map else settings.source


def _chat_input(
    settings: AdmitConfig,
    plain: Plain,
    source: Source,
    *,
    path: str,
    base: str = "config",
    given: Given | None = None,
    handed_over: bool = False,
) -> RowsInput:
    def rows(records: Iterable[Record]) -> Iterator[IncomingRow]:
        return chat_rows(records, source, strict=settings.strict, compat=settings.compat == "kiln")

    return RowsInput(
        split="corpus",
        receipt_source="dataset_path" if given is None else given.source,
        locator=path if given is None else given.locator,
        plain=plain,
        rows=rows,
        path=path,
        base=base,
        shape=source.name,
        source_reasons=source.reasons,
        given=given,
        handed_over=handed_over,
    )
