"""TRL's SFTTrainer over the same rows, from the same initial adapter, some steps at a time (see training_kiln.py).

    python bench/training_trl.py MODEL CORPUS.parquet FOLDER [--dtype float32] [--rate 3e-4] [--threads 2]

FOLDER holds what training_kiln.py wrote there. One row a step, in kiln's order, AdamW with kiln's settings, a constant
rate, no clipping, no gradient checkpointing; what is left at its default is TRL's own. Under bfloat16 model and adapter
are bfloat16, as kiln's are, and not float32 under autocast.
Runs in the venv of bench/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from steps_on_demand import Clock, demands, peak_mb, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        train(arguments, folder)
    say({"peak_mb": peak_mb()})


def train(arguments: argparse.Namespace, folder: str) -> None:
    import datasets
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig

    torch.set_num_threads(arguments.threads)
    datasets.disable_progress_bars()
    order = json.loads((arguments.folder / "order.json").read_text())
    rows = datasets.Dataset.from_parquet(str(arguments.corpus), cache_dir=folder)
    rows = rows.select_columns(["input_ids", "labels"]).select(order)
    base = AutoModelForCausalLM.from_pretrained(str(arguments.model), dtype=arguments.dtype, local_files_only=True)
    model = PeftModel.from_pretrained(
        base, str(arguments.folder / "initial"), is_trainable=True, autocast_adapter_dtype=False
    )
    config = SFTConfig(
        output_dir=folder,
        max_steps=len(order),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        learning_rate=arguments.rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        max_length=None,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.model), local_files_only=True)
    run(model, config, rows, tokenizer, arguments.threads)


def run(model: Any, config: Any, rows: Any, tokenizer: Any, threads: int) -> None:
    from transformers import TrainerCallback
    from trl import SFTTrainer

    losses: list[float] = []
    numbers = [len(ids) for ids in rows["input_ids"]]

    class Kept(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    class Blocks(TrainerCallback):
        """Waits at the end of a block for the next. Imports, loading and set-up lie before the first."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.asked = demands({"rows": len(numbers), "threads": threads})
            self._next(state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.until:
                done = slice(self.begun, self.until)
                say(self.clock.spent() | {"tokens": sum(numbers[done]), "losses": losses[done]})
                self._next(state, control)

        def _next(self, state: Any, control: Any) -> None:
            count = next(self.asked, None)
            self.begun = state.global_step
            self.until = self.begun + (count or 0)
            self.clock = Clock()
            if count is None:
                control.should_training_stop = True

    Kept(model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Blocks()]).train()


if __name__ == "__main__":
    main()
