"""What tells two runs apart: rows, their places and labels, settings, versions, and whether one can go on as the other.

A row is known by its hash, and a hash that stands more than once by its turn. Rows of one split that stand in another
order are those outside a longest run of rows that kept theirs: taking one row out moves no other. The test split is
not admitted: its rows have the hash that admission would give them, and no tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kiln_cli.config import load_config
from kiln_cli.counting import counted
from kiln_cli.files import open_input
from kiln_cli.lines import LineReader
from kiln_cli.manifests import RECEIPT_NAME, read_manifest, read_receipt, require_unchanged
from kiln_cli.receipts import TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest
from kiln_stages.admitting.corpus import AdmittedRow, read_corpus
from kiln_stages.admitting.incoming import prepared_rows
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.rows import ScoredRows, spans
from kiln_stages.evidence.claims import Unavailable
from kiln_stages.evidence.receipt_claims import binding
from kiln_stages.reading.sources import json_lines
from kiln_stages.training.checkpoint import latest_checkpoint, read_checkpoint_manifest
from kiln_stages.training.checkpoint_manifest import ABSENT, Binding, binding_of, differences, flatten

SPLITS = ("corpus", "heldout", "test")
TEST_ROWS = "data/test.jsonl"


class Change(msgspec.Struct, frozen=True):
    """One value that differs, as JSON text on either side."""

    what: str
    a: str
    b: str


class RowChange(msgspec.Struct, frozen=True, kw_only=True):
    """A row and where it stands: ``corpus 3`` is the third admitted row, ``test 3`` the third of the test split; ""
    where it does not stand. ``what``: what of
    a row in both runs differs."""

    row_sha256: str
    example_id: str | None
    a: str
    b: str
    what: str = ""


class RowsDiff(msgspec.Struct, frozen=True, kw_only=True):
    """``moved``: to another split or another order. ``changed``: the same conversation with other tokens or labels."""

    same: int
    added: list[RowChange]
    removed: list[RowChange]
    moved: list[RowChange]
    changed: list[RowChange]


class ResumeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the latest checkpoint of A can be resumed as the training of B. ``legal`` is None where nothing tells."""

    legal: bool | None
    why: str
    checkpoint: str | None = None
    differences: list[Change] = []


