"""Models trained for an experiment are kept in the user's cache folder, under a name that says what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from structured_voronoi.models.corpora import Corpus, load_corpus
from structured_voronoi.models.training import REPORT, Recipe, train_language_model

EXPERIMENT = Recipe(epochs=3.0)
"""For the experiments' language models: about twenty minutes on one core for E2E."""


def cache_folder() -> Path:
    """Where the user's cached files are, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "structured-voronoi"


def cached_language_model(data: str, tick: Callable[[str, int], None], recipe: Recipe = EXPERIMENT) -> Path:
    """The folder of a language model trained on ``data``: the one in the cache, or a new one, or one half done."""
    corpus = load_corpus(data)
    folder = cache_folder() / f"lm-{Path(data).resolve().name}-{_digest(corpus, recipe)}"
    if not (folder / REPORT).exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_language_model(corpus, folder, recipe, tick)
    return folder


def _digest(corpus: Corpus, recipe: Recipe) -> str:
    """Twelve characters that change with the texts and with the recipe."""
    whole = json.dumps([asdict(recipe), corpus.train, corpus.held_out])
    return hashlib.sha256(whole.encode()).hexdigest()[:12]
