"""``kiln admit``: rows in, token ids with proven labels out, and a receipt that names every row by hash.

The rows are the prepared examples of a run (``kiln admit CONFIG --out RUN``), a file in a chat shape (``--file``), a
split of a named data set (``--dataset``), or rows that are handed over (``--row``, standard input, ``run(rows=...)``).
All meet one contract, in ``admission.py``.
A corpus that a teacher scored (``--kind opd``) has a contract of its own, in ``distilling``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET, UnsetType

from kiln_cli.config import ADMIT_SECTIONS, AdmitConfig, LoadedConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile, run_lock, write_file
from kiln_cli.identity import canonical_json
from kiln_cli.manifests import document, manifest_reference, nonzero, reference, write_manifest
from kiln_cli.plugins import Plugins, load_plugins, version
from kiln_cli.receipts import INGESTION_SCHEMA, FileRef
from kiln_cli.stage_manifests import AdmitDetails, AdmitManifest, Contamination, PrepareManifest, RowsRead
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.admitting import fingerprint
from kiln_stages.admitting.admission import RejectedDetail
from kiln_stages.admitting.base_template import compare_with_base
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.admitting.corpus import CORPUS_SCHEMA, CorpusWriter
from kiln_stages.admitting.given import Given, given_texts, given_values, named_rows
from kiln_stages.admitting.inputs import open_inputs, rows_details
from kiln_stages.admitting.pipeline import Job, input_reference, judged_parts, worker_count
from kiln_stages.admitting.special_tokens import require_markers
from kiln_stages.admitting.tally import RECEIPTS, Tally
from kiln_stages.contamination.held_out import open_held_out
from kiln_stages.contamination.runs import run_exists
from kiln_stages.correcting.admitted import ADMITTED, admitted_corrections
from kiln_stages.distilling import admission as scored
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.corpus import CorpusFault
from kiln_stages.reading.mapping import parse_map
from kiln_stages.reading.ranges import copy_stream
from kiln_stages.reading.sources import STDIN
from kiln_stages.workers import Workers

SHOWN = 10  # rows that meet a held-out one, in the message


class AdmitResult(msgspec.Struct, frozen=True):
    """``notes``: what became of rows that did not come to admission."""

    manifest: AdmitManifest
    unchanged: bool
    notes: tuple[str, ...] = ()


def command(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")],
    config: Annotated[
        Path | None, typer.Argument(help="The run config; the rows are the prepared ones of RUN.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file of chat rows instead; - is stdin.")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="A named data set instead.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Its train, validation or holdout rows.")] = None,
    registry: Annotated[
        Path | None, typer.Option("--registry", help="Data sets and teachers; .kiln if left out.")
    ] = None,
    row: Annotated[list[str] | None, typer.Option("--row", help="One row as JSON, instead of a file.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The model directory.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="The rows' shape; auto if left out.")] = None,
    mapping: Annotated[list[str] | None, typer.Option("--map", help="field=path, for rows of another shape.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="sft, or opd: scored rows; auto if left out.")] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", help="Alias of who scored the rows (opd).")] = None,
    token_ids: Annotated[
        bool, typer.Option("--require-token-ids", help="Every scored token must name its id (opd).")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="List every fault, not the first alone (opd).")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse fields that change nothing.")] = False,
    compat: Annotated[str | None, typer.Option("--compat", help="kiln: read rows as the public server does.")] = None,
    template: Annotated[str | None, typer.Option("--template", help="A template by name, or a file.")] = None,
    policy: Annotated[str | None, typer.Option("--invalid-row-policy", help="fail or skip.")] = None,
    held_out: Annotated[
        list[str] | None, typer.Option("--held-out", help="Rows that must not be trained on: file, receipt or run.")
    ] = None,
    near: Annotated[
        float | None, typer.Option("--near-threshold", help="Also near duplicates of these, so much alike (0 to 1).")
    ] = None,
    drop: Annotated[bool, typer.Option("--drop-contaminated", help="Leave such rows out and count them.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; as many as cores.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tokenize rows, prove their labels, and write the corpus with its ingestion receipt."""
    if file is not None and row:
        raise KilnError("KLN201", "--file and --row exclude each other", hint="give the rows in one way")
    if dataset is not None and (file is not None or row):
        raise KilnError("KLN201", "--dataset and --file or --row exclude each other", hint="give the rows in one way")
    piped = file is not None and str(file) == STDIN
    options: dict[str, Any] = {"source": source, "template": template, "invalid_row_policy": policy}
    options |= {"map": parse_map(mapping) if mapping else None, "compat": compat}
    options |= {"held_out": held_out or None, "near_threshold": near, "drop_contaminated": drop or None}
    options |= {"dataset": dataset, "dataset_split": split, "registry": registry, "kind": kind}
    options |= {"file": None if piped else file, "strict": strict or None}
    distill = {"teacher": teacher, "require_token_ids": token_ids or None}
    as_written = config is not None and not (assignments or model or any((*options.values(), *distill.values())))
    handed_over = bool(row or dataset) or piped
    loaded = config_of_options(config, model, options, assignments or [], handed_over=handed_over, distill=distill)
    given = given_texts(row, loaded.run.admit) if row else Given(None) if piped else None
    plugins = load_plugins()
    found = _Report(report, json=json)
    try:
        result = run(loaded, out, plugins, rows=given, workers=workers, progress=terminal, on_fault=found.on_fault)
    except KilnError as error:
        raise found.completed(error) from None
    # What the command line changed stands in the run's own config alone, and train wants the settings of admission.
    tell(result, loaded, out, plugins, config if as_written else None, json=json)


