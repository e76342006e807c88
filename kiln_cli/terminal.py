"""What people see: data on stdout, everything else on stderr, one sanitizer in between.

Stages print through here and only from their ``command``; ``run`` functions report progress to the object they are
handed. Bars are drawn on a terminal only; elsewhere progress is a plain line now and then.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kiln_cli.manifests import document
from kiln_cli.text import block, printable

LINE_EVERY_SECONDS = 10.0


class Task(Protocol):
    """One thing that takes a while. ``advance`` adds to what is done; ``note`` is a short text beside the bar."""

    def advance(self, count: int = 1, note: str = "") -> None: ...


class Progress(Protocol):
    def task(self, label: str, total: int | None, unit: str, done: int = 0) -> Any:
        """A context manager that yields a :class:`Task`; ``done`` of ``total`` was done before."""
        ...


class Speed:
    """How much is done a second, over the latest seconds: what a person wants to see of something that varies."""

    WINDOW = 15.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])  # moments, and how much was done until then

    def add(self, amount: int) -> None:
        now = self._clock()
        self._marks.append((now, self._marks[-1][1] + amount))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self.WINDOW:
            self._marks.popleft()

    def a_second(self) -> float:
        (began, before), (ended, after) = self._marks[0], self._marks[-1]
        return (after - before) / (ended - began) if ended > began else 0.0


class _SilentTask:
    def advance(self, count: int = 1, note: str = "") -> None:
        """Nothing to show: this is the progress of a library call."""


class Silent:
    """The progress of a stage that is called from Python: none."""

    @contextmanager
    def task(self, label: str, total: int | None, unit: str, done: int = 0) -> Iterator[Task]:
        yield _SilentTask()


SILENT = Silent()


class Terminal:
    """The process's terminal; ``app.py`` sets the switches before a command runs."""

    def __init__(self) -> None:
        self.quiet = False
        self.verbose = False
        self.debug = False
        self.json = False

    def data(self, text: str) -> None:
        """The command's result, on stdout."""
        sys.stdout.write(block(text) + "\n")
        sys.stdout.flush()

    @property
    def colours(self) -> bool:
        """Whether stdout shows colours: a terminal that is not dumb, and no NO_COLOR in the environment."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def styled(self, pieces: Iterable[tuple[str, str]]) -> None:
        """As data, piece by piece: a text, and the numbers of an SGR sequence ("1;32") to show it by, "" for none."""
        colours = self.colours
        for style, run in itertools.groupby(pieces, key=lambda piece: piece[1]):
            shown = block("".join(text for text, _ in run))
            sys.stdout.write(f"\x1b[{style}m{shown}\x1b[0m" if colours and style and shown else shown)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def verbatim(self, text: str) -> None:
        """A file on stdout, to be redirected: nothing in it is escaped, or it would be another file."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def json_data(self, value: Any) -> None:
        """The command's result as one JSON object, on stdout."""
        sys.stdout.write(document(value).decode("utf-8"))
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """An account for people, on stderr; silent under --quiet."""
        if not self.quiet:
            sys.stderr.write(block(text) + "\n")

    def detail(self, text: str) -> None:
        """As say, under --verbose only."""
        if self.verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        sys.stderr.write(block(f"kiln: warning: {text}") + "\n")

    @contextmanager
    def task(self, label: str, total: int | None, unit: str, done: int = 0) -> Iterator[Task]:
        if self.quiet:
            yield _SilentTask()
        elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            with _bar(label, total, unit, done) as bar:
                yield bar
        else:
            yield _Lines(label, total, unit, done)


class _Lines:
    """Progress for logs: one plain line every ten seconds."""

    def __init__(self, label: str, total: int | None, unit: str, done: int) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = done
        self._last = time.monotonic()
        self._speed = Speed()

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        self._speed.add(count)
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_SECONDS:
            self._last = now
            rate = self._speed.a_second()
            of = f" of {self._total}" if self._total is not None else ""
            left = f", {duration((self._total - self._done) / rate)} left" if self._total is not None and rate else ""
            line = f"{self._label}: {self._done}{of} {self._unit}, {rate:,.1f} {self._unit}/s{left}  {note}"
            sys.stderr.write(printable(line.rstrip()) + "\n")
            sys.stderr.flush()


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 0:42, 12:05, 3:00:59."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _bar(label: str, total: int | None, unit: str, done: int) -> Iterator[Task]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Task as RichTask
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: RichTask) -> Text:
            """Empty where a note is shown: it has the speed that matters there, and the line must fit a terminal."""
            return Text(f"{task.speed:,.1f} {unit}/s" if task.speed and not task.fields["note"] else "")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30, table_column=Column(min_width=4)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(unit, markup=False),
        Rate(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        identity = progress.add_task(label, total=total, completed=done, note="")

        class Bar:
            def advance(self, count: int = 1, note: str = "") -> None:
                progress.update(identity, advance=count, note=printable(note, 60))

        yield Bar()


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Rows as aligned columns; numbers to the right. Cells are sanitized."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    numeric = [[isinstance(value, (int, float)) for value in row] for row in rows] if isinstance(rows, list) else None
    lines = []
    for number, row in enumerate(cells):
        parts = [
            text.rjust(widths[i]) if numeric and numeric[number][i] else text.ljust(widths[i])
            for i, text in enumerate(row)
        ]
        lines.append(indent + "  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


terminal = Terminal()
