"""The language model of an experiment on text: the bundled one, or one trained on the user's data and cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from structured_voronoi.core.progress import progress_bar
from structured_voronoi.models.cache import cached_language_model
from structured_voronoi.models.corpora import load_corpus
from structured_voronoi.models.training import TrainingSettings


@dataclass(frozen=True)
class TextSettings:
    """Settings of all experiments on text."""

    length: int = 20
    """Tokens per text."""
    recipe: TrainingSettings = field(default_factory=lambda: TrainingSettings(epochs=3.0))
    """Training of a language model on the user's data; about twenty minutes on one core for E2E."""


def prepare_model(data: str | None, recipe: TrainingSettings, progress: bool) -> str:
    """The name or folder of the language model; trained on the user's data unless the cache has it."""
    if data is None:
        return "bundled"
    corpus = load_corpus(data)
    with progress_bar(
        recipe.steps(len(corpus.train)), progress, "training the language model", stage="training"
    ) as tick:
        return str(cached_language_model(Path(data).resolve().name, corpus, recipe, tick))


def report_name(experiment: str, data: str | None) -> str:
    """The file name of a report: the experiment, and the user's data or model if given."""
    return experiment if data is None else f"{experiment}_{Path(data).resolve().name}"


def model_name(data: str | None) -> str:
    """The language model's name in reports."""
    return "bundled" if data is None else f"trained on {Path(data).resolve().name}"
