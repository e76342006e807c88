"""The card of an exported data set: Markdown behind YAML, made of the manifest and the ingestion receipts alone.

The same evidence gives the same bytes: no time, no host. Text that a user or a plugin chose (names of files, templates,
fields) stands in code spans, where Markdown and HTML are plain text, and a path of the machine loses its directories.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from msgspec import UNSET

from kiln_cli.counting import counted
from kiln_cli.manifests import nonzero
from kiln_cli.receipts import FileRef, IngestionReceipt
from kiln_cli.stage_manifests import AdmitDetails, AdmitManifest
from kiln_stages.evidence.markdown import code_span, table_row

# What the Hub calls data sets of fewer rows than the number; the last has no end.
SIZES = (
    ("n<1K", 10**3),
    ("1K<n<10K", 10**4),
    ("10K<n<100K", 10**5),
    ("100K<n<1M", 10**6),
    ("1M<n<10M", 10**7),
    ("10M<n<100M", 10**8),
    ("100M<n<1B", 10**9),
    ("n>1B", 0),
)
COLUMNS = """| column | type | meaning |
|---|---|---|
| `row_index` | int64 | number of the row in its source, from 1 |
| `line` | int64 | line of the source, from 1 |
| `example_id` | string or null | of the prepared example, where there is one |
| `row_sha256` | string | hash of the conversation; the receipt lists them |
| `input_ids` | list of int32 | all tokens of the conversation |
| `label_spans` | list of int32 | start, end, start, end, ...: what is trained on, in tokens, ends excluded |
| `labels` | list of int32 | the same as one label a token: its id inside of a span, else -100; not shifted |"""
TRAINING = """With TRL, which takes `labels` as they are. Rows stay whole only under `max_length=None`:

```python
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("path/to/this/directory", split="train")
config = SFTConfig(output_dir="out", max_length=None)
SFTTrainer(model="path/to/the/model", args=config, train_dataset=rows).train()
```

With Transformers alone:

