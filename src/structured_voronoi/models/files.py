"""Files that a user names: what may be read, how large it may be, and names that no file can have."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from structured_voronoi.errors import SamplingError

MOST_BYTES = 2 * 2**30
"""Of a file of texts, which is read into memory."""


def is_folder(name: str | Path) -> bool:
    """Is there such a folder? Of a name that no folder can have, too long for example, there is none."""
    return _mode(name, stat.S_ISDIR)


def is_file(name: str | Path) -> bool:
    """Is there such a file? Of a name that no file can have there is none."""
    return _mode(name, stat.S_ISREG)


def check_text_file(path: Path, option: str, most: int = MOST_BYTES) -> None:
    """Refuse what is no file, or no ordinary one: pipes and devices may never end; and what is too large to read."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SamplingError(f"{option} {str(path)[:200]!r} cannot be read ({reason}); give another file") from error
    if stat.S_ISDIR(found.st_mode):
        raise SamplingError(f"{option} {path} is a folder; give a file")
    if not stat.S_ISREG(found.st_mode):
        raise SamplingError(f"{option} {path} is a pipe or a device, which may never end; write it to a file first")
    if found.st_size > most:
        raise SamplingError(
            f"{option} {path} has {found.st_size / 2**20:,.0f} MiB, and at most {most / 2**20:,.0f} are read; "
            "give a part of it"
        )


def _mode(name: str | Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(Path(name).stat().st_mode)
    except (OSError, ValueError):
        return False
