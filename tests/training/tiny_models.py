"""Tiny models with random weights: two layers, a few dozen dimensions, a vocabulary of 97."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from kiln_plugins.cross_entropy import cross_entropy
from kiln_stages.training import determinism
from kiln_stages.training.base_adapter import BaseAdapter
from kiln_stages.training.loop import TrainRow
from kiln_stages.training.trainer import Plan

from kiln_cli.config import OptimizerConfig, TrainConfig
from kiln_cli.extensions import LossFunction

determinism.go_offline()

VOCABULARY = 97
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")
# Layers to train where a family names them otherwise than the profile's ten.
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_config(kind: str, **changes: Any) -> Any:
    import transformers as t

    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **changes}),
        "qwen3": lambda: t.Qwen3Config(**{**SMALL, "head_dim": 16, **changes}),
        "gemma2": lambda: t.Gemma2Config(
            **{
                **SMALL,
                "head_dim": 16,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 0.5,
                "query_pre_attn_scalar": 16,
                "sliding_window": 8,
                **changes,
            }
        ),
        "gemma3": lambda: t.Gemma3TextConfig(
            **{**SMALL, "head_dim": 16, "final_logit_softcapping": 0.1, "sliding_window": 8, **changes}
        ),
        "phi3": lambda: t.Phi3Config(**{**SMALL, "pad_token_id": 0, **changes}),
        "gpt2": lambda: t.GPT2Config(
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **changes}
        ),
    }
    return makers[kind]()


def tiny_causal(kind: str, **changes: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = tiny_config(kind, **changes)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    return cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation=attention)


def make_rows(count: int, first: int = 1) -> list[TrainRow]:
    """Rows of differing length with one or two label spans, the same every time."""
    rows = []
    for index in range(first, first + count):
        length = 9 + index % 5
        ids = [(index * 31 + place * place * 7) % VOCABULARY for place in range(length)]
        spans = [(3, 5), (length - 3, length)] if index % 2 else [(4, length)]
        rows.append(TrainRow(index, f"sha256:{index:064x}", ids, spans))
    return rows


def make_plan(
    model_dir: Path,
    rows: int = 4,
    seed: int = 42,
    loss: LossFunction = cross_entropy,
    base_adapter: BaseAdapter | None = None,
    **config: Any,
) -> Plan:
    """A plan for a tiny model: rank 2, three epochs unless told otherwise. ``optimizer`` is a kind."""
    optimizer = OptimizerConfig(kind=config.pop("optimizer", "muon"))
    settings: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 4.0, "epochs": 3, "learning_rate": 1e-2, **config}
    return Plan(
        config=TrainConfig(optimizer=optimizer, threads=1, **settings),
        seed=seed,
        model_dir=model_dir,
        base_model_id="tiny",
        base_model_sha256="sha256:" + "b" * 64,
        rows=make_rows(rows),
        corpus_sha256="sha256:" + "c" * 64,
        loss=loss,
        base_adapter=base_adapter,
        identities={"kiln_train_version": "0.0"},
    )
