"""What each stage's evidence says of one row. Files are held to the manifest that vouches for them (KLN207)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input
from kiln_cli.manifests import damaged, read_document, require_unchanged
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest, StageManifest
from kiln_cli.text import printable
from kiln_stages.admitting.admission import RejectedDetail
from kiln_stages.preparing.emit import Rejected
from kiln_stages.preparing.split import SPLITS
from kiln_stages.training.order import epoch_order


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was offered to admission. ``place`` counts the kept rows of the split from 0; None if rejected."""

    path: str
    split: str
    row_index: int
    line: int
    example_id: str | None
    row_sha256: str
    place: int | None = None
    fault: RejectedDetail | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        return (self.row_sha256,)


class Example(NamedTuple):
    """Where a prepared example stands: its split, its number there (from 1), and the row that it is a pair of."""

    split: str
    number: int
    example_id: str
    language: str
    source_example_id: str | None


class Visit(msgspec.Struct, frozen=True):
    """A line of ``train/metrics.jsonl``: ``step`` from 1, ``epoch`` and ``cursor`` from 0; loss in nats a token."""

    step: int
    epoch: int
    cursor: int
    row_index: int
    row_sha256: str
    loss: float


class _Named(msgspec.Struct):
    """As much of a prepared example as names it."""

    example_id: str
    language: str
    source_example_id: str | None


def rejected_rows(run: Path, prepare: PrepareManifest) -> Iterator[Rejected]:
    """The rows that prepare dropped, as ``data/rejected.jsonl`` has them."""
    yield from _lines(run, prepare, "data/rejected.jsonl", Rejected)


def examples(run: Path, prepare: PrepareManifest, wanted: Collection[str] | None = None) -> Iterator[Example]:
    """The prepared examples with one of these ids, or all of them."""
    for split in SPLITS:
        for number, found in enumerate(_lines(run, prepare, f"data/{split}.jsonl", _Named), start=1):
            if wanted is None or found.example_id in wanted:
                yield Example(split, number, found.example_id, found.language, found.source_example_id)


def offered_rows(run: Path, admit: AdmitManifest) -> Iterator[Offered]:
    """Every row that admission read: of each split the kept ones in order, then the rejected ones."""
    paths = dict(zip(admit.counts, (ref.path for ref in admit.inputs), strict=True))
    for split, path in paths.items():
        rows = _narrow(run, admit, split).select("row_index", "line", "example_id", "row_sha256").collect().iter_rows()
        for place, (row_index, line, example_id, row_sha256) in enumerate(rows):
            yield Offered(
                path=path,
                split=split,
                row_index=row_index,
                line=line,
                example_id=example_id,
                row_sha256=row_sha256,
                place=place,
            )
    for fault in _lines(run, admit, "admit/rejected.jsonl", RejectedDetail):
        yield Offered(
            path=paths[fault.split],
            split=fault.split,
            row_index=fault.row_index,
            line=fault.line,
            example_id=fault.example_id,
            row_sha256=fault.row_sha256,
            fault=fault,
        )


def tokens_of(run: Path, admit: AdmitManifest, row: Offered) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and label spans of a kept row."""
    assert row.place is not None
    table = _narrow(run, admit, row.split).select("input_ids", "label_spans").slice(row.place, 1).collect()
    ((ids, edges),) = table.iter_rows()
    return ids, list(zip(edges[::2], edges[1::2], strict=True))


def all_tokens(run: Path, admit: AdmitManifest, split: str) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Ids and label spans of every kept row of a split, in order."""
    for ids, edges in _narrow(run, admit, split).select("input_ids", "label_spans").collect().iter_rows():
        yield ids, list(zip(edges[::2], edges[1::2], strict=True))


class Training(NamedTuple):
    """The training of a run, as far as it is told here. ``stale`` says why it is not of this admission, else ""."""

    adapter: str
    stale: str
    seed: int | None
    epochs: int | None


def training_of(run: Path, admit: AdmitManifest) -> Training | None:
    """None where nothing was trained. Seed and epochs are known while the run's config is that of the training."""
    path = run / "train" / "training.json"
    if not path.exists():
        return None
    found: dict[str, Any] = read_document(path, dict, "kiln.training.v1")
    stale = ""
    if found.get("corpus_sha256") != admit.content_sha256:
        stale = f"it used corpus {found.get('corpus_sha256')}, this admission is {admit.content_sha256}"
    config = load_config(run / "config.resolved.toml")
    adapter = printable(found.get("adapter"))
    if config.sha256(*TRAIN_SECTIONS) != found.get("config_sha256"):
        return Training(adapter, stale, None, None)
    return Training(adapter, stale, config.run.project.seed, config.run.train.epochs)


def visits(run: Path, row: Offered) -> list[Visit]:
    """The committed steps that trained on a kept row; the row is known by its number and its hash.

    Raises KilnError KLN207 where a step of the row's number names another row.
    """
    path = run / "train" / "metrics.jsonl"
    if not path.exists():
        return []
    mark = f'"row_index":{row.row_index},'.encode()
    found = []
    with open_input(path) as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                break  # a training that was killed, or is at it, may leave half a line
            if mark in line and (visit := _decode(path, line, Visit)).row_index == row.row_index:
                if visit.row_sha256 != row.row_sha256:
                    raise KilnError(
                        "KLN207",
                        f"{printable(path)}: step {visit.step} trained on {printable(visit.row_sha256)}, "
                        f"row {row.row_index} of the corpus is {row.row_sha256}",
                        hint="run `kiln verify-receipt`; then train again with --fresh",
                    )
                found.append(visit)
    return found


def planned_steps(training: Training, place: int, rows: int) -> list[int]:
    """The steps (from 1) at which the order of the epochs visits the kept row at ``place``, one an epoch."""
    if training.seed is None or training.epochs is None:
        return []
    epochs = range(training.epochs)
    return [epoch * rows + epoch_order(training.seed, epoch, rows).index(place) + 1 for epoch in epochs]


def _narrow(run: Path, admit: AdmitManifest, split: str) -> Any:
    """A corpus as a lazy table: nothing is read before it is asked for."""
    import polars as pl

    name = f"admit/{split}.parquet"
    require_unchanged(admit.output(name), run / name, "admit_manifest.json")
    return pl.scan_parquet(run / name, glob=False)


def _lines(run: Path, manifest: StageManifest, name: str, kind: type[Any]) -> Iterator[Any]:
    """The lines of a file of evidence as values."""
    path = run / name
    require_unchanged(manifest.output(name), path, f"the manifest of {manifest.stage}")
    with open_input(path) as stream:
        for line in stream:
            yield _decode(path, line, kind)


def _decode(path: Path, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(path, f"{printable(line[:40].decode('utf-8', 'replace'))}: {error}") from None


def find_rejected(
    run: Path, prepare: PrepareManifest, keys: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], Rejected]:
    """The dropped rows among some, by language and row number."""
    wanted = set(keys)
    found = {}
    for row in rejected_rows(run, prepare):
        if (row.language, row.row_index) in wanted:
            found[row.language, row.row_index] = row
    return found