class RunDiff(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "kiln.diff.v1"
    a: str
    b: str
    rows: RowsDiff
    settings: list[Change]
    versions: list[Change]
    resume: ResumeAnswer

    @property
    def equal(self) -> bool:
        rows = self.rows
        return not any((rows.added, rows.removed, rows.moved, rows.changed, self.settings, self.versions))


class _Placed(NamedTuple):
    split: str
    place: int  # from 1
    row_sha256: str
    example_id: str | None
    row: AdmittedRow | None  # None in the test split

    def text(self) -> str:
        return f"{self.split} {self.place}"


_Key = tuple[str, int]


def rows_between(left: Path, right: Path) -> RowsDiff:
    """The rows of two runs. Raises KilnError KLN206 where a run is not admitted or its corpus is damaged, KLN207 where
    its test split changed."""
    a, b = _placed(left), _placed(right)
    common = [key for key in a if key in b]
    out_of_order = {key for split in SPLITS for key in _moved_within(split, common, a, b)}
    moved = [key for key in common if a[key].split != b[key].split or key in out_of_order]
    changes = {key: _changed(a[key].row, b[key].row) for key in common}
    changed = [key for key in common if changes[key]]
    return RowsDiff(
        same=len(common) - len({*moved, *changed}),
        added=[_row_change(None, b[key]) for key in b if key not in a],
        removed=[_row_change(a[key], None) for key in a if key not in b],
        moved=[_row_change(a[key], b[key]) for key in moved],
        changed=[_row_change(a[key], b[key], changes[key]) for key in changed],
    )


def settings_between(left: Path, right: Path) -> list[Change]:
    """The settings of two runs, defaults written out."""
    a, b = (msgspec.to_builtins(load_config(run / "config.resolved.toml").run) for run in (left, right))
    return _changes("config", a, b)


def versions_between(left: Path, right: Path) -> list[Change]:
    """Versions of kiln and of every plugin, and of machine and libraries where there is a receipt with a training."""
    return _changes("versions", _versions(left), _versions(right))


def resume_between(left: Path, right: Path) -> ResumeAnswer:
    """By the comparison that ``kiln resume`` itself makes."""
    path = latest_checkpoint(left / "train")
    if path is None:
        return ResumeAnswer(legal=False, why="A has no checkpoint to resume from")
    now = _binding_of_run(right)
    if now is None:
        why = "B has neither a receipt with a training nor a checkpoint: nothing says what it would be bound to"
        return ResumeAnswer(legal=None, why=why, checkpoint=path.name)
    found = differences(now, read_checkpoint_manifest(path)[0])
    one, more = "thing that the checkpoint is bound to differs", "things that the checkpoint is bound to differ"
    why = counted(len(found), one, more) if found else "all that it is bound to is equal"
    return ResumeAnswer(
        legal=not found, why=why, checkpoint=path.name, differences=[Change(*difference) for difference in found]
    )


def _placed(run: Path) -> dict[_Key, _Placed]:
    admit = read_manifest(run, AdmitManifest)
    seen: Counter[str] = Counter()
    found: dict[_Key, _Placed] = {}
    for placed in [*_admitted_rows(run, admit), *_test_rows(run, admit)]:
        found[placed.row_sha256, seen[placed.row_sha256]] = placed
        seen[placed.row_sha256] += 1
    return found


def _admitted_rows(run: Path, admit: AdmitManifest) -> Iterator[_Placed]:
    for ref in admit.outputs:
        if ref.kind in SPLITS:
            for place, row in enumerate(_rows_of(run / ref.path, admit), start=1):
                yield _Placed(ref.kind, place, row.row_sha256, row.example_id, row)


def _rows_of(path: Path, admit: AdmitManifest) -> Iterable[AdmittedRow]:
    """The rows of a corpus. Scored ones have no ids, and another hash where the teacher's scores are others."""
    if scored_corpus(admit) is None:
        return read_corpus(path)
    return (
        AdmittedRow(
            row_index=row.row_index,
            line=row.line,
            example_id=None,
            row_sha256=row.row_sha256,
            input_ids=row.input_ids,
            label_spans=spans(row.action_targets),
        )
        for row in ScoredRows(path)
    )


def _test_rows(run: Path, admit: AdmitManifest) -> Iterator[_Placed]:
    if admit.previous is None:  # rows of a file have no splits
        return
    require_unchanged(read_manifest(run, PrepareManifest).output(TEST_ROWS), run / TEST_ROWS, "data_manifest.json")
    with open_input(run / TEST_ROWS) as stream:
        rows = prepared_rows(json_lines(LineReader(stream, hashed=False)), admit.details.tools.mode)
        for place, row in enumerate(rows, start=1):
            yield _Placed("test", place, row.sha256(), row.example_id, None)


def _moved_within(split: str, common: list[_Key], a: dict[_Key, _Placed], b: dict[_Key, _Placed]) -> set[_Key]:
    """The fewest rows of a split that must move to make one order of the other."""
    here = [key for key in common if a[key].split == b[key].split == split]
    kept = _longest_rise([b[key].place for key in here])
    return {key for at, key in enumerate(here) if at not in kept}


def _longest_rise(numbers: list[int]) -> set[int]:
    """Places of a longest strictly rising subsequence (patience sorting)."""
    tops: list[int] = []  # the smallest last number of a rise of each length
    ends: list[int] = []  # and its place
    before: list[int] = []
    for at, number in enumerate(numbers):
        length = bisect_left(tops, number)
        before.append(ends[length - 1] if length else -1)
        tops[length : length + 1] = [number]
        ends[length : length + 1] = [at]
    found: set[int] = set()
    at = ends[-1] if ends else -1
    while at >= 0:
        found.add(at)
        at = before[at]
    return found


def _changed(a: AdmittedRow | None, b: AdmittedRow | None) -> str:
    if a is None or b is None:
        return ""
    if a.input_ids != b.input_ids:
        return f"tokens: {len(a.input_ids)}, now {len(b.input_ids)}; trained on {a.supervised}, now {b.supervised}"
    return "" if a.label_spans == b.label_spans else f"labels: trained on {a.label_spans}, now {b.label_spans}"


def _row_change(a: _Placed | None, b: _Placed | None, what: str = "") -> RowChange:
    row = a or b
    assert row is not None, "a row stands somewhere"
    return RowChange(
        row_sha256=row.row_sha256,
        example_id=row.example_id,
        a=a.text() if a is not None else "",
        b=b.text() if b is not None else "",
        what=what,
    )


def _changes(at: str, a: Any, b: Any) -> list[Change]:
    left, right = dict(flatten(at, a)), dict(flatten(at, b))
    names: Iterable[str] = [*left, *(name for name in right if name not in left)]
    pairs = ((name, left.get(name, ABSENT), right.get(name, ABSENT)) for name in names)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _receipt(run: Path) -> TrainReceipt | None:
    path = run / RECEIPT_NAME
    return read_receipt(path) if path.exists() else None


def _versions(run: Path) -> dict[str, Any]:
    admit, receipt = read_manifest(run, AdmitManifest), _receipt(run)
    said: dict[str, Any] = {
        "admit": {"kiln": admit.kiln_version, "plugins": {each.distribution: each.version for each in admit.plugins}}
    }
    if receipt is not None:
        said["train"] = {
            "kiln": receipt.kiln.get("package_version"),
            "plugins": {each.distribution: each.version for each in receipt.plugins},
            "execution": receipt.execution,
        }
    return said


def _binding_of_run(run: Path) -> Binding | None:
    """What a training of the run is bound to: by its receipt, else by its latest checkpoint."""
    receipt = _receipt(run)
    if receipt is not None:
        try:
            return binding(receipt)
        except Unavailable:
            pass  # it failed before there was a model
    path = latest_checkpoint(run / "train")
    return None if path is None else binding_of(read_checkpoint_manifest(path)[0])
