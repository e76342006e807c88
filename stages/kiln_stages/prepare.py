"""``kiln prepare``: untrusted rows in, typed, deduplicated, split examples out; every other row has a counted reason.

Keys move, rows stay: the first pass reads the file once and keeps a row's place and keys, never its body; the second
pass reads the chosen rows again by place, through the same open file, in the order of the splits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from kiln_cli.config import PREPARE_SECTIONS, DatasetConfig, LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.extensions import DropReason
from kiln_cli.files import AtomicFile, open_input, run_lock, write_file
from kiln_cli.identity import canonical_json, canonical_parsed
from kiln_cli.lines import TRIMMED, LineReader
from kiln_cli.manifests import document, nonzero, reference, write_manifest
from kiln_cli.plugins import Plugins, load_plugins, version
from kiln_cli.receipts import (
    DROP_SUMMARY_SCHEMA,
    DropSummary,
    FileRef,
    KilnDrops,
    LanguageDrops,
    StageManifest,
)
from kiln_cli.records import PREPARED_SCHEMA, Record
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.screening import Drop, Screen, Screened, raw_sha256
from kiln_stages.sources import Choice, choose_source, read_records
from kiln_stages.split import SPLITS, requested, require_disjoint, split_pool

# The closed set of the seed policy, in its order; the drop summary's `counts` holds these and no others.
SIXTEEN = (
    "missing_query",
    "missing_tools",
    "missing_answers",
    "query_too_short",
    "query_too_long",
    "invalid_tools_json",
    "invalid_tool_shape",
    "invalid_answers_json",
    "invalid_answer_shape",
    "multi_call_answer",
    "duplicate_query",
    "missing_source_example",
    "duplicate_source_example",
    "pair_tools_mismatch",
    "pair_answers_mismatch",
    "cross_split_duplicate",
)


class PrepareResult(msgspec.Struct, frozen=True):
    manifest: StageManifest
    summary: DropSummary
    source: Choice
    unchanged: bool


def command(
    config: Annotated[Path, typer.Argument(help="The run config (TOML or JSON).")],
    out: Annotated[Path, typer.Option("--out", help="The run directory.")],
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Turn raw function-calling rows into split, typed examples; count every drop."""
    loaded = load_config(config, assignments or ())
    result = run(loaded, out, load_plugins(), terminal)
    if json:
        terminal.json_data(result.manifest)
    terminal.say(account(result, out))
    terminal.say(f"next: kiln admit {printable(config)} --out {printable(out)}")


def run(config: LoadedConfig, out: Path, plugins: Plugins, progress: Progress = SILENT) -> PrepareResult:
    """Reads the root source, writes ``data/`` and ``data_manifest.json``.

    Raises KilnError: KLN204 for an input that cannot be read, KLN205 (before anything is written) for too small a
    pool, KLN207 where the input changes while it is read, KLN401/402 for locks and disks.
    """
    started = time.monotonic()
    if not config.run.datasets:
        raise KilnError("KLN203", "the config names no [[datasets]]", hint="add one with language and path")
    dataset = config.run.datasets[0]
    path = config.resolve(dataset.path)
    choice = choose_source(path, dataset.source, plugins.sources, "tool_calls")
    screen = Screen(dataset, choice.source, plugins.drop_reasons, config.run.data)
    sizes = requested(config.run.data)
    with run_lock(out, "kiln prepare"), open_input(path) as stream:
        before = os.fstat(stream.fileno())
        with AtomicFile(out / "data" / "rejected.jsonl") as rejected:
            survey = Survey(plugins.drop_reasons, rejected)
            lines = _survey(stream, choice, screen, survey, progress)
            try:
                splits, unused = split_pool(survey.pool, sizes, config.run.project.seed)
            except KilnError as error:
                raise _too_small(error, survey, sizes) from None
            require_disjoint({name: [member.query_sha256 for member in members] for name, members in splits.items()})
        revision = dataset.revision or lines.sha256
        outputs = [_write_split(out, name, splits[name], stream, screen, revision) for name in SPLITS]
        _require_same_file(path, before, os.fstat(stream.fileno()))
        outputs.append(reference(rejected, out, "rejected_rows", rows=survey.rows - len(survey.pool)))
        summary = survey.summary(dataset.language, sizes, splits, len(unused), lines)
        written = write_file(out / "data" / "drop_summary.json", document(summary))
        outputs.append(reference(written, out, "drop_summary", schema=DROP_SUMMARY_SCHEMA))
        manifest = StageManifest(
            stage="prepare",
            kiln_version=version(),
            plugins=plugins.loaded(),
            config_sha256=config.sha256(*PREPARE_SECTIONS),
            inputs=[_raw_input(dataset, lines, survey)],
            outputs=outputs,
            counts=msgspec.to_builtins(summary.kiln[dataset.language]),
            details=_details(config, dataset, choice, revision, plugins),
        )
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        unchanged = write_manifest(out, manifest, started, config.base_dir).unchanged
    return PrepareResult(manifest, summary, choice, unchanged)


