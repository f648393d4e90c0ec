"""The paper's topic control: restaurant reviews of seven kinds of food, by every method, beside exact rejection."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from structured_voronoi.base import SamplingError
from structured_voronoi.experiments.control_cells import Task
from structured_voronoi.experiments.control_tables import (
    GRID_SECONDS,
    GRID_TEXTS,
    SECONDS,
    TEXTS,
    average_table,
    averages,
    grid_table,
    sample_table,
    scatter,
    searched,
    six_axes,
    tabulated,
    target_table,
)
from structured_voronoi.experiments.control_task import Split, classifier_table, prepared
from structured_voronoi.experiments.control_truth import against_rejection, rejection_markdown
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model
from structured_voronoi.models.restaurants import FOODS

NONE = "none"
GRID_TARGETS = ("Chinese", "Italian")


def run(out: Path, runs: int = 100, seed: int = 0, progress: bool = True, *, data: str) -> list[Path]:
    """20 texts a target of every method; ``runs`` texts a target of SVS with refresh moves against rejection."""
    splits = _splits(data)
    task, reports = topic_task(data, seed, progress)
    winners = searched(task, GRID_TARGETS, seed, progress)
    rows = tabulated(task, FOODS, winners, seed, progress)
    truth = against_rejection(task, FOODS, runs, seed, progress)
    counts = {name: {food: split.labels.count(food) for food in (*FOODS, NONE)} for name, split in splits.items()}
    results = {"seed": seed, "classifiers": reports, "counts": counts, "grid": winners, "rows": rows, "truth": truth}
    results |= {"averages": averages(rows)}
    pictures = {"topic": scatter(rows), "topic_axes": six_axes(rows)}
    return write_report(out, "topic", results, _markdown(results), pictures)


def _splits(data: str) -> dict[str, Split]:
    files = {"train": "trainset.csv", "test": "testset_w_refs.csv"}
    return {name: foods(Path(data) / file) for name, file in files.items()}


def topic_task(data: str, seed: int, progress: bool) -> tuple[Task, dict[str, Any]]:
    """The language model, the classifiers of food, and how good these are."""
    return prepared("topic", experiment_model(data, progress), _splits(data), NONE, seed, progress)


def foods(path: Path) -> Split:
    """The reviews of one E2E file and the food that each is about, or none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise SamplingError(f"{path} cannot be read ({error.strerror}); give a folder with the E2E files") from error
    if not rows or not {"mr", "ref"} <= set(rows[0]):
        raise SamplingError(f"{path} has no columns mr and ref; give the files of the E2E challenge")
    found = [re.search(r"food\[(.*?)\]", row["mr"]) for row in rows]
    return Split([" ".join(row["ref"].split()) for row in rows], [match[1] if match else NONE for match in found])


def _markdown(results: dict[str, Any]) -> str:
    rows, counts = results["rows"], results["counts"]
    parts = [
        "# Topic control",
        f"{TEXTS} texts of {LENGTH} tokens for each of {len(FOODS)} kinds of food, seed {results['seed']}. Success is "
        "by the judge, with Wilson intervals; perplexity is of the drawn tokens under the sampled language model, with "
        "bootstrap intervals; Dist-n is distinct over all n-grams of the texts of one target, averaged. Chain-based "
        f"methods have {SECONDS:g} seconds of one core for a batch.",
        average_table(rows, "topic"),
        "![success against perplexity](topic.png)",
        "## By target",
        target_table(rows),
        "![six axes](topic_axes.png)",
        "## SVS with refresh moves against exact rejection",
        rejection_markdown(results["truth"]),
        "## Classifiers",
        classifier_table(results["classifiers"]),
        "## Texts",
        table(["split", *FOODS, NONE], [[name, *split.values()] for name, split in counts.items()]),
        "## Grid search",
        f"{GRID_TEXTS} texts for each of {', '.join(GRID_TARGETS)}, {GRID_SECONDS:g} seconds of one core a batch; the "
        "score is the share that the guide believes minus log10(perplexity / that of ancestral texts).",
        grid_table(results["grid"]),
        "## Samples",
        sample_table(rows),
    ]
    return "\n\n".join(parts)
