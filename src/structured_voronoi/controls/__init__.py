"""Controls on the text: classifiers on the language model's own embeddings, Python functions, text classifiers.

>>> import structured_voronoi as sv
>>> sv.controls.Predicate.keyword("river").name
'keyword=river'
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structured_voronoi.controls.classifier import Classifier as Classifier
    from structured_voronoi.controls.parsing import parse_control as parse_control
    from structured_voronoi.controls.predicate import Predicate as Predicate
    from structured_voronoi.controls.text_classifier import TextClassifier as TextClassifier

_HOMES = {
    "Classifier": "classifier",
    "Predicate": "predicate",
    "TextClassifier": "text_classifier",
    "parse_control": "parsing",
}
__all__ = sorted(_HOMES)

BUNDLED_CONTROLS = Path(__file__).parents[1] / "models" / "bundled_controls"


def bundled_controls() -> dict[str, list[str]]:
    """The labels of every classifier that comes with the package, read without loading anything heavy."""
    configs = {path.parent.name: path.read_text(encoding="utf-8") for path in BUNDLED_CONTROLS.glob("*/config.json")}
    return {name: json.loads(configs[name])["labels"] for name in sorted(configs)}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'structured_voronoi.controls' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"structured_voronoi.controls.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
