"""The paper's topic control: restaurant reviews of seven kinds of food, by every method, beside exact rejection."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control_runs import SECONDS, TEXTS, every_method
from structured_voronoi.experiments.control_tables import pictures, sections
from structured_voronoi.experiments.control_task import prepared, trained_guide
from structured_voronoi.experiments.control_truth import against_rejection, rejection_markdown
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model
from structured_voronoi.models.corpora import Labelled, labelled_texts
from structured_voronoi.models.restaurants import FOODS

NONE = "none"
GRID_TARGETS = ("Chinese", "Italian")
WEIGHT, STRONG = 1.5, 4.0
"""γ at which SVS is compared with rejection, and one for those who want success."""
FILES = {"train": "trainset.csv", "test": "testset_w_refs.csv"}


def run(out: Path, runs: int = 100, seed: int = 0, progress: bool = True, *, data: str) -> list[Path]:
    """20 texts a target of every method; ``runs`` texts a target of SVS with refresh moves
    against rejection, and 20 at a greater weight."""
    splits = _splits(data)
    task, reports = prepared("topic", experiment_model(data, progress), splits, NONE, progress)
    results = {"classifiers": reports} | every_method(task, FOODS, GRID_TARGETS, TEXTS, seed, progress)
    counts = {name: Counter(split.labels) for name, split in splits.items()}
    results["counts"] = {name: [count[food] for food in (*FOODS, NONE)] for name, count in counts.items()}
    results["truth"] = [
        against_rejection(task, FOODS, weight, count, seed, progress)
        for weight, count in ((WEIGHT, runs), (STRONG, min(runs, TEXTS)))
    ]
    return write_report(out, "topic", results, _markdown(results), pictures(results, "topic"))


def topic_guide(data: str, progress: bool) -> str:
    """The folder of the classifier of food that guides, trained if need be."""
    splits = _splits(data)
    return str(trained_guide("topic", experiment_model(data, progress), splits, NONE, progress)[0])


def _splits(data: str) -> dict[str, Labelled]:
    return {name: foods(Path(data) / file) for name, file in FILES.items()}


def foods(path: Path) -> Labelled:
    """The reviews of one E2E file and the food that each is about, or none."""
    texts, meanings = labelled_texts(str(path), "ref", "mr")
    found = [re.search(r"food\[(.*?)\]", meaning) for meaning in meanings]
    return Labelled(texts, [match[1] if match else NONE for match in found])


def _markdown(results: dict[str, Any]) -> str:
    parts = [
        "# Topic control",
        f"{TEXTS} texts of {LENGTH} tokens for each of {len(FOODS)} kinds of food, seed {results['seed']}. Success is "
        "by the judge, with Wilson intervals; perplexity is of the drawn tokens under the sampled language model, with "
        "bootstrap intervals; Dist-n is distinct over all n-grams of the texts of one target, averaged. Chain-based "
        f"methods have {SECONDS:g} seconds of one core for a batch.",
        *sections(results, "topic"),
        "## SVS with refresh moves against exact rejection",
        *map(rejection_markdown, results["truth"]),
        "## Texts to learn from",
        table(["split", *FOODS, NONE], [[name, *counts] for name, counts in results["counts"].items()]),
    ]
    return "\n\n".join(parts)
