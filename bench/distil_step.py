"""One distillation step over a long vocabulary, forward, backward and update: what it takes above the weights.

    python bench/distil_step.py VOCABULARY POSITIONS CANDIDATES [--full]

The decoder has two layers, so that the head decides. ``--full`` makes all logits of all positions and takes the
candidates' from them, as a plain loss does. Prints peak memory in MB, seconds and the loss as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from long_vocabulary import HIDDEN, memory_mb

if TYPE_CHECKING:
    from kiln_stages.training.model import LanguageModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("positions", type=int)
    parser.add_argument("candidates", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    from kiln_stages.training import determinism

    determinism.fix(arguments.threads)
    import torch
    from kiln_plugins.teacher_top_k import reverse_kl, teacher_top_k
    from kiln_stages.training.loop import TrainRow, row_loss

    from kiln_cli.extensions import LossOut

    generator = torch.Generator().manual_seed(1)
    model = fresh_model(arguments.vocabulary, arguments.positions)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=1e-5)

    def row(positions: int) -> TrainRow:
        ids = torch.randint(arguments.vocabulary, (positions + 1,), generator=generator).tolist()
        shape = (positions, arguments.candidates)
        columns = {
            "teacher_token_ids": torch.randint(arguments.vocabulary, shape, generator=generator),
            "teacher_logprobs": torch.randn(shape, generator=generator).log_softmax(-1).sort(descending=True).values,
        }
        return TrainRow(1, "", ids, [(1, positions + 1)], columns)

    def whole(hidden: Any, project: Any, batch: Any) -> LossOut:
        logits = project(hidden).gather(-1, batch.columns["teacher_token_ids"])
        return LossOut(loss=reverse_kl(logits, batch.columns["teacher_logprobs"]).mean())

    def step(given: TrainRow) -> float:
        out, _ = row_loss(model, whole if arguments.full else teacher_top_k, given)
        cast(Any, out.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out.loss.item()

    long = row(arguments.positions)
    step(row(4))  # what is imported and set up by the first step of all
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = memory_mb("VmRSS"), time.perf_counter()
    loss = step(long)
    told = {"peak_mb": memory_mb("VmHWM") - before, "seconds": time.perf_counter() - started, "loss": loss}
    print(json.dumps(told))


def fresh_model(vocabulary: int, positions: int) -> LanguageModel:
    import torch
    from kiln_stages.training.model import LanguageModel
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=positions + 1,
        tie_word_embeddings=True,
    )
    model = LanguageModel(cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation="sdpa"))
    model.add_lora(16, 32.0, 42)
    return model


if __name__ == "__main__":
    main()
