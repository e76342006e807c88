"""``kiln sign``: a receipt in, its signature beside it out: ``train_receipt.json.sig``, made by ``ssh-keygen -Y sign``.

A receipt that contradicts itself is not signed. The signature says who vouches for the receipt; that files and receipt
agree is what ``kiln verify-receipt`` checks, with ``--allowed-signers FILE`` both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded, run_lock, write_file
from kiln_cli.manifests import DOCUMENT_LIMIT, RECEIPT_NAME, parse_receipt
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.evidence.receipt_claims import receipt_claims
from kiln_stages.evidence.signature import NAMESPACE, sign, signature_path


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "kiln.signed.v1"
    namespace: str = NAMESPACE
    receipt: str
    receipt_sha256: str
    signature: str


def command(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its train_receipt.json.")],
    key: Annotated[Path, typer.Option("--key", help="An SSH private key; or a public one, for the agent's.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Sign a train receipt with an SSH key, through ssh-keygen."""
    signed = run(target, key)
    if json:
        terminal.json_data(signed)
    terminal.say(f"signed: {signed.signature}")
    terminal.say(f"next: kiln verify-receipt {printable(target)} --allowed-signers FILE")


def run(target: Path, key: Path) -> Signed:
    """Writes the signature beside the receipt.

    Raises KilnError: KLN206 where there is no readable receipt, KLN103 for one that contradicts itself, KLN204/217 for
    the key, KLN301 without ssh-keygen.
    """
    path = target / RECEIPT_NAME if target.is_dir() else target
    with run_lock(path.parent, "kiln sign"):
        receipt = parse_receipt(path)
        for found in receipt_claims(receipt):
            if found.status != "holds":
                raise KilnError(
                    "KLN103",
                    f"{printable(path)} is not signed, it contradicts itself: {found.name}: {found.detail}",
                    hint=f"`kiln verify-receipt {printable(target)}` lists all claims",
                )
        signature = signature_path(path)
        write_file(signature, sign(read_bounded(path, DOCUMENT_LIMIT), key))
    return Signed(receipt=printable(path), receipt_sha256=receipt.receipt_sha256, signature=printable(signature))
