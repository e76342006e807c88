"""A run directory as ``kiln admit`` leaves it, made from token ids directly."""

from __future__ import annotations

import time
from pathlib import Path

from kiln_stages.admitting.corpus import CORPUS_SCHEMA, AdmittedRow, admitted_sha256, write_corpus
from training.tiny_models import make_rows

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.files import write_file
from kiln_cli.identity import corpus_sha256
from kiln_cli.manifests import document, reference, write_manifest
from kiln_cli.plugins import load_plugins, version
from kiln_cli.receipts import INGESTION_SCHEMA, IngestionReceipt, StageManifest

CONFIG = """
schema = "kiln.config.v1"
[project]
seed = 42
[model]
path = "{model}"
id = "tiny"
[train]
epochs = 3
learning_rate = 0.01
lora_rank = 2
lora_alpha = 4.0
checkpoint_interval = 4
threads = 1
"""


def admitted_run(directory: Path, model_dir: Path, rows: int = 4, held_out: int = 2) -> tuple[LoadedConfig, Path]:
    """(config, run directory) with ``rows`` rows of corpus and ``held_out`` held-out rows."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "kiln.toml"
    path.write_text(CONFIG.format(model=model_dir))
    config = load_config(path)
    out = directory / "run"
    write_admitted(config, out, rows, held_out)
    return config, out


def write_admitted(config: LoadedConfig, out: Path, rows: int, held_out: int) -> None:
    splits = {"corpus": _admitted(rows, 1), "heldout": _admitted(held_out, 50)}
    outputs = []
    for split, kept in splits.items():
        written = write_corpus(out / "admit" / f"{split}.parquet", kept)
        outputs.append(reference(written, out, split, schema=CORPUS_SCHEMA, rows=len(kept)))
        name = "sft_ingestion.json" if split == "corpus" else f"{split}_ingestion.json"
        written = write_file(out / "admit" / name, document(_ingestion(kept)))
        outputs.append(reference(written, out, "ingestion_receipt", schema=INGESTION_SCHEMA))
    manifest = StageManifest(
        stage="admit",
        kiln_version=version(),
        plugins=load_plugins().loaded(),
        config_sha256=config.sha256("model", "admit"),
        inputs=[],
        outputs=outputs,
        counts={},
        details={
            "config_sections": ["model", "admit"],
            "admitted_sha256": {split: admitted_sha256(kept) for split, kept in splits.items()},
            "template": {"name": "model", "sha256": "sha256:" + "e" * 64},
            "tokenizer": {},
        },
    )
    write_manifest(out, manifest, time.monotonic(), config.base_dir)


def _admitted(count: int, first: int) -> list[AdmittedRow]:
    return [
        AdmittedRow(
            row_index=row.row_index,
            line=row.row_index,
            example_id=None,
            row_sha256=row.row_sha256,
            input_ids=row.input_ids,
            label_spans=row.label_spans,
        )
        for row in make_rows(count, first)
    ]


def _ingestion(kept: list[AdmittedRow]) -> IngestionReceipt:
    hashes = [row.row_sha256 for row in kept]
    return IngestionReceipt(
        source="dataset_path",
        source_locator="rows.jsonl",
        invalid_row_policy="fail",
        rows_read=len(kept),
        rows_kept=len(kept),
        rows_rejected=0,
        kept_row_hashes=hashes,
        rejected_rows=[],
        kept_corpus_sha256=corpus_sha256(hashes),
    )
