"""``kiln admit``: rows in, token ids with proven labels out, and a receipt that names every row by hash.

The rows are the prepared examples of a run (``kiln admit CONFIG --out RUN``) or a file in a chat shape
(``kiln admit --file ROWS --model DIR --out RUN``). Both meet one contract, in ``admission.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kiln_cli.config import ADMIT_SECTIONS, AdmitConfig, LoadedConfig, ModelConfig, RunConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, open_input, run_lock, write_file
from kiln_cli.identity import canonical_json
from kiln_cli.lines import LineReader
from kiln_cli.manifests import (
    document,
    manifest_reference,
    nonzero,
    read_manifest,
    reference,
    require_unchanged,
    write_manifest,
)
from kiln_cli.plugins import Plugins, load_plugins, version
from kiln_cli.receipts import INGESTION_SCHEMA, FileRef, StageManifest
from kiln_cli.records import Record
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.admitting.admission import Admission, Admitted, IncomingRow, chat_rows, prepared_rows
from kiln_stages.admitting.corpus import CORPUS_SCHEMA, admitted_sha256, write_corpus
from kiln_stages.admitting.labels import LabelFinder
from kiln_stages.admitting.model_files import ModelFiles, TemplateChoice, choose_template, load_model_files
from kiln_stages.admitting.prepared_rows import TOOL_PROMPT_NAME, ToolsMode, choose_mode, tool_prompt_sha256
from kiln_stages.admitting.rendering import ChatTemplate
from kiln_stages.admitting.tokens import RowTokenizer
from kiln_stages.reading.sources import STDIN, json_lines, open_rows
from kiln_stages.reading.transports import Plain


class RowsFile(msgspec.Struct, frozen=True):
    """A file to admit: what it becomes (``corpus`` or ``heldout``), its name in evidence, the opened file, and how its
    records become rows. ``ref`` is what an earlier manifest says of it."""

    split: str
    locator: str
    plain: Plain
    rows: Callable[[Iterable[Record]], Iterable[IncomingRow]]
    ref: FileRef | None = None
    source_reasons: tuple[str, ...] = ()


class AdmitResult(msgspec.Struct, frozen=True):
    manifest: StageManifest
    unchanged: bool


def command(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")],
    config: Annotated[
        Path | None, typer.Argument(help="The run config; the rows are the prepared ones of RUN.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file of chat rows to admit instead.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="With --file: the model directory.")] = None,
    source: Annotated[str, typer.Option("--source", help="With --file: the rows' shape.")] = "auto",
    template: Annotated[str | None, typer.Option("--template", help="A template by name, or a file.")] = None,
    policy: Annotated[str | None, typer.Option("--invalid-row-policy", help="fail or skip.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tokenize rows, prove their labels, and write the corpus with its ingestion receipt."""
    overrides = list(assignments or ())
    overrides += [f"admit.template={template}"] if template else []
    overrides += [f"admit.invalid_row_policy={policy}"] if policy is not None else []
    loaded = _config(config, file, model, overrides)
    result = run(loaded, out, load_plugins(), file=file, source=source, progress=terminal)
    if json:
        terminal.json_data(result.manifest)
    terminal.say(account(result, out))
    if config is not None:
        terminal.say(f"next: kiln train {printable(config)} --out {printable(out)}")


