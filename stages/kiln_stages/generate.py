"""``kiln generate``: what the model writes with the adapter beside what it writes without it.

The adapter is loaded as any user would load it, through peft; decoding is greedy, so the same files give the same text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input, read_bounded
from kiln_cli.lines import LineReader
from kiln_cli.manifests import RECEIPT_NAME, read_manifest, read_successful_receipt
from kiln_cli.receipts import TrainReceipt
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.admitting.incoming import prepared_rows
from kiln_stages.admitting.model_files import FILE_LIMIT, load_model_files
from kiln_stages.evidence.receipt_claims import CHAT_TEMPLATE
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.reading.sources import json_lines
from kiln_stages.training.packages import require_train_extra


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """``expected`` is the row's own answer; None for a prompt of the user's."""

    prompt: str
    expected: str | None
    base: str
    adapter: str


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a trained adapter.")],
    row: Annotated[int | None, typer.Option("--row", min=1, help="A row of the split, counted from 1.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A user message instead.")] = None,
    split: Annotated[
        str, typer.Option("--split", help="Where --row counts; test rows were never trained on.")
    ] = "test",
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
    run_directory: Path, *, row: int | None, prompt: str | None, split: str = "test", max_new_tokens: int = 96
) -> Generation:
    """Greedy answers of both models. Raises KilnError KLN201 for a call that names no prompt, KLN206 for a missing row
    or adapter, KLN207 for an adapter or base model that is not the receipt's, KLN302 for a missing model."""
    if (row is None) == (prompt is None):
        raise KilnError("KLN201", "give one of --row and --prompt", hint="kiln generate RUN --row 1")
    require_train_extra("kiln generate")
    receipt = read_successful_receipt(run_directory / RECEIPT_NAME)
    config = load_config(run_directory / "config.resolved.toml")
    files = load_model_files(config.model_dir())
    source = read_bounded(run_directory / CHAT_TEMPLATE, FILE_LIMIT).decode("utf-8")  # as the rows were admitted
    name = str(receipt.tokenizer["template"]["name"])
    template = ChatTemplate(source, name, files.special_tokens, config.run.admit.date)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    tools: list[Any] | None = None
    expected = None
    if row is not None:
        messages, tools, expected = _row(run_directory, split, row)
    text = template.render(messages, tools, add_generation_prompt=True)
    base, adapted = _answers(run_directory, config, receipt, text, max_new_tokens)
    return Generation(prompt=str(messages[-1]["content"]), expected=expected, base=base, adapter=adapted)


def _row(run_directory: Path, split: str, number: int) -> tuple[list[dict[str, Any]], list[Any] | None, str]:
    """The messages before the answer of one prepared row, its tools, and the answer."""
    mode = read_manifest(run_directory, "admit").details["tools"]["mode"]
    path = run_directory / "data" / f"{split}.jsonl"
    with open_input(path) as stream:
        for incoming in prepared_rows(json_lines(LineReader(stream)), mode):
            if incoming.record.row_index == number and incoming.row is not None:
                *before, answer = incoming.row.messages
                return before, incoming.row.tools, answer["content"] or str(answer.get("tool_calls"))
    raise KilnError("KLN206", f"{printable(path)} has no row {number}", hint="rows count from 1")


def _answers(run: Path, config: LoadedConfig, receipt: TrainReceipt, text: str, max_new_tokens: int) -> tuple[str, str]:
    """What the base model and the adapted one write after ``text``, each most likely token in turn."""
    from kiln_stages.training import determinism

    determinism.fix(config.run.train.threads)
    import torch
    from transformers import AutoTokenizer

    from kiln_stages.training.adapted import load_adapted

    model = load_adapted(run, config, receipt)
    tokenizer = AutoTokenizer.from_pretrained(
        str((run / CHAT_TEMPLATE).parent), local_files_only=True, trust_remote_code=False
    )
    batch = tokenizer(text, return_tensors="pt", add_special_tokens=False)

    def write() -> str:
        with torch.inference_mode():
            out = model.generate(
                **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        return str(tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))

    with model.disable_adapter():
        plain = write()
    return plain, write()
