"""``kiln sign`` and ``verify-receipt --allowed-signers``: consistent unsigned, authentic with a listed key."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_model import RUN, Kiln

from kiln_cli.manifests import document
from kiln_cli.receipts import TrainReceipt

RECEIPT = f"{RUN}/train_receipt.json"
SIGNATURE = f"{RECEIPT}.sig"
CLAIM = "the receipt is signed by an allowed signer"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys ``mine`` and ``other``, and ``allowed``, which lists the first as me@example.org."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
        )
    (folder / "allowed").write_text(f"me@example.org {(folder / 'mine.pub').read_text()}", encoding="utf-8")
    return folder


@pytest.fixture
def mine(finished: Path, copy_of: Callable[..., Path]) -> Path:
    return copy_of(finished)


def verify(kiln: Kiln, run: Path, *options: str | Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, the verdict, and the claim about the signature ({} if there is none)."""
    done = kiln("verify-receipt", run, "--json", *options)
    verdict = json.loads(done.out)
    found = [claim for claim in verdict["claims"] if claim["name"] == CLAIM]
    return done.code, verdict, found[0] if found else {}


def test_an_unsigned_receipt_is_consistent_and_never_authentic(mine: Path, kiln: Kiln, keys: Path) -> None:
    code, verdict, claim = verify(kiln, mine / RUN)
    assert (code, verdict["verdict"], verdict["signer"], claim) == (0, "consistent", None, {})
    assert "authentic" not in kiln("verify-receipt", mine / RUN).out
    code, verdict, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, verdict["verdict"], claim["status"]) == (1, "does not verify", "fails")
    assert "it is not signed" in claim["detail"]


def test_a_signature_of_a_listed_key_makes_it_authentic(mine: Path, kiln: Kiln, keys: Path) -> None:
    before = (mine / RECEIPT).read_bytes()
    signed = kiln("sign", mine / RUN, "--key", keys / "mine", "--json")
    assert signed.code == 0, signed.err
    assert (mine / RECEIPT).read_bytes() == before
    assert (mine / SIGNATURE).read_bytes().startswith(b"-----BEGIN SSH SIGNATURE-----")
    assert json.loads(signed.out)["receipt_sha256"] == json.loads(before)["receipt_sha256"]
    code, verdict, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, verdict["verdict"], verdict["signer"]) == (0, "authentic", "me@example.org")
    assert claim["status"] == "holds"
    # Whoever lists no keys learns that there is a signature, and that nobody looked at it.
    code, verdict, claim = verify(kiln, mine / RUN, "--require-all")
    assert (code, verdict["verdict"], claim["status"]) == (0, "consistent", "not checked")


def test_it_is_the_signature_that_ssh_keygen_itself_checks(mine: Path, kiln: Kiln, keys: Path) -> None:
    assert kiln("sign", mine / RECEIPT, "--key", keys / "mine").code == 0
    command = ["ssh-keygen", "-Y", "verify", "-f", str(keys / "allowed"), "-I", "me@example.org"]
    command += ["-n", "kiln-cli.train-receipt.v1", "-s", str(mine / SIGNATURE)]
    assert subprocess.run(command, input=(mine / RECEIPT).read_bytes(), check=False).returncode == 0


def test_a_key_that_is_not_listed_is_named_by_its_fingerprint(mine: Path, kiln: Kiln, keys: Path) -> None:
    assert kiln("sign", mine / RUN, "--key", keys / "other").code == 0
    listed = subprocess.run(["ssh-keygen", "-lf", keys / "other.pub"], capture_output=True, text=True, check=True)
    code, verdict, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, verdict["verdict"], verdict["signer"]) == (1, "does not verify", None)
    assert listed.stdout.split()[1] in claim["detail"]
    assert "allowed does not list" in claim["detail"]


def test_a_receipt_changed_and_resealed_is_not_what_was_signed(mine: Path, kiln: Kiln, keys: Path) -> None:
    assert kiln("sign", mine / RUN, "--key", keys / "mine").code == 0
    receipt = msgspec.json.decode((mine / RECEIPT).read_bytes(), type=TrainReceipt)
    receipt.produced["at"] = "2001-01-01T00:00:00Z"
    receipt.seal()
    (mine / RECEIPT).write_bytes(document(receipt))
    assert verify(kiln, mine / RUN)[0] == 0, "it is consistent"
    code, verdict, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, verdict["verdict"], claim["status"]) == (1, "does not verify", "fails")
    assert "no signature of these bytes" in claim["detail"]


def test_a_signed_receipt_does_not_cover_for_its_files(mine: Path, kiln: Kiln, keys: Path) -> None:
    assert kiln("sign", mine / RUN, "--key", keys / "mine").code == 0
    path = mine / RUN / "data" / "test.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    code, verdict, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, verdict["verdict"], claim["status"]) == (1, "does not verify", "holds")


def test_a_signature_of_another_namespace_does_not_count(mine: Path, kiln: Kiln, keys: Path) -> None:
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(keys / "mine"), "-n", "file", str(mine / RECEIPT)]
    subprocess.run(command, check=True, capture_output=True)
    code, _, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, claim["status"]) == (1, "fails")
    assert "namespace" in claim["detail"]


def test_a_file_that_is_no_signature_does_not_count(mine: Path, kiln: Kiln, keys: Path) -> None:
    (mine / SIGNATURE).write_bytes(b"trust me\n")
    code, _, claim = verify(kiln, mine / RUN, "--allowed-signers", keys / "allowed")
    assert (code, claim["status"]) == (1, "fails")


@pytest.mark.parametrize("command", ["sign", "verify-receipt"])
def test_without_ssh_keygen_both_say_so(
    mine: Path, kiln: Kiln, keys: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kiln("sign", mine / RUN, "--key", keys / "mine").code == 0
    monkeypatch.setenv("PATH", "")
    option = {"sign": ("--key", keys / "mine"), "verify-receipt": ("--allowed-signers", keys / "allowed")}[command]
    done = kiln(command, mine / RUN, *option)
    assert done.code == 3
    assert "KLN301" in done.err and "ssh-keygen is not installed" in done.err


def test_keys_and_lists_that_are_not_there_or_no_keys(mine: Path, kiln: Kiln, keys: Path) -> None:
    assert "KLN204" in kiln("sign", mine / RUN, "--key", keys / "none").err
    done = kiln("sign", mine / RUN, "--key", keys / "allowed")
    assert (done.code, "KLN218" in done.err) == (2, True)
    assert not (mine / SIGNATURE).exists()
    assert kiln("sign", mine / RUN, "--key", keys / "mine").code == 0
    assert "KLN204" in kiln("verify-receipt", mine / RUN, "--allowed-signers", keys / "none").err


def test_a_receipt_that_contradicts_itself_is_not_signed(mine: Path, kiln: Kiln, keys: Path) -> None:
    value = json.loads((mine / RECEIPT).read_bytes())
    (mine / RECEIPT).write_bytes(document(value | {"steps": value["steps"] + 1}))
    done = kiln("sign", mine / RUN, "--key", keys / "mine")
    assert (done.code, "KLN103" in done.err) == (1, True)
    assert not (mine / SIGNATURE).exists()
