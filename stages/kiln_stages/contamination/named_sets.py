"""The splits of a named data set as sets of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from kiln_cli.text import printable
from kiln_stages.admitting.incoming import chat_rows
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.row_sets import KeyedFile, RowSet, read_set
from kiln_stages.datasets.entry import SPLIT_FILES, read_entry
from kiln_stages.datasets.partition import SPLITS
from kiln_stages.reading.mapping import mapped_source
from kiln_stages.reading.sources import open_rows


def dataset_sets(name: str, wanted: str | None, reader: Reader) -> Iterator[RowSet]:
    """The splits of a data set, or the wanted one. Rows are counted within the split's file.

    Raises KilnError KLN212 where the registry has none of this name, KLN206/207 where it is not whole.
    """
    entry = read_entry(reader.registry, name)
    settings = entry.settings
    source = mapped_source(settings.map) if settings.map else settings.source
    for split in SPLITS:
        if wanted in (None, split):
            path = entry.directory / SPLIT_FILES[split]
            with open_rows(path, source, reader.plugins.sources, "chat", reader.scratch) as (plain, choice):
                rows = partial(chat_rows, source=choice.source)
                found = read_set(f"{printable(name)}:{split}", KeyedFile(plain, rows, reader.near))
            yield msgspec.structs.replace(
                found, owner=str(entry.directory.resolve()), role="trained" if split == "train" else "held out"
            )
