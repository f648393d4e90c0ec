"""The paper's sentiment control: positive phrases, by every method, from a small language model trained on SST-2.

A smoke test of the path: a model this small does not write films up well, whatever steers it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control_tables import (
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
)
from structured_voronoi.experiments.control_task import Split, classifier_table, prepared
from structured_voronoi.experiments.report import write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model
from structured_voronoi.models.corpora import labelled_texts

POSITIVE = "1"


def run(out: Path, runs: int = TEXTS, seed: int = 0, progress: bool = True, *, data: str) -> list[Path]:
    """``runs`` positive texts of every method."""
    splits = {
        name: Split(*labelled_texts(str(Path(data) / f"{name}.tsv"), "sentence", "label")) for name in ("train", "test")
    }
    task, reports = prepared("sentiment", experiment_model(data, progress), splits, None, seed, progress)
    winners = searched(task, (POSITIVE,), seed, progress)
    rows = tabulated(task, (POSITIVE,), winners, seed, progress, runs)
    results: dict[str, Any] = {"seed": seed, "classifiers": reports, "grid": winners, "rows": rows}
    results |= {"averages": averages(rows)}
    pictures = {"sentiment": scatter(rows), "sentiment_axes": six_axes(rows)}
    return write_report(out, "sentiment", results, _markdown(results), pictures)


def _markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    parts = [
        "# Sentiment control",
        f"{rows[0]['count']} positive texts of {LENGTH} tokens, seed {results['seed']}, from a language model of 1.1 M "
        f"parameters trained on SST-2; {SECONDS:g} seconds of one core a batch. Success is by the judge; perplexity is "
        "of the drawn tokens under the sampled model. The paper's numbers are of GPT-2.",
        average_table(rows, "sentiment"),
        "![success against perplexity](sentiment.png)",
        "![six axes](sentiment_axes.png)",
        classifier_table(results["classifiers"]),
        grid_table(results["grid"]),
        sample_table(rows),
    ]
    return "\n\n".join(parts)
