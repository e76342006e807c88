"""``kiln generate``: what the model writes with the adapter beside what it writes without it.

The adapter is loaded as any user would load it, through peft; decoding is greedy, so the same files give the same text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input, read_bounded
from kiln_cli.lines import LineReader
from kiln_cli.manifests import RECEIPT_NAME, read_manifest, read_successful_receipt
from kiln_cli.receipts import TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import prepared_rows
from kiln_stages.admitting.model_files import FILE_LIMIT, load_model_files
from kiln_stages.distilling.rows import SCORED_CORPUS_SCHEMA, ScoredRows, spans
from kiln_stages.evidence.receipt_claims import CHAT_TEMPLATE
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.reading.sources import json_lines
from kiln_stages.training.packages import require_train_extra


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt``: the message that is answered; of a scored example all text before its last answer. ``expected``: the
    row's own answer; None for a prompt of the user's."""

    prompt: str
    expected: str | None
    base: str
    adapter: str


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a trained adapter.")],
    row: Annotated[int | None, typer.Option("--row", min=1, help="A row of the split, counted from 1.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A user message instead.")] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Where --row counts: test; of a distillation heldout, or else corpus."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 96,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write an answer with the base model and with the adapter, one below the other."""
    result = run(run_directory, row=row, prompt=prompt, split=split, max_new_tokens=max_new_tokens)
    if json:
        terminal.json_data({"schema": "kiln.generation.v1", **msgspec.to_builtins(result)})
        return
    lines = [f"prompt:   {printable(result.prompt)}"]
    lines += [f"expected: {printable(result.expected, 400)}"] if result.expected is not None else []
    lines += [f"base:     {printable(result.base, 400)}", f"adapter:  {printable(result.adapter, 400)}"]
    terminal.data("\n".join(lines))


def run(
    run_directory: Path, *, row: int | None, prompt: str | None, split: str | None = None, max_new_tokens: int = 96
) -> Generation:
    """Greedy answers of both models. ``split``: where ``row`` counts; if None, rows that were not trained on, if any.

    Raises KilnError KLN201 for a call that names no prompt, KLN206 for a missing row or adapter, KLN207 for an adapter
    or base model that is not the receipt's, KLN302 for a missing model.
    """
    if (row is None) == (prompt is None):
        raise KilnError("KLN201", "give one of --row and --prompt", hint="kiln generate RUN --row 1")
    require_train_extra("kiln generate")
    receipt = read_successful_receipt(run_directory / RECEIPT_NAME)
    config = load_config(run_directory / "config.resolved.toml")
    admit = read_manifest(run_directory, AdmitManifest)
    template = _template(run_directory, config, receipt)
    if row is not None and admit.details.opd is not UNSET:
        ids, answer = _scored_row(run_directory, admit, split, row)
        model, tokenizer = _loaded(run_directory, config, receipt)
        shown, expected = tokenizer.decode(ids), tokenizer.decode(answer, skip_special_tokens=True).rstrip("\n")
    else:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        tools: list[Any] | None = None
        expected = None
        if row is not None:
            messages, tools, expected = _row(run_directory, admit, split or "test", row)
        text = template.render(messages, tools, add_generation_prompt=True)
        model, tokenizer = _loaded(run_directory, config, receipt)
        shown, ids = str(messages[-1]["content"]), tokenizer(text, add_special_tokens=False)["input_ids"]
    base, adapted = _answers(model, tokenizer, ids, max_new_tokens)
    return Generation(prompt=shown, expected=expected, base=base, adapter=adapted)


def _template(run: Path, config: LoadedConfig, receipt: TrainReceipt) -> ChatTemplate:
    """The one by which the rows were admitted."""
    files = load_model_files(config.model_dir())
    source = read_bounded(run / CHAT_TEMPLATE, FILE_LIMIT).decode("utf-8")
    name = str(receipt.tokenizer["template"]["name"])
    return ChatTemplate(source, name, files.special_tokens, config.run.admit.date)


def _scored_row(run: Path, admit: AdmitManifest, split: str | None, number: int) -> tuple[list[int], list[int]]:
    """The tokens before the last answer of one scored example, and those of the answer that its teacher scored."""
    corpora = {ref.kind: run / ref.path for ref in admit.outputs if ref.schema == SCORED_CORPUS_SCHEMA}
    split = split or ("heldout" if "heldout" in corpora else "corpus")
    if split not in corpora:
        names = ", ".join(sorted(corpora))
        raise KilnError(
            "KLN206", f"no scored rows of split {printable(split)!r}", hint=f"--split names one of: {names}"
        )
    rows = ScoredRows(corpora[split])
    if number > len(rows):
        raise _no_row(corpora[split], number)
    row = rows[number - 1]
    start, end = spans(row.action_targets)[-1]
    return row.input_ids[:start], row.input_ids[start:end]


def _row(
    run_directory: Path, admit: AdmitManifest, split: str, number: int
) -> tuple[list[dict[str, Any]], list[Any] | None, str]:
    """The messages before the answer of one prepared row, its tools, and the answer."""
    mode = admit.details.tools.mode
    path = run_directory / "data" / f"{split}.jsonl"
    with open_input(path) as stream:
        for incoming in prepared_rows(json_lines(LineReader(stream)), mode):
            if incoming.record.row_index == number and incoming.row is not None:
                *before, answer = incoming.row.messages
                return before, incoming.row.tools, answer["content"] or str(answer.get("tool_calls"))
    raise _no_row(path, number)


def _no_row(path: Path, number: int) -> KilnError:
    return KilnError("KLN206", f"{printable(path)} has no row {number}", hint="rows count from 1")


def _loaded(run: Path, config: LoadedConfig, receipt: TrainReceipt) -> tuple[Any, Any]:
    """The model with the adapter on it, and the tokenizer beside the adapter."""
    from kiln_stages.training import determinism

    determinism.fix(config.run.train.threads)
    from transformers import AutoTokenizer

    from kiln_stages.training.adapted import load_adapted

    model = load_adapted(run, config, receipt)
    tokenizer = AutoTokenizer.from_pretrained(
        str((run / CHAT_TEMPLATE).parent), local_files_only=True, trust_remote_code=False
    )
    return model, tokenizer


def _answers(model: Any, tokenizer: Any, ids: list[int], max_new_tokens: int) -> tuple[str, str]:
    """What the base model and the adapted one write after the tokens ``ids``, each most likely token in turn."""
    import torch

    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}

    def write() -> str:
        with torch.inference_mode():
            out = model.generate(
                **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    with model.disable_adapter():
        plain = write()
    return plain, write()
