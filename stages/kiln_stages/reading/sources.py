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
    path: Path | None, name: str, sources: Registry[Source], yields: Yields, scratch: Path
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


def choose_source(plain: Plain, label: str, name: str, sources: Registry[Source], yields: Yields) -> Choice:
    """The named source, or for "auto" the one that recognises the file's first row.

    Raises KilnError KLN212 where the name is unknown, none fits, or several do.
    """
    if name != "auto":
        source = sources.get(name)
        if source.yields != yields:
            raise KilnError(
                "KLN212",
                f"source {name!r} yields {source.yields} rows, and {yields} rows are wanted here",
                hint="`kiln plugins` lists the sources",
            )
        return Choice(source, "named")
    sample = first_object(plain)
    fitting = [
        Choice(source, why)
        for source in sources
        if source.yields == yields and sample is not None and (why := source.recognise(sample)) is not None
    ]
    if len(fitting) == 1:
        return fitting[0]
    names = [source.name for source in sources if source.yields == yields]
    found = ", ".join(f"{choice.source.name} ({choice.why})" for choice in fitting)
    keys = "no row parses" if sample is None else f"its first row has the keys {printable(', '.join(sorted(sample)))}"
    raise KilnError(
        "KLN212",
        f"{label} fits {'several sources: ' + found if fitting else 'no source: ' + keys}",
        hint=f"name one of: {', '.join(names)}",
    )


def first_object(plain: Plain) -> dict[str, object] | None:
    """The first line that parses to an object, among the first hundred; None where there is none."""
    stream = plain.stream
    stream.seek(0)
    try:
        for line in itertools.islice(LineReader(stream), SAMPLE_LINES):
            if line.text:
                try:
                    return strict_json.parse_object(line.text)
                except strict_json.JsonFault:
                    continue  # a broken line says nothing about the shape; the stage itself counts it
        return None
    finally:
        stream.seek(0)
