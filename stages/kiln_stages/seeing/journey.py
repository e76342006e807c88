"""One row through all stages: its place in the raw file, and what prepare, admit and train made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.lines import LineReader
from kiln_cli.manifests import locate
from kiln_cli.records import Record
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest
from kiln_stages.preparing.emit import Rejected
from kiln_stages.reading.sources import json_lines
from kiln_stages.reading.transports import Plain, open_plain
from kiln_stages.seeing import trail
from kiln_stages.seeing.raw_rows import ChatHash, RawFile, RawRow
from kiln_stages.seeing.selectors import Selector, select
from kiln_stages.seeing.trail import Example, Offered

EXCERPT = 200  # characters of a raw row that are shown


class RawPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a row stands. ``offset`` and ``length`` are bytes, of the unpacked file where it is packed; an element of
    something larger (an array, a table) has no line. ``fault`` says why the file could not be read again; the rest is
    then what evidence still knows."""

    path: str
    packing: str = "lines"
    line: int | None = None
    row_index: int | None = None
    offset: int | None = None
    length: int | None = None
    row_sha256: str | None = None
    excerpt: str | None = None
    fault: str = ""


class FirstRow(msgspec.Struct, frozen=True, kw_only=True):
    """The earlier row that a dropped one repeats; ``line`` is None where the raw file cannot be read again."""

    path: str
    row_index: int | None
    line: int | None = None
    example_id: str | None = None


class PreparePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``kept`` in a split (``number`` from 1), ``dropped``, or ``unused``: sound, and no split had room."""

    outcome: str
    split: str | None = None
    number: int | None = None
    pair_of: str | None = None
    reason: str | None = None
    detail: str | None = None
    pointer: str | None = None
    first: FirstRow | None = None


class AdmitPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``kept``, ``rejected``, ``not offered`` (a test row), ``not run``, or ``stale``: run on other prepared rows."""

    outcome: str
    split: str | None = None
    row_index: int | None = None
    row_sha256: str | None = None
    tokens: int | None = None
    supervised_tokens: int | None = None
    reason: str | None = None
    code: str | None = None
    detail: str | None = None
    pointer: str | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One visit of a row: epoch and step from 1; ``loss`` is None while the step is still to come."""

    epoch: int
    step: int
    loss: float | None


class TrainPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``trained``, ``held out``, ``not run``, or ``stale``: run on another corpus."""

    outcome: str
    adapter: str | None = None
    steps: list[Step] = []
    detail: str = ""


