"""Settings of controlled generation on a pretrained model, where a text costs a hundred times more."""

from __future__ import annotations

from dataclasses import dataclass, field

from structured_voronoi.experiments.control.methods import ComparisonSettings
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.models.prefix_classifier import PrefixSettings


def _make_recipes() -> ClassifierRecipes:
    """No probe, and a small prefix classifier, because FUDGE evaluates it on up to 200 tokens per position."""
    predictor = PrefixSettings(embedding=128, hidden=128, layers=1, epochs=3.0)
    return ClassifierRecipes(probe=None, prefix=predictor, prefix_texts=40_000)


@dataclass(frozen=True)
class PretrainedSettings:
    """Fewer texts and seconds, and exact methods at one weight without a grid search."""

    classifiers: ClassifierRecipes = field(default_factory=_make_recipes)
    comparison: ComparisonSettings = field(
        default_factory=lambda: ComparisonSettings(
            seconds=12.0, grid_seconds=6.0, grid_texts=4, weights=(4.0,), pncg_steps=(0.2, 0.4), pilot=128
        )
    )
    exact_methods: tuple[str, ...] = ("guided",)
    """Methods that are compared with rejection; chains of many steps would take hours."""
