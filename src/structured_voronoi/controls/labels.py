"""Labels of classifiers as controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from structured_voronoi.controls import bundled_controls
from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.core.validation import is_file, is_folder

if TYPE_CHECKING:
    from structured_voronoi.controls.classifier import Classifier
    from structured_voronoi.controls.text_classifier import TextClassifier


def label(
    name: str | Path, label: str | int, *, weight: float = 1.0, device: str = "cpu"
) -> Classifier | TextClassifier:
    """Texts to which a classifier gives a label: p(label | text) to the power of the weight.

    Parameters
    ----------
    name
        A bundled classifier (`svs ls` lists them), a folder written by `svs train classifier`, or a sequence classifier
        of Hugging Face by folder or hub name.
    label
        One of its labels.
    weight
        Exponent of the probability; above 1 it makes the label more certain.
    device
        Where the classifier runs.

    Returns
    -------
    Classifier or TextClassifier

    Raises
    ------
    SamplingError
        If there is no such classifier or label.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.label("food", "Italian", weight=1.5).name
    'food=Italian'
    """
    found = _load(str(name), label, device)
    found.weight = weight
    return found


def _load(folder: str, label: str | int, device: str) -> Classifier | TextClassifier:
    """A classifier of this package, whose config has the key `classifier`; else one of Hugging Face."""
    from structured_voronoi.controls.classifier import Classifier

    if folder in bundled_controls():
        return Classifier.load(folder, str(label), device)
    path = Path(folder)
    if folder.startswith((".", "/", "~")) and not is_folder(path):
        raise SamplingError(
            f"there is no folder {folder}",
            remedy=f"train one with `svs train classifier --out {folder}`",
        )
    config = path / "config.json"
    if is_folder(path):
        if not is_file(config):
            raise SamplingError(
                f"{folder} holds no config.json",
                remedy="give a folder written by `svs train classifier`",
            )
        try:
            is_ours = "classifier" in json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, TypeError, OSError, RecursionError) as error:  # a number holds nothing: a TypeError
            raise SamplingError(
                f"{config} cannot be read",
                cause=one_line(error),
                remedy="the folder is damaged: train it again",
            ) from error
        if is_ours:
            return Classifier.load(path, str(label), device)
    from structured_voronoi.controls.text_classifier import TextClassifier

    return TextClassifier.load(folder, label, device)
