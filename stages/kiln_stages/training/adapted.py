"""A run's base model with its adapter on it, loaded as any user would: by transformers and peft, from files that the
receipt vouches for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.manifests import RECEIPT_NAME, require_unchanged
from kiln_cli.receipts import TrainReceipt
from kiln_cli.text import printable
from kiln_stages.training.model import DTYPES, attention_of, require_model_files
from kiln_stages.training.tensors import base_model_sha256, weight_shards


def load_adapted(run: Path, config: LoadedConfig, receipt: TrainReceipt) -> Any:
    """The peft model, in eval mode, on the CPU, in the dtype of the training, which must have ended well.

    Raises KilnError: KLN207 where an adapter file or the base weights are not those of the receipt, KLN302 where there
    is no model.
    """
    directory = run / receipt.adapters["output"]["path"]
    for ref in receipt.outputs:
        if (run / ref.path).parent == directory:
            require_unchanged(ref, run / ref.path, RECEIPT_NAME)
    return attach(load_base(config, receipt), directory)


def load_base(config: LoadedConfig, receipt: TrainReceipt) -> Any:
    model_dir = config.model_dir()
    require_model_files(model_dir)
    found, expected = base_model_sha256(weight_shards(model_dir)), receipt.model["base_weight_shards"]["sha256"]
    if found != expected:
        raise KilnError(
            "KLN207",
            f"{printable(model_dir)} holds other weights than the adapter was trained on: {found}, expected {expected}",
            hint="restore the base model",
        )
    return load_causal(model_dir, config.run.train.dtype)


def load_causal(directory: Path, dtype: str) -> Any:
    """A causal language model from a local directory: safetensors only, no code from it, no network."""
    cast(Any, disable_progress_bar)()
    return cast(Any, AutoModelForCausalLM).from_pretrained(
        str(directory),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=DTYPES[dtype],
        attn_implementation=attention_of(directory),  # as it was trained
    )


def attach(base: Any, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # its own, of no use here
        model = PeftModel.from_pretrained(base, str(adapter), local_files_only=True, autocast_adapter_dtype=False)
    return cast(Any, model).eval()


@torch.inference_mode()
def logits(model: Any, input_ids: list[int]) -> torch.Tensor:
    """input_ids [T] -> logits [T, V], float32."""
    found: torch.Tensor = model(input_ids=torch.tensor([input_ids], dtype=torch.int64)).logits[0].float()  # [T, V]
    return found
