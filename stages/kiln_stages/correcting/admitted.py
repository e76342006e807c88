"""``admit/corrections.jsonl``: which correction each row of an admission came from.

Private, as the request ids are somebody's; admit_manifest.json vouches for it, since training marks by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input
from kiln_cli.manifests import damaged
from kiln_cli.receipts import IngestionReceipt
from kiln_cli.text import printable

ACTIVE = "corrections:active"  # the name of the rows as `[admit] dataset` has it
SOURCE = "corrections"  # and as a receipt does
ADMITTED = "admit/corrections.jsonl"


class AdmittedCorrection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row that was offered to admission: ``row_sha256`` is its identity, over the texts as they then were."""

    row_index: int
    request_id: str
    row_sha256: str
    kept: bool


def admitted_corrections(ids: Sequence[str], receipt: IngestionReceipt) -> Iterator[AdmittedCorrection]:
    """The rows of an admission in order; ``ids`` are their request ids."""
    rejected = {row.row_index: row.row_sha256 for row in receipt.rejected_rows}
    kept = iter(receipt.kept_row_hashes)
    for row_index, request_id in enumerate(ids, start=1):
        lost = rejected.get(row_index)
        yield AdmittedCorrection(
            row_index=row_index, request_id=request_id, row_sha256=lost or next(kept), kept=lost is None
        )


def read_admitted(run: Path) -> list[AdmittedCorrection]:
    """Raises KilnError KLN204 where the file is missing, KLN206 for a line that is none of it."""
    path = run / ADMITTED
    with open_input(path) as stream:
        try:
            return [msgspec.json.decode(line, type=AdmittedCorrection) for line in stream]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise damaged(path, str(error)) from None


def require_admitted(run: Path, receipt: IngestionReceipt) -> list[AdmittedCorrection]:
    """As :func:`read_admitted`, held to the ingestion receipt. Raises KilnError KLN207 where they differ."""
    found = read_admitted(run)
    ids = [row.request_id for row in found]
    if len(found) != receipt.rows_read or found != list(admitted_corrections(ids, receipt)):
        raise KilnError(
            "KLN207",
            f"{printable(run / ADMITTED)} has other rows than the ingestion receipt "
            f"({counted(len(found), 'row', 'rows')}, {receipt.rows_read} read)",
            hint="run `kiln admit` again",
        )
    return found
