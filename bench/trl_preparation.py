"""TRL's own preparation of the same rows: what `SFTTrainer` does to a data set under assistant_only_loss=True.

    python bench/trl_preparation.py MODEL ROWS.jsonl [--workers N] [--against CORPUS.parquet]

MODEL is a directory with a tokenizer and a template that has generation markers. The rows are loaded before, the model
has one tiny layer, and only the trainer's preparation is timed; rows are not cut (max_length=None), which spares TRL
two passes. Prints the seconds, and those of all processors, as JSON. ``--against`` compares ids and labels of every row
with kiln's corpus and ends with 1 where they differ. Runs in the venv of bench/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--against", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # a cache of its own: each run prepares anew, and leaves nothing
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a field that TRL's config sets
        os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        spent, processor, dataset = prepare(arguments.model, arguments.rows, arguments.workers, Path(folder))
        if arguments.against is not None:
            return compare(dataset, arguments.against)
        print(json.dumps({"seconds": spent, "processor": processor, "rows": len(dataset)}))
    return 0


def prepare(model: Path, rows: Path, workers: int | None, folder: Path) -> tuple[float, float, Any]:
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    spent = processor = 0.0

    class Timed(SFTTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal spent, processor
            started, before = time.perf_counter(), processor_seconds()
            prepared = super()._prepare_dataset(*args, **kwargs)
            spent += time.perf_counter() - started
            processor += processor_seconds() - before
            return prepared

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    dataset = datasets.load_dataset("json", data_files=str(rows), split="train", cache_dir=str(folder / "rows"))
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    config = SFTConfig(
        output_dir=str(folder / "out"),
        assistant_only_loss=True,
        max_length=None,
        dataset_num_proc=workers,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = Timed(model=LlamaForCausalLM(settings), args=config, train_dataset=dataset, processing_class=tokenizer)
    return spent, processor, trainer.train_dataset


def processor_seconds() -> float:
    """Of this process and of its workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compare(dataset: Any, corpus: Path) -> int:
    """Both sides must hold the same ids and the same labels, or a comparison of their speed means nothing."""
    import datasets

    ours = datasets.Dataset.from_parquet(str(corpus), cache_dir=os.environ["HF_HOME"])
    if len(ours) != len(dataset):
        print(f"{len(dataset)} rows of TRL, {len(ours)} of kiln")
        return 1
    for number, (mine, theirs) in enumerate(zip(ours, dataset, strict=True)):
        for column in ("input_ids", "labels"):
            if mine[column] != theirs[column]:
                print(f"row {number}: {column} differ: kiln {mine[column]}, TRL {theirs[column]}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
