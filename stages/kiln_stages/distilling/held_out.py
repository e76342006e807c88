"""``[distill] heldout_file``: a second corpus of the same teacher, which measures the reverse KL and trains nothing.

It is held to every rule of a scored corpus. An example whose tokens stand in the corpus too would measure what was
trained, and refuses the admission.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.distilling.rows import PackedScoredRow

HELD_OUT = "admit/heldout.parquet"
HELD_OUT_RECEIPT = "admit/scored_heldout_ingestion.json"
Keep = Callable[[PackedScoredRow], None]


def held_out_config(config: LoadedConfig) -> LoadedConfig | None:
    """The same settings for the held-out corpus; None where the config names none."""
    file = config.run.distill.heldout_file
    return None if file is None else config.replace("admit", file=file)


class Apart:
    """Holds the two corpora apart: 16 bytes and a number are kept of each row of the first."""

    def __init__(self, config: LoadedConfig) -> None:
        self._files = config.run.admit.file, config.run.distill.heldout_file
        self._lines: dict[bytes, int] = {}

    def corpus(self, keep: Keep) -> Keep:
        """``keep``, with a note of each row."""
        if self._files[1] is None:
            return keep

        def note(row: PackedScoredRow) -> None:
            self._lines.setdefault(_key(row), row.line)
            keep(row)

        return note

    def held_out(self, keep: Keep) -> Keep:
        """``keep`` for held-out rows. It raises KilnError KLN109 for one whose tokens the corpus has."""

        def check(row: PackedScoredRow) -> None:
            if (line := self._lines.get(_key(row))) is not None:
                corpus, held_out = map(printable, self._files)
                raise KilnError(
                    "KLN109",
                    f"{held_out}:{row.line}: the example has the same tokens as {corpus}:{line}, which is trained on",
                    hint="take it out of one of the two files",
                )
            keep(row)

        return check


def _key(row: PackedScoredRow) -> bytes:
    return hashlib.sha256(row.input_ids).digest()[:16]
