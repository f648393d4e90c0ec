"""Locks of checkpoint folders. A lock is a regular file; links are not followed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from structured_voronoi.core.errors import SamplingError

LOCK = "run.lock"
SIZE = 20
"""Bytes of a lock file: the id of the process that holds it, padded with spaces."""


class FolderLock:
    """The lock of a folder, held by this process until it is released or the process ends.

    Parameters
    ----------
    folder
        An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file = _lock(self._path)

    @property
    def is_held(self) -> bool:
        return self._file >= 0

    def clear(self) -> None:
        """Remove the process id from the file, which stays locked."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, b" " * SIZE, 0)

    def release(self) -> None:
        os.close(self._file)
        self._file = -1


def _lock(path: Path) -> int:
    """Lock a file and write the id of this process into it; returns the descriptor."""
    import fcntl  # Windows has none: only checkpoints need it

    lock = _open(path)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, SIZE, 0).decode(errors="replace").strip() or "(unknown)"
            raise SamplingError(
                f"{path.parent} is in use by process {holder}",
                remedy="wait until it has ended, or choose another folder",
            ) from None
        is_removed = not os.fstat(lock).st_nlink  # another process removed the file before it was locked
        if not is_removed:
            if not re.fullmatch(rb"[0-9 ]{0,%d}" % SIZE, os.pread(lock, SIZE + 1, 0)):
                raise _error(path, "holds other data")
            os.pwrite(lock, str(os.getpid()).encode().ljust(SIZE), 0)
    except BaseException:
        os.close(lock)
        raise
    if is_removed:
        os.close(lock)
        return _lock(path)
    return lock


def _open(path: Path) -> int:
    """Open or create a lock file: a regular file with one name, so that no other file is written through a link."""
    if path.is_symlink():
        raise _error(path, "is a symbolic link")
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
    lock = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # it may have become a link meanwhile
    status = os.fstat(lock)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return lock
    os.close(lock)
    raise _error(path, "has more than one hard link" if stat.S_ISREG(status.st_mode) else "is not a regular file")


def _error(path: Path, what: str) -> SamplingError:
    return SamplingError(f"the lock file {path} {what}", remedy="remove it, or choose another checkpoint folder")
