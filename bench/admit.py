"""`kiln admit` beside TRL's data set preparation and beside bare `encode_batch`, over the same rows and tokenizer.

Kiln's and TRL's speeds are steady states: the time for all rows less the time for a few, which is start-up and stated
apart. TRL needs a template with generation markers, so both sides use SmolLM2's own with markers around assistant
turns; kiln's figure with the model's own template, without markers, is printed beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import conversations
from measure import Cost, cost, output, peak_mb, require_success, seconds, spread

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "smollm2-135m-instruct"
FEW = 256
MEMORY_SHARE = 10  # the smaller measurement of memory has a tenth of the rows
LINKED = ("tokenizer.json", "tokenizer_config.json", "config.json")
TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED_TURN = (
    "{% if message['role'] == 'assistant' %}{{'<|im_start|>assistant\n'}}"
    "{% generation %}{{message['content'] + '<|im_end|>' + '\n'}}{% endgeneration %}"
    "{% else %}" + TURN + "{% endif %}"
)
# Admits twice in one process and says how long the second, unchanged one took.
AGAIN = """
import sys, time
from kiln_cli import app
assert app.run(sys.argv[1:]) == 0
started = time.perf_counter()
assert app.run(sys.argv[1:]) == 0
print(time.perf_counter() - started)
"""


class Speed(NamedTuple):
    """A steady state: rows a second on the clock, and milliseconds of all processors a row."""

    rate: float
    processor_ms: float


def speed(rows: int, spent: Cost) -> Speed:
    return Speed(rows / spent.wall, spent.processor / rows * 1000)


def measure(folder: Path, count: int, pairs: int, trl_python: Path | None) -> None:
    bench = Bench(folder, count)
    print(f"admit, {count:,} conversations: {bench.describe()}", flush=True)
    own = bench.kiln_speed("own", bench.model)
    trl = [] if trl_python is None else [Trl(trl_python, bench, workers) for workers in (None, 2)]
    if trl_python is None:
        print("admit against TRL: not measured, since no --trl-python is given (`make bench` gives one)")
    for one in trl:
        one.require_same_labels()
    kiln, bare = [], []
    for number in range(pairs):
        kiln.append(bench.kiln_speed(f"marked-{number}", bench.marked))
        bare.append(bench.bare_speed())
        for one in trl:
            one.measure()
    print(
        f"admit, kiln: {shown(kiln)}; with the model's own template {shown([own])}; start-up (the same command on "
        f"{FEW} rows) {statistics.median(bench.few_seconds):.2f} s"
    )
    print(f"admit, bare encode_batch: {shown(bare)}")
    print(f"admit, kiln's share of bare encode_batch: {ratio(kiln, bare)}")
    for one in trl:
        print(f"admit, TRL with {one.name}: {shown(one.speeds)}; {one.started}")
        print(f"admit, kiln over TRL with {one.name}: {ratio(kiln, one.speeds)}", flush=True)
        print(
            f"admit, bare encode_batch over TRL with {one.name}, the most there is: {ratio(bare, one.speeds)}",
            flush=True,
        )
    bench.memory()
    bench.again()


def shown(speeds: list[Speed]) -> str:
    rate, processor = (statistics.median(each) for each in zip(*speeds, strict=True))
    return f"{rate:,.0f} rows/s, {processor:.2f} ms of processors a row"


def ratio(ours: list[Speed], theirs: list[Speed]) -> str:
    pairs = list(zip(ours, theirs, strict=True))
    by_processor = [other.processor_ms / mine.processor_ms for mine, other in pairs]
    return f"{spread([mine.rate / other.rate for mine, other in pairs])}; by processor time {spread(by_processor)}"


class Bench:
    """The rows, a few of them, their rendered texts, and model directories without weights that both sides read."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.rows, self.few = folder / f"chats-{count}.jsonl", folder / f"chats-{FEW}.jsonl"
        conversations.write(self.rows, count)
        conversations.write(self.few, FEW)
        template = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
        if TURN not in template:
            raise SystemExit(f"{MODEL}: its template is not the one that this measurement knows")
        self.model = self._model("own", template)
        self.marked = self._model("marked", template.replace(TURN, MARKED_TURN))
        self.texts = folder / f"texts-{count}.jsonl"
        self._render(template)
        self.few_seconds: list[float] = []

    def _model(self, name: str, template: str) -> Path:
        directory = self.folder / f"model-{name}"
        directory.mkdir(exist_ok=True)
        for file in LINKED:
            (directory / file).unlink(missing_ok=True)
            (directory / file).symlink_to(MODEL / file)
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        return directory

    def _render(self, template: str) -> None:
        from jinja2 import Environment

        compiled = Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
        with self.rows.open(encoding="utf-8") as rows, self.texts.open("w", encoding="utf-8") as texts:
            for line in rows:
                texts.write(json.dumps(compiled.render(json.loads(line))) + "\n")

    def describe(self) -> str:
        counted = json.loads(output(self._bare()))
        return f"{self.rows.stat().st_size / 1e6:.0f} MB, {counted['tokens'] / counted['rows']:.0f} tokens each"

    def kiln(self, rows: Path, model: Path, name: str) -> list[str]:
        out = self.folder / f"run-{name}"
        command = [sys.executable, "-m", "kiln_cli.app", "--quiet", "admit", "--file", str(rows)]
        return [*command, "--source", "messages", "--model", str(model), "--out", str(out)]

    def kiln_speed(self, name: str, model: Path) -> Speed:
        """Start-up taken off. Each pair has runs of its own, into directories of their own."""
        few = cost(self.kiln(self.few, model, f"{name}-few"))
        self.few_seconds.append(few.wall)
        return speed(self.count - FEW, cost(self.kiln(self.rows, model, name)) - few)

    def _bare(self) -> list[str]:
        return [sys.executable, str(HERE / "bare_encode.py"), str(MODEL / "tokenizer.json"), str(self.texts)]

    def bare_speed(self) -> Speed:
        told = json.loads(output(self._bare()))
        return speed(self.count, Cost(told["seconds"], told["processor"]))

    def memory(self) -> None:
        """Peaks at all rows and at a tenth: what is bounded by the batch grows by the kept hashes alone."""
        fewer = self.folder / "chats-tenth.jsonl"
        conversations.write(fewer, self.count // MEMORY_SHARE)
        large = peak_mb(self.kiln(self.rows, self.marked, "memory"))
        small = peak_mb(self.kiln(fewer, self.marked, "memory-tenth"))
        print(
            f"admit, peak memory at {self.count:,} rows: {large / small:.2f} times that at "
            f"{self.count // MEMORY_SHARE:,} rows ({large:.0f} MB, {small:.0f} MB)",
            flush=True,
        )

    def again(self) -> None:
        """The same command on unchanged inputs, as a process and as a call."""
        command = self.kiln(self.rows, self.marked, "memory")
        whole = seconds(command)
        inside = float(output([sys.executable, "-c", AGAIN, *command[3:]]))
        print(
            f"admit, unchanged inputs, {self.count:,} rows: {whole * 1000:,.0f} ms as a process, "
            f"{inside * 1000:,.0f} ms as a call in a running one",
            flush=True,
        )


class Trl:
    """TRL's preparation with one setting of dataset_num_proc."""

    def __init__(self, python: Path, bench: Bench, workers: int | None) -> None:
        self._bench = bench
        self._command = [str(python), str(HERE / "trl_preparation.py"), str(bench.marked)]
        self._options = [] if workers is None else ["--workers", str(workers)]
        self.name = "its default dataset_num_proc" if workers is None else f"dataset_num_proc={workers}"
        self._few_seconds: list[float] = []
        self.speeds: list[Speed] = []

    def measure(self) -> None:
        few = self._cost(self._bench.few)
        self._few_seconds.append(few.wall)
        self.speeds.append(speed(self._bench.count - FEW, self._cost(self._bench.rows) - few))

    def _cost(self, rows: Path) -> Cost:
        told = json.loads(output([*self._command, str(rows), *self._options]))
        return Cost(told["seconds"], told["processor"])

    @property
    def started(self) -> str:
        return f"{FEW} rows take {statistics.median(self._few_seconds):.2f} s, imports not counted"

    def require_same_labels(self) -> None:
        """A comparison of speed means nothing where both sides do not make the same ids and labels."""
        cost(self._bench.kiln(self._bench.few, self._bench.marked, "same"))
        corpus = self._bench.folder / "run-same" / "admit" / "corpus.parquet"
        command = [*self._command, str(self._bench.few), *self._options, "--against", str(corpus)]
        require_success(command, subprocess.run(command, check=False).returncode)
