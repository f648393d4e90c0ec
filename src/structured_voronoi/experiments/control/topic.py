"""The paper's topic control: restaurant reviews of seven foods by every method, compared with exact rejection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control.against_rejection import compare_with_rejection, rejection_markdown
from structured_voronoi.experiments.control.draws import DrawTask, MethodSetting, draw_all
from structured_voronoi.experiments.control.foods import NO_FOOD, food_splits
from structured_voronoi.experiments.control.methods import ComparisonSettings, compare_methods
from structured_voronoi.experiments.control.pretrained import PretrainedSettings
from structured_voronoi.experiments.control.tables import pictures, sections
from structured_voronoi.experiments.control.task import ClassifierRecipes, prepare_task, require_data
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.models.restaurants import FOODS


@dataclass(frozen=True)
class Settings:
    runs: int = 100
    """Texts per food in the comparison with rejection; with ``model`` at most ``texts``."""
    seed: int = 0
    data: str | None = None
    """A folder with the E2E files."""
    model: str | None = None
    """A language model of such reviews, by name or folder; None: train a small one on the data."""
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    pretrained: PretrainedSettings = field(default_factory=PretrainedSettings)
    """Replaces ``classifiers``, ``comparison`` and ``exact_methods`` if ``model`` is given."""
    foods: tuple[str, ...] = FOODS
    grid_foods: tuple[str, ...] = ("Chinese", "Italian")
    texts: int = 20
    """Texts per food and method, and in the comparison with rejection at ``strong_weight``."""
    exact_methods: tuple[str, ...] = ("guided", "svs+refresh")
    """Methods that are compared with rejection."""
    weight: float = 1.5
    """Weight γ of the comparison with rejection."""
    strong_weight: float = 4.0
    """A second, larger weight γ of that comparison."""
    steps: int = 60
    """Steps of svs+refresh in the comparison with rejection."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Compare all methods, then the exact ones with rejection at two weights."""
    data = require_data(settings.data, "topic", "trainset.csv")
    splits = food_splits(data)
    if settings.model is not None:
        runs, pretrained = min(settings.runs, settings.texts), settings.pretrained
        settings = replace(settings, runs=runs, classifiers=pretrained.classifiers, comparison=pretrained.comparison)
        settings = replace(settings, exact_methods=pretrained.exact_methods)
    seed, foods, length, progress = settings.seed, settings.foods, settings.text.length, settings.progress
    model = settings.model or prepare_model(data, settings.text.recipe, progress)
    folders, reports = prepare_task("topic", model, splits, NO_FOOD, settings.classifiers, length, progress)
    draw = partial(draw_all, folders=folders, progress=progress, workers=settings.workers)
    results: dict[str, Any] = {"classifiers": reports, "model": settings.model or model_name(data)}
    results |= compare_methods(draw, foods, settings.grid_foods, settings.texts, length, seed, settings.comparison)
    counts = {name: Counter(split.labels) for name, split in splits.items()}
    results["counts"] = {name: [count[food] for food in (*foods, NO_FOOD)] for name, count in counts.items()}
    results["truth"] = [
        compare_with_rejection(draw, _task(method, weight, count, settings), foods)
        for method in settings.exact_methods
        for weight, count in (
            (settings.weight, settings.runs),
            (settings.strong_weight, min(settings.runs, settings.texts)),
        )
    ]
    stem = report_name("topic", settings.model)
    return write_report(out, stem, results, _markdown(results, stem, settings), pictures(results, stem))


def _task(method: str, weight: float, count: int, settings: Settings) -> DrawTask:
    """A task with ``count`` texts of a method at weight γ, for the comparison with rejection."""
    setting, pilot = MethodSetting(weight), settings.comparison.pilot
    length, seed = settings.text.length, settings.seed + 7
    return DrawTask(method, settings.foods[0], count, length, setting, steps=settings.steps, seed=seed, pilot=pilot)


def _markdown(results: dict[str, Any], stem: str, settings: Settings) -> str:
    foods = settings.foods
    parts = [
        "# Topic control",
        f"{settings.texts} texts of {settings.text.length} tokens for each of {len(foods)} foods, seed "
        f"{results['seed']}; model: {results['model']}. Success is by the judge, with Wilson intervals; perplexity is "
        "of the drawn tokens under the sampled language model, with bootstrap intervals; Dist-n is the share of "
        "distinct n-grams in the texts of one target, averaged over targets. Chain-based methods run for "
        f"{settings.comparison.seconds:g} seconds of one core per batch.",
        *sections(results, "topic", stem, settings.comparison, settings.text.length),
        "## Exact methods compared with rejection",
        *map(rejection_markdown, results["truth"]),
        "## Labelled texts",
        table(["split", *foods, NO_FOOD], [[name, *counts] for name, counts in results["counts"].items()]),
    ]
    return "\n\n".join(parts)
