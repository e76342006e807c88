"""``[train] base_adapter``: an adapter in PEFT's layout whose values a training begins with, in place of fresh ones.

It must be what the training will write: LoRA of the same rank and scale, on the same layers, with tensors of the same
names, shapes and dtypes. Nothing is converted; whatever differs is named. Of an adapter that lies in the run that made
it, the run's receipt is named too (:func:`with_its_receipt`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import RECEIPT_NAME, read_successful_receipt
from kiln_cli.receipts import ManifestRef
from kiln_cli.text import printable
from kiln_stages.training.tensors import StoredTensor, adapter_content_sha256, read_tensors

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
CONFIG_LIMIT, MODEL_LIMIT = 1 << 24, 1 << 40
OF_A_RUN = ("train", "adapter")  # where a training leaves its adapter
SHOWN = 20  # differing tensors named in the message; the error's details have them all
# Settings of PEFT's LoRA that change what an adapter computes, and the value that plain LoRA has.
PLAIN: dict[str, Any] = {
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "exclude_modules": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_bias": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


class BaseAdapter(NamedTuple):
    """An adapter as its two files hold it. ``path`` is how the config names it."""

    path: str
    settings: dict[str, Any]  # adapter_config.json
    tensors: list[StoredTensor]
    content_sha256: str
    file_sha256: str  # hex, of adapter_model.safetensors
    file_bytes: int
    receipt: ManifestRef | None = None  # of the training that made it, where that is known

    def in_receipt(self) -> dict[str, Any]:
        """Its entry under ``adapters.base``."""
        return {
            "adapter_model_bytes": self.file_bytes,
            "adapter_model_sha256": self.file_sha256,
            "content_sha256": self.content_sha256,
            "path": self.path,
            "receipt": None if self.receipt is None else msgspec.to_builtins(self.receipt),
        }


class Difference(NamedTuple):
    what: str
    base: object
    training: object


def read_base_adapter(directory: Path, path: str) -> BaseAdapter:
    """Raises KilnError KLN204 where one of its two files is missing, KLN206 where one is damaged."""
    for name in (CONFIG, MODEL):
        if not (directory / name).is_file():
            raise KilnError(
                "KLN204",
                f"the base adapter is missing: {printable(directory)} has no {name}",
                hint="name a directory in PEFT's layout with [train] base_adapter; its path counts from the config",
            )
    try:
        settings = strict_json.parse_object(read_bounded(directory / CONFIG, CONFIG_LIMIT))
    except strict_json.JsonFault as fault:
        raise _damaged(directory, f"{CONFIG}: {printable(fault.detail)}") from None
    data = read_bounded(directory / MODEL, MODEL_LIMIT)
    tensors = read_tensors(data, str(directory / MODEL))
    return BaseAdapter(path, settings, tensors, adapter_content_sha256(tensors), sha256_hex(data), len(data))


def receipt_path(path: str) -> str | None:
    """Where the receipt lies that speaks of the adapter at ``path``: two directories above ``train/adapter``.

    None for an adapter that lies anywhere else.
    """
    adapter = Path(os.path.normpath(path))
    return str(adapter.parents[1] / RECEIPT_NAME) if adapter.parts[-2:] == OF_A_RUN else None


def with_its_receipt(base: BaseAdapter, directory: Path) -> BaseAdapter:
    """The adapter, and the receipt of the training that made it if that is there.

    Raises KilnError KLN206 where that receipt is damaged or of a training that failed, KLN207 where it speaks of other
    tensors: then nothing vouches for the adapter, though something seems to.
    """
    named, found = receipt_path(base.path), receipt_path(str(directory))
    if named is None or found is None or not Path(found).exists():
        return base
    receipt = read_successful_receipt(Path(found))
    if (vouched := receipt.adapters["output"]["content_sha256"]) != base.content_sha256:
        raise KilnError(
            "KLN207",
            f"the base adapter {printable(base.path)} is not the one of its {RECEIPT_NAME}: its tensors are "
            f"{base.content_sha256}, the receipt says {printable(vouched)}",
            hint="restore the adapter, or copy it to a directory of its own if it was changed on purpose",
        )
    return base._replace(receipt=ManifestRef(path=named, content_sha256=receipt.content_digest()))


def require_fit(base: BaseAdapter, expected: Iterable[StoredTensor], rank: int, alpha: float) -> None:
    """Raises KilnError KLN217 with every difference from the adapter that is about to be trained."""
    found = [*_setting_differences(base.settings, rank, alpha), *_tensor_differences(base.tensors, expected)]
    if not found:
        return
    rows = [("", "base adapter", "this training"), *(tuple(printable(cell) for cell in each) for each in found[:SHOWN])]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows)
    more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    plural = "thing differs" if len(found) == 1 else "things differ"
    raise KilnError(
        "KLN217",
        f"base adapter {printable(base.path)} does not fit: {len(found)} {plural}\n{table}{more}",
        hint="set lora_rank, lora_alpha, target_modules and dtype as the base adapter has them; none is converted",
        details={"differences": [{key: str(value) for key, value in each._asdict().items()} for each in found]},
    )


def _setting_differences(settings: Mapping[str, Any], rank: int, alpha: float) -> Iterable[Difference]:
    for name, value in {"r": rank, "lora_alpha": alpha}.items():
        if settings.get(name) != value:
            yield Difference(name, settings.get(name), value)
    for name, plain in PLAIN.items():
        if (found := settings.get(name, plain)) != plain and (found or plain):  # null, {} and [] all mean none
            yield Difference(name, found, plain)


def _tensor_differences(base: Iterable[StoredTensor], expected: Iterable[StoredTensor]) -> Iterable[Difference]:
    there, here = ({tensor.name: _shape(tensor) for tensor in side} for side in (base, expected))
    for name in sorted(there.keys() | here.keys()):
        pair = there.get(name, "(absent)"), here.get(name, "(absent)")
        if pair[0] != pair[1]:
            yield Difference(name, *pair)


def _shape(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _damaged(directory: Path, detail: str) -> KilnError:
    return KilnError("KLN206", f"{printable(directory)} is no adapter: {detail}", hint="restore the file")