def account(result: PrepareResult, out: Path) -> str:
    """What happened to the rows, for people."""
    language, drops = next(iter(result.summary.kiln.items()))
    sizes = result.summary.languages[language].split_sizes
    counts = {**result.summary.languages[language].counts, **drops.counts}
    rows: list[list[object]] = [["rows read", drops.rows_read]]
    rows += [["  " + name, count] for name, count in nonzero(counts).items()]
    rows += [["  unused", drops.unused], ["kept", drops.kept]]
    rows += [["  " + name, sizes[name]] for name in SPLITS]
    state = "unchanged" if result.unchanged else "written"
    return (
        f"prepare: source {result.source.source.name} ({result.source.why})\n{table(rows)}\n"
        f"{state}: {printable(out)}/data_manifest.json"
    )


class Member(msgspec.Struct, frozen=True, gc=False):
    """A row of the pool: where its bytes lie and its query's digest. ``value`` only for rows without bytes."""

    row_index: int
    line: int
    offset: int
    length: int
    query_sha256: str
    value: dict[str, object] | None = None


class Survey:
    """What the first pass learns: the pool of valid, distinct rows, and a count and a line for every other row."""

    def __init__(self, reasons: Iterable[DropReason], rejected: AtomicFile) -> None:
        reasons = list(reasons)
        self.counts = {reason.name: 0 for reason in reasons}
        self.pool: list[Member] = []
        self.rows = 0
        self.valid = 0
        self._rejected = rejected
        self._ids: set[str] = set()
        self._pool_reasons = [reason for reason in reasons if reason.scope == "pool"]
        self._seen: list[dict[str, int]] = [{} for _ in self._pool_reasons]

    def take(self, screened: Screened) -> None:
        self.rows += 1
        drop = self._claim_id(screened) or screened.drop
        if drop is None:
            self.valid += 1
            drop = self._claim_keys(screened)
        if drop is not None:
            self._reject(screened, drop)
            return
        record = screened.record
        value = record.value if record.text is None else None
        self.pool.append(
            Member(record.row_index, record.line, record.offset, record.length, screened.query_sha256, value)
        )

    def _claim_id(self, screened: Screened) -> Drop | None:
        """The first row with an id has it, kept or not."""
        if screened.example_id is None:
            return None
        if screened.example_id in self._ids:
            return Drop("duplicate_example_id", f"id {screened.example_id!r} stands in an earlier row")
        self._ids.add(screened.example_id)
        return None

    def _claim_keys(self, screened: Screened) -> Drop | None:
        for reason, seen, key in zip(self._pool_reasons, self._seen, screened.keys, strict=True):
            first = seen.setdefault(key, screened.record.row_index)
            if first != screened.record.row_index:
                return Drop(reason.name, f"row {first} has the same key", reason.pointer)
        return None

    def _reject(self, screened: Screened, drop: Drop) -> None:
        if drop.reason not in self.counts:
            raise KilnError(
                "KLN501",
                f"a plugin dropped a row for {printable(drop.reason)!r}, which no plugin declares",
                hint="declare it with the hook kiln_drop_reasons",
            )
        self.counts[drop.reason] += 1
        record = screened.record
        self._rejected.write(
            canonical_json(
                {
                    "detail": drop.detail,
                    "example_id": screened.example_id,
                    "length": record.length,
                    "line": record.line,
                    "offset": record.offset,
                    "pointer": drop.pointer,
                    "reason": drop.reason,
                    "row_index": record.row_index,
                    "row_sha256": raw_sha256(record),
                }
            )
            + b"\n"
        )

    def summary(
        self,
        language: str,
        sizes: dict[str, int],
        splits: dict[str, list[Member]],
        unused: int,
        lines: LineReader,
    ) -> DropSummary:
        """Raises KilnError KLN501 if the account does not add up: no row may vanish."""
        kept = sum(map(len, splits.values()))
        dropped = sum(self.counts.values())
        if self.rows != kept + dropped + unused:
            raise KilnError("KLN501", f"{self.rows} rows read != {kept} kept + {dropped} dropped + {unused} unused")
        return DropSummary(
            languages={
                language: LanguageDrops(
                    counts={name: self.counts.get(name, 0) for name in SIXTEEN},
                    valid_rows=self.valid,
                    deduplicated_rows=self.valid - self.counts["duplicate_query"],
                    split_sizes={name: len(members) for name, members in splits.items()},
                )
            },
            requested=sizes,
            kiln={
                language: KilnDrops(
                    counts={name: count for name, count in self.counts.items() if name not in SIXTEEN},
                    rows_read=self.rows,
                    kept=kept,
                    dropped=dropped,
                    unused=unused,
                    blank_lines=lines.blank,
                    byte_order_marks=int(lines.had_bom),
                )
            },
        )


