"""The cards of a trained adapter and of a model it was merged into: Markdown behind YAML, made of the train receipt.

The same receipt and losses give the same bytes, so that ``verify-receipt`` can hold a card against its receipt: no
time, no host, no path. The base model is named as ``[model] id`` names it, or by the digest of its weights. The front
matter, which the Hub reads, has ``base_model`` only where that name can be one of the Hub's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kiln_cli.receipts import EchoBlock, OpdBlock, TrainReceipt
from kiln_stages.evidence.markdown import code_span, table_row
from kiln_stages.training.kinds import SFT, Kind, kind_named
from kiln_stages.training.metrics import Step

FORMAT = "kiln.model-card.v1"  # changes with the text below: a card of another format is not held against its receipt
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")
HUB_NAME_LIMIT = 96

LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
model = PeftModel.from_pretrained(base, "path/to/this/directory")
```"""
LOAD_MERGED = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```"""
VERIFY = """```sh
kiln verify-receipt RUN
```"""


def adapter_card(receipt: TrainReceipt, steps: Sequence[Step]) -> bytes:
    """``README.md`` of an adapter directory. ``steps``: the loss log."""
    return _document(
        _front_matter(receipt, "peft", "adapter"),
        f"# {receipt.adapter_name}",
        f"A LoRA adapter for {_base(receipt)}, trained by kiln {receipt.kiln['package_version']}.\n"
        "It fits those weights alone, with the tokenizer and the chat template in this directory.",
        "## To load it",
        LOAD_ADAPTER.format(base=json.dumps(_hub_name(receipt) or "path/to/the/base/model")),
        *_account(receipt, steps),
    )


def merged_card(receipt: TrainReceipt, steps: Sequence[Step], proof: str) -> bytes:
    """``README.md`` of a merged model; ``proof`` says in a sentence how it was compared with base and adapter."""
    return _document(
        _front_matter(receipt, "transformers", "finetune"),
        f"# {receipt.adapter_name}, merged",
        f"{_base(receipt)} with the LoRA adapter `{receipt.adapter_name}` in its weights, merged by kiln. {proof}",
        "## To load it",
        LOAD_MERGED,
        *_account(receipt, steps),
    )


def _account(receipt: TrainReceipt, steps: Sequence[Step]) -> Iterable[str]:
    yield "## What it learned from"
    yield _data(receipt)
    yield "## How it was trained"
    yield _training(receipt, steps)
    yield "## To verify it"
    yield (
        "The run directory holds `train_receipt.json` and what it speaks of. This holds every claim of it against the\n"
        "files, back to the raw rows:"
    )
    yield VERIFY
    yield _digests(receipt)
    yield (
        "The receipt is consistent where that command says so; unsigned, it does not say who made it.\n"
        "Kiln does not know the licences of the base model and of the rows."
    )


def _document(*parts: str) -> bytes:
    return ("\n\n".join(parts) + "\n").encode("utf-8")


def _hub_name(receipt: TrainReceipt) -> str | None:
    """The base model's name where it can be one of the Hub's; a digest is none."""
    name = str(receipt.model["id"])
    return name if HUB_NAME.match(name) and len(name) <= HUB_NAME_LIMIT and ".." not in name else None


def _base(receipt: TrainReceipt) -> str:
    name, digest = receipt.model["id"], receipt.model["base_weight_shards"]["sha256"]
    return f"the model whose weights are `{digest}`" if name == digest else code_span(name)


def _front_matter(receipt: TrainReceipt, library: str, relation: str) -> str:
    name = _hub_name(receipt)
    base = [f"base_model: {json.dumps(name)}", f"base_model_relation: {relation}"] if name is not None else []
    lines = [
        "---",
        f"# {FORMAT}",
        *base,
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags:",
        "- kiln",
        "- lora",
        f"- {receipt.hyperparameters['mode']}",
        "---",
    ]
    return "\n".join(lines)


def _kind(receipt: TrainReceipt) -> Kind:
    return kind_named(receipt.hyperparameters["mode"])


def _data(receipt: TrainReceipt) -> str:
    data, counts = receipt.data, receipt.token_counts
    template, kind = receipt.tokenizer["template"], _kind(receipt)
    return _table(
        *_data_set(receipt.training_data),
        (f"{kind.row}s read", data.examples_read),
        ("refused", data.examples_filtered),
        ("trained on, each once an epoch", data.examples_kept),
        ("tokens over all epochs", receipt.tokens()),
        ("supervised tokens over all epochs", counts["action_tokens"]),
        ("chat template", f"{code_span(template['name'])}, {template['sha256']}"),
        *_teacher(receipt),
    )


def _data_set(data: dict[str, Any]) -> list[tuple[str, object]]:
    """Rows of the table that only rows of a named data set have."""
    if "dataset" not in data:
        return []
    return [
        ("named data set", f"{code_span(data['dataset'])}, split {code_span(data['split'])}"),
        ("its split", data["split_manifest_sha256"]),
    ]


def _teacher(receipt: TrainReceipt) -> Iterable[tuple[str, object]]:
    """Who scored the examples, and what of it is proven."""
    opd = receipt.opd
    if isinstance(opd, OpdBlock):
        yield "teacher", f"{code_span(opd.teacher_id)}, revision {opd.teacher_content_revision}"
        yield "candidates of the teacher at each token", opd.top_k
        yield "scored tokens whose id the corpus names", f"{opd.alignment.proven:,} of {opd.alignment.of:,}"


def _training(receipt: TrainReceipt, steps: Sequence[Step]) -> str:
    settings, held = receipt.hyperparameters, receipt.held_out
    kind = kind_named(settings["mode"])
    rows = receipt.data.examples_kept
    losses = [step.loss for step in steps]
    handed = settings["optimizer"]["effective"]
    lines: list[tuple[str, object]] = [
        ("profile", code_span(settings["profile"])),
        ("loss", code_span(settings["loss"])),
        ("epochs", settings["epochs"]),
        (f"steps, one {kind.row} each", receipt.steps),
        ("learning rate, constant", f"{settings['learning_rate']:g}"),
        ("optimizer", code_span(settings["optimizer"]["kind"])),
        ("as torch was handed it", ", ".join(code_span(f"{name} = {value}") for name, value in sorted(handed.items()))),
        ("LoRA rank and alpha", f"{settings['rank']}, {settings['alpha']:g}"),
        ("target layers", ", ".join(code_span(name) for name in settings["target_modules"])),
        ("seed", f"`{settings['seed']}`"),
        ("precision", code_span(receipt.config["train"]["dtype"])),
    ]
    if losses:
        lines += [
            ("mean training loss of the first epoch (nats a supervised token)", _nats(losses[:rows])),
            ("mean training loss of the last epoch", _nats(losses[-rows:])),
        ]
    lines += _distillation(receipt)
    if held is not None:
        lines += [
            (f"held-out {kind.row}s", held.rows),
            (f"{receipt.held_out_loss()} before (nats a supervised token)", f"{held.loss_before:.4f}"),
            (f"{receipt.held_out_loss()} after", f"{held.loss_after:.4f}"),
        ]
    return _table(*lines)


def _distillation(receipt: TrainReceipt) -> Iterable[tuple[str, object]]:
    opd, echo = receipt.opd, receipt.echo
    if not isinstance(opd, OpdBlock) or not isinstance(echo, EchoBlock):
        return
    if opd.initial_opd_loss is not None and opd.final_opd_loss is not None:
        yield "reverse KL from the teacher at the first step", f"{opd.initial_opd_loss:.4f}"
        yield "reverse KL at the last step", f"{opd.final_opd_loss:.4f}"
    added = f"{echo.lambda_:g} x cross-entropy, {echo.env_mask_mode}" if echo.enabled else "not enabled"
    yield "ECHO on observed tokens", added


def _digests(receipt: TrainReceipt) -> str:
    return _table(
        ("adapter tensors", receipt.adapters["output"]["content_sha256"]),
        ("base weights", receipt.model["base_weight_shards"]["sha256"]),
        (
            "kept rows in order" if _kind(receipt) is SFT else "the scored corpus",
            receipt.training_data["sha256"],
        ),
        ("admission", receipt.previous.content_sha256),
        ("config", receipt.config_sha256),
        ("losses by step", receipt.loss_log_sha256),
    )


def _nats(losses: Sequence[float]) -> str:
    return f"{sum(losses) / len(losses):.4f}"


def _table(*rows: tuple[str, object]) -> str:
    return "\n".join(["| | |", "|---|---|", *(table_row(name, [value]) for name, value in rows)])
