"""``kiln export --merged``: the adapter added into the base model's weights, a model directory that needs no peft.

What is written is loaded again from its files and must give the adapter's logits, or no directory appears.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import flush_files, hash_file, publish_directory, read_bounded, write_file
from kiln_cli.receipts import TrainReceipt
from kiln_cli.text import printable
from kiln_stages.admitting.corpus import AdmittedRow, read_corpus
from kiln_stages.admitting.model_files import FILE_LIMIT
from kiln_stages.distilling.rows import ScoredRow, ScoredRows
from kiln_stages.evidence.model_card import merged_card
from kiln_stages.evidence.receipt_claims import kind_of
from kiln_stages.exported_file import ExportedFile
from kiln_stages.training import determinism
from kiln_stages.training.adapted import load_adapted, load_causal, logits
from kiln_stages.training.kinds import OPD
from kiln_stages.training.metrics import read_steps
from kiln_stages.training.tokenizer_copy import KINDS

PROOF_ROWS, PROOF_TOKENS = 3, 512
# How far a merged model's logits may lie from the adapter's, relative to the largest: W + BA is rounded once to the
# weights' dtype, where the adapter's path adds it to each activation.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-2}


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """``largest_difference``: of logits, relative to the largest one, over ``proof_tokens`` tokens of admitted rows."""

    schema: str = "kiln.merged.v1"
    directory: str
    dtype: str
    files: list[ExportedFile]
    largest_difference: float
    bound: float
    proof_tokens: int

    def account(self) -> str:
        size = sum(file.bytes for file in self.files)
        where = printable(self.directory)
        return (
            f"export: base and adapter merged in {self.dtype}: {len(self.files)} files, {size / (1 << 20):,.1f} MiB\n"
            f"  logits within {self.largest_difference:.1e} of the adapter's over {self.proof_tokens:,} tokens "
            f"(bound {self.bound:g})\n"
            f"written: {where}\nnext: AutoModelForCausalLM.from_pretrained({where!r})"
        )


class _Proof(msgspec.Struct, frozen=True, kw_only=True):
    difference: float
    tokens: int


def export_merged(run: Path, config: LoadedConfig, receipt: TrainReceipt, target: Path) -> Merged:
    """Makes the directory, whole or not at all.

    Raises KilnError: KLN216 where ``target`` exists, KLN103 where the merged model's logits are not the adapter's, and
    as :func:`load_adapted` does.
    """
    if target.exists() or target.is_symlink():
        raise KilnError(
            "KLN216", f"{printable(target)} exists; a merged model makes its directory", hint="name another"
        )
    determinism.fix(config.run.train.threads)
    dtype, adapter = config.run.train.dtype, run / receipt.adapters["output"]["path"]
    texts = _proof_rows(run, receipt)
    model = load_adapted(run, config, receipt)
    wanted = [logits(model, text) for text in texts]
    model = model.merge_and_unload()
    steps = read_steps(run / "train" / "metrics.jsonl")
    proof: list[_Proof] = []

    def fill(staging: Path) -> None:
        model.save_pretrained(str(staging))
        for name in KINDS:
            write_file(staging / name, read_bounded(adapter / name, FILE_LIMIT))
        flush_files(staging)
        proof.append(_prove(load_causal(staging, dtype), texts, wanted, dtype))
        write_file(staging / "README.md", merged_card(receipt, steps, _words(proof[0], dtype)))

    publish_directory(target, fill)
    return Merged(
        directory=str(target),
        dtype=dtype,
        files=[_file(path, target) for path in sorted(target.iterdir())],
        largest_difference=proof[0].difference,
        bound=BOUNDS[dtype],
        proof_tokens=proof[0].tokens,
    )


def _proof_rows(run: Path, receipt: TrainReceipt) -> list[list[int]]:
    """The ids of a few admitted rows, cut to a length that is quickly gone over."""
    path = run / "admit" / "corpus.parquet"
    rows: Sequence[AdmittedRow | ScoredRow] = ScoredRows(path) if kind_of(receipt) is OPD else read_corpus(path)
    return [row.input_ids[:PROOF_TOKENS] for row in rows[:PROOF_ROWS]]


def _prove(merged: Any, texts: Sequence[list[int]], wanted: Sequence[Any], dtype: str) -> _Proof:
    """Raises KilnError KLN103 where a logit is further off than the bound of the dtype."""
    difference = 0.0
    for text, expected in zip(texts, wanted, strict=True):
        found = logits(merged.eval(), text)
        difference = max(difference, float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)))
        if not difference <= BOUNDS[dtype]:  # written so that NaN is refused too
            raise KilnError(
                "KLN103",
                f"the merged model's logits differ from the adapter's by {difference:.3g} of the largest, "
                f"bound {BOUNDS[dtype]:g}",
                hint="use the adapter as it is, with peft",
            )
    return _Proof(difference=difference, tokens=sum(map(len, texts)))


def _words(proof: _Proof, dtype: str) -> str:
    return (
        f"Loaded from these files\nit gave the adapter's logits within {proof.difference:.1e} of the largest over "
        f"{proof.tokens:,} tokens (bound {BOUNDS[dtype]:g}, {dtype})."
    )


def _file(path: Path, target: Path) -> ExportedFile:
    sha256, size = hash_file(path)
    return ExportedFile(path=path.relative_to(target).as_posix(), sha256=sha256, bytes=size)
