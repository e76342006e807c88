"""Rows that are given to an admission instead of lying in a file that can be read again.

They come by ``--row`` or standard input, from a Python call, in a request or recipe, or from the registry: a named
dataset, the active corrections. Admission copies them into the run, so that what was admitted can be admitted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.compat_json import require_json
from kiln_cli.config import AdmitConfig, LoadedConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.identity import canonical_json
from kiln_cli.text import printable
from kiln_stages.correcting.admitted import ACTIVE, SOURCE
from kiln_stages.correcting.store import read_store, store_path
from kiln_stages.datasets.entry import SPLIT_FILES, provenance, read_entry


class LinesFile(msgspec.Struct, frozen=True):
    """A file of JSON lines that another one vouches for by its SHA-256 (hex)."""

    path: Path
    sha256: str


class Given(msgspec.Struct, frozen=True):
    """``texts``: one JSON value each, or None for rows that lie elsewhere: in ``file``, on standard input, or in the
    run's copy.

    ``source`` (one of ``receipts.INGESTION_SOURCES``) and ``locator`` are what the ingestion receipt says of them;
    neither is part of a row's identity. ``provenance``: what admit_manifest.json and the train receipt say beside that,
    of JSON types; it must be a function of the rows and where they come from, without times. ``shape``: the source
    that reads them, where it is known, and ``map`` its fields where it is made of a map. ``ids``: what each text is
    called where it comes from. ``notes``: what to tell people of rows that were passed over.
    """

    texts: tuple[bytes, ...] | None
    source: str = "inline"
    locator: str | None = None
    provenance: dict[str, Any] | None = None
    shape: str | None = None
    ids: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    map: dict[str, str] = {}
    file: LinesFile | None = None


def given_texts(texts: Iterable[str], settings: AdmitConfig) -> Given:
    """Rows as JSON texts. Raises KilnError KLN204 where one is no JSON: then it is no row that could be refused."""
    return Given(tuple(_one_line(text, number, settings) for number, text in enumerate(texts, start=1)))


def _one_line(text: str, number: int, settings: AdmitConfig) -> bytes:
    row = text.encode("utf-8", "surrogateescape").strip()
    try:
        if settings.compat is None:
            value = strict_json.parse(row)
            return canonical_json(value) if b"\n" in row else row
        require_json(row)
        return row.replace(b"\n", b" ")  # in JSON a raw line end is white space
    except (strict_json.JsonFault, RowFault) as fault:
        raise KilnError(
            "KLN204", f"row {number} is no JSON: {printable(fault.detail)}", hint="one JSON object a --row"
        ) from None


def given_values(values: Iterable[Any]) -> Given:
    """Rows as Python values. Raises KilnError KLN204 where one has no JSON form."""
    rows = []
    for number, value in enumerate(values, start=1):
        try:
            rows.append(canonical_json(value))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise KilnError(
                "KLN204", f"row {number} has no JSON form: {printable(error)}", hint="rows are dicts as in JSON lines"
            ) from None
    return Given(tuple(rows))


def named_rows(config: LoadedConfig) -> Given | None:
    """The rows that ``[admit] dataset`` names; None where it names none. Raises KilnError KLN212 for corrections by
    another name than the one there is, and as :func:`active_corrections` and :func:`rows_of_split` do."""
    if (name := config.run.admit.dataset) is None:
        return None
    if name == ACTIVE:
        return active_corrections(store_path(config.resolve(config.run.admit.registry)))
    if name.startswith(f"{SOURCE}:"):
        raise KilnError("KLN212", f"there are no corrections by the name {printable(name)!r}", hint=f"it is {ACTIVE}")
    return rows_of_split(config, name)


def active_corrections(path: Path) -> Given:
    """The corrections of a store that are to be trained on, in its order.

    Raises KilnError KLN204 where there is no store, KLN107 where none of its corrections is active.
    """
    store = read_store(path)
    active, passed_over = store.active(), {state: count for state, count in store.counts().items() if count}
    passed_over.pop("active", None)
    others = ", ".join(f"{count} {state}" for state, count in passed_over.items())
    if not active:
        raise KilnError(
            "KLN107",
            f"{printable(path)} holds no active correction ({others or 'it is empty'})",
            hint="`kiln corrections list` says why of each; `kiln corrections add` brings new ones",
        )
    return Given(
        tuple(canonical_json({"messages": correction.row().messages}) for correction in active),
        source=SOURCE,
        locator=ACTIVE,
        shape="messages",
        ids=tuple(correction.request_id for correction in active),
        notes=(f"corrections: {len(active)} active; passed over: {others or 'none'}",),
    )


def rows_of_split(config: LoadedConfig, name: str) -> Given:
    """The rows of ``[admit] dataset_split`` of a named data set.

    Raises KilnError: KLN110 for a split without rows, KLN212 for an unknown name, KLN206/207 for a data set that is
    half written or that changed after its last split, KLN203 for ``compat`` and rows that are no messages.
    """
    settings = config.run.admit
    entry, split = read_entry(config.resolve(settings.registry), name), settings.dataset_split
    sizes = entry.identity.split_rows
    if not sizes[split]:
        there = ", ".join(f"{other} {sizes[other]}" for other in SPLIT_FILES)
        raise KilnError(
            "KLN110",
            f"split {split} of data set {name!r} is empty (rows: {there})",
            hint="name another split, add rows, or `kiln dataset split` by other percentages",
        )
    if settings.compat is not None and entry.settings.source != "messages":
        raise KilnError(
            "KLN203",
            f"[admit] compat reads rows of messages alone, and those of data set {name!r} have the shape "
            f"{printable(entry.settings.source)}",
            hint="leave compat out",
        )
    file = SPLIT_FILES[split]
    return Given(
        None,
        source="named_dataset",
        locator=f"{name}:{split}",
        provenance=provenance(entry, split),
        shape=entry.settings.source,
        map=entry.settings.map,
        file=LinesFile(entry.directory / file, entry.identity.files[file].sha256),
    )
