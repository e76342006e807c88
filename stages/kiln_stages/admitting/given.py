"""Rows that are given to an admission instead of lying in a file that can be read again.

They come by ``--row`` or standard input, from a Python call, in a request or recipe, or from the registry: a named
dataset, the active corrections. Admission copies them into the run, so that what was admitted can be admitted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.compat_json import require_json
from kiln_cli.config import AdmitConfig, LoadedConfig
from kiln_cli.errors import KilnError, RowFault, not_built
from kiln_cli.identity import canonical_json
from kiln_cli.text import printable


class Given(msgspec.Struct, frozen=True):
    """``texts``: one JSON value each, or None for rows that lie elsewhere: on standard input, or in the run's copy.

    ``source`` (one of ``receipts.INGESTION_SOURCES``) and ``locator`` are what the ingestion receipt says of them;
    neither is part of a row's identity. ``provenance``: what admit_manifest.json and the train receipt say beside that,
    of JSON types; it must be a function of the rows and where they come from, without times.
    """

    texts: tuple[bytes, ...] | None
    source: str = "inline"
    locator: str | None = None
    provenance: dict[str, Any] | None = None


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
    """The rows that ``[admit] dataset`` names; None where it names none. Raises KilnError KLN211."""
    if config.run.admit.dataset is None:
        return None
    raise not_built("admission of a named dataset", "give a file of rows")
