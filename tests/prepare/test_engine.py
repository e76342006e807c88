"""The engine of prepare: however a file is cut and shared out, the bytes are the same and no byte of it is lost."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages import prepare
from kiln_stages.preparing.screening import Screen
from kiln_stages.preparing.survey import OpenSource, survey
from kiln_stages.reading.ranges import ranges
from kiln_stages.reading.sources import open_rows
from kiln_stages.workers import Workers
from prepare.conftest import (
    ABSENT,
    LINE_REASONS,
    ROOT_REASONS,
    SPLITS,
    A,
    T,
    data_files,
    ids,
    jsonl,
    paired,
    project,
    raw,
    rejected,
    tree,
)

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import DropReason, Source
from kiln_cli.lines import LineReader
from kiln_cli.plugins import Plugins
from kiln_cli.records import Candidate, ToolCallRow
from kiln_cli.terminal import SILENT

EN: dict[str, object] = {"path": "rows.jsonl", "source": "sommelier"}
FR: dict[str, object] = {
    "path": "rows.fr.jsonl",
    "language": "fr",
    "source_id_column": "source_example_id",
    "source": "sommelier",
}
SIZES = (14, 5, 4)
CAP = 4000


def dumped(row: dict[str, Any], **options: Any) -> bytes:
    return json.dumps(row, **options).encode()


def hostile_lines() -> list[tuple[bytes, str | None]]:
    """Lines with every fault that a line or a row can have, and the reason of each ("" for a blank line)."""
    good: list[tuple[bytes, str | None]] = [(dumped(raw(n)), None) for n in range(20)]
    odd_but_good: list[tuple[bytes, str | None]] = [
        (dumped(raw("cr")) + b"\r", None),
        (b" \t\x0c" + dumped(raw("space")) + b" \x0c\t", None),
        (dumped(raw("sep", query="one\u2028two\u0085three four"), ensure_ascii=False), None),
        (dumped(raw("lone cr")).replace(b", ", b",\r"), None),
        (dumped(raw("kanji", query="天気はどうですか、明日の東京で"), ensure_ascii=False), None),
        (dumped(raw("cap")).ljust(CAP), None),
    ]
    broken: list[tuple[bytes, str | None]] = [
        (dumped(raw("long")).ljust(CAP + 1), "line_too_long"),
        (b"\xff" * (3 * CAP), "line_too_long"),
        (dumped(raw("utf8")).replace(b"Valid", b"V\xfflid"), "invalid_utf8"),
        (b"\xc3", "invalid_utf8"),
        (b"\xed\xa0\x80", "invalid_utf8"),
        (b"{", "invalid_row_json"),
        (b"\x00", "invalid_row_json"),
        (b"\x0b", "invalid_row_json"),
        (b"\xc2\xa0" + dumped(raw("nbsp")), "invalid_row_json"),
        (b"\xef\xbb\xbf" + dumped(raw("inner bom")), "invalid_row_json"),
        (dumped(raw("nan")).replace(b'"v"', b"NaN"), "invalid_row_json"),
        (dumped(raw("twice"))[:-1] + b',"query":"Another query here"}', "invalid_row_json"),
        (dumped(raw("lone", query="a lone surrogate \ud800")), "invalid_row_json"),
        (dumped(raw("huge")).replace(b'"v"', b"1e999"), "invalid_row_json"),
        (dumped(raw("two")) * 2, "invalid_row_json"),
        (b"[" * 1000, "invalid_row_json"),
        (b"[1]", "row_not_object"),
        (b'"text"', "row_not_object"),
        (dumped(raw("schema", schema_version=ABSENT)), "unknown_schema"),
        (dumped(raw("field", source_revision=ABSENT)), "missing_field"),
        (dumped(raw("no id", source_id=ABSENT)), "missing_field"),
        (dumped(raw("null id", source_id=None)), "invalid_example_id"),
        (dumped(raw("blank id", source_id=" \u3000")), "invalid_example_id"),
        (dumped(raw("number id", source_id=7)), "invalid_example_id"),
        (dumped(raw("repeat", source_id="s3")), "duplicate_example_id"),
        (dumped(raw("repeat", source_id="s3", query="")), "duplicate_example_id"),
        (dumped(raw("a", query=None)), "missing_query"),
        (dumped(raw("b", tools=[])), "missing_tools"),
        (dumped(raw("c", answers=" ")), "missing_answers"),
        (dumped(raw("d", query="short")), "query_too_short"),
        (dumped(raw("e", query="x" * 2001)), "query_too_long"),
        (dumped(raw("f", tools="[NaN]")), "invalid_tools_json"),
        (dumped(raw("g", tools="{}")), "invalid_tool_shape"),
        (dumped(raw("h", answers='[{"name":"f","name":"g"}]')), "invalid_answers_json"),
        (dumped(raw("i", answers="[]")), "invalid_answer_shape"),
        (dumped(raw("j", answers=f"[{A[1:-1]},{A[1:-1]}]")), "multi_call_answer"),
        (dumped(raw("k", query="  VALID query\u00a0for ROW 4 ")), "duplicate_query"),
    ]
    blank: list[tuple[bytes, str | None]] = [(text, "") for text in (b"", b"  ", b"\t\r", b"\x0c", b"", b"\r")]
    first, *rest = good
    # Repeats must come behind what they repeat, so those stay at the end.
    late = [line for line in broken if line[1] in ("duplicate_example_id", "duplicate_query")]
    mixed = rest + odd_but_good + [line for line in broken if line not in late] + blank
    random.Random(7).shuffle(mixed)
    return [(b"\xef\xbb\xbf" + first[0] + b"\r", None), *mixed, *late, (dumped(raw("last")), None)]


def hostile_pairs() -> bytes:
    rows = [paired(n, f"s{n}") for n in range(0, 20, 2)]
    rows += [paired(40, "s1", query=raw(2)["query"]), paired(41, ABSENT), paired(42, "s3", tools=T + " ")]
    return b"\n" + jsonl(*rows)[:-1]


@pytest.fixture
def low_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineReader.__init__, "__defaults__", (CAP,))


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many workers as are asked for, whatever the machine has."""
    monkeypatch.setattr(prepare, "available", lambda wanted=None: wanted or 1)


