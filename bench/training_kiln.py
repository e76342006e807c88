"""kiln's training of an admitted run, some steps at a time: told on stdin how many, it answers a line of JSON.

    python bench/training_kiln.py CONFIG RUN FOLDER [--dtype float32] [--optimizer adam_w] [--threads 2]

CONFIG and RUN are as for `kiln train`. FOLDER gets the adapter as it is before the first step, which the other side
loads, and `order.json`, the rows' places in the order of the steps. At the end of stdin it tells its peak memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from steps_on_demand import Clock, demands, peak_mb, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", default="adam_w")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    trainer = make_trainer(arguments)
    from kiln_stages.training.order import epoch_order

    write_initial(trainer, arguments.folder / "initial")
    order = epoch_order(trainer.plan.seed, 0, len(trainer.plan.rows))
    (arguments.folder / "order.json").write_text(json.dumps(order))
    steps = trainer.steps()
    for count in demands({"rows": len(order), "threads": arguments.threads}):
        say(block(trainer, steps, count))
    peak = peak_mb()
    say({"peak_mb": peak} | products_alone(trainer))


def make_trainer(arguments: argparse.Namespace) -> Any:
    from kiln_stages.training.inputs import read_inputs
    from kiln_stages.training.trainer import Trainer

    from kiln_cli.config import load_config
    from kiln_cli.plugins import load_plugins
    from kiln_cli.terminal import SILENT

    settings = {"dtype": arguments.dtype, "optimizer.kind": arguments.optimizer, "threads": arguments.threads}
    config = load_config(arguments.config, [f"train.{name}={value}" for name, value in settings.items()])
    return Trainer(read_inputs(config, arguments.run, load_plugins(), SILENT).plan())


def write_initial(trainer: Any, directory: Path) -> None:
    """The adapter before its first step, which kiln itself refuses to write."""
    from kiln_stages.training.lora import adapter_config
    from kiln_stages.training.tensors import encode_tensors

    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_bytes(adapter_config(trainer.model.shape, trainer.plan.base_model_id))
    (directory / "adapter_model.safetensors").write_bytes(encode_tensors(trainer.adapter_tensors()))


def block(trainer: Any, steps: Iterator[Any], count: int) -> dict[str, Any]:
    before, clock = trainer.phases.optimizer, Clock()
    records = list(islice(steps, count))
    return clock.spent() | {
        "optimizer_seconds": trainer.phases.optimizer - before,
        "tokens": sum(record.tokens for record in records),
        "losses": [record.loss for record in records],
    }


def products_alone(trainer: Any) -> dict[str, float]:
    """The arithmetic limit: what a step of the rows' mean length would take if it were nothing but the products with
    base weights, forward and backward, and with the head where a token is supervised."""
    import torch
    from kiln_stages.training.loop import supervised_positions

    rows = trainer.plan.rows
    tokens = round(sum(len(row.input_ids) for row in rows) / len(rows))
    supervised = round(sum(len(supervised_positions(row)) for row in rows) / len(rows))
    head = trainer.model.causal.get_output_embeddings().weight
    shapes = Counter(
        (tokens, *module.base_layer.weight.shape)
        for module in trainer.model.causal.modules()
        if hasattr(module, "base_layer")
    ) + Counter([(supervised, *head.shape)])
    seconds = flops = 0.0
    with torch.no_grad():
        for (count, wide, narrow), times in shapes.items():
            x, y, weight = (
                torch.randn(shape).to(head.dtype) for shape in ((count, narrow), (count, wide), (wide, narrow))
            )
            seconds += times * (shortest(lambda: x @ weight.t()) + shortest(lambda: y @ weight))  # noqa: B023
            flops += times * 4 * count * wide * narrow
    return {
        "limit_tokens_per_second": tokens / seconds,
        "gigaflops_per_second": flops / seconds / 1e9,
        "gigaflops_per_token": flops / tokens / 1e9,
    }


def shortest(product: Callable[[], Any], repeats: int = 15) -> float:
    """Seconds of the quickest of some runs: what the processor can do."""
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        product()
        took.append(time.perf_counter() - started)
    return min(took)


if __name__ == "__main__":
    main()
