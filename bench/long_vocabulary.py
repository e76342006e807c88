"""The loss alone over a long vocabulary, forward and backward: what it takes above the weights and hidden states.

    python bench/long_vocabulary.py VOCABULARY POSITIONS [--full]

``--full`` projects all positions at once, as a plain loss does. Prints peak memory in MB, seconds and the loss as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

HIDDEN = 576


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("positions", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    import torch
    from kiln_plugins.chunks import CHUNK
    from kiln_plugins.cross_entropy import cross_entropy
    from kiln_stages.training import determinism

    from kiln_cli.extensions import LossBatch

    determinism.fix(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(arguments.vocabulary, HIDDEN, generator=generator).mul_(HIDDEN**-0.5)
    hidden = torch.randn(arguments.positions, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(arguments.vocabulary, (arguments.positions,), generator=generator)
    batch = LossBatch(
        targets=targets.clone(),
        weights=torch.ones(arguments.positions),
        row_ids=torch.zeros(arguments.positions, dtype=torch.int64),
    )

    def step(head: Any, chunk: int) -> Any:
        loss: Any = cross_entropy(hidden, lambda rows: rows @ head.t(), batch, chunk=chunk).loss
        loss.backward()
        return loss

    batch.targets.remainder_(4)
    step(weight[:4], CHUNK)  # what is imported and set up by the first step of all
    batch.targets.copy_(targets)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = memory_mb("VmRSS"), time.perf_counter()
    loss = step(weight, arguments.positions if arguments.full else CHUNK)
    told = {"peak_mb": memory_mb("VmHWM") - before, "seconds": time.perf_counter() - started, "loss": loss.item()}
    print(json.dumps(told))


def memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
