"""The identity of a teacher that runs here, from its files: weights, adapter, tokenizer, and how it is run.

Everything is derived again when the teacher is verified or scores rows, so a changed file cannot score under the old
name. The protocol is kiln's own: the public server knows served teachers alone.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.text import printable
from kiln_stages.admitting.model_files import load_model_files
from kiln_stages.distilling.identity import (
    IDENTITY_SCHEMA,
    LOCAL_PROTOCOL,
    LOGPROBS_MODE,
    MAX_CANDIDATES,
    AdapterIdentity,
    IdentityFault,
    TeacherIdentity,
)
from kiln_stages.distilling.registry import LocalModel
from kiln_stages.distilling.tokenizers import tokenizer_identity, vocabulary_size
from kiln_stages.training.base_adapter import CONFIG, MODEL, read_base_adapter
from kiln_stages.training.determinism import go_offline
from kiln_stages.training.packages import require_train_extra
from kiln_stages.training.tensors import base_model_sha256, weight_shards

MAX_TOP_K = 32  # no loss takes more; a corpus may carry more, which nobody reads
DTYPES = ("float32", "bfloat16")
DEVICE_TYPES = ("cpu", "cuda")


class LocalTeacher(NamedTuple):
    """What a registration of local files comes to. The paths in ``model`` are as they were given."""

    identity: TeacherIdentity
    model: LocalModel


def identify(
    model: Path,
    adapter: Path | None = None,
    *,
    served_model_id: str | None = None,
    max_top_k: int | None = None,
    max_model_len: int | None = None,
    dtype: str = "float32",
    device_type: str = "cpu",
) -> LocalTeacher:
    """Reads and hashes the files. ``served_model_id``: the directory's name if None; ``max_top_k``: 32, or the whole
    vocabulary where that is smaller; ``max_model_len``: the positions of the model's config.

    Raises KilnError: KLN302 for a missing or damaged model, KLN204/206 for such an adapter, KLN201 where a value breaks
    a rule of identities, KLN301 where transformers is not installed.
    """
    require_train_extra("a local teacher")
    inference = _inference(model, dtype, device_type)
    files = load_model_files(model)
    vocabulary = vocabulary_size(model)
    length = max_model_len or files.positions
    if length is None:
        raise KilnError(
            "KLN201",
            f"{printable(model)} does not state how many positions it has",
            hint="say it with --max-model-len",
        )
    tokenizer = tokenizer_identity(files)
    identity = TeacherIdentity(
        schema=IDENTITY_SCHEMA,
        protocol=LOCAL_PROTOCOL,
        served_model_id=directory_name(model) if served_model_id is None else served_model_id,
        base_model_sha256=_bare(base_model_sha256(weight_shards(model))),
        tokenizer_vocab_sha256=tokenizer.vocab_sha256,
        tokenizer_config_sha256=tokenizer.config_sha256,
        adapter=None if adapter is None else _adapter_identity(adapter),
        vocab_size=vocabulary,
        max_top_k=min(MAX_TOP_K, vocabulary) if max_top_k is None else max_top_k,
        max_model_len=length,
        max_prompt_logprob_candidates=MAX_CANDIDATES,
        logprobs_mode=LOGPROBS_MODE,
        implementation=f"transformers/{inference['transformers']}",
        inference_config_sha256=sha256_hex(canonical_json(inference)),
    )
    try:
        identity.require_sound()
    except IdentityFault as fault:
        raise KilnError("KLN201", f"no teacher can have this identity: {fault}", hint="mend the option") from None
    place = LocalModel(model=str(model), adapter=None if adapter is None else str(adapter), **inference)
    return LocalTeacher(identity, place)


def identify_again(identity: TeacherIdentity, place: LocalModel, model: Path, adapter: Path | None) -> LocalTeacher:
    """The same teacher from its files as they are now. Raises KilnError as :func:`identify` does."""
    found = identify(
        model,
        adapter,
        served_model_id=identity.served_model_id,
        max_top_k=identity.max_top_k,
        max_model_len=identity.max_model_len,
        dtype=place.dtype,
        device_type=place.device_type,
    )
    return found if identity.adapter is None else _with_adapter_name(found, identity.adapter.name)


def inference_differences(pinned: LocalModel, found: LocalModel) -> list[tuple[str, object, object]]:
    """How the run of the model differs: what is behind two values of ``inference_config_sha256``."""
    here, there = msgspec.to_builtins(pinned), msgspec.to_builtins(found)
    return [
        (name, here[name], there[name])
        for name in here
        if name not in ("model", "adapter") and here[name] != there[name]
    ]


def directory_name(path: Path) -> str:
    """The last part of a path, also of ``.`` and ``..``; a link goes by its own name."""
    return Path(os.path.normpath(Path.cwd() / path)).name


def _with_adapter_name(found: LocalTeacher, name: str) -> LocalTeacher:
    """A directory that was moved is the same adapter: its name is what it was registered under."""
    if found.identity.adapter is None:
        return found
    adapter = msgspec.structs.replace(found.identity.adapter, name=name)
    return found._replace(identity=msgspec.structs.replace(found.identity, adapter=adapter))


def _inference(model: Path, dtype: str, device_type: str) -> dict[str, str]:
    """The settings behind ``inference_config_sha256``, as canonical JSON orders them."""
    go_offline()
    import torch

    from kiln_stages.training.model import attention_of

    return {
        "attention": attention_of(model),
        "device_type": device_type,
        "dtype": dtype,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def _adapter_identity(adapter: Path) -> AdapterIdentity:
    """``weights_sha256`` is over the tensors, as in a train receipt, ``config_sha256`` over the file."""
    for name in (CONFIG, MODEL):
        if not (adapter / name).is_file():
            raise KilnError("KLN204", f"{printable(adapter)} has no {name}", hint="name a directory in PEFT's layout")
    tensors = read_base_adapter(adapter, str(adapter)).content_sha256
    return AdapterIdentity(directory_name(adapter), _bare(tensors), hash_file(adapter / CONFIG)[0])


def _bare(digest: str) -> str:
    return digest.removeprefix("sha256:")