def hostile_project(root: Path) -> Any:
    data = b"\n".join(line for line, _ in hostile_lines())
    return project(root, (EN, FR), SIZES, files={"rows.jsonl": data, "rows.fr.jsonl": hostile_pairs()})


@pytest.mark.usefixtures("low_cap", "many_cores")
def test_bytes_do_not_depend_on_workers_or_cuts(tmp_path: Path, plugins: Plugins) -> None:
    config = hostile_project(tmp_path)
    found = {}
    for workers in (1, 2, 4):
        for range_bytes in (1, 7, 64, 1000, 4 * 1024 * 1024):
            run = tmp_path / f"run{workers}-{range_bytes}"
            result = prepare.run(config, run, plugins, workers=workers, range_bytes=range_bytes)
            found[workers, range_bytes] = (result.manifest.content_sha256, data_files(run))
    expected = found[1, 4 * 1024 * 1024]
    assert set(expected[1]) == {f"data/{name}" for name in (*(f"{split}.jsonl" for split in SPLITS), *ACCOUNT)}
    assert [combination for combination, files in found.items() if files != expected] == []


ACCOUNT = ("rejected.jsonl", "drop_summary.json")


@pytest.mark.usefixtures("low_cap", "many_cores")
@pytest.mark.parametrize("workers, range_bytes", [(1, 4 * 1024 * 1024), (3, 50)])
def test_every_byte_of_the_file_has_one_outcome(
    tmp_path: Path, plugins: Plugins, workers: int, range_bytes: int
) -> None:
    lines = hostile_lines()
    result = prepare.run(hostile_project(tmp_path), tmp_path / "run", plugins, workers=workers, range_bytes=range_bytes)
    data = (tmp_path / "rows.jsonl").read_bytes()
    places, start = [], 0
    for text, _ in lines:
        length = len(text) + 1 if start + len(text) < len(data) else len(text)
        places.append((start, length))
        start += length
    assert start == len(data)
    dropped = {(row["offset"], row["length"]): row for row in rejected(tmp_path / "run") if row["language"] == "en"}
    blank = [place for place, (_, reason) in zip(places, lines, strict=True) if reason == ""]
    expected = {place: reason for place, (_, reason) in zip(places, lines, strict=True) if reason}
    assert {place: row["reason"] for place, row in dropped.items()} == expected
    assert {row["reason"] for row in dropped.values()} == {*LINE_REASONS, *ROOT_REASONS}
    by_id = {
        json.loads(text.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\x0c"))["source_id"]: place
        for place, (text, reason) in zip(places, lines, strict=True)
        if reason is None
    }
    english = [name for split in SPLITS for name in ids(tmp_path / "run", split) if name in by_id]
    kept = [by_id[name] for name in english]
    drops = result.summary.kiln["en"]
    unused = sorted(set(by_id.values()) - set(kept))
    assert len(unused) == drops.unused > 0
    assert (len(kept), len(dropped), len(blank)) == (drops.kept, drops.dropped, drops.blank_lines)
    assert drops.rows_read == drops.kept + drops.dropped + drops.unused
    assert drops.byte_order_marks == 1
    # Together they tile the file: no gap, no overlap.
    assert sorted([*kept, *dropped, *unused, *blank]) == places
    # Line and row numbers are those of the file.
    for place, row in dropped.items():
        number = places.index(place)
        assert row["line"] == number + 1
        assert row["row_index"] == 1 + sum(reason != "" for _, reason in lines[:number])
        text = lines[number][0].removeprefix(b"\xef\xbb\xbf" if number == 0 else b"").strip(b" \t\r\n\x0c")
        digest = hashlib.sha256(b"kiln-cli.raw-tool-call-row.v1\x00" + text).hexdigest()
        assert row["row_sha256"] == (None if row["reason"] == "line_too_long" else f"sha256:{digest}")


def test_a_line_above_the_real_cap_in_another_process(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "available", lambda wanted=None: wanted or 1)
    cap = 16 * 1024 * 1024
    long = dumped(raw("x")).ljust(2 * cap + 5)  # above what is read as a whole
    data = jsonl(raw(1), raw(2)) + long + b"\n" + jsonl(raw(3), raw(4))
    config = project(tmp_path, (EN,), files={"rows.jsonl": data})
    prepare.run(config, tmp_path / "run", plugins, workers=2)
    (row,) = rejected(tmp_path / "run")
    assert (row["reason"], row["line"], row["length"]) == ("line_too_long", 3, len(long) + 1)


# --- ranges


def open_source(path: Path, plugins: Plugins, scratch: Path, stack: ExitStack) -> OpenSource:
    plain, choice = stack.enter_context(open_rows(path, "sommelier", plugins.sources, "tool_calls", scratch))
    config = project(scratch, (EN,))
    names = plugins.in_force(())
    screen = Screen(config.run.datasets[0], choice.source, names, config.run.data)
    return OpenSource(plain, screen, {reason.name: number for number, reason in enumerate(names)})


PIECES = st.sampled_from(
    [b"\n", b"\n", b"\r", b" ", b"{", b"}", b"\xef\xbb\xbf", b"\xff", b"\x00", b"[1]", dumped(raw(1)), dumped(raw(2))]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=14).map(b"".join), st.integers(1, 60))