class Journey(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that the row did not come to is None; so is prepare where admission read the file itself."""

    example_id: str | None
    raw: RawPart
    prepare: PreparePart | None
    admit: AdmitPart | None
    train: TrainPart | None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a name: ``count`` of them, the first few in ``rows``."""

    count: int
    rows: list[Journey]


class EvidenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a raw file that cannot be read again, as far as evidence knows it."""

    path: str
    language: str
    fault: str
    line: int | None = None
    row_index: int | None = None
    offset: int | None = None
    length: int | None = None
    example_id: str | None = None
    hashes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.language, self.row_index or 0


AnyRow = RawRow | EvidenceRow


class PreparedRun:
    """A run whose rows went through prepare, with its raw files opened again. ``admit`` is None before admission."""

    def __init__(self, run: Path, prepare: PrepareManifest, admit: AdmitManifest | None, files: list[RawFile]) -> None:
        self._run = run
        self._prepare = prepare
        self._stale = ""
        previous = admit.previous.content_sha256 if admit is not None and admit.previous is not None else None
        if previous is not None and previous != prepare.content_sha256:
            self._stale = f"it read the prepared rows of {previous}; prepare has since written {prepare.content_sha256}"
        self._admit = admit
        self._files = files

    def find(self, selector: Selector) -> Found:
        """Raises KilnError KLN106 and KLN201 as ``select`` does."""
        chat_hash = self._chat_hashes(selector)
        candidates = chain.from_iterable(self._rows(file, chat_hash) for file in self._files)
        rows, count = select(selector, candidates, self._searched())
        rejected = trail.find_rejected(self._run, self._prepare, (row.key for row in rows))
        names = {row.example_id for row in rows if row.key not in rejected and row.example_id is not None}
        kept = {found.example_id: found for found in trail.examples(self._run, self._prepare, names)}
        offered = {
            row.example_id: row for row in self._offered() if row.example_id is not None and row.example_id in kept
        }
        firsts = self._firsts(rejected)
        journeys = []
        for row in rows:
            drop = rejected.get(row.key)
            example = kept.get(row.example_id or "") if drop is None else None
            journeys.append(
                Journey(
                    example_id=row.example_id,
                    raw=_raw_part(row),
                    prepare=_prepare_part(drop, example, firsts.get(row.key)),
                    admit=self._admit_part(example, offered) if example is not None else None,
                    train=self._train_part(offered.get(example.example_id)) if example is not None else None,
                )
            )
        return Found(count=count, rows=journeys)

    def _rows(self, file: RawFile, chat_hash: ChatHash | None) -> Iterator[AnyRow]:
        if not file.fault:
            yield from file.rows(chat_hash)
            return
        for drop in trail.rejected_rows(self._run, self._prepare):
            if drop.language == file.language:
                yield EvidenceRow(
                    path=file.path,
                    language=file.language,
                    fault=file.fault,
                    line=drop.line,
                    row_index=drop.row_index,
                    offset=drop.offset,
                    length=drop.length,
                    example_id=drop.example_id,
                    hashes=(drop.row_sha256,) if drop.row_sha256 is not None else (),
                )
        hashes = {row.example_id: row.hashes for row in self._offered()}
        for example in trail.examples(self._run, self._prepare):
            if example.language == file.language:
                yield EvidenceRow(
                    path=file.path,
                    language=file.language,
                    fault=file.fault,
                    example_id=example.example_id,
                    hashes=hashes.get(example.example_id, ()),
                )

    def _chat_hashes(self, selector: Selector) -> ChatHash | None:
        """How a raw row is called by the hash of its chat row: through its example id, if prepare kept it."""
        if selector.digest is None:
            return None
        begin = f"sha256:{selector.digest}"
        hashes = {row.example_id: row.row_sha256 for row in self._offered() if row.row_sha256.startswith(begin)}
        if not hashes:
            return None
        dropped = {(row.language, row.row_index) for row in trail.rejected_rows(self._run, self._prepare)}
        return lambda row: None if row.key in dropped else hashes.get(row.example_id)

    def _offered(self) -> Iterable[Offered]:
        return trail.offered_rows(self._run, self._admit) if self._admit is not None and not self._stale else ()

    def _searched(self) -> list[str]:
        places = [f"{file.path}: {file.fault or 'every row, by place, hash and id'}" for file in self._files]
        places += ["data/: the ids of the splits and what data/rejected.jsonl names"]
        if self._admit is None:
            return [*places, "no admission: `kiln admit` has not run, so there are no hashes of chat rows"]
        return [*places, f"admit/: {self._stale or 'the hashes of kept and rejected chat rows'}"]

    def _firsts(self, rejected: dict[tuple[str, int], Rejected]) -> dict[tuple[str, int], FirstRow]:
        """For each dropped row that repeats an earlier one: that row, as its raw file shows it."""
        places = {(drop.language, drop.repeats) for drop in rejected.values() if drop.repeats is not None}
        names = {drop.example_id for drop in rejected.values() if drop.reason == "duplicate_example_id"}
        if not places and not names:
            return {}
        by_place: dict[tuple[str, int], FirstRow] = {}
        by_name: dict[str | None, FirstRow] = {}
        for row in chain.from_iterable(file.rows() for file in self._files):
            if row.key in places or (names and row.example_id in names):
                first = FirstRow(path=row.path, row_index=row.row_index, line=row.line, example_id=row.example_id)
                by_place[row.key] = first
                by_name.setdefault(row.example_id, first)
        found = {}
        paths = {file.language: file.path for file in self._files}
        for key, drop in rejected.items():
            if drop.repeats is not None:
                unread = FirstRow(path=paths[drop.language], row_index=drop.repeats)
                found[key] = by_place.get((drop.language, drop.repeats), unread)
            elif drop.reason == "duplicate_example_id" and drop.example_id in by_name:
                found[key] = by_name[drop.example_id]
        return found

    def _admit_part(self, example: Example, offered: dict[str, Offered]) -> AdmitPart:
        if self._admit is None:
            return AdmitPart(outcome="not run")
        if self._stale:
            return AdmitPart(outcome="stale", detail=self._stale)
        if example.example_id not in offered:
            return AdmitPart(outcome="not offered")
        return _admit_part(self._run, self._admit, offered[example.example_id])

    def _train_part(self, row: Offered | None) -> TrainPart | None:
        return _train_part(self._run, self._admit, row) if self._admit is not None and row is not None else None


def find_given(run: Path, admit: AdmitManifest, selector: Selector) -> Found:
    """The rows of a run whose admission read a file. Raises KilnError KLN106 and KLN201 as ``select`` does."""
    searched = [f"{row.path}: the lines, row numbers, hashes and ids of all rows" for row in admit.inputs]
    rows, count = select(selector, trail.offered_rows(run, admit), searched)
    parts = _given_parts(run, admit, rows)
    journeys = [
        Journey(
            example_id=row.example_id,
            raw=parts[row.row_index],
            prepare=None,
            admit=_admit_part(run, admit, row),
            train=_train_part(run, admit, row),
        )
        for row in rows
    ]
    return Found(count=count, rows=journeys)


def _raw_part(row: AnyRow) -> RawPart:
    if isinstance(row, EvidenceRow):
        return RawPart(
            path=row.path,
            line=row.line,
            row_index=row.row_index,
            offset=row.offset,
            length=row.length,
            row_sha256=next(iter(row.hashes), None) if row.row_index is not None else None,
            fault=row.fault,
        )
    assert row.file.plain is not None
    return RawPart(
        path=row.path,
        packing=row.file.plain.packing,
        line=row.line if not row.file.plain.elements else None,
        row_index=row.row_index,
        offset=row.offset,
        length=row.length,
        row_sha256=row.sha256,
        excerpt=_excerpt(row.record.text),
    )


def _excerpt(text: bytes | None) -> str | None:
    """The beginning of a raw row ; bytes that are no UTF-8 show as ``\\xff``."""
    if text is None:
        return None
    head = text[: 4 * EXCERPT].decode("utf-8", "backslashreplace")[:EXCERPT]
    return head if len(head.encode("utf-8")) == len(text) else head + "…"


def _prepare_part(drop: Rejected | None, example: Example | None, first: FirstRow | None) -> PreparePart:
    if drop is not None:
        return PreparePart(
            outcome="dropped", reason=drop.reason, detail=drop.detail, pointer=drop.pointer or None, first=first
        )
    if example is None:
        return PreparePart(outcome="unused")
    return PreparePart(outcome="kept", split=example.split, number=example.number, pair_of=example.source_example_id)


def _admit_part(run: Path, admit: AdmitManifest, row: Offered) -> AdmitPart:
    if row.fault is not None:
        return AdmitPart(
            outcome="rejected",
            split=row.split,
            row_index=row.row_index,
            row_sha256=row.row_sha256,
            reason=row.fault.reason,
            code=row.fault.code,
            detail=row.fault.detail,
            pointer=row.fault.pointer or None,
        )
    ids, spans = trail.tokens_of(run, admit, row)
    return AdmitPart(
        outcome="kept",
        split=row.split,
        row_index=row.row_index,
        row_sha256=row.row_sha256,
        tokens=len(ids),
        supervised_tokens=sum(end - start for start, end in spans),
    )


def _train_part(run: Path, admit: AdmitManifest, row: Offered) -> TrainPart | None:
    """None for a rejected row. Raises KilnError KLN207 where the log and the order of the epochs disagree."""
    if row.place is None:
        return None
    training = trail.training_of(run, admit)
    if training is None:
        return TrainPart(outcome="not run")
    if training.stale:
        return TrainPart(outcome="stale", adapter=training.adapter, detail=training.stale)
    if row.split != "corpus":
        return TrainPart(outcome="held out", adapter=training.adapter)
    done = trail.visits(run, row)
    planned = trail.planned_steps(training, row.place, admit.counts["corpus"]["rows_kept"])
    if planned and [visit.step for visit in done] != planned[: len(done)]:
        raise KilnError(
            "KLN207",
            f"train/metrics.jsonl has row {row.row_index} at steps {[visit.step for visit in done]}, "
            f"the order of its seed at {planned}",
            hint="run `kiln verify-receipt`; then train again with --fresh",
        )
    steps = [Step(epoch=visit.epoch + 1, step=visit.step, loss=visit.loss) for visit in done]
    steps += [Step(epoch=n + 1, step=step, loss=None) for n, step in enumerate(planned) if n >= len(done)]
    return TrainPart(outcome="trained", adapter=training.adapter, steps=steps)


def _given_parts(run: Path, admit: AdmitManifest, rows: list[Offered]) -> dict[int, RawPart]:
    """The places of rows of a given file, by row number."""
    (ref,) = admit.inputs
    wanted = {row.row_index for row in rows}
    try:
        with open_plain(locate(ref, run, admit), run) as plain:
            sha256 = plain.sha256 or hash_file(locate(ref, run, admit))[0]
            if sha256 != ref.sha256:
                raise KilnError("KLN207", f"it changed after admission: sha256 is {sha256}, expected {ref.sha256}")
            records = json_lines(LineReader(plain.stream, hashed=False), elements=plain.elements)
            found = {record.row_index: record for record in records if record.row_index in wanted}
            return {row.row_index: _given_part(row, found.get(row.row_index), plain) for row in rows}
    except KilnError as error:
        return {row.row_index: _given_part(row, None, None, error.message) for row in rows}


def _given_part(row: Offered, record: Record | None, plain: Plain | None, fault: str = "") -> RawPart:
    known = record or row.fault
    return RawPart(
        path=row.path,
        packing=plain.packing if plain is not None else "lines",
        line=row.line if plain is None or not plain.elements else None,
        row_index=row.row_index,
        offset=known.offset if known is not None else None,
        length=known.length if known is not None else None,
        excerpt=_excerpt(record.text) if record is not None else None,
        fault=fault,
    )
