"""kiln with a disk that is slow while a checkpoint is published, so that random kills land there.

python tests/faults/slow_publishing.py train CONFIG --out RUN
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kiln_cli import files

SECONDS = 0.004  # a call; publishing makes some forty


class SlowDisk(files.Filesystem):
    """Waits before every call between the making of a staging directory and the flush behind its renaming."""

    publishing = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "publishing" and self.publishing:
            time.sleep(SECONDS)
        return super().__getattribute__(name)

    def make_directory(self, path: Path) -> None:
        if files.INCOMPLETE_MARK in path.name:
            self.publishing = True
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if files.INCOMPLETE_MARK not in path.name:
            self.publishing = False


if __name__ == "__main__":
    files.FS = SlowDisk()
    from kiln_cli import app  # behind the line above: stages take FS by name

    sys.exit(app.run(sys.argv[1:]))
