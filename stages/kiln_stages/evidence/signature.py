"""Signatures of receipts, made and checked by OpenSSH: ``ssh-keygen -Y``, under a namespace of kiln's own.

What is signed are the bytes of ``train_receipt.json``, which have one canonical form; the signature lies beside it. The
namespace keeps a signature of anything else from passing for one of a receipt. Who may sign is the reader's own list of
keys, in the form of ALLOWED SIGNERS in ssh-keygen(1).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded
from kiln_cli.text import printable

NAMESPACE = "kiln-cli.train-receipt.v1"
SUFFIX = ".sig"
SIGNATURE_LIMIT = 64 * 1024
PROGRAM = "ssh-keygen"
_KEY = re.compile(r"key (SHA256:\S+)")


def signature_path(receipt: Path) -> Path:
    return receipt.with_name(receipt.name + SUFFIX)


def sign(data: bytes, key: Path) -> bytes:
    """The armoured signature of ``data`` by a private key (or a public one whose private half an agent holds).

    Raises KilnError KLN204 where there is no such key, KLN218 where ssh-keygen refuses it, KLN301 without ssh-keygen.
    """
    if not key.is_file():
        raise KilnError("KLN204", f"cannot read {printable(key)}: there is no such key", hint="check the path of --key")
    done = _run(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE], data)
    if done.returncode != 0 or not done.stdout:
        raise KilnError(
            "KLN218",
            f"{PROGRAM} does not sign with {printable(key)}: {_said(done)}",
            hint="name a private key, or a public one whose private half your agent holds",
        )
    return done.stdout


def signer(data: bytes, signature: Path, allowed: Path) -> str:
    """The allowed signer whose signature of ``data`` it is.

    Raises KilnError KLN218 where it is no signature of these bytes, or of nobody on the list; KLN204 for a list that is
    not there; KLN301 without ssh-keygen.
    """
    if not allowed.is_file():
        raise KilnError("KLN204", f"cannot read {printable(allowed)}: there is no such file", hint="check the path")
    read_bounded(signature, SIGNATURE_LIMIT)
    good = _run(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)], data)
    if good.returncode != 0:
        raise _bad(f"{signature.name} is no signature of these bytes: {_said(good)}")
    found = _KEY.search(good.stdout.decode("utf-8", "replace"))
    key = found[1] if found else "an unknown key"
    named = _run(["-Y", "find-principals", "-s", str(signature), "-f", str(allowed)], b"")
    principals = named.stdout.decode("utf-8", "replace").split() if named.returncode == 0 else []
    if not principals:
        raise _bad(f"it is signed with {key}, which {printable(allowed.name)} does not list")
    verify = ["-Y", "verify", "-f", str(allowed), "-n", NAMESPACE, "-s", str(signature)]
    refused = ""
    for principal in principals:
        done = _run([*verify, "-I", principal], data)
        if done.returncode == 0:
            return printable(principal)
        refused = _said(done)
    raise _bad(f"it is signed with {key}, which {printable(allowed.name)} lists but not for this: {refused}")


def _run(arguments: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [PROGRAM, *arguments], input=data, capture_output=True, env=os.environ | {"LC_ALL": "C"}, check=False
        )
    except FileNotFoundError:
        raise KilnError(
            "KLN301", f"{PROGRAM} is not installed", hint="install OpenSSH 8.2 or later; it makes and checks signatures"
        ) from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [*done.stderr.decode("utf-8", "replace").splitlines(), *done.stdout.decode("utf-8", "replace").splitlines()]
    return printable("; ".join(line.strip() for line in lines if line.strip()) or f"exit code {done.returncode}")


def _bad(what: str) -> KilnError:
    return KilnError("KLN218", what, hint="ask the signer for the receipt as it was signed")
