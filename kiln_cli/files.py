"""The one write path: whole files by rename, directories by rename, the manifest last. Nothing else in kiln writes.

A reader of a run directory sees an artifact as it was or as it is, never between: the bytes go to a temporary name in
the same directory, are flushed, renamed over the target, and the directory is flushed. A failed write leaves the old
artifact and no debris; what a killed process leaves behind is swept under the lock by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from filelock import Timeout, UnixFileLock

from kiln_cli.errors import KilnError
from kiln_cli.text import printable

TEMP_PREFIX = ".kiln-tmp-"
INCOMPLETE_MARK = ".incomplete-"
LOCK_NAME = ".kiln.lock"
NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\Z")
_BLOCK = 1024 * 1024


class Filesystem:
    """The system calls that change a disk, in one place so that tests can record them or make the k-th one fail."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open_for_append(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def chmod(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def rename_directory(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)


FS = Filesystem()


class AtomicFile:
    """A file that appears under its name whole or not at all. Use as a context manager; hashes what passes.

    After the block ``sha256`` (hex) and ``size`` describe the bytes, and ``unchanged`` says that the target already
    held exactly these bytes and was left alone, time stamp included. Raises KilnError KLN402 when the disk refuses.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self.unchanged = False
        self.size = 0
        self._mode = mode
        self._digest = hashlib.sha256()
        self._temporary = path.parent / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        self._descriptor = -1
        self._buffer: list[bytes] = []
        self._buffered = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> AtomicFile:
        with writing(self.path):
            FS.make_directory(self.path.parent)
            self._descriptor = FS.create(self._temporary)
        return self

    def write(self, data: bytes) -> int:
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= _BLOCK:
            self._drain()
        return len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            with writing(self.path):
                self._commit()
        except KilnError:
            self._discard()
            raise

    def _drain(self) -> None:
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._buffered = 0
        self._digest.update(data)
        self.size += len(data)
        view = memoryview(data)
        try:
            with writing(self.path):
                while view:
                    view = view[FS.write(self._descriptor, view) :]
        except KilnError:
            self._discard()
            raise

    def _commit(self) -> None:
        self._drain()
        if _holds(self.path, self.sha256, self.size):
            self.unchanged = True
            self._discard()
            return
        FS.fsync(self._descriptor)
        FS.chmod(self._temporary, self._mode)
        descriptor, self._descriptor = self._descriptor, -1
        FS.close(descriptor)
        FS.replace(self._temporary, self.path)
        FS.sync_directory(self.path.parent)

    def _discard(self) -> None:
        """Best effort on purpose: the error that led here is the one to report."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        self._temporary.unlink(missing_ok=True)


class AppendLog:
    """A file that grows in place, a line at a time: the one thing that is not written whole.

    A line is with the system when ``append`` returns, and on disk after ``sync``. ``keep``: bytes of the file that
    stay, all if None; what stands behind them goes. Use as a context manager.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        with writing(path):
            self._descriptor = FS.open_for_append(path)
            if keep is not None:
                FS.truncate(self._descriptor, keep)

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, *_: object) -> None:
        FS.close(self._descriptor)

    def append(self, line: bytes) -> None:
        """Adds ``line`` and a line feed. Raises KilnError KLN402 where the disk refuses."""
        view = memoryview(line + b"\n")
        with writing(self.path):
            while view:
                view = view[FS.write(self._descriptor, view) :]

    def sync(self) -> None:
        with writing(self.path):
            FS.fsync(self._descriptor)


def write_file(path: Path, data: bytes, mode: int = 0o644) -> AtomicFile:
    """Writes one whole file through the write path; the result tells digest, size and whether anything changed."""
    with AtomicFile(path, mode) as out:
        out.write(data)
    return out


def publish_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes an immutable directory: ``fill`` writes into a hidden sibling, which is flushed and renamed into place.

    An existing target is an error (KLN206): published directories are never overwritten. A kill at any moment leaves
    either no target or a whole one; the hidden sibling holds ``.incomplete`` until the last moment and never loads.
    """
    if os.path.lexists(target):  # a link that leads nowhere is in the way too
        raise KilnError("KLN206", f"{printable(target)} exists and is immutable", hint="choose another step or --out")
    staging = target.parent / f".{target.name}{INCOMPLETE_MARK}{uuid.uuid4()}"
    with writing(target):
        FS.make_directory(staging)
        try:
            sentinel = staging / ".incomplete"
            write_file(sentinel, target.name.encode())
            FS.sync_directory(staging)
            fill(staging)
            FS.unlink(sentinel)
            for directory in sorted((p for p in staging.rglob("*") if p.is_dir()), reverse=True):
                FS.sync_directory(directory)
            FS.sync_directory(staging)
            FS.rename_directory(staging, target)
            FS.sync_directory(target.parent)
        except BaseException:
            if staging.exists():
                FS.remove_tree(staging)
            raise


def discard_directory(path: Path) -> None:
    """Removes a published directory, its name first: a kill leaves it whole, or hidden and for the next sweep."""
    doomed = path.parent / f".{path.name}{INCOMPLETE_MARK}{uuid.uuid4()}"
    with writing(path):
        FS.rename_directory(path, doomed)
        FS.sync_directory(path.parent)
        FS.remove_tree(doomed)


def flush_files(directory: Path) -> None:
    """Files that a library wrote into a directory that is about to be published: onto the disk, and readable by all."""
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with writing(path):
            FS.chmod(path, 0o644)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                FS.fsync(descriptor)
            finally:
                os.close(descriptor)


