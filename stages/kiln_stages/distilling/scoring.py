"""A scored corpus from rows and a teacher: the manifest line, then one line a row, in the order of the request.

What is scored is appended to ``OUT.partial/rows.jsonl``, row by row, and the file gets its name when the last row is
in it. A run that was cut goes on from there: the rows it finds are held against the request first, half a line at the
end goes, and the result has the bytes that an uncut run gives.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.files import FS, AppendLog, hash_file, open_input, run_lock, write_file, writing
from kiln_cli.identity import canonical_json
from kiln_cli.terminal import SILENT, Progress, Task
from kiln_cli.text import printable
from kiln_stages.distilling.candidates import Scored, narrow, scored
from kiln_stages.distilling.examples import LINE_CAP, parse_line, to_example
from kiln_stages.distilling.identity import TeacherIdentity
from kiln_stages.distilling.repeated import WrittenRows
from kiln_stages.distilling.request_rows import TOKENS, RefusedRow, RequestRow, request_rows
from kiln_stages.distilling.scores import id_faults, require_count
from kiln_stages.distilling.targets import TargetFinder, Targets

FAULTS_SHOWN = 20
ROWS = "rows.jsonl"


class Scorer(Protocol):
    """Something that scores rows; ``parallel`` rows may be asked for at a time, from threads."""

    @property
    def parallel(self) -> int: ...

    def score(self, text: str, input_ids: list[int], targets: list[int]) -> list[Scored]:
        """One entry a target, in order. Raises RowFault for a row that cannot be scored."""
        ...

    def give_up(self) -> None:
        """Ends what is under way in other threads: nobody waits for it any more."""
        ...


class Tally:
    """What was scored, in numbers."""

    def __init__(self) -> None:
        self.rows = self.targets = self.outside = self.unscored = self.settled = 0
        self._masses: list[float] = []  # of rows

    def add(self, entries: list[dict[str, Any]]) -> None:
        """The ``teacher_tokens`` of a row, as written."""
        self.rows += 1
        self.targets += len(entries)
        for entry in entries:
            self.outside += all(each["token_id"] != entry["token_id"] for each in entry["top_logprobs"])
            self.unscored += "logprob" not in entry
        self._masses.append(
            math.fsum(math.exp(narrow(each["logprob"])) for entry in entries for each in entry["top_logprobs"])
        )

    @property
    def mean_mass(self) -> float:
        return math.fsum(self._masses) / self.targets if self.targets else 0.0


class ScoringResult(msgspec.Struct, frozen=True, kw_only=True):
    """``targets``: positions that were scored. ``chosen_outside``: of them, where the row's own token is not among the
    candidates; ``chosen_unscored``: where the teacher gave that token no score. ``mean_mass``: probability that the
    candidates have together, averaged over positions. ``rows_found``: rows that an earlier run had scored.
    ``settled``: positions of the other rows where the teacher gave other scores than in an earlier row of the same
    tokens, whose scores they have.
    ``ignored_fields``: rows with a field that no scored row has. ``other_tokenizer_config``: the rows' tokenizer has
    the teacher's vocabulary and other settings."""

    schema: str = "kiln.teacher-scoring.v1"
    out: str
    teacher: str
    content_revision: str
    top_k: int
    rows: int
    rows_found: int
    targets: int
    chosen_outside: int
    chosen_unscored: int
    mean_mass: float
    settled: int
    ignored_fields: dict[str, int]
    other_tokenizer_config: bool
    sha256: str
    bytes: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be scored, and as what. ``max_tokens``: the longest row that the teacher takes; ``max_candidates``:
    how many it gives of all positions of a row, None for no such limit."""

    request: Path
    out: Path
    alias: str
    identity: TeacherIdentity
    finder: TargetFinder
    top_k: int
    max_tokens: int
    max_candidates: int | None = None
    other_tokenizer_config: bool = False

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".partial")

    @property
    def rows_path(self) -> Path:
        return self.partial / ROWS

    def written(self, path: Path) -> WrittenRows:
        """Of a scored file whose lines are yet to be read or written."""
        return WrittenRows(path, self.finder, self.top_k)

    def rows(self) -> Iterator[tuple[RequestRow, Targets]]:
        """Every row with its targets. Raises KilnError KLN113 for the first that has none."""
        for row in request_rows(self.request):
            found = self.judged(row)
            if isinstance(found, RowFault):
                raise self.refused([(row.line, found)])
            assert isinstance(row, RequestRow), "only such rows have targets"
            yield row, found

    def judged(self, row: RequestRow | RefusedRow) -> Targets | RowFault:
        """The targets of a row, or the fault that keeps it from being scored."""
        if isinstance(row, RefusedRow):
            return row.fault
        try:
            found = row.targets(self.finder)
        except RowFault as fault:
            return fault
        return self._beyond_limits(len(found.input_ids)) or found

    def _beyond_limits(self, tokens: int) -> RowFault | None:
        """Why the teacher takes no row of so many tokens, if it does not."""
        if tokens > self.max_tokens:
            return RowFault("over_length", f"{tokens} tokens, the teacher takes {self.max_tokens}")
        # Nothing predicts the first token; a token that is not among its K best is scored beside them.
        positions, each = tokens - 1, min(self.top_k + 1, self.identity.vocab_size)
        if self.max_candidates is not None and positions * each > self.max_candidates:
            return RowFault(
                "too_many_candidates",
                f"{positions:,} positions of up to {each} candidates are {positions * each:,}, "
                f"the teacher gives at most {self.max_candidates:,} a request",
            )
        return None

    def refused(self, faults: list[tuple[int, RowFault]], more: int = 0) -> KilnError:
        lines = "\n".join(f"  line {line}: {_told(fault)}" for line, fault in faults)
        count = len(faults) + more
        tail = f"\n  and {more} more" if more else ""
        return KilnError(
            "KLN113",
            f"{count} {'row' if count == 1 else 'rows'} of {printable(self.request)} cannot be scored:\n{lines}{tail}",
            hint="mend or remove the rows; what is scored already is kept, and the same command goes on from there",
            details={
                "faults": [{"line": line, "code": fault.reason, "detail": fault.detail} for line, fault in faults]
            },
        )


class Survey(NamedTuple):
    rows: int
    targets: int
    ignored: Counter[str]


def score_rows(work: Work, scorer: Callable[[], Scorer], progress: Progress = SILENT) -> ScoringResult:
    """Writes the corpus, whole or not at all under its name. ``scorer`` is called once there is something to score.

    Raises KilnError: KLN113 where rows cannot be scored, KLN107 where there is none, KLN207 where what was scored
    before is not what the request asks for, KLN401 where another process scores to this file, KLN402 where the disk
    refuses; and what the scorer raises.
    """
    survey = _survey(work)
    tally = Tally()
    if work.out.exists():
        _held(work, work.out, tally, work.written(work.out), whole=True)
        found = tally.rows
        if work.partial.exists() and not work.rows_path.exists():
            FS.remove_tree(work.partial)  # a run was killed between its last two acts
    else:
        with run_lock(work.partial, "kiln teacher score"):
            found = _score(work, scorer, survey, tally, progress)
    sha256, size = hash_file(work.out)
    return ScoringResult(
        out=str(work.out),
        teacher=work.alias,
        content_revision=work.identity.content_revision(),
        top_k=work.top_k,
        rows=tally.rows,
        rows_found=found,
        targets=tally.targets,
        chosen_outside=tally.outside,
        chosen_unscored=tally.unscored,
        mean_mass=tally.mean_mass,
        settled=tally.settled,
        ignored_fields=dict(sorted(survey.ignored.items())),
        other_tokenizer_config=work.other_tokenizer_config,
        sha256=sha256,
        bytes=size,
    )


def _survey(work: Work) -> Survey:
    """Looks at every row before the first is scored, so that hours of scoring do not end at a misspelt field."""
    rows = targets = 0
    ignored: Counter[str] = Counter()
    faults: list[tuple[int, RowFault]] = []
    for row in request_rows(work.request):
        found = work.judged(row)
        if isinstance(found, RowFault):
            faults.append((row.line, found))
            continue
        assert isinstance(row, RequestRow)
        rows += 1
        targets += len(found.action_targets)
        ignored.update(row.ignored)
    if faults:
        raise work.refused(faults[:FAULTS_SHOWN], len(faults[FAULTS_SHOWN:]))
    if not rows:
        raise KilnError("KLN107", f"{printable(work.request)} holds no rows", hint="one JSON object a line")
    return Survey(rows, targets, ignored)


def _score(work: Work, scorer: Callable[[], Scorer], survey: Survey, tally: Tally, progress: Progress) -> int:
    """Scores what is left of the request, and gives the file its name; the count of rows that were there before."""
    path = work.rows_path
    written = work.written(path)
    keep = _held(work, path, tally, written, whole=False) if path.exists() else 0
    if not keep:
        write_file(path, b"")
    found = tally.rows
    with (
        AppendLog(path, keep) as log,
        progress.task("score", survey.targets, "tokens", tally.targets) as task,
    ):
        if not keep:
            log.append(work.identity.manifest_line())
            written.add(work.identity.manifest_line(), None)
        if found < survey.rows:
            _append(work, scorer(), found, log, tally, written, task)
        log.sync()
    with writing(work.out):
        FS.replace(path, work.out)
        FS.sync_directory(work.out.parent)
        FS.remove_tree(work.partial)
    return found


def _append(
    work: Work, scorer: Scorer, found: int, log: AppendLog, tally: Tally, written: WrittenRows, task: Task
) -> None:
    pending = (pair for number, pair in enumerate(work.rows()) if number >= found)
    for row, targets, scores in _in_order(work, scorer, pending):
        settled = written.settled(targets, scores)
        entries = [
            each.written(targets.input_ids[target], text)
            for each, target, text in zip(settled, targets.action_targets, _texts(work, targets), strict=True)
        ]
        line = _line(row, entries)
        if len(line) > LINE_CAP:
            fault = RowFault("line_too_long", f"its line would have {len(line)} bytes, at most {LINE_CAP}")
            raise work.refused([(row.line, fault)])
        log.append(line)
        log.sync()
        written.add(line, targets)
        tally.add(entries)
        tally.settled += sum(kept != given for kept, given in zip(settled, scores, strict=True))
        task.advance(len(entries), note=f"row {tally.rows}")


def _in_order(
    work: Work, scorer: Scorer, rows: Iterator[tuple[RequestRow, Targets]]
) -> Iterator[tuple[RequestRow, Targets, list[Scored]]]:
    """Rows with their scores in the order of the request, ``scorer.parallel`` of them under way at a time."""
    if scorer.parallel == 1:
        for row, targets in rows:
            yield row, targets, _scores(work, scorer, row, targets)
        return

    under_way: deque[tuple[RequestRow, Targets, Future[list[Scored]]]] = deque()
    with ThreadPoolExecutor(scorer.parallel) as pool:
        try:
            for row, targets in rows:
                under_way.append((row, targets, pool.submit(_scores, work, scorer, row, targets)))
                if len(under_way) >= scorer.parallel:
                    first, of_first, future = under_way.popleft()
                    yield first, of_first, future.result()
            for row, targets, future in under_way:
                yield row, targets, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            scorer.give_up()
            raise


def _scores(work: Work, scorer: Scorer, row: RequestRow, targets: Targets) -> list[Scored]:
    try:
        return scorer.score(targets.text, targets.input_ids, targets.action_targets)
    except RowFault as fault:
        raise work.refused([(row.line, fault)]) from fault


def _held(work: Work, path: Path, tally: Tally, written: WrittenRows, *, whole: bool) -> int:
    """How many bytes of a scored file are what the request asks for; counts its rows. Half a line at the end is none.

    Raises KilnError KLN207 where a line is of another teacher or row, or scores the tokens of an earlier row otherwise,
    and, with ``whole``, where one is missing.
    """
    keep = 0
    with open_input(path) as stream:
        rows = work.rows()
        for number, raw in enumerate(stream):
            if not raw.endswith(b"\n"):
                break
            line, targets = raw[:-1], None
            if number == 0:
                if line != work.identity.manifest_line():
                    raise _other(path, 1, "it is not the manifest line of this teacher")
            else:
                targets, scores = _hold(work, path, number + 1, line, next(rows, None), tally)
                if written.settled(targets, scores) != scores:
                    raise _other(path, number + 1, "an earlier row has the same tokens and other scores")
            written.add(line, targets)
            keep += len(raw)
        if whole and (next(rows, None) is not None or keep != path.stat().st_size):
            raise _other(path, tally.rows + 2, "it is missing or cut")
    return keep


def _hold(
    work: Work, path: Path, number: int, line: bytes, expected: tuple[RequestRow, Targets] | None, tally: Tally
) -> tuple[Targets, list[Scored]]:
    """The targets of a line and their scores. Raises KilnError KLN207 where it is not the expected row."""
    if expected is None:
        raise _other(path, number, "the request has no such row")
    row, targets = expected
    try:
        value = parse_line(line, len(line))
        example, entries = to_example(value, work.top_k), value.get(TOKENS)
        if not isinstance(entries, list) or _line(row, entries) != line:
            raise RowFault("other_row", f"it is not the row on line {row.line} of {printable(work.request)}")
        ids, texts = [targets.input_ids[at] for at in targets.action_targets], _texts(work, targets)
        require_count(example.entries, ids, texts.__getitem__)
        for fault in id_faults(example.entries, ids, texts.__getitem__, required=True):
            raise fault
        scores = [
            _as_written(work, written, at, token_id, text)
            for at, (written, token_id, text) in enumerate(zip(entries, ids, texts, strict=True))
        ]
    except RowFault as fault:
        raise _other(path, number, _told(fault)) from fault
    tally.add(entries)
    return targets, scores


def _as_written(work: Work, written: dict[str, Any], at: int, token_id: int, text: str) -> Scored:
    """The scores of an entry, which must be what they come to when they are ranked and written again."""
    pointer = f"/{TOKENS}/{at}"
    if (found := len(written["top_logprobs"])) != work.top_k:
        raise RowFault("other_top_k", f"it has {counted(found, 'candidate', 'candidates')}, not {work.top_k}", pointer)
    scores = {each["token_id"]: each["logprob"] for each in written["top_logprobs"]}
    if (own := written.get("logprob")) is not None:
        scores.setdefault(token_id, own)
    again = scored(scores.items(), token_id, at, work.top_k, work.identity.vocab_size)
    if again.written(token_id, text) != written:
        raise RowFault("other_entry", f"it is not as the scores of {printable(repr(text), 40)} are written", pointer)
    return again


def _texts(work: Work, targets: Targets) -> list[str]:
    """The text of each target; see :meth:`TargetFinder.token_texts`."""
    texts = work.finder.token_texts(targets)
    return [texts[target] for target in targets.action_targets]


def _line(row: RequestRow, entries: list[Any]) -> bytes:
    """A scored row, without a line feed: canonical JSON."""
    return canonical_json({**row.fields, TOKENS: entries})


def _told(fault: RowFault) -> str:
    at = f" at {printable(fault.pointer)}" if fault.pointer else ""
    return f"{fault.reason}{at}: {printable(fault.detail, 400)}"


def _other(path: Path, number: int, why: str) -> KilnError:
    return KilnError(
        "KLN207",
        f"{printable(path)} was made for something else: line {number}: {why}",
        hint="give the request, teacher and --top-k that it was made with, or another --out; or remove it",
    )
