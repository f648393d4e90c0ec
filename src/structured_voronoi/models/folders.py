"""Folders: where results are written, and where the user's cache is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from structured_voronoi.core.errors import SamplingError


def writable_folder(path: Path, names: Sequence[str] = ()) -> Path:
    """The folder, made if need be; checked before the long work, not after it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        blocked = [
            file
            for name in names
            for file in (*path.glob(f"{name}*.*"), *path.glob(name))
            if not os.access(file, os.W_OK) or file.is_dir()
        ]
        if blocked:
            raise SamplingError(
                f"{blocked[0]} is in the way and cannot be replaced",
                remedy="move it or choose another --out",
            )
        return path
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SamplingError(
            f"--out {str(path)[:200]} cannot be written to",
            cause=reason,
            remedy="choose a folder of your own, as in --out results",
        ) from error


def cache_folder() -> Path:
    """Where the user's cached files are, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "structured-voronoi"
