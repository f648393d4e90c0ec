"""The paper's sentiment control: positive phrases, by every method, from a small language model trained on SST-2.

A smoke test of the path: a model this small does not write films up well, whatever steers it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control_runs import SECONDS, TEXTS, every_method
from structured_voronoi.experiments.control_tables import pictures, sections
from structured_voronoi.experiments.control_task import prepared
from structured_voronoi.experiments.report import write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model
from structured_voronoi.models.corpora import labelled_texts

POSITIVE = "1"


def run(out: Path, runs: int = TEXTS, seed: int = 0, progress: bool = True, *, data: str) -> list[Path]:
    """``runs`` positive texts of every method."""
    splits = {name: labelled_texts(str(Path(data) / f"{name}.tsv"), "sentence", "label") for name in ("train", "test")}
    task, reports = prepared("sentiment", experiment_model(data, progress), splits, None, progress)
    results = {"classifiers": reports} | every_method(task, (POSITIVE,), (POSITIVE,), runs, seed, progress)
    return write_report(out, "sentiment", results, _markdown(results), pictures(results, "sentiment"))


def _markdown(results: dict[str, Any]) -> str:
    parts = [
        "# Sentiment control",
        f"{results['rows'][0]['count']} positive texts of {LENGTH} tokens, seed {results['seed']}, from a language "
        f"model of 1.1 M parameters trained on SST-2; {SECONDS:g} seconds of one core a batch. Success is by the "
        "judge; perplexity is of the drawn tokens under the sampled model. The paper's numbers are of GPT-2.",
        *sections(results, "sentiment"),
    ]
    return "\n\n".join(parts)