def _survey(stream: BinaryIO, choice: Choice, screen: Screen, survey: Survey, progress: Progress) -> LineReader:
    """The first pass: every row is screened and taken account of."""
    lines = LineReader(stream)
    with progress.task("prepare: reading", None, "rows") as task:
        for record in read_records(choice.source, lines):
            survey.take(screen.screen(record))
            task.advance()
    return lines


def _raw_input(dataset: DatasetConfig, lines: LineReader, survey: Survey) -> FileRef:
    return FileRef(
        path=dataset.path, base="config", kind="raw_rows", sha256=lines.sha256, bytes=lines.size, rows=survey.rows
    )


def _details(
    config: LoadedConfig, dataset: DatasetConfig, choice: Choice, revision: str, plugins: Plugins
) -> dict[str, Any]:
    return {
        "config_sections": list(PREPARE_SECTIONS),
        "datasets": [
            {
                "dataset_id": dataset.dataset_id,
                "language": dataset.language,
                "revision": revision,
                "root": True,
                "source": choice.source.name,
                "source_chosen": choice.why,
            }
        ],
        "drop_reasons": plugins.drop_reasons.names(),
        "seed": config.run.project.seed,
    }


def _write_split(
    out: Path, name: str, members: list[Member], stream: BinaryIO, screen: Screen, revision: str
) -> FileRef:
    with AtomicFile(out / "data" / f"{name}.jsonl") as target:
        for record in _read_again(stream, members):
            target.write(canonical_parsed(screen.example(record, name, revision)) + b"\n")
    return reference(target, out, "dataset_split", schema=PREPARED_SCHEMA, rows=len(members))


def _read_again(stream: BinaryIO, members: Iterable[Member]) -> Iterator[Record]:
    for member in members:
        text = None
        if member.value is None:
            raw = os.pread(stream.fileno(), member.length, member.offset)
            text = raw.removeprefix(b"\xef\xbb\xbf").strip(TRIMMED) if member.offset == 0 else raw.strip(TRIMMED)
        yield Record(
            row_index=member.row_index,
            line=member.line,
            offset=member.offset,
            length=member.length,
            text=text,
            value=member.value,
        )


def _require_same_file(path: Path, before: os.stat_result, after: os.stat_result) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise KilnError(
            "KLN207",
            f"{printable(path)} changed while it was read ({before.st_size} bytes before, {after.st_size} after)",
            hint="run again when nothing writes to it",
        )


def _too_small(error: KilnError, survey: Survey, sizes: dict[str, int]) -> KilnError:
    funnel = table(
        [
            ["rows read", survey.rows],
            *[["  " + name, count] for name, count in nonzero(survey.counts).items()],
            ["left for the splits", len(survey.pool)],
            ["asked for", sum(sizes.values())],
        ]
    )
    return KilnError(
        "KLN205",
        f"{error.message}; nothing was written\n{funnel}",
        hint="lower [data] n_train, n_validation or n_test, or bring more rows",
        details={"counts": survey.counts, "pool": len(survey.pool), "requested": sizes},
    )
