"""The language model of a text experiment: the bundled one, or one trained on the user's data and kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from structured_voronoi.core.progress import progress_bar
from structured_voronoi.models.cache import cached_language_model
from structured_voronoi.models.corpora import load_corpus
from structured_voronoi.models.training import TrainingSettings


@dataclass(frozen=True)
class TextSettings:
    """What all experiments on text have in common."""

    length: int = 20
    """Tokens of a text."""
    recipe: TrainingSettings = field(default_factory=lambda: TrainingSettings(epochs=3.0))
    """Of a language model for the user's data: about twenty minutes on one core for E2E."""


def prepare_model(data: str | None, recipe: TrainingSettings, progress: bool) -> str:
    """What `TextTarget.load` takes; training on the user's data happens once, with progress."""
    if data is None:
        return "bundled"
    corpus = load_corpus(data)
    with progress_bar(
        recipe.steps(len(corpus.train)), progress, "training the language model", stage="training"
    ) as tick:
        return str(cached_language_model(Path(data).resolve().name, corpus, recipe, tick))


def report_name(experiment: str, data: str | None) -> str:
    """The name of the experiment, and of the data or of the model if they are the user's."""
    return experiment if data is None else f"{experiment}_{Path(data).resolve().name}"


def model_name(data: str | None) -> str:
    """What a report calls the model."""
    return "bundled" if data is None else f"trained on {Path(data).resolve().name}"
