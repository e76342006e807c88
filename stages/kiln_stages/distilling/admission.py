"""Admission of a scored corpus: the whole file holds and becomes rows to distil, or it is refused and nothing appears.

One file, one teacher, no row skipped. Memory is bounded by a few pieces of the file, a key of some 250 bytes a row and,
when the Parquet file is joined at the end, what Parquet says of each row group, some 40 KB for 32 rows.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from kiln_cli.config import DISTILL_SECTIONS, LoadedConfig
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input, write_file
from kiln_cli.manifests import document, reference, write_manifest
from kiln_cli.plugins import Plugins, version
from kiln_cli.receipts import FileRef
from kiln_cli.stage_manifests import AdmitDetails, AdmitManifest, RowsRead
from kiln_cli.terminal import SILENT, Progress, table
from kiln_cli.text import printable
from kiln_stages.admitting import fingerprint
from kiln_stages.admitting.contract import Contract, build_contract, load_terms
from kiln_stages.admitting.special_tokens import require_markers
from kiln_stages.distilling.admitted import Alignment, scored_corpus
from kiln_stages.distilling.binding import REFUSED, Binding, bind, pinned_teacher
from kiln_stages.distilling.corpus import (
    RANGE_BYTES,
    CorpusFault,
    FirstRecord,
    Job,
    Part,
    Phase,
    first_record,
    judge_again,
    judged_parts,
)
from kiln_stages.distilling.duplicates import SeenRows
from kiln_stages.distilling.held_out import HELD_OUT, HELD_OUT_RECEIPT, Apart, held_out_config
from kiln_stages.distilling.ingestion import RECEIPT, SCORED_INGESTION_SCHEMA, ScoredIngestion
from kiln_stages.distilling.rows import SCORED_CORPUS_SCHEMA, PackedScoredRow, ScoredCorpusDigest, ScoredWriter
from kiln_stages.reading.ranges import hash_stream
from kiln_stages.workers import Workers, available

CORPUS = "admit/corpus.parquet"
OnFault = Callable[[str, CorpusFault], None]  # with the corpus's path, as given
_SECOND = "admit: held out"
_WHOLE = "a scored corpus is refused whole; mend the line, `kiln admit --report` lists every fault"


class Scored(NamedTuple):
    """What reading a corpus came to. ``counts``: for the manifest."""

    receipt: ScoredIngestion
    binding: Binding
    counts: dict[str, Any]


class _Admitted(NamedTuple):
    """A corpus that holds, and where its rows and its receipt are written."""

    split: str
    rows: ScoredWriter
    receipt: str
    scored: Scored

    def outputs(self, out: Path) -> list[FileRef]:
        """Writes the receipt. The rows are written by now."""
        found = self.scored.receipt
        assert self.rows.file is not None
        written = write_file(out / self.receipt, document(found))
        return [
            reference(self.rows.file, out, self.split, schema=SCORED_CORPUS_SCHEMA, rows=found.examples),
            reference(written, out, "ingestion_receipt", schema=SCORED_INGESTION_SCHEMA),
        ]


def is_scored(config: LoadedConfig, *, handed_over: bool) -> bool:
    """Whether the rows are a scored corpus: the config says so, or the file begins with a teacher's manifest line.

    Raises KilnError KLN201 for a kind "opd" without a file, or with rows that are handed over, KLN203 for a setting
    that is not for scored rows.
    """
    settings = config.run.admit
    if settings.kind == "opd":
        if handed_over or settings.file is None:
            raise KilnError(
                "KLN201",
                'kind "opd" takes one file that can be read again',
                hint="kiln admit --file CORPUS --kind opd --teacher ALIAS --model DIR --out RUN",
            )
        return True
    if settings.kind == "sft" or handed_over or settings.file is None:
        return False
    path = config.resolve(settings.file)
    if not path.is_file():
        return False
    with open_input(path) as stream:
        record = first_record(stream)
    if record is None or not record.is_manifest:
        return False
    # What a config that says the kind itself is refused for.
    if fault := next(iter(msgspec.structs.replace(settings, kind="opd").faults()), None):
        raise KilnError("KLN203", f"admit.{fault.text}", hint="leave it out")
    return True


def admit_scored(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    *,
    workers: int | None = None,
    progress: Progress = SILENT,
    on_fault: OnFault | None = None,
) -> tuple[AdmitManifest, bool]:
    """Writes ``admit/corpus.parquet``, its receipt, the same of a held-out corpus, and, last, the manifest; and whether
    nothing changed.

    ``on_fault`` is told of every fault of both, in the order of the lines; without it reading ends where nothing can
    come before a fault that was found. The caller holds the run's lock.

    Raises KilnError: KLN112 with the first fault by the order of the contract, KLN107 for a file without an example,
    KLN109 for a held-out example that is trained on, KLN204 for a file that cannot be read, KLN207 for one that changes
    meanwhile, and those of ``binding.bind``.
    """
    started = time.monotonic()
    teacher, terms = pinned_teacher(config), load_terms(config, plugins)
    known = fingerprint.of_inputs(config, out, plugins, terms, DISTILL_SECTIONS, teacher.content_revision)
    if known is not None and (done := fingerprint.recorded(out, known)) is not None:
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        return done, True
    contract = build_contract(config, terms)
    require_markers(contract)
    read = partial(read_scored, contract=contract, workers=workers, progress=progress, on_fault=on_fault)
    admitted = _admit(config, out, read, report=on_fault is not None)
    manifest = AdmitManifest(
        stage="admit",
        kiln_version=version(),
        plugins=plugins.loaded(),
        config_sha256=config.sha256(*DISTILL_SECTIONS),
        inputs=[_input(each.scored.receipt) for each in admitted],
        outputs=[ref for each in admitted for ref in each.outputs(out)],
        counts={each.split: each.scored.counts for each in admitted},
        details=_details(contract, admitted),
    )
    write_file(out / "config.resolved.toml", config.resolved_toml(out))
    unchanged = write_manifest(out, manifest, started, config.base_dir).unchanged
    if known is not None:
        fingerprint.record(out, known, manifest)
    return manifest, unchanged


def _admit(config: LoadedConfig, out: Path, read: Callable[..., Scored], *, report: bool) -> list[_Admitted]:
    """The corpus and the held-out one, their rows written. ``report``: the faults of the second are told even where the
    first is refused."""
    apart, second = Apart(config), held_out_config(config)
    with ExitStack() as stack:
        rows = stack.enter_context(ScoredWriter(out / CORPUS))
        try:
            scored = read(config, keep=apart.corpus(rows.write), label="admit")
        except KilnError as error:
            if second is None or not report or error.code != REFUSED:
                raise
            raise _with_held_out(error, partial(read, second, keep=_let_go, label=_SECOND)) from None
        admitted = [_Admitted("corpus", rows, RECEIPT, scored)]
        if second is not None:
            rows = stack.enter_context(ScoredWriter(out / HELD_OUT))
            scored = read(second, keep=apart.held_out(rows.write), label=_SECOND)
            admitted.append(_Admitted("heldout", rows, HELD_OUT_RECEIPT, scored))
    return admitted


def _with_held_out(error: KilnError, read: Callable[[], Scored]) -> KilnError:
    """The refusal of the corpus, once the faults of the held-out one are told too, and what refuses that one."""
    try:
        read()
    except KilnError as second:
        return KilnError(error.code, f"{error.message}\n{second.message}", hint=error.hint, details=error.details)
    return error


def _let_go(row: PackedScoredRow) -> None:
    """The corpus is refused, so no row of the held-out one is kept either."""


def read_scored(
    config: LoadedConfig,
    contract: Contract,
    keep: Callable[[PackedScoredRow], None],
    *,
    workers: int | None = None,
    progress: Progress = SILENT,
    label: str,
    on_fault: OnFault | None = None,
) -> Scored:
    """Reads the corpus of the config and judges it whole. ``keep`` gets its rows in order, and they count only if this
    returns. Raises KilnError as :func:`admit_scored` does."""
    assert config.run.admit.file is not None, "is_scored has asked"
    name = printable(config.run.admit.file)
    with ExitStack() as stack:
        stream = stack.enter_context(open_input(config.resolve(config.run.admit.file)))
        record = first_record(stream)
        if record is None:
            raise KilnError("KLN107", f"{name} holds no rows", hint="every line of it is blank")
        binding = _bound(config, contract, record, name, on_fault)
        job = _job(stream, record, binding)
        size = os.fstat(stream.fileno()).st_size
        pool = stack.enter_context(Workers(job, min(available(workers), max(1, size // RANGE_BYTES))))
        tally = _Tally(name, SeenRows(lambda place: judge_again(job, place)), on_fault)
        with progress.task(label, None, "examples") as task:
            for part in judged_parts(job, name, pool):
                tally.add(part, keep)
                task.advance(part.examples)
                if tally.settled:
                    break
        _require_sound(tally, record, name)
        assert binding is not None, "a corpus without a manifest is refused"
        return Scored(_receipt(config, binding, tally, stream, size), binding, tally.counts())


def account(manifest: AdmitManifest, out: Path, *, unchanged: bool) -> str:
    """What became of the corpus, for people."""
    corpus, details, counts = scored_corpus(manifest), manifest.details, manifest.counts["corpus"]
    assert corpus is not None, "asked for the manifest of a scored corpus"
    teacher, alignment = corpus.teacher, corpus.alignment
    rows: list[list[object]] = [
        ["corpus: examples", counts["rows_kept"]],
        ["  tokens", counts["tokens"]],
        ["  action tokens, scored", counts["action_tokens"]],
        ["  observation tokens", counts["observation_tokens"]],
        *([["held out: examples", held["rows_kept"]]] if (held := manifest.counts.get("heldout")) else []),
    ]
    lines = [
        f"admit: scored by {printable(teacher.alias)} (revision {teacher.content_revision[:12]}), "
        f"template {details.template.name}, {corpus.top_k} candidates a token",
        table(rows),
        f"  token ids: {alignment.proven:,} of {alignment.of:,} are named by the corpus and match",
    ]
    if alignment.proven < alignment.of:
        lines.append("  of the others only the number is known to be right; --require-token-ids refuses them")
    for key, one, more, text in (
        ("duplicate_rows", "row repeats", "rows repeat", "the scores of an earlier row"),
        (
            "candidates_beyond_top_k",
            "candidate stands",
            "candidates stand",
            "behind those that are read, not looked at",
        ),
        ("suspect_logprobs", "score is", "scores are", "-100 exactly, which some servers write for minus infinity"),
        ("blank_lines", "blank line", "blank lines", "not counted as rows"),
    ):
        lines += [f"  {counted(counts[key], one, more)} {text}"] if counts[key] else []
    for field, count in counts["ignored_fields"].items():
        lines.append(f"  ignored field {field}: {counted(count, 'example', 'examples')}")
    for note, count in counts["template_notes"].items():
        lines.append(f"  template: {printable(note)}: {counted(count, 'example', 'examples')}")
    return "\n".join([*lines, f"{'unchanged' if unchanged else 'written'}: {printable(out)}/admit_manifest.json"])


def fault_details(faults: list[tuple[str, CorpusFault]]) -> dict[str, Any]:
    """Faults as an error carries them, each with the file that has it."""
    fields = ("line", "example", "code", "pointer", "detail")
    return {"faults": [{"file": name} | {field: getattr(fault, field) for field in fields} for name, fault in faults]}


class _Tally:
    """The account of a corpus, without its rows."""

    def __init__(self, path: str, seen: SeenRows, on_fault: OnFault | None) -> None:
        self._path = path
        self._seen = seen
        self._on_fault = on_fault
        self._digest = ScoredCorpusDigest()
        self._first: dict[int, CorpusFault] = {}
        self._ignored: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self.faults = self.examples = self.tokens = self.action_tokens = self.observation_tokens = 0
        self._proven = self._beyond = self._suspect = self._blank = self._longest = 0

    @property
    def settled(self) -> bool:
        """Whether no line to come can change which fault is told."""
        return self._on_fault is None and Phase.LINE in self._first

    @property
    def first(self) -> CorpusFault | None:
        """The fault that the contract reports."""
        return self._first[min(self._first)] if self._first else None

    @property
    def alignment(self) -> Alignment:
        return Alignment(proven=self._proven, of=self.action_tokens)

    def corpus_sha256(self) -> str:
        return self._digest.text()

    @property
    def duplicates(self) -> int:
        return self._seen.duplicates

    def add(self, part: Part, keep: Callable[[PackedScoredRow], None]) -> None:
        conflicts = []
        for kept in part.kept:
            if (fault := self._seen.add(kept)) is not None:
                row = kept.row
                conflicts.append(
                    CorpusFault(
                        phase=Phase.EXAMPLE,
                        line=row.line,
                        example=row.row_index,
                        code=fault.reason,
                        pointer=fault.pointer,
                        detail=fault.detail,
                    )
                )
        for found in sorted([*part.faults, *conflicts], key=lambda fault: fault.line):
            self.faults += 1
            self._first.setdefault(found.phase, found)
            if self._on_fault is not None:
                self._on_fault(self._path, found)
        self._blank += part.blank
        self._ignored.update(part.ignored)
        self._notes.update(part.notes)
        self.examples += part.examples
        if not self._first:
            self._add_kept(part, keep)

    def _add_kept(self, part: Part, keep: Callable[[PackedScoredRow], None]) -> None:
        for kept in part.kept:
            row = kept.row
            self._digest.update(row.row_sha256)
            self.tokens += row.tokens
            self.action_tokens += row.targets
            self.observation_tokens += row.observation_tokens
            self._longest = max(self._longest, row.tokens)
            keep(row)
        self._proven += part.proven
        self._beyond += part.beyond
        self._suspect += part.suspect

    def counts(self) -> dict[str, Any]:
        return {
            "rows_read": self.examples,
            "rows_kept": self.examples,
            "rows_rejected": 0,
            "duplicate_rows": self.duplicates,
            "tokens": self.tokens,
            "action_tokens": self.action_tokens,
            "observation_tokens": self.observation_tokens,
            "longest_row": self._longest,
            "candidates_beyond_top_k": self._beyond,
            "suspect_logprobs": self._suspect,
            "blank_lines": self._blank,
            "ignored_fields": dict(sorted(self._ignored.items())),
            "template_notes": dict(sorted(self._notes.items())),
        }


def _bound(
    config: LoadedConfig, contract: Contract, record: FirstRecord, name: str, on_fault: OnFault | None
) -> Binding | None:
    """What the manifest line is bound to; None for a corpus without one, which is refused once its lines are read."""
    if not record.is_manifest:
        if on_fault is not None:
            on_fault(name, _manifest_missing(record))
        return None
    try:
        return bind(config, contract, record, name)
    except KilnError as error:
        if on_fault is not None and error.code == REFUSED and isinstance(error.details, dict):
            for fault in error.details["faults"]:
                fields = {field: value for field, value in fault.items() if field != "file"}
                on_fault(name, CorpusFault(phase=Phase.MANIFEST, **fields))
        raise


def _manifest_missing(record: FirstRecord) -> CorpusFault:
    return CorpusFault(
        phase=Phase.UNNAMED,
        line=record.number,
        example=0,
        code="manifest_missing",
        pointer="",
        detail="the first record is no manifest line, so nothing says who scored the corpus",
    )


def _job(stream: BinaryIO, record: FirstRecord, binding: Binding | None) -> Job:
    return Job(stream, None, -1) if binding is None else Job(stream, binding.judge, record.offset)


def _require_sound(tally: _Tally, record: FirstRecord, name: str) -> None:
    """Raises KilnError KLN112 for the first fault, or for a corpus without a manifest; KLN107 without an example."""
    fault = tally.first
    if fault is None and not record.is_manifest:
        fault = _manifest_missing(record)
    if fault is not None:
        hint = _WHOLE
        if fault.code in ("manifest_missing", "logprobs_without_manifest"):
            hint = "put the line of `kiln teacher manifest ALIAS` in front, if that teacher scored it"
        raise KilnError(REFUSED, fault.text(name), hint=hint, details=fault_details([(name, fault)]))
    if not tally.examples:
        raise KilnError("KLN107", f"{name} holds no example, only a manifest line", hint="score some rows first")


def _receipt(config: LoadedConfig, binding: Binding, tally: _Tally, stream: BinaryIO, size: int) -> ScoredIngestion:
    assert config.run.admit.file is not None
    receipt = ScoredIngestion(
        source_locator=config.run.admit.file,
        source_sha256="sha256:" + hash_stream(stream, size),
        source_bytes=size,
        teacher_alias=binding.alias,
        teacher_content_revision=binding.identity.content_revision(),
        teacher_identity=binding.identity,
        top_k=binding.top_k,
        examples=tally.examples,
        duplicate_rows=tally.duplicates,
        tokens=tally.tokens,
        action_tokens=tally.action_tokens,
        observation_tokens=tally.observation_tokens,
        alignment=tally.alignment,
        scored_corpus_sha256=tally.corpus_sha256(),
    )
    if fault := next(receipt.faults(), None):
        raise KilnError("KLN501", f"the receipt of the corpus contradicts itself: {fault}")
    return receipt


def _input(receipt: ScoredIngestion) -> FileRef:
    return FileRef(
        path=receipt.source_locator,
        base="config",
        kind="scored_rows",
        sha256=receipt.source_sha256.removeprefix("sha256:"),
        bytes=receipt.source_bytes,
        rows=receipt.examples,
    )


def _details(contract: Contract, admitted: list[_Admitted]) -> AdmitDetails:
    receipt, binding = admitted[0].scored.receipt, admitted[0].scored.binding
    return AdmitDetails(
        config_sections=list(DISTILL_SECTIONS),
        rows=RowsRead(origin="file", shape=receipt.source, packing="lines", elements=False),
        admitted_sha256={each.split: each.scored.receipt.scored_corpus_sha256 for each in admitted},
        opd=msgspec.to_builtins(receipt.corpus()),
        teacher_tokenizer=binding.tokenizer_config,
        vocabulary=binding.vocabulary,
        **contract.details(contract.chat_mode),
    )