def run(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    file: Path | None = None,
    source: str = "auto",
    progress: Progress = SILENT,
) -> AdmitResult:
    """Writes ``admit/`` and ``admit_manifest.json``.

    Raises KilnError: KLN101 for a rejected row under ``fail``, KLN102 where no row is kept, KLN206/207 where the
    prepared rows are missing or changed, KLN302 for missing model files, KLN213 for an unusable template.
    """
    started = time.monotonic()
    settings = config.run.admit
    files = load_model_files(config.model_dir())
    choice = choose_template(settings.template, files, plugins.templates, config.base_dir)
    finder = LabelFinder(ChatTemplate(choice.source, choice.name, files.special_tokens, settings.date))
    mode = choose_mode(settings.tools, finder)
    max_tokens = settings.max_tokens or files.positions
    tokenizer = RowTokenizer(files.tokenizer_json, files.special_tokens.get("bos_token"))
    with run_lock(out, "kiln admit"), ExitStack() as stack:
        if file is not None:
            mode = "native"  # rows of a file bring their own tools
            inputs = [_given_file(file, source, plugins, out, stack)]
        else:
            inputs = _prepared_files(out, mode, stack)
        admission = Admission(finder, tokenizer, max_tokens, settings, inputs[0].source_reasons)
        read = [_admit_file(rows, admission, progress) for rows in inputs]
        admitted = [result for result, _ in read]
        _require_policy(admitted, settings)
        outputs = _write(out, inputs, admitted, settings)
        manifest = StageManifest(
            stage="admit",
            kiln_version=version(),
            plugins=plugins.loaded(),
            config_sha256=config.sha256(*ADMIT_SECTIONS),
            previous=manifest_reference(out, "prepare") if file is None else None,
            inputs=[ref for _, ref in read],
            outputs=outputs,
            counts={result.split: result.counts() for result in admitted},
            details={
                "config_sections": list(ADMIT_SECTIONS),
                "admitted_sha256": {result.split: admitted_sha256(result.kept) for result in admitted},
                **_rendering_details(files, choice, mode, max_tokens),
            },
        )
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        unchanged = write_manifest(out, manifest, started, config.base_dir).unchanged
    return AdmitResult(manifest, unchanged)


def account(result: AdmitResult, out: Path) -> str:
    """What happened to the rows, for people."""
    details = result.manifest.details
    lines = [f"admit: template {details['template']['name']}, tools as {details['tools']['mode']}"]
    for split, counts in result.manifest.counts.items():
        rows: list[list[object]] = [[f"{split}: rows read", counts["rows_read"]]]
        rows += [["  " + name, count] for name, count in nonzero(counts["reasons"]).items()]
        rows += [
            ["  kept", counts["rows_kept"]],
            ["  tokens", counts["tokens"]],
            ["  supervised tokens", counts["supervised_tokens"]],
        ]
        lines.append(table(rows))
        lines += [f"  ignored field {name}: {count} rows" for name, count in counts["ignored_fields"].items()]
        lines += [f"  template: {printable(note)}: {count} rows" for note, count in counts["template_notes"].items()]
    state = "unchanged" if result.unchanged else "written"
    return "\n".join([*lines, f"{state}: {printable(out)}/admit_manifest.json"])


def _config(config: Path | None, file: Path | None, model: Path | None, overrides: list[str]) -> LoadedConfig:
    """The config of the command line: a file's, or what --file and --model say."""
    if config is not None and file is None:
        return load_config(config, overrides)
    if file is None or model is None or config is not None:
        raise KilnError(
            "KLN201",
            "give a CONFIG (for the prepared rows of RUN), or --file with --model",
            hint="kiln admit CONFIG --out RUN, or kiln admit --file ROWS --model DIR --out RUN",
        )
    admit: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        if section != "admit":
            raise KilnError("KLN201", f"--set {printable(key)!r} without a CONFIG", hint="only admit.* applies here")
        admit[name] = value
    try:
        settings = msgspec.convert(admit, AdmitConfig, strict=False)
    except msgspec.ValidationError as error:
        raise KilnError("KLN201", f"admit settings: {printable(error)}", hint="docs/config.md lists them") from None
    run_config = RunConfig(schema="kiln.config.v1", model=ModelConfig(path=str(model)), admit=settings)
    return LoadedConfig(run=run_config, base_dir=Path())


def _prepared_files(out: Path, mode: ToolsMode, stack: ExitStack) -> list[RowsFile]:
    """The train and validation splits of the run; test.jsonl is left for evaluation."""
    manifest = read_manifest(out, "prepare")
    found = []
    for split, name in (("corpus", "data/train.jsonl"), ("heldout", "data/validation.jsonl")):
        ref = manifest.output(name)
        require_unchanged(ref, out / name, "data_manifest.json")
        stream = stack.enter_context(open_input(out / name))
        plain = Plain(stream=stream, size=ref.bytes, packing="lines", elements=False, sha256=None)
        found.append(RowsFile(split, name, plain, lambda records: prepared_rows(records, mode), ref))
    return found


