"""Conversations to admit, made of real rows: user turns are queries of downloaded rows, assistant turns their calls.

Half have one exchange and half have two, which gives about 95 to 200 tokens under SmolLM2's template. Each query and
each answer carries the number of its conversation, so no text comes twice and nothing is won by remembering one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED_ROWS = Path(__file__).resolve().parent.parent / "fixtures" / "downloaded" / "bfcl_xlam_rows.jsonl"
LONGEST_TEXT = 120  # characters


def write(path: Path, count: int) -> None:
    """``count`` lines ``{"messages": [...]}``; equal bytes for an equal count, and the first n of a longer file."""
    seeds = [json.loads(line) for line in SEED_ROWS.read_text(encoding="utf-8").splitlines()]
    seeds = [row for row in seeds if max(len(row["query"]), len(row["answers"])) <= LONGEST_TEXT]
    chance = random.Random(4)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            messages = []
            for turn in range(1 + number % 2):
                seed = seeds[chance.randrange(len(seeds))]
                query = f"{seed['query'].strip()} (case {number}.{turn})"
                answer = f"For case {number}.{turn}: {seed['answers']}"
                messages += [{"role": "user", "content": query}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
