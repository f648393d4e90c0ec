"""Folders for results and for cached files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from structured_voronoi.core.errors import SamplingError


def writable_folder(path: Path, names: Sequence[str] = ()) -> Path:
    """Create a folder for results and check that it can be written, before the long computation starts.

    Parameters
    ----------
    path
        The folder.
    names
        Beginnings of the names of the files that will be written; existing ones must be replaceable.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    SamplingError
        If the folder or one of these files cannot be written.
    """
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
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        raise SamplingError(
            f"{str(path)[:200]} cannot be written",
            cause=getattr(error, "strerror", None) or error,
            remedy="choose a folder that you can write to, for example results",
            argument="out",
        ) from error
    if blocked:
        raise SamplingError(f"{blocked[0]} cannot be replaced", remedy="move it, or choose another folder")
    return path


def cache_folder() -> Path:
    """The cache folder of this package, following the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "structured-voronoi"
