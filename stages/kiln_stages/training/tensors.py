"""Safetensors files as plain bytes: reading, stable writing, and the two identities built on them. Needs no torch.

The adapter's identity is over its tensors (name, dtype, shape, bytes), because a safetensors header may order the same
tensors in another way. The base model's identity is over its weight shards, whatever they are called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import safetensors

from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.identity import Domain, domain_hasher, length_prefixed
from kiln_cli.text import printable

# Safetensors' own names of element types, the names its writer wants, and bytes an element.
DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
MAX_SHARDS = 4096


class StoredTensor(NamedTuple):
    """One tensor as a file holds it. ``dtype`` is safetensors' name (``F32``), ``data`` little-endian, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Shard(NamedTuple):
    """One file of base weights: its name, size in bytes, and ``sha256:`` digest."""

    filename: str
    size_bytes: int
    sha256: str


def read_tensors(data: bytes, what: str = "the file") -> list[StoredTensor]:
    """The tensors of a safetensors file, by name. Raises KilnError KLN206 where the bytes are none."""
    try:
        found: list[tuple[str, dict[str, Any]]] = cast(Any, safetensors.deserialize)(data)
    except safetensors.SafetensorError as error:
        raise KilnError(
            "KLN206", f"{printable(what)} is no safetensors file: {printable(error)}", hint="restore the file"
        ) from None
    stored = [StoredTensor(name, str(t["dtype"]), tuple(t["shape"]), bytes(t["data"])) for name, t in found]
    return sorted(stored, key=lambda tensor: tensor.name)


def encode_tensors(tensors: Iterable[StoredTensor]) -> bytes:
    """A safetensors file with equal bytes for equal tensors: one metadata key, tensors by name.

    Raises ValueError for a dtype outside DTYPES, a length that does not fit the shape, or a name given twice.
    """
    specs: dict[str, safetensors.TensorSpec] = {}
    keep: list[Any] = []  # the writer is handed addresses: their owners must outlive the call
    for tensor in sorted(tensors, key=lambda item: item.name):
        dtype, width = DTYPES.get(tensor.dtype, ("", 0))
        if not width or len(tensor.data) != width * prod(tensor.shape) or tensor.name in specs:
            raise ValueError(f"{tensor.name}: {tensor.dtype} {tensor.shape} with {len(tensor.data)} bytes")
        buffer = (ctypes.c_char * max(len(tensor.data), 1)).from_buffer_copy(tensor.data or b"\0")
        keep.append(buffer)
        specs[tensor.name] = cast(Any, safetensors.TensorSpec)(
            dtype=dtype, shape=list(tensor.shape), data_ptr=ctypes.addressof(buffer), data_len=len(tensor.data)
        )
    return bytes(safetensors.serialize(specs, {"format": "pt"}))


def adapter_content_sha256(tensors: Iterable[StoredTensor]) -> str:
    """``sha256:`` digest of the tensors, independent of their order in a file (domain kiln-cli.adapter-content.v1)."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name.encode("utf-8"))
    digest = domain_hasher(Domain.ADAPTER_CONTENT)
    digest.update(len(ordered).to_bytes(8, "big"))
    for tensor in ordered:
        digest.update(length_prefixed(tensor.name.encode("utf-8")))
        digest.update(length_prefixed(tensor.dtype.encode("ascii")))
        for number in (len(tensor.shape), *tensor.shape):
            digest.update(number.to_bytes(8, "big"))
        digest.update(length_prefixed(tensor.data))
    return "sha256:" + digest.hexdigest()


def weight_files(model: Path) -> list[Path]:
    """The ``.safetensors`` files of a model directory, by name."""
    return sorted(model.glob("*.safetensors"))


def weight_shards(model: Path, digest: Callable[[Path], tuple[str, int]] = hash_file) -> list[Shard]:
    """The ``.safetensors`` files of a model directory by name, hashed by ``digest`` (hex, bytes).

    Raises KilnError KLN302 where there are none.
    """
    paths = weight_files(model)
    if not 1 <= len(paths) <= MAX_SHARDS:
        raise KilnError(
            "KLN302",
            f"{printable(model)} holds {len(paths)} .safetensors files, expected 1..{MAX_SHARDS}",
            hint="run `python fixtures/fetch_model.py`, or name a model directory with `[model] path`",
        )
    shards = []
    for path in paths:
        sha256, size = digest(path)
        shards.append(Shard(path.name, size, "sha256:" + sha256))
    return shards


def model_config_sha256(model: Path) -> str:
    """``sha256:`` digest of a model directory's ``config.json``. Raises KilnError KLN204 where it is not there."""
    return "sha256:" + hash_file(model / "config.json")[0]


def base_model_sha256(shards: Iterable[Shard]) -> str:
    """``sha256:`` identity of base weights by content: renaming a shard does not change it."""
    records = sorted((bytes.fromhex(shard.sha256.removeprefix("sha256:")), shard.size_bytes) for shard in shards)
    digest = domain_hasher(Domain.BASE_MODEL_CONTENT)
    digest.update(len(records).to_bytes(8, "little"))
    for content, size in records:
        digest.update(size.to_bytes(8, "little") + content)
    return "sha256:" + digest.hexdigest()
