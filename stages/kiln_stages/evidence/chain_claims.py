"""From a training that began with an adapter to the training that made it, and so on to the first one: by receipts.

A receipt names the one behind its base adapter by content. Each link is one claim; the files of the earlier run are
held to their receipt by ``kiln verify-receipt`` of that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kiln_cli.manifests import parse_receipt
from kiln_cli.receipts import TrainReceipt
from kiln_cli.text import printable
from kiln_stages.evidence.claims import Claim, claim, differ, require
from kiln_stages.evidence.receipt_claims import receipt_claims


def chain_claims(run: Path, receipt: TrainReceipt) -> Iterator[Claim]:
    """One claim a training before this one, the nearest first; the walk ends at the first that does not hold."""
    while (base := _linked_base(receipt)) is not None:
        path = run / str(receipt.produced.get("base_dir", ".")) / str(base["receipt"].get("path"))
        name = f"the base adapter is that of the training of {printable(base['receipt'].get('path'))}"
        found = claim(name, partial(_check_link, path, base))
        yield found
        if found.status != "holds":
            return
        run, receipt = path.parent, parse_receipt(path)


def _linked_base(receipt: TrainReceipt) -> dict[str, Any] | None:
    """``adapters.base`` where it names a receipt. What has another form is the receipt's own claims' to refuse."""
    base = receipt.adapters.get("base")
    return base if isinstance(base, dict) and isinstance(base.get("receipt"), dict) else None


def _check_link(path: Path, base: dict[str, Any]) -> str:
    receipt = parse_receipt(require(path))
    if text := differ("its content_sha256", receipt.content_digest(), base["receipt"]["content_sha256"]):
        return text
    faults = [
        differ("its status", receipt.status, "success"),
        differ("its adapter", (receipt.adapters["output"] or {}).get("content_sha256"), base["content_sha256"]),
        *(f"{one.name}: {one.detail}" for one in receipt_claims(receipt) if one.status != "holds"),
    ]
    return "; ".join(filter(None, faults))
