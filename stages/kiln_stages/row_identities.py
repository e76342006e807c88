"""What a row of any shape is the same as: its whole content, its normal form, its group, its session.

Contract: ``docs/artifacts.md``, *identities of a row*. They look at the parsed JSON value as it was given, every field
included, and not at the conversation that admission makes of it. Named data sets are split by them, and held-out rows
are kept out of training by them.
"""

from __future__ import annotations

from typing import Any

from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.white_space import trimmed, words

# Where a row that has no id at its root may have one, first come first served.
_PLACES = ("metadata", "provenance", "extra")


def content_sha256(row: Any) -> str:
    """``sha256:`` and 64 hex digits over the row's canonical JSON, without a domain."""
    return "sha256:" + sha256_hex(canonical_json(row))


def normalized_sha256(row: Any) -> str:
    """As :func:`content_sha256`, of the row with each string value as :func:`normal_text` has it."""
    return content_sha256(normal_values(row))


def normal_values(value: Any) -> Any:
    """The value with each string in it in normal form. Keys stay as they are."""
    if isinstance(value, str):
        return normal_text(value)
    if isinstance(value, dict):
        return {key: normal_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normal_values(item) for item in value]
    return value


def normal_text(text: str) -> str:
    """Runs of Unicode White_Space as one space, none at the ends, in lower case.

    Composed and decomposed letters stay apart, as do compatibility forms.
    """
    return " ".join(words(text)).lower()


def group_id(row: Any) -> str | None:
    """The row's ``group_id``: the first string that is not blank, trimmed; at the root, else in metadata, provenance
    or extra. None where there is none."""
    return _named(row, "group_id")


def session_id(row: Any) -> str | None:
    """The row's ``session_id``, found as :func:`group_id` is."""
    return _named(row, "session_id")


def _named(row: Any, name: str) -> str | None:
    if not isinstance(row, dict):
        return None
    for place in (row, *(row.get(key) for key in _PLACES)):
        text = place.get(name) if isinstance(place, dict) else None
        if isinstance(text, str) and (found := trimmed(text)):
            return found
    return None
