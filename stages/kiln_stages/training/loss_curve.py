"""``train/loss.svg``: the loss of every step, its moving mean, and the held-out losses, drawn without any library.

It is drawn from ``metrics.jsonl``, ``training.json`` and the held-out loss behind the last step; the same of them give
the same bytes, so that ``verify-receipt`` can draw it again. It reads well on light and on dark ground, and says
in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from kiln_cli.counting import counted
from kiln_cli.files import AtomicFile, write_file
from kiln_cli.text import printable
from kiln_stages.training.metrics import steps_from_end
from kiln_stages.training.training_file import read_training

CURVE_NAME = "loss.svg"
CURVE_MARK = "<!-- kiln.loss-curve.v1 -->"  # changes with the drawing
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 36, 56, 48
COLUMNS = 600  # of the drawing: a longer log is drawn by the lowest and the highest loss in each
MOST_EPOCH_LINES = 24
STYLE = """
  svg { color-scheme: light dark; font: 13px system-ui, sans-serif; }
  .ground { fill: #ffffff; } text { fill: #24292f; } .title { font-size: 15px; font-weight: 600; }
  .grid { stroke: #d8dee4; } .epoch { stroke: #8c959f; stroke-dasharray: 2 4; }
  .step { stroke: #8fbbe6; stroke-width: 1; } .mean { stroke: #0550ae; stroke-width: 2.2; }
  .held { stroke: #bc4c00; stroke-width: 1.6; stroke-dasharray: 6 4; } .point { fill: #bc4c00; }
  polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; } text { fill: #e6edf3; }
    .grid { stroke: #30363d; } .epoch { stroke: #6e7681; }
    .step { stroke: #3d6a99; } .mean { stroke: #79c0ff; }
    .held { stroke: #ffa657; } .point { fill: #ffa657; }
  }
"""


class Curve(NamedTuple):
    """What is drawn. ``losses`` are by step, from step 1; ``held_out`` by number of steps made, 0 before the first."""

    adapter: str
    losses: Sequence[float]
    held_out: Mapping[int, float]
    rows: int  # steps of an epoch


def loss_curve(directory: Path, rows: int, after: tuple[int, float] | None = None) -> bytes | None:
    """The picture of what the log in ``directory`` holds; None where it holds no step.

    ``rows``: steps of an epoch. ``after``: the last step and the held-out loss behind it.
    """
    training = read_training(directory)
    steps = [*steps_from_end(directory / "metrics.jsonl")][::-1]
    if training is None or not steps:
        return None
    held_out = {step.step: step.held_out["mean_per_token"] for step in steps if step.held_out is not None}
    if training.held_out_before is not None:
        held_out = {0: training.held_out_before.mean_per_token, **held_out}
    if after is not None:
        held_out[after[0]] = after[1]
    return draw(Curve(training.adapter, [step.loss for step in steps], held_out, rows))


def write_loss_curve(directory: Path, rows: int, after: tuple[int, float] | None = None) -> AtomicFile | None:
    """Writes :func:`loss_curve` into the same directory."""
    picture = loss_curve(directory, rows, after)
    return None if picture is None else write_file(directory / CURVE_NAME, picture)


def draw(curve: Curve) -> bytes:
    """The picture as SVG."""
    window = max(3, len(curve.losses) // 20)
    means = _means(curve.losses, window)
    frame = _Frame(len(curve.losses), [*curve.losses, *curve.held_out.values()])
    title = f"Loss of {printable(curve.adapter)}, nats a supervised token"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-labelledby="title description">',
        CURVE_MARK,
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(_in_words(curve))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        *_legend(window if means else 0, bool(curve.held_out)),
        *frame.axes(),
        *_epoch_lines(frame, curve),
        frame.line("step", _thinned([(step, loss) for step, loss in enumerate(curve.losses, start=1)])),
        frame.line("mean", _thinned(means)),
    ]
    if curve.held_out:
        points = sorted(curve.held_out.items())
        parts += [frame.line("held", points), *(frame.point(*point) for point in points)]
    return ("\n".join([*parts, "</svg>"]) + "\n").encode("utf-8")


class _Frame:
    """From steps and losses to places in the picture."""

    def __init__(self, steps: int, losses: Sequence[float]) -> None:
        self.steps = steps
        self.ticks = nice_ticks(min(losses), max(losses))
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def x(self, step: float) -> str:
        return f"{LEFT + step / self.steps * (WIDTH - LEFT - RIGHT):.1f}"

    def y(self, loss: float) -> str:
        return f"{TOP + (self.high - loss) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM):.1f}"

    def axes(self) -> Iterator[str]:
        for loss in self.ticks:
            y = self.y(loss)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{loss:g}</text>'
        for step in nice_ticks(0, self.steps):
            if step <= self.steps and step == int(step):
                yield (f'<text x="{self.x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{int(step):,}</text>')
        yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'

    def line(self, kind: str, points: Sequence[tuple[float, float]]) -> str:
        """Of one point, a dot: its round ends."""
        drawn = points if len(points) != 1 else [*points, *points]
        places = " ".join(f"{self.x(step)},{self.y(loss)}" for step, loss in drawn)
        return f'<polyline class="{kind}" points="{places}"/>'

    def point(self, step: int, loss: float) -> str:
        """A diamond: told from the lines by its form, not by its colour alone."""
        x, y = float(self.x(step)), float(self.y(loss))
        corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in ((0, -5), (5, 0), (0, 5), (-5, 0)))
        return f'<polygon class="point" points="{corners}"/>'


def nice_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers at equal distances, from at or below ``low`` to at or above ``high``; at least two."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / distance), math.ceil(high / distance)
    return [float(f"{number * distance:.10g}") for number in range(first, last + 1)]


def _means(losses: Sequence[float], window: int) -> list[tuple[float, float]]:
    """The mean of the latest ``window`` losses at each step that has so many, placed in their middle."""
    sums = [0.0, *accumulate(losses)]
    return [(end - (window - 1) / 2, (sums[end] - sums[end - window]) / window) for end in range(window, len(sums))]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same curve to the eye: of each column the lowest and the highest point, in order."""
    if len(points) <= 2 * COLUMNS:
        return points
    size = math.ceil(len(points) / COLUMNS)
    thin: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        column = points[begin : begin + size]
        ends = {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
        thin += sorted(ends)
    return thin


def _epoch_lines(frame: _Frame, curve: Curve) -> Iterator[str]:
    ends = range(curve.rows, len(curve.losses), curve.rows)
    for step in ends if len(ends) <= MOST_EPOCH_LINES else ():
        yield f'<line class="epoch" x1="{frame.x(step)}" x2="{frame.x(step)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def _legend(window: int, held_out: bool) -> Iterator[str]:
    shown = [("step", "each step")]
    shown += [("mean", f"mean of {window:,} steps")] if window else []
    shown += [("held", "held-out rows")] if held_out else []
    x = LEFT
    for kind, name in shown:
        yield f'<line class="{kind}" x1="{x}" x2="{x + 24}" y1="42" y2="42"/>'
        yield f'<text x="{x + 30}" y="46">{name}</text>'
        x += 44 + 8 * len(name)


def _in_words(curve: Curve) -> str:
    losses, rows = curve.losses, curve.rows
    text = (
        f"{counted(len(losses), 'step', 'steps')}, {rows:,} an epoch. "
        f"The loss is {losses[0]:.4f} at the first step and {losses[-1]:.4f} "
        f"at the last; its mean is {_mean(losses[:rows]):.4f} over the first {counted(rows, 'step', 'steps')} and "
        f"{_mean(losses[-rows:]):.4f} over the last."
    )
    points = _ends(sorted(curve.held_out.items()))
    if not points:
        return text
    return f"{text} On held-out rows it is {', '.join(f'{loss:.4f} after step {step:,}' for step, loss in points)}."


def _ends(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return points if len(points) <= 8 else [points[0], points[-1]]


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
