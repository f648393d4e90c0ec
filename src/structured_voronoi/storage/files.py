"""Files that are complete at every moment."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from structured_voronoi.core.errors import SamplingError

NEW_SUFFIX = ".new"
"""Suffix of a file that is being written and will replace the one without it."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: at every moment it holds all of the old bytes or all of the new ones.

    The new bytes are first written to a file with the suffix ``.new``. A link of that name is removed, not followed.
    """
    new = path.with_name(path.name + NEW_SUFFIX)
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:  # creates the file, or fails
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system supports this
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the new name survives a power cut
        finally:
            os.close(folder)


class LineFile:
    """A file that holds complete lines at every moment.

    The first lines replace what the file held before; without lines it is left as it is.

    Parameters
    ----------
    path
        A file, a pipe or a terminal.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = Path(os.path.realpath(path)), -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file; after Ctrl-C, add a note with the number of its lines to the error."""
        if isinstance(error, KeyboardInterrupt) and self.path.is_file():
            with self.path.open("rb") as file:
                error.add_note(f"{sum(1 for _ in file):,} lines are in {self.path}")
        if self._file >= 0:
            os.close(self._file)

    def write(self, lines: Sequence[str]) -> None:
        """Append lines. If the disk is full, an incomplete line is removed again."""
        data = [f"{line}\n".encode() for line in lines]
        try:
            if self._file < 0:
                data = self._open(data)
            for line in data:
                written = os.write(self._file, line)
                if written < len(line):
                    os.ftruncate(self._file, os.lseek(self._file, -written, os.SEEK_CUR))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.path.is_file():
                os.fsync(self._file)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SamplingError(
                f"{self.path} cannot be written",
                cause=error.strerror,
                remedy="free some space, or choose another file; the lines so far are complete",
            ) from error

    def _open(self, data: list[bytes]) -> list[bytes]:
        """Open the file and write the first lines, if they can replace it atomically; returns the other lines."""
        if (self.path.is_file() or not self.path.exists()) and os.access(self.path.parent, os.W_OK):
            write_atomically(self.path, b"".join(data))
            self._file, data = os.open(self.path, os.O_WRONLY | os.O_APPEND), []
        else:  # a pipe, a terminal, or a file in a folder without write permission
            self._file = os.open(self.path, os.O_WRONLY | os.O_TRUNC)
        return data
