"""``adapter_smoke_test``: the adapter loaded from disk as a user would load it, and a few tokens written with it.

The base model is loaded a second time for it, so that nothing of the training's own model can help along.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.training.lora import store
from kiln_stages.training.model import LanguageModel, attention_of, load_language_model
from kiln_stages.training.tensors import StoredTensor
from kiln_stages.training.written_adapter import first_difference

NEW_TOKENS = 4
# How far peft's logits may lie from the trained ones, relative to the largest: it sums in another order. Thirty layers
# of a model in use were 2e-7 and 8e-3 apart; an adapter that is scaled or placed otherwise is off by far more.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def smoke_test(trained: LanguageModel, adapter: Path, model_dir: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """What the receipt has under ``adapter_smoke_test``: the tensors that peft loaded, and what each prompt became.

    Each prompt is encoded as plain text, without a template; the tokens are the most probable ones. Raises KilnError
    KLN104 where peft loads other tensors than were trained, or the model then gives other logits than the trained one.
    """
    device = str(trained.device)
    dtype = str(trained.dtype).removeprefix("torch.")
    base = load_language_model(model_dir, dtype=dtype, attention=attention_of(model_dir), device=device)
    reloaded = _load(base, adapter)
    found = _adapter_tensors(reloaded)
    if different := first_difference(found, store(trained.parameters)):
        raise _failed(f"peft loads another adapter than was trained: {different}")
    written = []
    worst = 0.0
    for prompt, ids in zip(prompts, _encode(model_dir, prompts, device), strict=True):
        difference = _logit_difference(reloaded, trained, ids)
        if not difference <= BOUNDS[trained.dtype]:  # written so that NaN fails too
            raise _failed(
                f"behind {printable(prompt)!r} the logits are {difference:.3g} of the largest from the trained"
            )
        worst = max(worst, difference)
        written.append({"new_token_ids": _greedy(reloaded, ids), "prompt": prompt})
    return {"largest_logit_difference": worst, "new_tokens": NEW_TOKENS, "prompts": written, "tensors": len(found)}


def _load(base: LanguageModel, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        try:
            loaded = PeftModel.from_pretrained(
                cast(Any, base.causal), str(adapter), local_files_only=True, autocast_adapter_dtype=False
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _failed(f"peft cannot load the adapter: {printable(error)}") from error
    return loaded.eval()


def _adapter_tensors(model: Any) -> list[StoredTensor]:
    """The LoRA leaves of a model that peft made, under their names in the adapter file."""
    named = model.named_parameters()
    return store({name.replace(".default.", "."): leaf for name, leaf in named if ".lora_" in name})


def _encode(model_dir: Path, prompts: Sequence[str], device: str) -> list[Tensor]:
    """Token ids [1, T] of each prompt, by the model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    encoded = []
    for prompt in prompts:
        ids: list[int] = tokenizer(prompt)["input_ids"]
        if not ids:
            raise _failed(f"the prompt {printable(prompt)!r} has no token")
        encoded.append(torch.tensor([ids], dtype=torch.int64, device=device))
    return encoded


@torch.no_grad()
def _logit_difference(reloaded: Any, trained: LanguageModel, ids: Tensor) -> float:
    """Largest difference of the logits behind ids [1, T], relative to the largest logit."""
    with trained.modules_own():
        here = trained.project(trained.hidden(ids)[0, -1:]).float()[0]  # [V]
    there: Tensor = reloaded(input_ids=ids, use_cache=False).logits[0, -1].float()  # [V]
    return float((there - here).abs().max() / here.abs().max().clamp(min=1e-30))


@torch.no_grad()
def _greedy(model: Any, ids: Tensor) -> list[int]:
    """The NEW_TOKENS most probable tokens behind ids [1, T], one after the other."""
    length = ids.shape[1]
    for _ in range(NEW_TOKENS):
        following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)  # [1, 1]
        ids = torch.cat((ids, following), dim=1)
    new: list[int] = ids[0, length:].tolist()
    return new


def _failed(detail: str) -> KilnError:
    return KilnError(
        "KLN104",
        f"the adapter smoke test failed: {detail}",
        hint="the adapter lies under train/adapter; report this, or train without [train] adapter_smoke_test",
    )
