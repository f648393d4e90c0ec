"""Models trained for an experiment are kept in the user's cache folder, under the digest of their recipe and texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.models.training import REPORT, Recipe, digest, train_language_model


def cached_language_model(name: str, corpus: Corpus, recipe: Recipe, tick: Callable[[str, int], None]) -> Path:
    """The folder of a language model trained on the texts; trained, or its training resumed, if not in the cache."""
    folder = cache_folder() / f"lm-{name}-{digest(corpus, recipe)}"
    if not (folder / REPORT).exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_language_model(corpus, folder, recipe, tick)
    return folder
