"""TRL's SFTTrainer on ``corpus.parquet`` as it is, and its own preparation of the same rows (`make test-trl`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests_support import shared_path
from tiny_model import RUN, write_project, write_tiny_model
from with_trl.chat_files import MADE, Row, messages_rows, question_rows, sharegpt_rows
from with_trl.conftest import Admit, ModelWith

from kiln_cli import app

pytest.importorskip("trl", reason="TRL is not here; `make test-trl` runs these in a venv of its own")

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer
from trl import SFTConfig, SFTTrainer

CONTEXT = -100
ROWS_A_STEP = 4


class Watched(SFTTrainer):
    """SFTTrainer that keeps the loss and the batch of each step, and the logits of the model as it was then."""

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        with torch.no_grad():
            seen = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            logits = model(**seen).logits.double()
        self.batch = {name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")} | {
            "logits": logits
        }
        loss = super().compute_loss(model, inputs, **options)
        self.loss = loss.item()
        return loss


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project, prepared and admitted."""
    folder = tmp_path_factory.mktemp("tiny")
    config = write_project(folder, write_tiny_model(folder / "tiny-llama"))
    for stage in ("prepare", "admit"):
        assert app.run(["--quiet", stage, str(config), "--out", str(folder / RUN)]) == 0
    return folder / RUN


@pytest.fixture
def corpus(run: Path, tmp_path: Path) -> Any:
    path = str(run / "admit" / "corpus.parquet")
    return datasets.load_dataset(
        "parquet", data_files={"train": path}, split="train", cache_dir=str(tmp_path / "cache")
    )


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        settings = {
            "max_steps": 1,
            "per_device_train_batch_size": ROWS_A_STEP,
            "max_length": None,
            "save_strategy": "no",
        }
        quiet = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
        return SFTConfig(output_dir=str(tmp_path / "out"), **quiet, **(settings | options))

    return make


def test_datasets_opens_the_corpus_as_it_is(corpus: Any) -> None:
    assert corpus.column_names == [
        "row_index",
        "line",
        "example_id",
        "row_sha256",
        "input_ids",
        "label_spans",
        "labels",
    ]
    assert len(corpus) == 13
    for name in ("input_ids", "label_spans", "labels"):
        assert corpus.features[name].feature.dtype == "int32"


def by_hand(batch: dict[str, Any], spans: dict[tuple[int, ...], list[int]]) -> tuple[float, int]:
    """Mean cross entropy over the tokens inside of ``label_spans``, in float64, and their number; labels unread."""
    losses = []
    for ids, mask, logits in zip(batch["input_ids"], batch["attention_mask"], batch["logits"], strict=True):
        row = ids[: int(mask.sum())].tolist()
        edges = spans[tuple(row)]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            for place in range(start, end):
                scores = logits[place - 1].tolist()
                top = max(scores)
                total = math.log(sum(math.exp(score - top) for score in scores)) + top
                losses.append(total - scores[row[place]])
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("options", [{}, {"dataset_kwargs": {"skip_prepare_dataset": True}}], ids=["as is", "skipped"])
def test_a_step_of_sft_trainer_has_exactly_our_supervised_tokens_in_its_loss(
    run: Path, corpus: Any, config: Callable[..., Any], options: dict[str, Any]
) -> None:
    before = corpus.to_dict()
    trainer = Watched(model=str(run.parent / "tiny-llama"), args=config(**options), train_dataset=corpus)
    assert {name: trainer.train_dataset[name] for name in before} == before
    trainer.train()
    assert trainer.state.global_step == 1
    spans = {tuple(row["input_ids"]): row["label_spans"] for row in corpus}
    expected, count = by_hand(trainer.batch, spans)
    assert int((trainer.batch["labels"] != CONTEXT).sum()) == count
    assert trainer.loss == pytest.approx(expected, rel=1e-5)
    everything = [[0, len(ids)] for ids in spans]
    over_all, _ = by_hand(trainer.batch, dict(zip(spans, [[1, end] for _, end in everything], strict=True)))
    assert abs(over_all - expected) > 1e-3, "the loss over all tokens would not be told from ours"


