"""What a training that is complete marks: the corrections that it was trained on, and no others.

It comes behind the receipt, and is never part of it. A process that dies in between leaves the corrections active and
the run without ``train/corrections_marked.json``; training again finds nothing to train and marks them. A correction
that was edited since it was admitted is left active: its new text was not trained on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.files import write_file
from kiln_cli.manifests import document, read_document
from kiln_cli.receipts import TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.text import printable
from kiln_stages.correcting.admitted import SOURCE, AdmittedCorrection, require_admitted
from kiln_stages.correcting.store import Store, changing, read_store, store_path

MARKED = "train/corrections_marked.json"
MARKED_SCHEMA = "kiln.corrections-marked.v1"
IDS_SHOWN = 5


class Marked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was marked for one training. ``edited``: not marked, since their texts changed after they were admitted;
    ``gone``: not in the store any more; ``rejected``: how many were refused by admission, and so stay active."""

    schema: str = MARKED_SCHEMA
    receipt_content_sha256: str
    adapter: str
    at: str  # RFC 3339, UTC
    marked: list[str]
    edited: list[str]
    gone: list[str]
    rejected: int

    def account(self) -> str:
        """What became of the corrections, for people."""
        parts = [f"{len(self.marked)} marked as trained into {printable(self.adapter)}"]
        if self.edited:
            parts.append(f"{len(self.edited)} edited since admission and so not marked ({_shown(self.edited)})")
        if self.gone:
            parts.append(f"{len(self.gone)} not in the store any more ({_shown(self.gone)})")
        if self.rejected:
            parts.append(f"{self.rejected} rejected and still active")
        return ", ".join(parts)


class Marking(NamedTuple):
    """``marked``, or the ``fault`` for which nothing was marked."""

    marked: Marked | None
    fault: str = ""

    def lines(self) -> list[str]:
        return [] if self.marked is None else [f"corrections: {self.marked.account()}"]


def is_of_corrections(admit: AdmitManifest) -> bool:
    """Whether the rows of an admission are corrections."""
    return admit.details.rows.origin == SOURCE


def mark_trained(config: LoadedConfig, run: Path, admit: AdmitManifest, receipt: TrainReceipt) -> Marking | None:
    """Marks the kept corrections of a successful training; None where its rows are no corrections.

    The training is complete whatever happens here, so that a store that is missing, locked or cannot be written is no
    error of it: the result says why nothing was marked, and the same command marks them later.
    """
    if not is_of_corrections(admit):
        return None
    try:
        return Marking(read_marked(run, receipt) or _mark(config, run, receipt))
    except KilnError as error:
        hint = f"; {error.hint}" if error.hint else ""
        return Marking(
            None,
            f"the training is complete, but its corrections are not marked: {error.message}{hint}; "
            "then run `kiln train` again, which finds the training complete and marks them",
        )


def read_marked(run: Path, receipt: TrainReceipt) -> Marked | None:
    """What was marked for the training of this receipt; None where nothing was yet."""
    path = run / MARKED
    if not path.exists():
        return None
    found = read_document(path, Marked, MARKED_SCHEMA)
    return found if found.receipt_content_sha256 == receipt.content_sha256 else None


def _mark(config: LoadedConfig, run: Path, receipt: TrainReceipt) -> Marked:
    rows = require_admitted(run, receipt.data.conversations())
    path = store_path(config.resolve(config.run.admit.registry))
    read_store(path)  # one that is missing is an error, and no reason to make a directory
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    marked = Marked(
        receipt_content_sha256=receipt.content_sha256,
        adapter=receipt.adapter_name,
        at=now,
        marked=[],
        edited=[],
        gone=[],
        rejected=sum(not row.kept for row in rows),
    )
    with changing(path, "kiln train") as store:
        for row in rows:
            if row.kept:
                _mark_one(store, row, marked)
    write_file(run / MARKED, document(marked))
    return marked


def _mark_one(store: Store, row: AdmittedCorrection, done: Marked) -> None:
    line = store.get(row.request_id)
    if line is None or line.correction is None:
        done.gone.append(row.request_id)
        return
    correction = line.correction
    if correction.row().sha256() != row.row_sha256:
        done.edited.append(row.request_id)
        return
    done.marked.append(row.request_id)
    if (correction.trained_into, correction.trained_row_sha256) != (done.adapter, row.row_sha256):
        marker = {"trained_into": done.adapter, "trained_at": done.at, "trained_row_sha256": row.row_sha256}
        try:
            store.set_members(line, {key: msgspec.json.encode(value).decode() for key, value in marker.items()})
        except RowFault as fault:  # the line would be longer than a line may be
            why = f"correction {printable(row.request_id)} cannot be marked: {fault.detail}"
            raise KilnError("KLN206", why, hint="shorten the line of it in the store") from None


def _shown(ids: list[str]) -> str:
    more = [f"and {len(ids) - IDS_SHOWN} more"] if len(ids) > IDS_SHOWN else []
    return ", ".join([*(printable(text, 60) for text in ids[:IDS_SHOWN]), *more])
