"""The floor of admission: `tokenizers.encode_batch` on texts that are rendered already, in batches, on all cores.

    python bench/bare_encode.py TOKENIZER.json TEXTS.jsonl

Prints the seconds of the calls alone, and of all processors, as JSON; the texts are in memory before, and the results
are thrown away.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

BATCH = 1_000


def main(tokenizer_json: Path, texts: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    rendered = [json.loads(line) for line in texts.open(encoding="utf-8")]
    tokens = 0
    spent = processor = 0.0
    for start in range(0, len(rendered), BATCH):
        batch = rendered[start : start + BATCH]
        started, before = time.perf_counter(), time.process_time()
        encoded = tokenizer.encode_batch(batch, add_special_tokens=False)
        spent += time.perf_counter() - started
        processor += time.process_time() - before
        tokens += sum(len(each) for each in encoded)
    print(json.dumps({"seconds": spent, "processor": processor, "rows": len(rendered), "tokens": tokens}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