class _Report:
    """``--report``: every fault of a scored corpus on stdout as it is found, or with ``--json`` in the one error."""

    def __init__(self, wanted: bool, *, json: bool) -> None:
        self._json = json
        self._faults: list[tuple[str, CorpusFault]] = []
        self._count = 0
        self.on_fault = self._take if wanted else None

    def _take(self, path: str, fault: CorpusFault) -> None:
        self._count += 1
        if self._json:
            self._faults.append((path, fault))
        else:
            terminal.data(fault.text(path))

    def completed(self, error: KilnError) -> KilnError:
        """The error with all faults that were found."""
        if self._count <= 1:
            return error
        message = f"{error.message}\n{self._count} faults in all"
        details = scored.fault_details(self._faults) if self._json else None
        return KilnError(error.code, message, hint="mend each; a scored corpus is refused whole", details=details)


def tell(
    result: AdmitResult, loaded: LoadedConfig, out: Path, plugins: Plugins, config: Path | None, *, json: bool
) -> None:
    """Prints what was admitted and what to run next; ``config``: the file to train by, the run's own if None."""
    if json:
        terminal.json_data(result.manifest)
    terminal.say(account(result, out))
    if (compared := compare_with_base(loaded, load_terms(loaded, plugins).choice)) is not None:
        (terminal.say if compared.same else terminal.warn)(compared.text)
    settings = out / "config.resolved.toml" if config is None else config
    terminal.say(f"next: kiln train {printable(settings)} --out {printable(out)}")


def run(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    rows: Given | Iterable[Any] | None = None,
    workers: int | None = None,
    progress: Progress = SILENT,
    on_fault: scored.OnFault | None = None,
) -> AdmitResult:
    """Writes ``admit/`` and ``admit_manifest.json``. ``rows``: rows to admit in place of the config's, as values.
    ``on_fault``: is told of every fault of a scored corpus, with its path; for other rows KLN201.

    Raises KilnError: KLN101 for a rejected row under ``fail``, KLN102 where no row is kept, KLN107 where there is none,
    KLN109 for a row to train on that meets a held-out one, unless such rows are dropped, KLN206/207 where the
    prepared rows are missing or changed, KLN204/212 for rows that cannot be read, KLN302 for missing model files,
    KLN213 for an unusable template; for a scored corpus KLN112 and others of ``admit_scored``.
    """
    rows = config.examples if rows is None else rows
    given = named_rows(config) if rows is None else rows if isinstance(rows, Given) else given_values(rows)
    if scored.is_scored(config, handed_over=given is not None):
        with run_lock(out, "kiln admit"):
            manifest, unchanged = scored.admit_scored(
                config, out, plugins, workers=workers, progress=progress, on_fault=on_fault
            )
        return AdmitResult(manifest, unchanged)
    if on_fault is not None:
        raise KilnError("KLN201", "--report is for scored corpora", hint="admit/rejected.jsonl lists other rows")
    return _admit_conversations(config, out, plugins, given, workers, progress)


