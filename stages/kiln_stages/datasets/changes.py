"""What changes a data set: rows are added, it is split anew, it is removed. One change at a time, under a lock.

``data.jsonl`` is replaced whole and first, ``identity.json`` last. A process that is killed between leaves a data set
that readers refuse and that the next ``add`` or ``split`` finishes: of the rows that an add was to bring, either none
are there or all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Source
from kiln_cli.files import AtomicFile, discard_directory, open_input, require_name, run_lock, write_file
from kiln_cli.lines import LineReader
from kiln_cli.manifests import document
from kiln_cli.plugins import Plugins
from kiln_cli.text import printable
from kiln_stages.datasets.building import Built, rebuild
from kiln_stages.datasets.entry import (
    DATA,
    IDENTITY,
    MANIFEST,
    SPLIT,
    DatasetIdentity,
    Settings,
    SplitManifest,
    directory_of,
    folder,
    half_written,
    names,
    read_identity,
    read_settings,
    read_split,
)
from kiln_stages.datasets.moves import Move, moves
from kiln_stages.datasets.partition import SPLITS, Component, SplitConfig
from kiln_stages.datasets.rows import lines_of, row_text
from kiln_stages.reading.mapping import mapped_source
from kiln_stages.reading.ranges import copy_stream, read_text
from kiln_stages.reading.sources import choose_source, has_rows, json_lines, sample_objects
from kiln_stages.reading.transports import Plain, open_plain, spool_records

T = TypeVar("T")
LOCKED_FOR = "kiln dataset"


class SplitSize(msgspec.Struct, frozen=True, kw_only=True):
    """``asked_percent`` of the rows, and the rows there are. Components stay whole, so the two differ."""

    asked_percent: int
    rows: int
    components: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a change made of a data set.

    ``added``: rows that came; ``blank_lines`` and ``byte_order_mark``: what stood beside them in the file and is not
    stored. ``repeated``: those of them whose content was there before; they are kept. ``again``: the
    rows were the last ones of the data set, and were not added once more. ``taken_in``: rows that stood in data.jsonl
    and in no split, by an add that was cut short or by hand, less the rows that are gone; ``gone``: how many those are,
    None where nobody knows the rows of before. ``ungrouped``: rows without a
    value where ``group_by`` looks; None without ``group_by``. ``moves`` is None where nobody knows the split of before.
    """

    schema: str = "kiln-cli.dataset-change.v1"
    directory: str
    settings: Settings
    identity: DatasetIdentity
    packing: str | None = None
    added: int = 0
    blank_lines: int = 0
    byte_order_mark: bool = False
    repeated: int = 0
    taken_in: int = 0
    gone: int | None = 0
    again: bool = False
    ungrouped: int | None
    sizes: dict[str, SplitSize]
    moves: list[Move] | None


