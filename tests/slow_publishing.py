"""kiln with a disk that is slow while a checkpoint is published, so that random kills land there.

python tests/slow_publishing.py SECONDS train CONFIG --out RUN
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kiln_cli import files


class SlowDisk(files.Filesystem):
    """Waits before each of the forty or so calls from the making of a staging directory to the flush behind its
    renaming."""

    publishing = False
    seconds = 0.0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("publishing", "seconds") and self.publishing:
            time.sleep(self.seconds)
        return super().__getattribute__(name)

    def make_directory(self, path: Path) -> None:
        if files.INCOMPLETE_MARK in path.name:
            self.publishing = True
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if files.INCOMPLETE_MARK not in path.name:
            self.publishing = False


def start(seconds: float, *arguments: str | Path) -> subprocess.Popen[str]:
    """One command line in a process group of its own; ``seconds`` a call while it publishes, 0 for kiln as it is."""
    program = [str(Path(__file__)), str(seconds)] if seconds else ["-m", "kiln_cli.app"]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    SlowDisk.seconds = float(sys.argv[1])
    files.FS = SlowDisk()
    from kiln_cli import app  # behind the line above: stages take FS by name

    sys.exit(app.run(sys.argv[2:]))
