"""What the tables of controlled generation do otherwise on a pretrained model: a text costs a hundred times more."""

from __future__ import annotations

from dataclasses import dataclass, field

from structured_voronoi.experiments.control.methods import ComparisonSettings
from structured_voronoi.experiments.control.task import ClassifierRecipes


@dataclass(frozen=True)
class PretrainedSettings:
    """The paper's probe is left out, which reads hidden states and guides nothing; all budgets are smaller."""

    classifiers: ClassifierRecipes = field(default_factory=lambda: ClassifierRecipes(probe=None))
    comparison: ComparisonSettings = field(
        default_factory=lambda: ComparisonSettings(
            seconds=20.0, grid_seconds=8.0, grid_texts=4, weights=(4.0,), pilot=256
        )
    )
    exact_methods: tuple[str, ...] = ("guided",)
    """Those that are compared with rejection: chains of many steps would take hours."""
