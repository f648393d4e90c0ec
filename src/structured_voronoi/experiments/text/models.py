"""The language model of a text experiment: the bundled one, or one trained on the user's data and kept."""

from __future__ import annotations

from pathlib import Path

from structured_voronoi.models.cache import cached_language_model
from structured_voronoi.models.corpora import load_corpus
from structured_voronoi.models.training import Recipe
from structured_voronoi.run.progress import progress_bar

LENGTH = 20
RECIPE = Recipe(epochs=3.0)
"""Of the language models that experiments train: about twenty minutes on one core for E2E."""


def experiment_model(data: str | None, progress: bool) -> str:
    """What `LanguageModel.load` takes. Training on data of one's own happens once, with progress."""
    if data is None:
        return "bundled"
    corpus = load_corpus(data)
    with progress_bar(RECIPE.steps(len(corpus.train)), progress, "training the language model") as tick:
        return str(cached_language_model(Path(data).resolve().name, corpus, RECIPE, tick))


def named(experiment: str, data: str | None) -> str:
    """The name of the report: that of the experiment, and of the data if they are the user's."""
    return experiment if data is None else f"{experiment}_{Path(data).resolve().name}"


def model_name(data: str | None) -> str:
    """What a report calls the model."""
    return "bundled" if data is None else f"trained on {Path(data).resolve().name}"
