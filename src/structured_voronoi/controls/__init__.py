"""What a text must be: classifiers on the language model's own embeddings, Python functions, text classifiers.

>>> import structured_voronoi as sv
>>> sv.controls.Predicate.keyword("river").name
'keyword=river'
"""

from __future__ import annotations

import importlib
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'structured_voronoi.controls' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"structured_voronoi.controls.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