def _admit_conversations(
    config: LoadedConfig, out: Path, plugins: Plugins, given: Given | None, workers: int | None, progress: Progress
) -> AdmitResult:
    """As :func:`run`, for rows that no teacher scored."""
    started = time.monotonic()
    terms = load_terms(config, plugins)
    with run_lock(out, "kiln admit"), ExitStack() as stack:
        known = None if given is not None else fingerprint.of_inputs(config, out, plugins, terms)
        if known is not None and (done := fingerprint.recorded(out, known)) is not None:
            write_file(out / "config.resolved.toml", config.resolved_toml(out))
            return AdmitResult(done, unchanged=True)
        contract = build_contract(config, terms)
        require_markers(contract)
        inputs = open_inputs(config, out, plugins, contract, stack, given)
        held_out = open_held_out(config, out, plugins)
        index = None if held_out is None else held_out.index
        job = Job(inputs, contract.admission(inputs[0].source_reasons, index))
        pool = stack.enter_context(Workers(job, worker_count(inputs, workers)))
        tallies, outputs = _admit(job, pool, out, config.run.admit, progress)
        prepared = inputs[0].ref is not None
        manifest = AdmitManifest(
            stage="admit",
            kiln_version=version(),
            plugins=plugins.loaded(),
            config_sha256=config.sha256(*ADMIT_SECTIONS),
            previous=manifest_reference(out, PrepareManifest) if prepared else None,
            inputs=[input_reference(tally.source, tally.rows_read) for tally in tallies],
            outputs=outputs,
            counts={tally.split: tally.counts() for tally in tallies},
            details=AdmitDetails(
                config_sections=list(ADMIT_SECTIONS),
                rows=rows_details(inputs),
                admitted_sha256={tally.split: tally.admitted_sha256() for tally in tallies},
                held_out=UNSET if held_out is None else held_out.details(tallies[0].met),
                **contract.details(contract.prepared_mode if prepared else contract.chat_mode),
            ),
        )
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        unchanged = write_manifest(out, manifest, started, config.base_dir).unchanged
        if known is not None:
            fingerprint.record(out, known, manifest)
    return AdmitResult(manifest, unchanged, given.notes if given is not None else ())


def account(result: AdmitResult, out: Path) -> str:
    """What happened to the rows, for people."""
    details = result.manifest.details
    if scored_corpus(result.manifest) is not None:
        return scored.account(result.manifest, out, unchanged=result.unchanged)
    lines = [f"admit: template {details.template.name}, tools as {details.tools.mode}"]
    if details.rows.shape is not None:
        lines.append(f"rows: {_where(details.rows)}, in the shape {details.rows.shape}")
    lines += result.notes
    lines += _held_out_lines(details.held_out)
    for split, counts in result.manifest.counts.items():
        lines.append(table([[f"{split}: rows read", counts["rows_read"]], *_outcomes(counts)]))
        if lengths := counts["over_length_tokens"]:
            lines.append(f"  over_length: {_lengths(lengths)} tokens, at most {details.max_tokens:,}")
        if counts["byte_order_marks"]:
            lines.append("  a byte-order mark at the start of the file is stepped over")
        if counts["blank_lines"]:
            lines.append(f"  blank lines: {counts['blank_lines']}, which are no rows")
        lines += [
            f"  ignored field {name}: {counted(count, 'row', 'rows')}"
            for name, count in counts["ignored_fields"].items()
        ]
        for note, count in counts["template_notes"].items():
            lines.append(f"  template: {printable(note)}: {counted(count, 'row', 'rows')}")
    state = "unchanged" if result.unchanged else "written"
    return "\n".join([*lines, f"{state}: {printable(out)}/admit_manifest.json"])


def _where(rows: RowsRead) -> str:
    """Where rows come from that lie in no file, and how the others were packed."""
    if rows.provenance is not UNSET:
        return f"data set {printable(rows.provenance['dataset'])}, split {printable(rows.provenance['split'])}"
    return f"read as {rows.packing}"


def _held_out_lines(held_out: Contamination | UnsetType) -> list[str]:
    """The rows that were held out, and what of them could be compared."""
    lines = []
    for rows in (rows for named in (held_out.rows if held_out else ()) for rows in named.sets):
        limit = "" if rows.by == "rows" else ", by hash alone: only the same conversation is found"
        lines.append(f"held out: {printable(rows.name)}: {counted(rows.rows, 'row', 'rows')}{limit}")
    return lines