class Taken(NamedTuple):
    """What a file holds that is added. ``packing`` is None where there is none."""

    rows: int = 0
    packing: str | None = None
    blank_lines: int = 0
    byte_order_mark: bool = False


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the directory before a change. ``rows``: those that were split. ``split``: the split of then; None
    where it is not known."""

    settings: Settings
    rows: int
    split: SplitManifest | None
    first: bool  # there has been no split yet


def add(
    registry: Path,
    name: str,
    file: Path | None,
    plugins: Plugins,
    *,
    source: str = "auto",
    mapping: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    append: bool = False,
) -> Change:
    """Makes a data set of a file's rows (standard input for None), or adds them to one that is there (``append``).

    ``options``: settings of the split by name. Rows that are the last ones of the data set already are not added
    again, so that a command that was cut short can be repeated.
    Raises KilnError: KLN201 for a name that is none or taken, KLN107 for a file without rows, KLN212 for a shape that
    no source knows or that is not the data set's, KLN401 where another process changes the registry.
    """
    require_name(name, "data set")
    if append:
        directory_of(registry, name)
    directory = folder(registry) / name
    label = "standard input" if file is None else printable(file)
    with ExitStack() as stack:
        given = stack.enter_context(open_plain(file, folder(registry)))
        stack.enter_context(run_lock(folder(registry), f"{LOCKED_FOR} add", instead="name another --registry"))
        before = _before(directory) if (directory / DATA).exists() else None
        grown = before.settings if append and before is not None else None
        rows, shape = _rows_of(given, label, _wanted(grown, source, mapping), plugins, folder(registry), stack)
        if grown is not None and source == "auto":
            _require_shape(rows, shape, label)
        taken = _taken(rows, label)  # before anything is written: a row may be refused
        known = _settings_left(directory) if before is None else None
        asked = Settings(
            dataset_name=name,
            source=shape.name,
            map=dict(mapping or (grown.map if grown is not None else {})),
            split=changed(SplitConfig() if known is None else known.split, options or {}),
        )
        again = before is not None and _stand_there(directory, rows, label, alone=not append)
        if before is None:
            _require_free(registry, name)
            write_file(directory / MANIFEST, document(asked))
        else:
            _require_addition(directory, before, asked, options or {}, append=append, again=again)
        if not again:
            _write_rows(directory, rows, label, behind=before is not None)
        settings = asked if before is None else before.settings
        return _finish(directory, settings, before, taken, again=again)


def split(registry: Path, name: str, options: Mapping[str, Any] | None = None) -> Change:
    """Splits data.jsonl as it is now, with other settings where ``options`` says so.

    Raises KilnError: KLN212 for an unknown name, KLN206 where data.jsonl or manifest.json is missing.
    """
    directory = directory_of(registry, name)
    with run_lock(folder(registry), f"{LOCKED_FOR} split", instead="name another --registry"):
        if not (directory / DATA).exists():
            raise half_written(directory, f"{DATA} is missing")
        before = _before(directory)
        settings = msgspec.structs.replace(before.settings, split=changed(before.settings.split, options or {}))
        return _finish(directory, settings, before, Taken())


def remove(registry: Path, name: str) -> Path:
    """Removes a data set with its rows. Raises KilnError KLN212 for an unknown name, KLN204 for a link to a data set:
    whose rows those are is not for kiln to say."""
    directory = directory_of(registry, name)
    if directory.is_symlink():
        raise KilnError("KLN204", f"{printable(directory)} is a link", hint="remove the link, or what it leads to")
    with run_lock(folder(registry), f"{LOCKED_FOR} remove", instead="name another --registry"):
        discard_directory(directory)
    return directory


def changed(config: SplitConfig, options: Mapping[str, Any]) -> SplitConfig:
    """The settings of a split with others in their place; an empty ``group_by`` ends the grouping.

    Raises KilnError KLN201 for one that is out of bounds.
    """
    value = {**msgspec.to_builtins(config), **options}
    if value.get("group_by") == "":
        del value["group_by"]
    try:
        found = msgspec.convert(value, SplitConfig)
        fault = found.fault()
    except msgspec.ValidationError as error:
        fault = str(error)
    if fault:
        raise KilnError(
            "KLN201",
            f"the split cannot be made so: {printable(fault)}",
            hint="--seed 0..2^64-1, --train-percent 1..99, --validation-percent, --group-by /POINTER",
        )
    return found


def _before(directory: Path) -> Before:
    """What is there, as far as it can be read; only data.jsonl and the settings must be."""
    settings = read_settings(directory)
    identity = _readable(read_identity, directory)
    known = _readable(read_split, directory / SPLIT)
    if identity is None or (known is not None and known.sha256() != identity.split_manifest_sha256):
        known = None  # of a command that was cut short: nobody was told of it
    return Before(
        settings=settings,
        rows=0 if identity is None else identity.rows,
        split=known,
        first=identity is None and not (directory / SPLIT).exists(),
    )


def _settings_left(directory: Path) -> Settings | None:
    """Those of a data set that was whole and lost its rows: it is split as it was, unless something else is asked."""
    whole_once = (directory / IDENTITY).exists() and (directory / MANIFEST).exists()
    return read_settings(directory) if whole_once else None


def _readable(read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except KilnError:
        return None  # half written or damaged: it is about to be made anew


def _wanted(settings: Settings | None, source: str, mapping: Mapping[str, str] | None) -> str | Source:
    """The shape to read a file in: the one asked for, else the data set's own."""
    if mapping:
        return mapped_source(mapping)
    if settings is None or source != "auto":
        return source
    return mapped_source(settings.map) if settings.map else settings.source


def _rows_of(
    given: Plain, label: str, wanted: str | Source, plugins: Plugins, scratch: Path, stack: ExitStack
) -> tuple[Plain, Source]:
    """The file's rows as lines, and their shape."""
    choice = choose_source(given, label, wanted, plugins.sources, "chat")
    if not has_rows(given):
        raise KilnError("KLN107", f"{label} holds no rows", hint="every line of it is blank")
    if choice.source.read is None:
        return given, choice.source
    return stack.enter_context(spool_records(choice.source, given, scratch)), choice.source


def _taken(rows: Plain, label: str) -> Taken:
    """What a file of rows brings. Raises KilnError KLN206 for a row above the cap."""
    rows.stream.seek(0)
    lines, count = LineReader(rows.stream, hashed=False), 0
    for record in json_lines(lines):
        row_text(record, label)
        count += 1
    return Taken(count, rows.packing, rows.blank + lines.blank, rows.had_bom or lines.had_bom)


