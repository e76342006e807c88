"""SHA-256 of many files, each read once and some of them at a time: hashing lets other threads run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kiln_cli.files import hash_file
from kiln_stages.workers import available

# Hex digest and size in bytes of a file; raises KilnError KLN204 where it cannot be read.
Digest = Callable[[Path], tuple[str, int]]


class Digests:
    """``digests(path)`` is what :func:`kiln_cli.files.hash_file` gives. Use as a context manager.

    ``ahead`` begins to read files that will be asked for. A file that several claims are about is read once, so all of
    them speak of the same bytes.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(available())
        self._found: dict[Path, Future[tuple[str, int]]] = {}

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ahead(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self._found and path.is_file():
                self._found[path] = self._pool.submit(hash_file, path)

    def __call__(self, path: Path) -> tuple[str, int]:
        if path not in self._found:
            self._found[path] = self._pool.submit(hash_file, path)
        return self._found[path].result()
