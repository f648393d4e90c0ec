"""The paper's sentiment control: positive phrases, by every method, from a small language model trained on SST-2.

A smoke test of the path: a model this small does not write films up well, whatever steers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from structured_voronoi.errors import SamplingError
from structured_voronoi.experiments.control.draws import draw_all
from structured_voronoi.experiments.control.methods import ComparisonSettings, compare_methods
from structured_voronoi.experiments.control.tables import pictures, sections
from structured_voronoi.experiments.control.task import ClassifierRecipes, prepare_task
from structured_voronoi.experiments.report import write_report
from structured_voronoi.experiments.text.models import TextSettings, prepare_model
from structured_voronoi.models.corpora import labelled_texts

POSITIVE = "1"


@dataclass(frozen=True)
class Settings:
    runs: int = 20
    """Positive texts of every method."""
    seed: int = 0
    data: str | None = None
    """A folder with the SST-2 files."""
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)


def run(settings: Settings, out: Path) -> list[Path]:
    """Every method at its best."""
    if settings.data is None:
        raise SamplingError("sentiment needs the SST-2 phrases with their labels; give the folder of train.tsv as data")
    data, length, progress = Path(settings.data), settings.text.length, settings.progress
    splits = {name: labelled_texts(str(data / f"{name}.tsv"), "sentence", "label") for name in ("train", "test")}
    model = prepare_model(settings.data, settings.text.recipe, progress)
    folders, reports = prepare_task("sentiment", model, splits, None, settings.classifiers, length, progress)
    draw = partial(draw_all, folders=folders, progress=progress, workers=settings.workers)
    results = {"classifiers": reports}
    results |= compare_methods(
        draw, (POSITIVE,), (POSITIVE,), settings.runs, length, settings.seed, settings.comparison
    )
    return write_report(out, "sentiment", results, _markdown(results, settings), pictures(results, "sentiment"))


def _markdown(results: dict[str, Any], settings: Settings) -> str:
    parts = [
        "# Sentiment control",
        f"{settings.runs} positive texts of {settings.text.length} tokens, seed {results['seed']}, from a language "
        f"model of 1.1 M parameters trained on SST-2; {settings.comparison.seconds:g} seconds of one core a batch. "
        "Success is by the judge; perplexity is of the drawn tokens under the sampled model. The paper's numbers are "
        "of GPT-2.",
        *sections(results, "sentiment", settings.comparison, settings.text.length),
    ]
    return "\n\n".join(parts)
