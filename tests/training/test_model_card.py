"""The card of an adapter: made of the receipt, valid on the Hub, held against the receipt by ``verify-receipt``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest
import torch
from huggingface_hub import ModelCard
from kiln_stages import verify_receipt
from kiln_stages.evidence.model_card import FORMAT, adapter_card
from kiln_stages.training.metrics import read_steps
from peft import PeftModel
from transformers import AutoModelForCausalLM

from kiln_cli.files import hash_file
from kiln_cli.manifests import document, read_receipt
from kiln_cli.receipts import FileRef, TrainReceipt

CLAIM = "the adapter's README.md is the card of this receipt"


def receipt_of(run: Path) -> TrainReceipt:
    return read_receipt(run / "train_receipt.json")


def card_of(run: Path) -> str:
    return (run / "train" / "adapter" / "README.md").read_text(encoding="utf-8")


def test_the_front_matter_is_the_hubs(finished: Path) -> None:
    data = ModelCard.load(finished / "train" / "adapter" / "README.md").data.to_dict()
    assert data == {
        "base_model": "tiny",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["kiln", "lora", "sft"],
    }


def test_the_card_tells_what_the_receipt_says(finished: Path) -> None:
    text, receipt = card_of(finished), receipt_of(finished)
    assert receipt.held_out is not None
    for value in (
        receipt.adapters["output"]["content_sha256"],
        receipt.model["base_weight_shards"]["sha256"],
        receipt.data.sft_ingestion.kept_corpus_sha256,
        receipt.tokenizer["template"]["sha256"],
        receipt.loss_log_sha256,
        f"{receipt.held_out.loss_before:.4f}",
        f"{receipt.held_out.loss_after:.4f}",
        "| supervised tokens over all epochs | " + f"{receipt.token_counts['action_tokens']:,} |",
        "| epochs | 3 |",
        "| steps, one conversation each | 12 |",
        "| LoRA rank and alpha | 2, 4 |",
        "`q_proj`",
        "kiln verify-receipt RUN",
    ):
        assert str(value) in text, value
    losses = [step.loss for step in read_steps(finished / "train" / "metrics.jsonl")]
    assert f"first epoch (nats a supervised token) | {sum(losses[:4]) / 4:.4f} |" in text
    assert f"last epoch | {sum(losses[-4:]) / 4:.4f} |" in text


def test_peft_loads_the_adapter_and_gives_the_held_out_loss_that_the_card_tells(finished: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(str(finished.parent / "model"))
    model = PeftModel.from_pretrained(base, str(finished / "train" / "adapter")).eval()
    losses: list[float] = []
    for ids, labels in (
        pl.read_parquet(finished / "admit" / "heldout.parquet").select("input_ids", "labels").iter_rows()
    ):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        targets = torch.tensor(labels[1:])
        losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100].tolist()
    held_out = receipt_of(finished).held_out
    assert held_out is not None and held_out.supervised_tokens == len(losses)
    assert sum(losses) / len(losses) == pytest.approx(held_out.loss_after, rel=1e-5)


def test_no_path_of_the_machine_is_in_the_card(finished: Path) -> None:
    """Nor where the model lies, which the receipt knows."""
    text = card_of(finished)
    assert str(finished.parent) not in text and str(Path.home()) not in text
    assert receipt_of(finished).model["path"] == "model" and "(model" not in text and '"model"' not in text


def test_without_an_id_the_base_is_named_by_digest_and_the_hub_is_told_of_none(run: Path) -> None:
    receipt = receipt_of(run)
    digest = receipt.model["base_weight_shards"]["sha256"]
    receipt.model["id"] = digest
    text = adapter_card(receipt, []).decode()
    assert f"the model whose weights are `{digest}`" in text
    assert "base_model" not in text.split("---\n")[1]
    assert 'from_pretrained("path/to/the/base/model")' in text


@pytest.mark.parametrize("name", ["/home/me/model", "../model", "a/b/c", "x" * 97, "a b", 'a"\n- x'])
def test_a_name_that_is_none_of_the_hub_stays_out_of_the_front_matter(run: Path, name: str) -> None:
    receipt = receipt_of(run)
    receipt.model["id"] = name
    assert "base_model" not in adapter_card(receipt, []).decode().split("---\n")[1]


def test_text_of_others_is_no_markup(run: Path) -> None:
    receipt = receipt_of(run)
    receipt.tokenizer["template"]["name"] = "a|b`<img src=x>`\n# c"
    text = adapter_card(receipt, []).decode()
    assert "| chat template | `a\\|b'<img src=x>'\\n# c`, " in text


def test_a_card_that_says_something_else_fails_even_where_the_receipt_was_sealed_over_it(run: Path) -> None:
    path = run / "train" / "adapter" / "README.md"
    path.write_text(card_of(run).replace("| epochs | 3 |", "| epochs | 4 |"), encoding="utf-8")
    receipt = receipt_of(run)
    receipt.outputs[3] = card_reference(run, receipt)
    receipt.seal()
    (run / "train_receipt.json").write_bytes(document(receipt))
    failing = [line for line in verify_receipt.run(run).claims if line.status == "fails"]
    assert [line.name for line in failing] == [CLAIM]
    assert "| epochs | 4 |, expected | epochs | 3 |" in failing[0].detail


def test_a_card_of_another_format_is_held_by_its_digest_alone(run: Path) -> None:
    path = run / "train" / "adapter" / "README.md"
    path.write_text(card_of(run).replace(FORMAT, "kiln.model-card.v9"), encoding="utf-8")
    claims = {line.name: line.status for line in verify_receipt.run(run).claims}
    assert claims[CLAIM] == "not checkable here"
    assert claims["train/adapter/README.md has its digest"] == "fails"


def card_reference(run: Path, receipt: TrainReceipt) -> FileRef:
    """The receipt's reference to the card, with the digest of what lies there now."""
    sha256, size = hash_file(run / "train" / "adapter" / "README.md")
    return msgspec.structs.replace(receipt.outputs[3], sha256=sha256, bytes=size)
