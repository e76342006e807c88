"""``kiln prepare``: untrusted rows in, typed, deduplicated, split examples out; every other row has a counted reason.

Keys move, rows stay. The first pass (``survey``) screens every row and keeps its place and its keys; ids, duplicates,
pairs and splits are decided on that narrow table (``pool``, ``pairing``, ``split``); the second pass (``emit``) reads
the chosen rows again by place. Bytes out are the same for any number of workers.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kiln_cli.config import PREPARE_SECTIONS, DatasetConfig, LoadedConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.extensions import DropReason
from kiln_cli.files import AtomicFile, run_lock, write_file
from kiln_cli.manifests import document, nonzero, reference, write_manifest
from kiln_cli.plugins import Plugins, load_plugins, version
from kiln_cli.receipts import DROP_SUMMARY_SCHEMA, SIXTEEN, DropSummary, FileRef, KilnDrops, LanguageDrops
from kiln_cli.records import PREPARED_SCHEMA
from kiln_cli.stage_manifests import DROP_SUMMARY, PrepareDetails, PrepareManifest, RawDataset
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.preparing.emit import Chosen, SplitWriter, write_rejected
from kiln_stages.preparing.pairing import Pair, Pairing, Root
from kiln_stages.preparing.pool import Pool
from kiln_stages.preparing.screening import Screen
from kiln_stages.preparing.split import SPLITS, Splits, require_disjoint, sizes, split_pool
from kiln_stages.preparing.survey import OpenSource, Survey, survey
from kiln_stages.reading.ranges import RANGE_BYTES
from kiln_stages.reading.sources import STDIN, Choice, open_rows
from kiln_stages.workers import Workers, available


class PrepareResult(msgspec.Struct, frozen=True):
    manifest: PrepareManifest
    summary: DropSummary
    unchanged: bool


def command(
    config: Annotated[Path, typer.Argument(help="The run config (TOML or JSON).")],
    out: Annotated[Path, typer.Option("--out", help="The run directory.")],
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; as many as cores.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Turn raw function-calling rows into split, typed examples; count every drop."""
    loaded = load_config(config, assignments or ())
    result = run(loaded, out, load_plugins(), progress=terminal, workers=workers)
    if json:
        terminal.json_data(result.manifest)
    terminal.say(account(result, out))
    terminal.say(f"next: kiln admit {printable(config)} --out {printable(out)}")


def run(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    progress: Progress = SILENT,
    *,
    workers: int | None = None,
    range_bytes: int = RANGE_BYTES,
) -> PrepareResult:
    """Reads every source, writes ``data/`` and ``data_manifest.json``.

    Raises KilnError: KLN203 for a config without sources, KLN204/206 for an input that cannot be read or unpacked,
    KLN205 (before anything is written) for too small a pool, KLN207 where an input changes while it is read, KLN401 to
    403 for locks, disks and memory.
    """
    started = time.monotonic()
    datasets = _root_first(config)
    reasons = plugins.in_force(config.run.data.checks)
    with run_lock(out, "kiln prepare"), ExitStack() as stack:
        inputs = [_open(dataset, config, plugins, reasons, out, stack) for dataset in datasets]
        sources = [entry.source for entry in inputs]
        count = _worker_count(sources, workers, range_bytes)
        pools = stack.enter_context(Workers(sources, count))
        with progress.task("prepare: reading", None, "rows") as task:
            surveys = [survey(sources, n, pools, out, task, range_bytes) for n in range(len(sources))]
        for read in surveys:
            stack.callback(read.dropped.close)
        decided = _decide(config, datasets, surveys, reasons)
        revisions = tuple(dataset.revision or read.sha256 for dataset, read in zip(datasets, surveys, strict=True))
        outputs = _write(out, inputs, surveys, decided, revisions, pools, progress)
        manifest = PrepareManifest(
            stage="prepare",
            kiln_version=version(),
            plugins=plugins.loaded(),
            config_sha256=config.sha256(*PREPARE_SECTIONS),
            inputs=[_raw_input(dataset, read) for dataset, read in zip(datasets, surveys, strict=True)],
            outputs=outputs,
            counts=msgspec.to_builtins(decided.summary.kiln),
            details=PrepareDetails(
                config_sections=list(PREPARE_SECTIONS),
                datasets=[entry.details(revision) for entry, revision in zip(inputs, revisions, strict=True)],
                drop_reasons=[reason.name for reason in reasons],
                seed=config.run.project.seed,
            ),
        )
        write_file(out / "config.resolved.toml", config.resolved_toml(out))
        unchanged = write_manifest(out, manifest, started, config.base_dir).unchanged
    return PrepareResult(manifest, decided.summary, unchanged)