```python
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

rows = load_dataset("path/to/this/directory", split="train").select_columns(["input_ids", "labels"])
model = AutoModelForCausalLM.from_pretrained("path/to/the/model")
collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained("path/to/the/model"))
config = TrainingArguments(output_dir="out")
Trainer(model=model, args=config, data_collator=collator, train_dataset=rows).train()
```"""


class Split(NamedTuple):
    """A split of the export: the name that trainers know, the one that admit gives it, its file in the export, the file
    that admit wrote, and the receipt of its rows."""

    name: str
    admitted_as: str
    path: str
    file: FileRef
    receipt: IngestionReceipt


def dataset_card(manifest: AdmitManifest, splits: Sequence[Split]) -> bytes:
    """``README.md`` of the export."""
    kept = sum(split.receipt.rows_kept for split in splits)
    parts = [
        _front_matter(splits, kept),
        "# Admitted conversations",
        f"{counted(kept, 'conversation', 'conversations')} as token ids with labels, made by `kiln admit` of kiln "
        f"{manifest.kiln_version}. The labels cover what the assistant says,\nend of turn included. Two methods found "
        "them and agree, or the row was refused. No row was cut.",
        "The ids belong to the tokenizer and the chat template below: train the model that has these.",
        "## Rows",
        _rows(manifest, splits),
        "## Tokenizer and template",
        _rendering(manifest.details),
        "## Columns",
        COLUMNS,
        "## To train on it",
        TRAINING,
        "## Evidence",
        _evidence(manifest, splits),
        "Kiln does not know the licence of the rows, nor where they were before the files named here.",
    ]
    return ("\n\n".join(parts) + "\n").encode("utf-8")


def shown_locator(receipt: IngestionReceipt) -> str:
    """Where the rows came from, without the directories of a machine: a relative path as given, else its last part."""
    if receipt.source_locator is UNSET:
        return receipt.source
    path = PurePath(str(receipt.source_locator))
    return path.name if path.is_absolute() else str(receipt.source_locator)


def _front_matter(splits: Sequence[Split], kept: int) -> str:
    size = next(name for name, end in SIZES if kept < end or not end)
    files = [line for split in splits for line in (f"  - split: {split.name}", f"    path: {split.path}")]
    return "\n".join(
        [
            "---",
            "configs:",
            "- config_name: default",
            "  data_files:",
            *files,
            "size_categories:",
            f"- {size}",
            "tags:",
            "- kiln",
            "- sft",
            "- tokenized",
            "task_categories:",
            "- text-generation",
            "---",
        ]
    )


def _rows(manifest: AdmitManifest, splits: Sequence[Split]) -> str:
    """Rows read, refused by reason, and kept, a column a split; then what was left out of rows that were kept."""
    receipts = [split.receipt for split in splits]
    counts = [manifest.counts[split.admitted_as] for split in splits]
    refused = [nonzero(each["reasons"]) for each in counts]
    reasons = dict.fromkeys(name for each in refused for name in each)
    lines = [
        table_row("", [split.name for split in splits]),
        table_row("---", ["---:"] * len(splits)),
        table_row("source", [code_span(shown_locator(each)) for each in receipts]),
        table_row("rows read", [each.rows_read for each in receipts]),
        *(table_row(f"refused: {code_span(name)}", [each.get(name, 0) for each in refused]) for name in reasons),
        table_row("rows kept", [each.rows_kept for each in receipts]),
        table_row("tokens", [each["tokens"] for each in counts]),
        table_row("supervised tokens", [each["supervised_tokens"] for each in counts]),
        table_row("tokens of the longest row", [each["longest_row"] for each in counts]),
        table_row("a row that is refused", [_POLICIES[each.invalid_row_policy] for each in receipts]),
    ]
    notes = [
        f"- {split.name}: {what} {code_span(name)}, in {counted(number, 'row', 'rows')}"
        for split, each in zip(splits, counts, strict=True)
        for what, found in (
            ("a field that changes nothing and was left out:", each["ignored_fields"]),
            ("what the template does:", each["template_notes"]),
        )
        for name, number in found.items()
    ]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


_POLICIES = {"skip": "is counted and left out", "fail": "refuses the file"}


def _rendering(details: AdmitDetails) -> str:
    template, tools = details.template, details.tools
    prompt = f", by {code_span(tools.prompt)} ({tools.prompt_sha256})" if tools.prompt else ""
    cap = "none" if details.max_tokens is None else f"{details.max_tokens:,}"
    files = [f"| {code_span(name)} | sha256:{digest} |" for name, digest in details.tokenizer.items()]
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| chat template | {code_span(template.name)}, {template.sha256} |",
            f"| tools | {code_span(tools.mode)}{prompt} |",
            f"| most tokens a row may have | {cap} |",
            *files,
        ]
    )


def _evidence(manifest: AdmitManifest, splits: Sequence[Split]) -> str:
    """What identifies the rows and who made them. The digests are those that ``docs/artifacts.md`` of kiln explains."""
    lines = [
        "`kiln/` holds what `kiln admit` wrote about these rows, byte for byte: its manifest, and for each split a "
        "receipt with\nthe hash of every row that was kept or refused.",
        "",
        "| | |",
        "|---|---|",
        f"| `kiln/admit_manifest.json` | content {manifest.content_sha256} |",
    ]
    if (before := manifest.previous) is not None:
        lines.append(f"| {code_span(before.path)} of `kiln prepare` | content {before.content_sha256} |")
    for split in splits:
        admitted = manifest.details.admitted_sha256[split.admitted_as]
        lines += [
            f"| `{split.path}` | {split.file.bytes:,} bytes, sha256:{split.file.sha256} |",
            f"| {split.name}: kept rows in order | {split.receipt.kept_corpus_sha256} |",
            f"| {split.name}: ids and labels | {admitted} |",
        ]
    lines += [f"| {code_span(plugin.distribution)} | {code_span(plugin.version)} |" for plugin in manifest.plugins]
    return "\n".join(lines)
