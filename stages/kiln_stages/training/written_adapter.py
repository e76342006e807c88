"""The adapter as it lies on disk, against the one in memory: what was saved must be what was trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded
from kiln_cli.identity import sha256_hex
from kiln_cli.text import printable
from kiln_stages.training.base_adapter import MODEL, MODEL_LIMIT
from kiln_stages.training.tensors import StoredTensor, read_tensors


def require_written(directory: Path, trained: Iterable[StoredTensor], begun: Mapping[str, StoredTensor]) -> None:
    """Reads the adapter back and compares it with what was trained: names, dtypes, shapes and digests.

    ``begun``: the tensors that the training began with, by name. An adapter without tensors, or with every LoRA-B as it
    was, is an error too: it loads without complaint and does nothing new. Raises KilnError KLN402 for a file that reads
    back otherwise, KLN104 for an adapter that was not trained.
    """
    expected = list(trained)
    if different := first_difference(read_tensors(read_bounded(directory / MODEL, MODEL_LIMIT), MODEL), expected):
        raise KilnError(
            "KLN402",
            f"{printable(directory / MODEL)} reads back otherwise than it was written: {different}",
            hint="check the disk, then run the same command again",
        )
    moved = [one for one in expected if one.name.endswith(".lora_B.weight") and one != begun.get(one.name)]
    if not moved:
        what = "holds no tensor" if not expected else "has every LoRA-B as it was before the first step"
        raise KilnError(
            "KLN104",
            f"the adapter {what}: nothing was trained",
            hint="raise `[train] learning_rate`, or look at the loss and its gradients",
        )


def first_difference(found: Iterable[StoredTensor], trained: Iterable[StoredTensor]) -> str:
    """The first tensor, by name, that is not what was trained, with both sides; "" where all are."""
    there, here = ({tensor.name: tensor for tensor in side} for side in (found, trained))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{printable(name)} is {_identity(there.get(name))}, in memory {_identity(here.get(name))}"
    return ""


def _identity(tensor: StoredTensor | None) -> str:
    if tensor is None:
        return "(absent)"
    return f"{tensor.dtype} {list(tensor.shape)} sha256:{sha256_hex(tensor.data)}"