def _given_file(file: Path, source: str, plugins: Plugins, scratch: Path, stack: ExitStack) -> RowsFile:
    path = None if str(file) == STDIN else file
    plain, choice = stack.enter_context(open_rows(path, source, plugins.sources, "chat", scratch))
    chosen = choice.source
    return RowsFile(
        "corpus", str(file), plain, lambda records: chat_rows(records, chosen), source_reasons=chosen.reasons
    )


def _admit_file(rows: RowsFile, admission: Admission, progress: Progress) -> tuple[Admitted, FileRef]:
    """Reads a file once: the bytes that are admitted are the bytes that are hashed."""
    lines = LineReader(rows.plain.stream)
    with progress.task(f"admit: {rows.split}", None, "rows") as task:
        records = json_lines(lines, elements=rows.plain.elements)
        admitted = admission.admit(rows.split, rows.rows(records), task)
    count = len(admitted.kept) + len(admitted.rejected)
    sha256 = rows.plain.sha256 or lines.sha256
    ref = rows.ref or FileRef(
        path=rows.locator, base="config", kind="chat_rows", sha256=sha256, bytes=rows.plain.size, rows=count
    )
    if sha256 != ref.sha256:
        raise KilnError(
            "KLN207",
            f"{printable(rows.locator)} changed while it was read: sha256 is {sha256}, expected {ref.sha256}",
            hint="run again when nothing writes to it",
        )
    return admitted, ref


def _require_policy(admitted: list[Admitted], settings: AdmitConfig) -> None:
    """Under ``fail`` one rejected row refuses everything; no kept row is an error under both policies."""
    if settings.invalid_row_policy == "fail":
        for result in admitted:
            if result.rejected:
                first = result.rejected[0]
                raise KilnError(
                    "KLN101",
                    f"{result.split} row {first.row_index} (line {first.line}) {first.row_sha256}: {first.reason}: "
                    f"{first.code}: {printable(first.detail)}\n{_reason_table(result)}",
                    hint='mend the row, or set [admit] invalid_row_policy = "skip" to count such rows and go on',
                    details={"rejected": [msgspec.to_builtins(row) for row in result.rejected[:20]]},
                )
    for result in admitted:
        if not result.kept:
            raise KilnError(
                "KLN102",
                f"no row of {result.split} is kept\n{_reason_table(result)}",
                hint="the counts say which rule they break",
                details={"rejected": [msgspec.to_builtins(row) for row in result.rejected[:20]]},
            )


def _reason_table(result: Admitted) -> str:
    counts = result.counts()
    reasons = counts["reasons"]
    rows: list[list[object]] = [["rows read", counts["rows_read"]], ["kept", counts["rows_kept"]]]
    rows += [["  " + name, count] for name, count in nonzero(reasons if isinstance(reasons, dict) else {}).items()]
    return table(rows)


def _write(out: Path, inputs: list[RowsFile], admitted: list[Admitted], settings: AdmitConfig) -> list[FileRef]:
    outputs = []
    with AtomicFile(out / "admit" / "rejected.jsonl") as rejected:
        for rows, result in zip(inputs, admitted, strict=True):
            written = write_corpus(out / "admit" / f"{result.split}.parquet", result.kept)
            outputs.append(reference(written, out, result.split, schema=CORPUS_SCHEMA, rows=len(result.kept)))
            receipt = result.receipt("dataset_path", rows.locator, settings.invalid_row_policy)
            if fault := next(receipt.faults(), None):
                raise KilnError("KLN501", f"the ingestion receipt contradicts itself: {fault}")
            name = "sft_ingestion.json" if result.split == "corpus" else f"{result.split}_ingestion.json"
            written = write_file(out / "admit" / name, document(receipt))
            outputs.append(reference(written, out, "ingestion_receipt", schema=INGESTION_SCHEMA))
            for row in result.rejected:
                rejected.write(canonical_json(row) + b"\n")
    count = sum(len(result.rejected) for result in admitted)
    return [*outputs, reference(rejected, out, "rejected_rows", rows=count)]


def _rendering_details(
    files: ModelFiles, choice: TemplateChoice, mode: ToolsMode, max_tokens: int | None
) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "template": {"name": choice.name, "sha256": choice.sha256},
        "tokenizer": files.file_digests(),
        "tools": {
            "mode": mode,
            "prompt": TOOL_PROMPT_NAME if mode == "system" else None,
            "prompt_sha256": tool_prompt_sha256() if mode == "system" else None,
        },
    }
