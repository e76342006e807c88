"""Safetensors as bytes: identities against their vectors, stable files, and no torch."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from kiln_stages.training.tensors import (
    Shard,
    StoredTensor,
    adapter_content_sha256,
    base_model_sha256,
    encode_tensors,
    read_tensors,
    weight_shards,
)

from kiln_cli import KilnError

A = StoredTensor("a", "F32", (1, 2), struct.pack("<2f", 1.0, -1.0))
B = StoredTensor("b", "F32", (2, 1), bytes(8))


def test_adapter_content_is_that_of_the_contract() -> None:
    digest = "sha256:b7bbb2fad3426af2e3aac6ef2ac60438af658d479878a7ca60b7c2f34058be85"
    assert adapter_content_sha256([A, B]) == digest
    assert adapter_content_sha256([B, A]) == digest


@pytest.mark.parametrize(
    "other",
    [
        A._replace(name="c"),
        A._replace(dtype="BF16", shape=(1, 4)),
        A._replace(shape=(2, 1)),
        A._replace(data=struct.pack("<2f", 1.0, -1.5)),
    ],
)
def test_name_dtype_shape_and_bytes_all_count(other: StoredTensor) -> None:
    assert adapter_content_sha256([other, B]) != adapter_content_sha256([A, B])


def test_base_model_content_is_that_of_the_contract_and_ignores_names() -> None:
    shards = [Shard("x", 10, "sha256:" + "11" * 32), Shard("y", 20, "sha256:" + "22" * 32)]
    digest = "sha256:b77de79ba32054ed0deae97bdcc66f7299ad7e5298982388bb1b7c19139d3652"
    assert base_model_sha256(shards) == digest
    assert base_model_sha256([shard._replace(filename="z") for shard in reversed(shards)]) == digest


def test_files_have_equal_bytes_for_equal_tensors_and_read_back() -> None:
    data = encode_tensors([B, A])
    assert data == encode_tensors([A, B])
    assert read_tensors(data) == [A, B]
    assert data[8:].startswith(b'{"__metadata__":{"format":"pt"},"a":')


@pytest.mark.parametrize(
    "tensors", [[A, A], [A._replace(dtype="F99")], [A._replace(shape=(3, 1))], [A._replace(data=b"")]]
)
def test_contradictory_tensors_are_not_written(tensors: list[StoredTensor]) -> None:
    with pytest.raises(ValueError, match=r"^a: "):
        encode_tensors(tensors)


@pytest.mark.parametrize("data", [b"", b"xx", bytes(8), (2**60).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_safetensors_are_named(data: bytes) -> None:
    with pytest.raises(KilnError, match=r"adapter\.safetensors is no safetensors file") as caught:
        read_tensors(data, "adapter.safetensors")
    assert caught.value.code == "KLN206"


def test_a_file_cut_short_is_refused() -> None:
    with pytest.raises(KilnError):
        read_tensors(encode_tensors([A, B])[:-1])


def test_weight_shards_are_found_by_name_and_hashed(tmp_path: Path) -> None:
    with pytest.raises(KilnError, match=r"0 \.safetensors files") as caught:
        weight_shards(tmp_path)
    assert caught.value.code == "KLN302"
    (tmp_path / "b.safetensors").write_bytes(b"b")
    (tmp_path / "a.safetensors").write_bytes(b"aa")
    assert [shard[:2] for shard in weight_shards(tmp_path)] == [("a.safetensors", 2), ("b.safetensors", 1)]


def test_reading_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, kiln_stages.training.tensors, kiln_stages.training.checkpoint\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert done.stdout.strip() == "[]"


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