def _outcomes(counts: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = [["  " + name, count] for name, count in nonzero(counts["reasons"]).items()]
    rows += [["  kept", counts["rows_kept"]]]
    return [*rows, ["  tokens", counts["tokens"]], ["  supervised tokens", counts["supervised_tokens"]]]


def _lengths(lengths: list[int]) -> str:
    """The longest few of the rows that are too long; the manifest and rejected.jsonl have them all."""
    shown = ", ".join(f"{length:,}" for length in sorted(lengths, reverse=True)[:5])
    return shown if len(lengths) <= 5 else f"{shown}, … ({len(lengths):,} rows, from {min(lengths):,})"


def config_of_options(
    path: Path | None,
    model: Path | None,
    options: dict[str, Any],
    assignments: list[str],
    *,
    handed_over: bool,
    distill: dict[str, Any] | None = None,
) -> LoadedConfig:
    """The config of the command line: a file's or an empty one, with the options laid over it: those of ``[admit]``,
    and of ``[distill]``. ``handed_over``: the rows do not come from ``path`` or a file."""
    file, registry = options.pop("file", None), options.pop("registry", None)
    if path is None and file is None and not handed_over:
        raise KilnError(
            "KLN201",
            "give a CONFIG (for the prepared rows of RUN), or rows by --file, --dataset or --row",
            hint="kiln admit CONFIG --out RUN, or kiln admit --file ROWS --model DIR --out RUN",
        )
    laid_over = {
        section: {key: value for key, value in settings.items() if value is not None}
        for section, settings in (("admit", options), ("distill", distill or {}))
    }
    if options["dataset"] is not None:  # in place of the config's file
        laid_over["admit"]["file"] = None
    loaded = load_config(path, assignments, laid_over)
    if file is not None and loaded.examples is not None:
        raise KilnError("KLN201", f"{printable(path)} brings rows of its own (examples)", hint="leave out --file")
    if loaded.run.admit.dataset is None and options["dataset_split"]:
        raise KilnError("KLN201", "--split is for a named data set", hint="name it with --dataset")
    admit, teacher = loaded.run.admit, loaded.run.distill.teacher
    if registry and admit.dataset is None and teacher is None and not admit.held_out:
        raise KilnError(
            "KLN201",
            "--registry is for a named data set, a teacher or rows that are held out",
            hint="name one with --dataset, --teacher or --held-out",
        )
    if path is None and model is None and loaded.run.model.path is None:
        raise KilnError("KLN201", "--model is missing", hint="name a Hugging Face model directory")
    if file is not None:
        loaded = loaded.replace("admit", file=loaded.counted_from_base(file), dataset=None)
    if registry is not None:
        loaded = loaded.replace("admit", registry=loaded.counted_from_base(registry))
    if held_out := options.get("held_out"):
        loaded = loaded.replace("admit", held_out=[_named_from_base(name, loaded) for name in held_out])
    if model is not None:
        loaded = loaded.replace("model", path=loaded.counted_from_base(model))
    return loaded


def _named_from_base(name: str, config: LoadedConfig) -> str:
    """Held-out rows of the command line as the config names them: a path, one with a split behind it, or no path."""
    if Path(name).exists():
        return config.counted_from_base(Path(name))
    before, _, split = name.rpartition(":")
    return f"{config.counted_from_base(Path(before))}:{split}" if before and run_exists(Path(before)) else name


def _admit(
    job: Job, workers: Workers, out: Path, settings: AdmitConfig, progress: Progress
) -> tuple[list[Tally], list[FileRef]]:
    """Judges all rows and writes what they give. Nothing appears under its name unless everything holds."""
    folder = out / "admit"
    tallies = []
    with ExitStack() as stack:
        rejected = stack.enter_context(AtomicFile(folder / "rejected.jsonl"))
        corpora = [stack.enter_context(CorpusWriter(folder / f"{source.split}.parquet")) for source in job.inputs]
        handed_over = [source for source in job.inputs if source.handed_over]
        copies = [stack.enter_context(AtomicFile(out / source.path)) for source in handed_over]
        for number, (source, corpus) in enumerate(zip(job.inputs, corpora, strict=True)):
            tally = Tally(source, job.admission.reasons)
            tallies.append(tally)
            with progress.task(f"admit: {source.split}", None, "rows") as task:
                for part in judged_parts(job, number, workers):
                    tally.add(part)
                    for row in part.kept:
                        corpus.write(row)
                    for detail in part.rejected:
                        rejected.write(canonical_json(detail) + b"\n")
                    task.advance(part.rows)
        _require_policy(tallies, settings)
        for source, copy in zip(handed_over, copies, strict=True):
            copy_stream(source.plain.stream, copy)
    outputs = []
    for tally, corpus in zip(tallies, corpora, strict=True):
        assert corpus.file is not None
        outputs.append(reference(corpus.file, out, tally.split, schema=CORPUS_SCHEMA, rows=len(tally.kept_hashes)))
        outputs.append(_write_receipt(tally, out, settings))
        if tally.source.given is not None and tally.source.given.ids is not None:
            outputs.append(_write_ids(tally, tally.source.given.ids, out, settings))
    outputs += [reference(copy, out, "chat_rows") for copy in copies]
    return tallies, [*outputs, reference(rejected, out, "rejected_rows", rows=sum(len(t.rejected) for t in tallies))]


def _write_receipt(tally: Tally, out: Path, settings: AdmitConfig) -> FileRef:
    receipt = tally.receipt(settings.invalid_row_policy)
    if fault := next(receipt.faults(), None):
        raise KilnError("KLN501", f"the ingestion receipt contradicts itself: {fault}")
    written = write_file(out / RECEIPTS[tally.split], document(receipt))
    return reference(written, out, "ingestion_receipt", schema=INGESTION_SCHEMA)


def _write_ids(tally: Tally, ids: tuple[str, ...], out: Path, settings: AdmitConfig) -> FileRef:
    rows = list(admitted_corrections(ids, tally.receipt(settings.invalid_row_policy)))
    data = b"".join(canonical_json(row) + b"\n" for row in rows)
    return reference(write_file(out / ADMITTED, data), out, "corrections", rows=len(rows))


def _require_policy(tallies: list[Tally], settings: AdmitConfig) -> None:
    """Under ``fail`` one invalid row refuses everything, and under both policies one that meets a held-out row, unless
    such rows are dropped, and that no row is kept."""
    for tally in tallies:
        if settings.invalid_row_policy == "fail" and tally.invalid:
            first = tally.invalid[0]
            raise KilnError(
                "KLN101",
                f"{tally.split} row {first.row_index} ({_place(first)}) {first.row_sha256}: {first.reason}: "
                f"{'' if first.code == first.reason else first.code + ': '}{printable(first.detail)}\n"
                f"{_reason_table(tally)}",
                hint='mend the row, or set [admit] invalid_row_policy = "skip" to count such rows and go on',
                details={"rejected": [msgspec.to_builtins(row) for row in tally.invalid]},
            )
        if tally.contaminated and not settings.drop_contaminated:
            raise _contaminated(tally)
    for tally in tallies:
        if not tally.rows_read:
            raise KilnError("KLN107", f"{printable(tally.source.path)} holds no rows", hint="every line of it is blank")
        if not tally.kept_hashes:
            examples = tally.invalid or tally.contaminated
            first = examples[0]
            raise KilnError(
                "KLN102",
                f"no row of {tally.split} is kept; row {first.row_index} ({_place(first)}): {first.code}: "
                f"{printable(first.detail)}\n{_reason_table(tally)}",
                hint="the counts say which rule they break",
                details={"rejected": [msgspec.to_builtins(row) for row in examples]},
            )


def _place(row: RejectedDetail) -> str:
    return f"line {row.line}" + (f", {printable(row.example_id)}" if row.example_id is not None else "")


def _contaminated(tally: Tally) -> KilnError:
    """The refusal of an admission, with the first rows that must go and the held-out row that each meets."""
    total = sum(tally.met.values())
    named = [
        f"\n  {tally.split} row {row.row_index} ({_place(row)}): {printable(row.detail)}"
        for row in tally.contaminated[:SHOWN]
    ]
    more = f"\n  and {total - len(named):,} more" if total > len(named) else ""
    return KilnError(
        "KLN109",
        f"{counted(total, 'row to train on meets', 'rows to train on meet')} held-out rows:{''.join(named)}{more}\n"
        f"{table([[rule, count] for rule, count in tally.met.items()])}",
        hint="take them out, or leave them out and count them: --drop-contaminated",
        details={"contaminated": [msgspec.to_builtins(row) for row in tally.contaminated], "met": dict(tally.met)},
    )


def _reason_table(tally: Tally) -> str:
    counts = tally.counts()
    rows: list[list[object]] = [["rows read", counts["rows_read"]], ["kept", counts["rows_kept"]]]
    rows += [["  " + name, count] for name, count in nonzero(counts["reasons"]).items()]
    rows += [["blank lines", counts["blank_lines"]]] if counts["blank_lines"] else []
    return table(rows)
