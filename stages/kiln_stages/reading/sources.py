"""From a file to records: unpacking it, choosing the source, and the default reader of one JSON text a line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.extensions import Source
from kiln_cli.lines import Line, LineReader
from kiln_cli.records import Record
from kiln_cli.registry import Registry
from kiln_cli.text import printable
from kiln_stages.reading.transports import Plain, open_plain, spool_records

SAMPLE_LINES = 100
STDIN = "-"

Yields = Literal["tool_calls", "chat"]


class Choice(msgspec.Struct, frozen=True):
    """The source that reads a file, and why it was chosen."""

    source: Source
    why: str


@contextmanager
def open_rows(
    path: Path | None, name: str | Source, sources: Registry[Source], yields: Yields, scratch: Path
) -> Iterator[tuple[Plain, Choice]]:
    """A file's rows as a plain file of lines, and the source that understands them. Standard input for None.

    Raises KilnError as :func:`open_plain` and :func:`choose_source` do.
    """
    with ExitStack() as stack:
        plain = stack.enter_context(open_plain(path, scratch))
        label = "standard input" if path is None else printable(path)
        choice = choose_source(plain, label, name, sources, yields)
        if choice.source.read is not None:
            plain = stack.enter_context(spool_records(choice.source, plain, scratch))
        yield plain, choice


def json_lines(lines: Iterable[Line], *, elements: bool = False) -> Iterator[Record]:
    """One record for each non-blank line."""
    row_index = 0
    for line in lines:
        if line.text != b"":
            row_index += 1
            yield Record(
                row_index=row_index,
                line=line.number,
                offset=line.offset,
                length=line.length,
                text=line.text,
                element=elements,
            )


def choose_source(plain: Plain, label: str, name: str | Source, sources: Registry[Source], yields: Yields) -> Choice:
    """The named source, or for "auto" the one that recognises the first row that any does; a source is taken as it is.

    Raises KilnError KLN212 where the name is unknown, none fits, or several do, KLN107 for "auto" and no rows.
    """
    if isinstance(name, Source):
        return Choice(name, "given")
    if name != "auto":
        source = sources.get(name)
        if source.yields != yields:
            raise KilnError(
                "KLN212",
                f"source {name!r} yields {source.yields} rows, and {yields} rows are wanted here",
                hint="`kiln plugins` lists the sources",
            )
        return Choice(source, "named")
    samples = list(sample_objects(plain))
    for sample in samples:
        if fitting := _fitting(sample, sources, yields):
            if len(fitting) == 1:
                return fitting[0]
            found = ", ".join(f"{choice.source.name} ({choice.why})" for choice in fitting)
            raise _no_choice(f"{label} fits several sources: {found}", sources, yields)
    named = next(filter(None, samples), None)
    if named is None and not has_rows(plain):
        raise KilnError("KLN107", f"{label} holds no rows", hint="every line of it is blank")
    if named is None and yields == "chat":
        # Nothing to go by, and no row that could be kept: as conversations, each gets its own reason.
        return Choice(sources.get("messages"), "no row has a field")
    keys = "no row has a field" if named is None else f"a row has the keys {printable(', '.join(sorted(named)))}"
    raise _no_choice(f"{label} fits no source: {keys}", sources, yields)


def _fitting(sample: dict[str, object], sources: Registry[Source], yields: Yields) -> list[Choice]:
    return [
        Choice(source, why)
        for source in sources
        if source.yields == yields and (why := source.recognise(sample)) is not None
    ]


def _no_choice(message: str, sources: Registry[Source], yields: Yields) -> KilnError:
    names = ", ".join(source.name for source in sources if source.yields == yields)
    other = "; or say where its fields are: --map user=/prompt --map assistant=/reply" if yields == "chat" else ""
    return KilnError("KLN212", message, hint=f"name one of: {names}{other}")


def has_rows(plain: Plain) -> bool:
    """Whether any line is not blank."""
    stream = plain.stream
    stream.seek(0)
    try:
        return any(line.text != b"" for line in LineReader(stream, hashed=False))
    finally:
        stream.seek(0)


def sample_objects(plain: Plain) -> Iterator[dict[str, object]]:
    """Those of the first hundred lines that parse to an object. A broken line says nothing about the shape."""
    stream = plain.stream
    stream.seek(0)
    try:
        for line in itertools.islice(LineReader(stream), SAMPLE_LINES):
            if line.text:
                try:
                    value = strict_json.parse(line.text)
                except strict_json.JsonFault:
                    continue  # the stage itself counts it
                if isinstance(value, dict):
                    yield value
    finally:
        stream.seek(0)