def account(result: PrepareResult, out: Path) -> str:
    """What happened to the rows, for people."""
    lines = []
    for entry in result.manifest.details.datasets:
        language = entry.language
        drops, listed = result.summary.kiln[language], result.summary.languages[language]
        rows: list[list[object]] = [["rows read", drops.rows_read]]
        rows += [["  " + name, count] for name, count in nonzero({**listed.counts, **drops.counts}).items()]
        rows += [["  unused", drops.unused], ["kept", drops.kept]]
        rows += [["  " + name, listed.split_sizes[name]] for name in SPLITS]
        kind = "root" if entry.root else "paired"
        why = f"source {entry.source} ({entry.source_chosen})"
        lines.append(f"prepare: {language} ({kind}): {why}\n{table(rows)}")
        for name, count in drops.lost_keys.items():
            lines.append(f"  not carried over: {printable(name)}: {counted(count, 'row', 'rows')}")
    state = "unchanged" if result.unchanged else "written"
    return "\n".join([*lines, f"{state}: {printable(out)}/data_manifest.json"])


class Input(msgspec.Struct, frozen=True):
    """A source of the config, opened: what is read, why it is read so, and the file as it was at the start."""

    dataset: DatasetConfig
    source: OpenSource
    choice: Choice
    path: Path | None
    before: os.stat_result | None

    def require_unchanged(self) -> None:
        """Raises KilnError KLN207 where the file changed while it was read."""
        if self.path is None or self.before is None:
            return
        after = self.path.stat()
        if (self.before.st_size, self.before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise KilnError(
                "KLN207",
                f"{printable(self.path)} changed while it was read "
                f"({self.before.st_size} bytes before, {after.st_size} after)",
                hint="run again when nothing writes to it",
            )

    def details(self, revision: str) -> RawDataset:
        """What the manifest says of the source."""
        return RawDataset(
            dataset_id=self.dataset.dataset_id,
            language=self.dataset.language,
            packing=self.source.plain.packing,
            revision=revision,
            root=self.dataset.source_id_column is None,
            source=self.choice.source.name,
            source_chosen=self.choice.why,
        )


class Decided(msgspec.Struct, frozen=True):
    """What the global steps say: the rows of each split in order, the pool of each source, the account."""

    rows: dict[str, list[Chosen]]
    pools: list[Pool]
    summary: DropSummary


def _root_first(config: LoadedConfig) -> list[DatasetConfig]:
    if not config.run.datasets:
        raise KilnError("KLN203", "the config names no [[datasets]]", hint="add one with language and path")
    return sorted(config.run.datasets, key=lambda dataset: dataset.source_id_column is not None)


def _open(
    dataset: DatasetConfig,
    config: LoadedConfig,
    plugins: Plugins,
    reasons: list[DropReason],
    scratch: Path,
    stack: ExitStack,
) -> Input:
    path = None if dataset.path == STDIN else config.resolve(dataset.path)
    before = path.stat() if path is not None and path.is_file() else None
    plain, choice = stack.enter_context(open_rows(path, dataset.source, plugins.sources, "tool_calls", scratch))
    pairing = len(config.run.datasets) > 1
    screen = Screen(dataset, choice.source, reasons, config.run.data, pairing=pairing)
    numbers = {reason.name: number for number, reason in enumerate(reasons)}
    return Input(dataset, OpenSource(plain, screen, numbers), choice, path, before)


def _worker_count(sources: list[OpenSource], wanted: int | None, range_bytes: int) -> int:
    """As many processes as cores, unless there is too little to share."""
    total = sum(os.fstat(source.plain.stream.fileno()).st_size for source in sources)
    return available(wanted) if total > 2 * range_bytes else 1


def _decide(
    config: LoadedConfig, datasets: list[DatasetConfig], surveys: list[Survey], reasons: list[DropReason]
) -> Decided:
    limits = config.run.data
    pools = [Pool(read.frame, reasons, limits) for read in surveys]
    for number, pool in enumerate(pools):
        pool.claim_ids(pools[:number])
    root = pools[0]
    root.drop_duplicates()
    wanted, splits = _split_root(config, root)
    rows, roots, queries = _chosen_roots(root, splits)
    place = {chosen.example_id: number for split in rows.values() for number, chosen in enumerate(split)}
    for number, pool in enumerate(pools[1:], start=1):
        pairs = Pairing(roots, datasets[0].dataset_id, queries).pair(
            pool, release_digests=limits.release_failed_pair_digest
        )
        for split, members in _chosen_pairs(number, pool, pairs, place).items():
            rows[split] += members
    _require_safe(rows, pools, roots)
    kept = [{split: sum(row.source == n for row in rows[split]) for split in SPLITS} for n in range(len(pools))]
    summary = _summary(datasets, surveys, pools, wanted, kept)
    return Decided(rows, pools, summary)


def _split_root(config: LoadedConfig, root: Pool) -> tuple[dict[str, int], Splits]:
    limits = config.run.data
    rows = array("q", root.left("row")["row"])
    wanted = sizes(limits, len(rows))
    label = "group" if limits.group_by is not None else "stratum" if limits.stratify_by is not None else None
    labels = root.left(label)[label].to_list() if label is not None else None
    try:
        return wanted, split_pool(rows, wanted, config.run.project.seed, limits, labels)
    except KilnError as error:
        raise _too_small(error, root, wanted) from None


def _chosen_roots(root: Pool, splits: Splits) -> tuple[dict[str, list[Chosen]], dict[str, Root], dict[bytes, str]]:
    """Root rows in their splits, how pairs find them, and which split each query stands in."""
    wanted = [row for members in splits.values() for row in members]
    by_row = root.rows(wanted, "offset", "length", "example_id", "texts", "query")
    rows: dict[str, list[Chosen]] = {}
    roots: dict[str, Root] = {}
    queries: dict[bytes, str] = {}
    for split, members in splits.items():
        rows[split] = []
        for row in members:
            offset, length, example_id, texts, query = by_row[row]
            rows[split].append(Chosen(0, row, offset, length, example_id, None))
            roots[example_id] = Root(example_id, split, texts)
            queries[query] = split
    return rows, roots, queries


def _chosen_pairs(number: int, pool: Pool, pairs: list[Pair], place: dict[str, int]) -> dict[str, list[Chosen]]:
    """Accepted rows of a paired source by split, in the order of their root rows."""
    by_row = pool.rows([pair.row for pair in pairs], "offset", "length", "example_id")
    rows: dict[str, list[Chosen]] = {split: [] for split in SPLITS}
    for pair in sorted(pairs, key=lambda pair: place[pair.root.example_id]):
        offset, length, example_id = by_row[pair.row]
        rows[pair.root.split].append(Chosen(number, pair.row, offset, length, example_id, pair.root.example_id))
    return rows


def _require_safe(rows: dict[str, list[Chosen]], pools: list[Pool], roots: dict[str, Root]) -> None:
    """Split safety over all languages at once. Raises KilnError KLN501: the steps before must have seen to it."""
    chosen = [row for members in rows.values() for row in members]
    digests = [pool.rows((row.row for row in chosen if row.source == n), "query") for n, pool in enumerate(pools)]
    require_disjoint((split, digests[row.source][row.row][0]) for split, members in rows.items() for row in members)
    ids = [row.example_id for members in rows.values() for row in members]
    if len(set(ids)) != len(ids):
        raise KilnError("KLN501", f"{len(ids) - len(set(ids))} example ids stand in more than one row")
    for split, members in rows.items():
        for row in members:
            if row.root_id is not None and roots[row.root_id].split != split:
                raise KilnError("KLN501", f"pair {row.example_id!r} is in {split}, its root row is not")


def _summary(
    datasets: list[DatasetConfig],
    surveys: list[Survey],
    pools: list[Pool],
    wanted: dict[str, int],
    kept: list[dict[str, int]],
) -> DropSummary:
    summary = DropSummary(languages={}, requested=wanted, kiln={})
    for dataset, read, pool, sizes_kept in zip(datasets, surveys, pools, kept, strict=True):
        counts = pool.counts()
        total, dropped = sum(sizes_kept.values()), sum(counts.values())
        unused = read.frame.height - total - dropped
        if unused < 0 or (unused and dataset.source_id_column is not None):
            detail = f"{read.frame.height} rows read != {total} kept + {dropped} dropped + {unused} unused"
            raise KilnError("KLN501", f"{dataset.language}: {detail}")
        summary.languages[dataset.language] = LanguageDrops(
            counts={name: counts[name] for name in SIXTEEN},
            valid_rows=pool.valid_rows,
            deduplicated_rows=pool.valid_rows - counts["duplicate_query"],
            split_sizes=sizes_kept,
        )
        summary.kiln[dataset.language] = KilnDrops(
            counts={name: count for name, count in counts.items() if name not in SIXTEEN},
            rows_read=read.frame.height,
            kept=total,
            dropped=dropped,
            unused=unused,
            blank_lines=read.blank_lines,
            byte_order_marks=int(read.had_bom),
            lost_keys={},
        )
    return summary


def _write(
    out: Path,
    inputs: list[Input],
    surveys: list[Survey],
    decided: Decided,
    revisions: tuple[str, ...],
    workers: Workers,
    progress: Progress,
) -> list[FileRef]:
    """Everything below ``data/``. No file takes its name before all are written and the inputs found unchanged."""
    rejected_rows = 0
    with ExitStack() as files:
        splits = {name: files.enter_context(AtomicFile(out / "data" / f"{name}.jsonl")) for name in SPLITS}
        rejected = files.enter_context(AtomicFile(out / "data" / "rejected.jsonl"))
        task = files.enter_context(progress.task("prepare: writing", sum(map(len, decided.rows.values())), "rows"))
        writers = {name: SplitWriter(name, decided.rows[name], revisions, workers) for name in SPLITS}
        for entry, read, pool in zip(inputs, surveys, decided.pools, strict=True):
            rejected_rows += write_rejected(rejected, entry.source, entry.dataset.language, read, pool)
        for name, writer in writers.items():
            writer.write(splits[name], task)
            for entry, keys in zip(inputs, writer.lost, strict=True):
                lost = decided.summary.kiln[entry.dataset.language].lost_keys
                lost.update(Counter(lost) + keys)
        for entry in inputs:
            entry.require_unchanged()
    summary = write_file(out / DROP_SUMMARY, document(decided.summary))
    return [
        *(
            reference(target, out, "dataset_split", schema=PREPARED_SCHEMA, rows=len(decided.rows[name]))
            for name, target in splits.items()
        ),
        reference(rejected, out, "rejected_rows", rows=rejected_rows),
        reference(summary, out, "drop_summary", schema=DROP_SUMMARY_SCHEMA),
    ]


def _raw_input(dataset: DatasetConfig, read: Survey) -> FileRef:
    return FileRef(
        path=dataset.path,
        base="config",
        kind="raw_rows",
        sha256=read.sha256,
        bytes=read.size,
        rows=read.frame.height,
    )


def _too_small(error: KilnError, root: Pool, wanted: dict[str, int]) -> KilnError:
    counts, left = root.counts(), root.left().height
    funnel = table(
        [
            ["rows read", root.frame.height],
            *[["  " + name, count] for name, count in nonzero(counts).items()],
            ["left for the splits", left],
            ["asked for", sum(wanted.values())],
        ]
    )
    return KilnError(
        "KLN205",
        f"{error.message}; nothing was written\n{funnel}",
        hint=error.hint or "lower [data] n_train, n_validation or n_test, or bring more rows",
        details={"counts": counts, "pool": left, "requested": wanted},
    )