def test_rows_of_the_held_out_split_are_evaluated_as_they_are(
    run: Path, corpus: Any, config: Callable[..., Any], tmp_path: Path
) -> None:
    path = str(run / "admit" / "heldout.parquet")
    held_out = datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path / "held-out"))
    trainer = SFTTrainer(
        model=str(run.parent / "tiny-llama"), args=config(), train_dataset=corpus, eval_dataset=held_out
    )
    assert trainer.evaluate()["eval_loss"] > 0


def test_max_length_cuts_rows_unless_it_is_none(run: Path, corpus: Any, config: Callable[..., Any]) -> None:
    """What docs/artifacts.md warns of."""
    model = str(run.parent / "tiny-llama")
    assert SFTConfig.__dataclass_fields__["max_length"].default == 1024
    cut = SFTTrainer(model=model, args=config(max_length=140), train_dataset=corpus).train_dataset
    assert max(map(len, cut["input_ids"])) == 140 < max(map(len, corpus["input_ids"]))


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    assert app.run(["--quiet", "export", str(run), "--layout", "hf", "--out", str(tmp_path / "export")]) == 0
    return tmp_path / "export"


def test_an_export_opens_by_its_card(exported: Path, tmp_path: Path, corpus: Any) -> None:
    rows = datasets.load_dataset(str(exported), cache_dir=str(tmp_path / "export-cache"))
    assert {name: len(split) for name, split in rows.items()} == {"train": 13, "validation": 4}
    assert rows["train"].to_dict() == corpus.to_dict()


@pytest.mark.parametrize("place", [0, 1], ids=["TRL", "Transformers"])
def test_the_programs_of_the_card_train(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """As they stand, but for the two paths and what a small machine needs."""
    program = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(encoding="utf-8"), re.DOTALL)[place]
    quick = f'output_dir="{tmp_path / "out"}", max_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no"'
    for old, new in (
        ("path/to/this/directory", str(exported)),
        ("path/to/the/model", str(run.parent / "tiny-llama")),
        ('output_dir="out"', quick),
    ):
        assert old in program
        program = program.replace(old, new)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    told: list[Any] = []
    monkeypatch.setattr(Trainer, "log", lambda self, logs, *_: told.append(logs))
    exec(compile(program, f"card {place}", "exec"), {})
    assert any(logs.get("train_loss", 0) > 0 for logs in told)


def plain_rows() -> list[Row]:
    """Rows without tools, which a data set of one schema can hold."""
    rows = [
        *MADE.values(),
        *messages_rows("openai_toy_chat.jsonl")[:4],
        *messages_rows("gsm8k_messages.jsonl")[:10],
        *messages_rows("mgsm_multilingual.jsonl")[::40],
        *sharegpt_rows("fastchat_dummy_sharegpt.json")[:10],
        *question_rows("gsm8k_question_answer.jsonl")[:10],
    ]
    keys = {"role", "content"}
    return [row for row in rows if "tools" not in row and all(set(message) == keys for message in row["messages"])]


@pytest.mark.parametrize("name", ["qwen2_5_training", "qwen3_training", "phi3_training"])
def test_the_trainers_own_preparation_gives_our_rows(
    admit: Admit, model_with: ModelWith, config: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """TRL from messages and TRL from our corpus end with the same ids and labels."""
    rows, model = plain_rows(), model_with(shared_path(f"data/templates/trl/{name}.jinja"))
    ours = admit(rows, model)
    kept = [rows[number - 1] for number in ours.kept]
    assert len(kept) >= len(rows) - 2
    file = tmp_path / "kept.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(shape),
        args=config(assistant_only_loss=True),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_json(str(file), cache_dir=str(tmp_path / "cache")),
    )
    theirs = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert theirs == [(row["input_ids"], row["labels"]) for row in ours.kept.values()]