def test_ranges_cover_the_file_and_change_nothing(plugins: Plugins, data: bytes, range_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        scratch = Path(directory)
        path = scratch / "rows.jsonl"
        path.write_bytes(data)
        cuts = ranges(0, io.BytesIO(data), len(data), range_bytes)
        assert [part.start for part in cuts] == [0, *(part.end for part in cuts)][: len(cuts)]
        assert b"".join(data[part.start : part.end] for part in cuts) == data
        assert all(data[part.end - 1 : part.end] == b"\n" for part in cuts[:-1])
        if data.strip(b"\xef\xbb\xbf \t\r\n\x0c")[:1] == b"[":
            return  # may be an array, which is laid out as lines first
        source = open_source(path, plugins, scratch, stack)
        whole, parts = (surveyed(source, scratch, size) for size in (len(data) + 1, range_bytes))
        assert parts == whole


def surveyed(source: OpenSource, scratch: Path, range_bytes: int) -> tuple[object, ...]:
    """All that a survey says of a source."""
    with Workers([source], 1) as workers, SILENT.task("", None, "") as task:
        read = survey([source], 0, workers, scratch, task, range_bytes)
    dropped = list(read.dropped)
    read.dropped.close()
    return read.frame.to_dict(as_series=False), dropped, read.blank_lines, read.had_bom, read.sha256, read.size


@pytest.mark.usefixtures("low_cap")
def test_the_survey_tiles_the_file_too(tmp_path: Path, plugins: Plugins) -> None:
    config = hostile_project(tmp_path)
    assert config is not None
    data = (tmp_path / "rows.jsonl").read_bytes()
    with ExitStack() as stack:
        (tmp_path / "scratch").mkdir()
        source = open_source(tmp_path / "rows.jsonl", plugins, tmp_path / "scratch", stack)
        with Workers([source], 1) as workers, SILENT.task("", None, "") as task:
            read = survey([source], 0, workers, tmp_path / "scratch", task, 333)
        assert (read.sha256, read.size) == (hashlib.sha256(data).hexdigest(), len(data))
        rows = list(read.frame.select("offset", "length", "line").iter_rows())
        end, blank = 0, 0
        for offset, length, line in [*rows, (len(data), 0, None)]:
            gap = data[end:offset]
            assert not gap.strip(b" \t\r\n\x0c")
            blank += gap.count(b"\n")
            assert line is None or line == data[:offset].count(b"\n") + 1
            end = offset + length
        assert (end, blank) == (len(data), read.blank_lines)
        read.dropped.close()


# --- workers and plugins that fail


def in_force_with(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """One more row reason, called ``extra``."""
    fields: dict[str, Any] = {"name": "extra", "doc": "a test's own", "scope": "row", "order": 105, **changes}
    extra, usual = DropReason(**fields), plugins.in_force
    monkeypatch.setattr(
        plugins, "in_force", lambda checks: sorted([*usual(checks), extra], key=lambda reason: reason.order)
    )


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("number", [0, 150, 299])
def test_a_killed_worker(tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    parent = os.getpid()

    def check(candidate: Candidate, limits: object) -> str | None:
        if candidate.query.endswith(f" {number}") and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    in_force_with(plugins, monkeypatch, check=check)
    config = project(tmp_path, (EN,), (100, 10, 10), files={"rows.jsonl": jsonl(*(raw(n) for n in range(300)))})
    started = time.monotonic()
    with pytest.raises(KilnError) as caught:
        prepare.run(config, tmp_path / "run", plugins, workers=2, range_bytes=500)
    assert time.monotonic() - started < 30
    assert (caught.value.code, caught.value.exit_code) == ("KLN403", 4)
    assert "worker" in caught.value.message and caught.value.hint
    assert tree(tmp_path / "run") == {}


def _dies_on_three(shared: object, item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_worker_that_dies_before_its_results_are_asked_for() -> None:
    """Work is handed out while results are taken: that may be what finds the pool broken."""
    with Workers(None, 2) as workers, pytest.raises(KilnError) as caught:
        results = workers.map(_dies_on_three, range(100))
        time.sleep(1)
        list(results)
    assert caught.value.code == "KLN403"


def _refuses_three(shared: object, item: int) -> int:
    if item == 3:
        raise KilnError("KLN210", "three is refused", hint="take four", details={"item": item})
    return item


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_of_a_worker_arrives_whole(count: int) -> None:
    taken = []
    with Workers(None, count) as workers, pytest.raises(KilnError) as caught:
        taken += list(workers.map(_refuses_three, range(3)))
        for item in workers.map(_refuses_three, range(100)):
            taken.append(item)
    error = caught.value
    assert (error.code, error.message, error.hint, error.details) == (
        "KLN210",
        "three is refused",
        "take four",
        {"item": 3},
    )
    assert taken == [0, 1, 2, 0, 1, 2]


def test_results_come_in_the_order_of_the_work() -> None:
    def slow_at_first(shared: int, item: int) -> int:
        time.sleep(0.05 if item % 7 == 0 else 0)
        return shared * item

    global _local
    _local = slow_at_first
    with Workers(3, 4) as workers:
        assert list(workers.map(_call_local, range(40))) == [3 * item for item in range(40)]
        assert list(workers.map(_call_local, ())) == []


_local: Callable[[int, int], int]


def _call_local(shared: int, item: int) -> int:
    return _local(shared, item)


PARENT = """
import os, time
from kiln_stages.workers import Workers

def work(shared, item):
    time.sleep(0.5 if item < 2 else 1)
    return os.getpid()

with Workers(None, 2) as workers:
    results = workers.map(work, range(100))
    print(next(results), next(results), flush=True)
    time.sleep(60)
"""


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        workers = {int(text) for text in parent.stdout.readline().split()}
        assert workers and all(map(is_alive, workers))
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.send_signal(number)
        started = time.monotonic()
        while any(map(is_alive, workers)) and time.monotonic() - started < 20:
            time.sleep(0.1)
        assert not any(map(is_alive, workers))
        assert parent.wait(20) != 0
        # An interrupt is the parent's alone to tell of.
        assert parent.stderr.read().count("Traceback") == (number == signal.SIGINT)


def _explode(*_: object) -> Any:
    raise ZeroDivisionError("of its own making")


def _yields_chat(value: dict[str, Any]) -> ToolCallRow:
    return value["query"]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["check", "key", "match", "convert", "type"])
def test_a_plugin_that_fails_is_named(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, where: str, workers: int
) -> None:
    if where == "check":
        in_force_with(plugins, monkeypatch, check=_explode)
    elif where == "key":
        in_force_with(plugins, monkeypatch, scope="pool", order=115, key=_explode)
    elif where == "match":
        in_force_with(plugins, monkeypatch, scope="pool", order=115, key=lambda candidate: "", match=_explode)
    else:
        source = Source(
            name="extra",
            doc="",
            yields="tool_calls",
            convert=_explode if where == "convert" else _yields_chat,
            recognise=lambda row: None,
        )
        usual = plugins.sources.get
        monkeypatch.setattr(plugins.sources, "get", lambda name: source if name == "extra" else usual(name))
    dataset = {**EN, "source": "extra" if where in ("convert", "type") else "sommelier"}
    files = {"rows.jsonl": jsonl(*(raw(n) for n in range(50)))}
    config = project(tmp_path, (dataset,), files=files)
    with pytest.raises(KilnError) as caught:
        prepare.run(config, tmp_path / "run", plugins, workers=workers, range_bytes=1000)
    assert caught.value.code == "KLN210"
    assert "'extra'" in caught.value.message
    assert ("str" if where == "type" else "ZeroDivisionError: of its own making") in caught.value.message
    assert tree(tmp_path / "run") == {}


def test_a_row_fault_of_a_source_is_no_failure(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(value: dict[str, Any]) -> ToolCallRow:
        if value["source_id"] == "s1":
            raise RowFault("missing_field", "no good", "/query")
        return ToolCallRow(query=value["query"], tools=value["tools"], answers=value["answers"])

    source = Source(name="extra", doc="", yields="tool_calls", convert=convert, recognise=lambda row: None)
    monkeypatch.setattr(plugins.sources, "get", lambda name: source)
    config = project(tmp_path, ({**EN, "source": "extra"},), files={"rows.jsonl": jsonl(*(raw(n) for n in range(4)))})
    prepare.run(config, tmp_path / "run", plugins)
    assert [(row["row_index"], row["reason"]) for row in rejected(tmp_path / "run")] == [(2, "missing_field")]


# --- determinism over what Python and polars may vary


def test_bytes_do_not_depend_on_hash_seed_or_threads(tmp_path: Path, plugins: Plugins) -> None:
    files = {
        "rows.jsonl": jsonl(
            *(
                raw(n, answers=A.replace('"f"', f'"f{n % 5}"'), query="twin query" if n % 9 == 0 else raw(n)["query"])
                for n in range(60)
            )
        ),
        "rows.fr.jsonl": hostile_pairs(),
    }
    project(tmp_path, (EN, FR), (30, 8, 8), files=files, limits={"stratify_by": "tool"})
    command = [sys.executable, "-m", "kiln_cli.app", "prepare", str(tmp_path / "kiln.toml"), "--json", "--workers", "2"]
    found = []
    for seed, threads in ((0, 1), (1, 4), (2, 1), (3, 4)):
        run = tmp_path / f"run{seed}"
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "POLARS_MAX_THREADS": str(threads)}
        done = subprocess.run([*command, "--out", str(run)], env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append((json.loads(done.stdout)["content_sha256"], data_files(run)))
    assert all(files == found[0] for files in found[1:])
