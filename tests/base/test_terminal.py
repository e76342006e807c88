"""Progress as people see it: a speed over the latest seconds, plain lines for logs, nothing under --quiet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from kiln_cli import terminal as module
from kiln_cli.terminal import Speed, Terminal, duration


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_speed_is_that_of_the_latest_seconds() -> None:
    clock = Clock()
    speed = Speed(clock)
    assert speed.a_second() == 0.0
    for _ in range(40):  # 10 a second, then 100 a second for longer than the window
        clock.now += 1
        speed.add(10)
    assert speed.a_second() == pytest.approx(10)
    for _ in range(40):
        clock.now += 1
        speed.add(100)
    assert speed.a_second() == pytest.approx(100)


def test_a_speed_of_steps_longer_than_the_window_is_that_of_the_last_one() -> None:
    clock = Clock()
    speed = Speed(clock)
    for amount in (1000, 3000):
        clock.now += 60
        speed.add(amount)
    assert speed.a_second() == pytest.approx(50)


@pytest.mark.parametrize("seconds, text", [(0.4, "0:00"), (42, "0:42"), (725, "12:05"), (10859, "3:00:59")])
def test_durations_are_written_as_a_clock_shows_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_off_a_terminal_progress_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    monkeypatch.setattr(module.Speed.__init__, "__defaults__", (clock,))
    with Terminal().task("train", 90, "steps") as task:
        for number in range(30):
            clock.now += 1
            task.advance(note=f"loss {number}.5")
    out, err = capsys.readouterr()
    assert out == "" and "\r" not in err and "\x1b" not in err
    lines = err.splitlines()
    assert len(lines) == 3  # one each ten seconds
    assert lines[0] == "train: 10 of 90 steps, 1.0 steps/s, 1:20 left  loss 9.5"


def test_what_was_done_before_counts_in_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    monkeypatch.setattr(module.Speed.__init__, "__defaults__", (clock,))
    with Terminal().task("train", 90, "steps", 50) as task:
        for _ in range(10):
            clock.now += 1
            task.advance()
    assert capsys.readouterr().err == "train: 60 of 90 steps, 1.0 steps/s, 0:30 left\n"


def test_on_a_terminal_of_eighty_columns_the_bar_is_one_line() -> None:
    """With loss, tokens a second and the time left, all of them whole."""
    script = (
        "from kiln_cli.terminal import terminal\n"
        "import time\n"
        "with terminal.task('train', 12000, 'steps') as task:\n"
        "    for _ in range(12):\n"
        "        time.sleep(0.06)\n"
        "        task.advance(10, 'epoch 12  loss 4.9915  11,892 tokens/s')\n"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stderr=slave, env=environment | {"TERM": "xterm"}) as process:
        os.close(slave)
        drawn = b""
        with contextlib.suppress(OSError):  # the end of a terminal that nobody has open
            while data := os.read(master, 1 << 16):
                drawn += data
    os.close(master)
    assert process.returncode == 0
    assert drawn.count(b"\x1b[1A") == 1, "the cursor goes up once, to erase the line at the end"
    last = [line for line in drawn.decode().split("\r") if "tokens/s" in line][-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last).strip()
    note = r"epoch 12  loss 4\.9915  11,892 tokens/s"
    assert re.fullmatch(rf"train \S+ +120/12000 steps +\d:\d\d:\d\d {note}", plain), plain


def test_an_unknown_total_has_no_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_SECONDS", 0.0)
    with Terminal().task("read", None, "rows") as task:
        task.advance(5)
    assert re.fullmatch(r"read: 5 rows, [\d,.]+ rows/s\n", capsys.readouterr().err)


def test_quiet_shows_no_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_SECONDS", 0.0)
    quiet = Terminal()
    quiet.quiet = True
    with quiet.task("train", 10, "steps") as task:
        task.advance(note="loss 1")
    assert capsys.readouterr() == ("", "")