# What stands at a path is of the wrong kind: no space or permission would help.
_OF_THE_NAME = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}
IN_THE_WAY = "move what stands there, or name another place"
NO_ROOM = "free space or mend the permissions, then run the same command again"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a refusal of the disk into KLN402, with the reason and the space that is left."""
    try:
        yield
    except OSError as error:
        where = path.parent if path.parent.exists() else Path(".")
        free = shutil.disk_usage(where).free
        raise KilnError(
            "KLN402",
            f"cannot write {printable(path)}: {error.strerror or error} ({free // 1_000_000} MB free)",
            hint=IN_THE_WAY if error.errno in _OF_THE_NAME else NO_ROOM,
        ) from error


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading, once. Raises KilnError KLN204 for anything else: pipes would hang."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KilnError("KLN204", f"cannot read {printable(path)}: {error.strerror}", hint="check the path") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise KilnError("KLN204", f"{printable(path)} is no regular file", hint="name a file")
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def read_sealed(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that has one name and is reached through no link, at most ``limit`` of them.

    Raises KilnError KLN204 for anything else: what lies in an immutable directory must not be shared with elsewhere.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KilnError("KLN204", f"cannot read {printable(path)}: {error.strerror}", hint="restore the file") from None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            detail = "is no regular file of its own (a link, or linked elsewhere)"
            raise KilnError("KLN204", f"{printable(path)} {detail}", hint="restore the file")
        if status.st_size > limit:
            detail = f"has {status.st_size} bytes, expected at most {limit}"
            raise KilnError("KLN204", f"{printable(path)} {detail}", hint="restore the file")
        return stream.read(status.st_size + 1)


def hash_file(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a regular file."""
    digest = hashlib.sha256()
    size = 0
    with open_input(path) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes. Raises KilnError KLN204 or KLN206."""
    with open_input(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        # Asking for the limit itself would allocate all of it.
        data = stream.read(min(size, limit) + 1)
    if len(data) > limit:
        raise KilnError("KLN206", f"{printable(path)} is larger than {limit} bytes", hint="this is no such artifact")
    return data


def _holds(path: Path, sha256: str, size: int) -> bool:
    try:
        if path.is_symlink() or path.stat().st_size != size:
            return False
    except OSError:
        return False
    return hash_file(path) == (sha256, size)


@contextmanager
def run_lock(
    run: Path,
    purpose: str,
    instead: str = "choose another --out",
    *,
    wait_seconds: float = 0.2,
    nested: bool = True,
) -> Iterator[int]:
    """Holds the run directory for this process and sweeps what a killed one left; yields how many leftovers went.

    The lock is an flock and dies with its holder; the file's text only serves the message. It is waited for
    ``wait_seconds``: a moment, in which `lock_holder` may be looking, or as long as another's change may take.
    ``nested=False`` leaves alone what lies in directories below: others hold locks of their own there. Raises KilnError
    KLN401, whose hint says to wait, or ``instead``.
    """
    with writing(run / LOCK_NAME):
        FS.make_directory(run)
    path = run / LOCK_NAME
    lock = UnixFileLock(str(path), fallback_to_soft=False, preserve_lock_file=True)
    with writing(path):
        try:
            lock.acquire(timeout=wait_seconds, poll_interval=0.02)
        except Timeout:
            raise KilnError(
                "KLN401",
                f"{printable(run)} is in use by {_holder(path)}",
                hint=f"wait for it to end, or {instead}",
            ) from None
    try:
        holder = {"pid": os.getpid(), "command": purpose, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with writing(path):
            path.write_text(json.dumps(holder) + "\n", encoding="utf-8")
            leftovers = sweep(run, nested=nested)
        yield leftovers
    finally:
        lock.release()


def sweep(run: Path, *, nested: bool = True) -> int:
    """Removes temporary files and unfinished directories of killed processes below ``run``. Needs the lock."""
    leftovers = [
        path
        for path in (run.rglob(".*") if nested else run.glob(".*"))
        if path.name.startswith(TEMP_PREFIX) or (INCOMPLETE_MARK in path.name and path.is_dir())
    ]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            FS.remove_tree(path)
        elif path.is_symlink() or path.exists():
            FS.unlink(path)
    return len(leftovers)


class LockHolder(NamedTuple):
    """Who holds a run directory: what it does, its process id, and since when (UTC)."""

    command: str
    pid: int
    since: str


UNNAMED = LockHolder("another process", 0, "an unknown time")  # it took the lock and has not said yet who it is


def lock_holder(run: Path) -> LockHolder | None:
    """The process that holds the run directory now; None where none does. Writes nothing.

    An flock dies with its holder, so a lock that can be shared is nobody's, whatever the file's text says.
    """
    path = run / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KilnError("KLN204", f"cannot read {printable(path)}: {error.strerror}", hint="check the path") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path) or UNNAMED
    finally:
        os.close(descriptor)
    return None


def _read_holder(path: Path) -> LockHolder | None:
    try:
        text: Any = json.loads(path.read_text(encoding="utf-8"))
        return LockHolder(str(text["command"]), int(text["pid"]), str(text["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder(path: Path) -> str:
    holder = _read_holder(path)
    if holder is None:
        return "another process"
    return printable(f"`{holder.command}` (pid {holder.pid}, since {holder.since})")


def require_name(text: str, what: str) -> str:
    """Names that become parts of paths: letters, digits, ``._-``, no leading dot, at most 100. Raises KLN201."""
    if NAME_PATTERN.match(text) is None:
        raise KilnError(
            "KLN201",
            f"{what} {printable(text)!r} is no name",
            hint="use letters, digits, '.', '_' and '-', at most 100, not starting with a dot",
        )
    return text