def _texts(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The rows of a plain file, from its beginning."""
    stream.seek(0)
    for record in json_lines(LineReader(stream, hashed=False)):
        yield row_text(record, name)


def _require_shape(rows: Plain, source: Source, label: str) -> None:
    """A file whose rows none looks like those of the data set is not added to it unless ``--source`` says so."""
    samples = list(sample_objects(rows))
    if source.name == "map" or source.read is not None or not samples:
        return
    if not any(source.recognise(sample) for sample in samples):
        keys = printable(", ".join(sorted(samples[0])))
        raise KilnError(
            "KLN212",
            f"{label} has not the shape {printable(source.name)} of the data set: a row has the keys {keys}",
            hint=f"--source {printable(source.name)} adds it all the same; rows of another shape are another data set",
        )


def _require_free(registry: Path, name: str) -> None:
    """Names that some file systems take for one are refused everywhere."""
    for other in names(registry):
        if other != name and other.casefold() == name.casefold():
            raise KilnError(
                "KLN201", f"data set {name!r} differs from {other!r} in case alone", hint="choose another name"
            )


def _stand_there(directory: Path, rows: Plain, label: str, *, alone: bool) -> bool:
    """Whether the last rows of data.jsonl are just these, or (``alone``) all of them are: then this command was run
    before, and may have been killed before it could say so."""
    with open_input(directory / DATA) as data:
        before = sum(1 for _ in _texts(data, DATA)) - sum(1 for _ in _texts(rows.stream, label))
        if before < 0 or (alone and before):
            return False
        last = islice(_texts(data, DATA), before, None)
        return all(one == other for one, other in zip(last, _texts(rows.stream, label), strict=True))


def _require_addition(
    directory: Path, before: Before, asked: Settings, options: Mapping[str, Any], *, append: bool, again: bool
) -> None:
    """Raises KilnError where rows may not be added, or not with these settings."""
    name, there = printable(directory.name), before.settings
    if not append and not again:
        if before.first:
            raise half_written(directory, "an add of other rows was cut short")
        raise KilnError(
            "KLN201",
            f"data set {name!r} exists and has {counted(before.rows, 'row', 'rows')}",
            hint="--append adds the rows to them; `kiln dataset remove` removes it",
        )
    if (asked.source, asked.map) != (there.source, there.map):
        found = f"{printable(asked.source)} {asked.map or ''}".strip()
        expected = f"{printable(there.source)} {there.map or ''}".strip()
        raise KilnError(
            "KLN212",
            f"the rows have the shape {found}, those of data set {name!r} the shape {expected}",
            hint="a data set has rows of one shape: make another one of these",
        )
    if changed(there.split, options) != there.split:
        raise KilnError(
            "KLN201",
            f"data set {name!r} is split by {_shown(there.split)}, and add is told {_shown(options)}",
            hint=f"leave the options out, or change them first: `kiln dataset split {name}` takes the same ones",
        )


def _shown(options: object) -> str:
    return ", ".join(f"{key} {printable(value)}" for key, value in msgspec.to_builtins(options).items())


def _write_rows(directory: Path, rows: Plain, label: str, *, behind: bool) -> None:
    """Writes data.jsonl whole: the rows, behind those that are there or alone."""
    with AtomicFile(directory / DATA) as out:
        if behind:
            _copy_lines(directory / DATA, out)
        for block in lines_of(_texts(rows.stream, label)):
            out.write(block)


def _copy_lines(path: Path, out: AtomicFile) -> None:
    """A file as it is, and a line end where its last line has none."""
    with open_input(path) as stream:
        copy_stream(stream, out)
        size = os.fstat(stream.fileno()).st_size
        if size and read_text(stream, size - 1, 1) != b"\n":
            out.write(b"\n")


def _finish(directory: Path, settings: Settings, before: Before | None, taken: Taken, *, again: bool = False) -> Change:
    """Makes everything anew of data.jsonl, and tells what changed."""
    added = taken.rows
    built, identity = rebuild(directory, settings)
    rows_before = 0 if before is None else before.rows
    if again:  # those of them that no split knew of
        added = min(added, max(0, len(built.rows) - rows_before))
    earlier = {row.keys.content_sha256 for row in built.rows[: len(built.rows) - added]}
    grouped = sum(row.keys.group_by_sha256 is not None for row in built.rows)
    moved: list[Move] | None = []
    if before is not None and not before.first:
        moved = None if before.split is None else moves(before.split, built.manifest)
    return Change(
        directory=str(directory),
        settings=settings,
        identity=identity,
        packing=taken.packing,
        added=added,
        blank_lines=taken.blank_lines,
        byte_order_mark=taken.byte_order_mark,
        repeated=sum(row.keys.content_sha256 in earlier for row in built.rows[len(built.rows) - added :]),
        taken_in=len(built.rows) - added - rows_before,
        gone=_gone(before, built),
        again=again,
        ungrouped=len(built.rows) - grouped if isinstance(settings.split.group_by, str) else None,
        sizes=split_sizes(built.components, settings.split),
        moves=moved,
    )


def _gone(before: Before | None, built: Built) -> int | None:
    """Rows that were split and are not in data.jsonl any more, by content."""
    if before is None or before.first:
        return 0
    if before.split is None:
        return None
    there = Counter(row.keys.content_sha256 for row in built.rows)
    return (Counter(row.content_sha256 for row in before.split.rows) - there).total()


def split_sizes(components: Iterable[Component], config: SplitConfig) -> dict[str, SplitSize]:
    """What was asked of each split and what there is."""
    found = {split: [each for each in components if each.split == split] for split in SPLITS}
    return {
        split: SplitSize(
            asked_percent=config.percent(split),
            rows=sum(len(each.rows) for each in found[split]),
            components=len(found[split]),
        )
        for split in SPLITS
    }
