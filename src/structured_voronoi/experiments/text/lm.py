"""The paper's perplexity figure: texts of gradient-based samplers beside ancestral ones."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.base import Sampler, Start
from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model, model_name, named
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.text import bootstrap_quantiles, perplexity, wasserstein
from structured_voronoi.run.sampling import steps
from structured_voronoi.samplers.choices import text_sampler
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANCESTRAL, FLOOR_SETS = 1000, 500
BURN_IN = {"ancestral": 1, "svs+refresh": 50, "svs": 50, "pncg": 100, "gwg": 100}
"""Steps from ancestral starts."""
FROM_RANDOM = {"langevin": 500, "mucola": 500, "svs-paper": 50}
"""Steps of the paper's methods, from random tokens; it takes 500, but its SVS evaluates some twenty texts a step."""
LEVELS = (0.05, 0.5, 0.95)


def run(out: Path, runs: int = 100, seed: int = 0, progress: bool = True, data: str | None = None) -> list[Path]:
    """``runs`` texts of each sampler against 1,000 ancestral ones, or as many."""
    model, stem = experiment_model(data, progress), named("lm", data)
    rows = side_by_side(partial(_texts, model=model, runs=runs, seed=seed), (*BURN_IN, *FROM_RANDOM), "lm", progress)
    truth = np.array(rows[0]["perplexity"])
    floor = _floor(truth, np.array(_texts("ancestral", model, ANCESTRAL, seed + 1)["perplexity"]), runs)
    for row in rows:
        row["wasserstein"] = wasserstein(truth, np.array(row["perplexity"]))
        row["quantiles"] = bootstrap_quantiles(np.array(row["perplexity"]), LEVELS)
    results = {"runs": runs, "seed": seed, "ancestral": len(truth), "floor": floor, "rows": rows}
    results |= {"model": model_name(data)}
    return write_report(out, stem, results, _markdown(results, stem), {stem: _picture(rows)})


def _floor(truth: np.ndarray, other: np.ndarray, runs: int) -> tuple[float, float]:
    """The distance of ``runs`` ancestral texts from many, on average and in 95 of 100 cases."""
    source = np.random.default_rng(0)
    found = [wasserstein(truth, source.choice(other, runs)) for _ in range(FLOOR_SETS)]
    return float(np.mean(found)), float(np.quantile(found, 0.95))


def _texts(name: str, model: str, runs: int, seed: int) -> dict[str, Any]:
    """The perplexities of one sampler's last states, and what they cost."""
    target = LanguageModel.load(model, length=LENGTH)
    sampler: Sampler = text_sampler(name)
    chains = max(runs, ANCESTRAL) if name == "ancestral" else runs
    start: Start = "random" if name in FROM_RANDOM else None
    count, cost = (BURN_IN | FROM_RANDOM)[name], 0.0
    for tokens, info in islice(steps(target, sampler, chains, seed, start), count):
        last, cost = tokens, cost + float(info.evaluations.double().mean())
    found = perplexity(target.log_prob(last).double().numpy(), LENGTH)
    example = target.decode(last[0])
    return {"sampler": name, "steps": count, "evaluations": cost, "perplexity": found.tolist(), "example": example}


def _markdown(results: dict[str, Any], stem: str) -> str:
    runs, ancestral = results["runs"], results["ancestral"]
    intro = (
        f"{runs} texts of {LENGTH} tokens from each sampler and {ancestral} ancestral ones, model: {results['model']}, "
        f"seed {results['seed']}. Perplexity of the drawn tokens under the sampled model; 95 % bootstrap intervals. "
        f"The Wasserstein distance between {ancestral} and {runs} ancestral texts is {results['floor'][0]:.3g} on "
        f"average, and below {results['floor'][1]:.3g} in 95 % of cases. "
        f"{', '.join(FROM_RANDOM)} start from random tokens, the others from ancestral texts."
    )
    body = [
        [
            row["sampler"],
            row["steps"],
            row["evaluations"],
            row["wasserstein"],
            *(f"{q:.3g} ({low:.3g} – {high:.3g})" for q, low, high in row["quantiles"]),
            row["example"],
        ]
        for row in results["rows"]
    ]
    header = ["sampler", "steps", "evaluations", "Wasserstein", "5 %", "50 %", "95 %", "an example"]
    return "\n\n".join(["# Perplexities of texts", intro, table(header, body), f"![{stem}]({stem}.png)"])


def _picture(rows: list[dict[str, Any]]) -> Figure:
    figure, axis = new_figure(8, 4)
    edges = np.geomspace(1, max(max(row["perplexity"]) for row in rows) * 1.01, 60)
    for row in rows:
        style = {"linewidth": 2.5 if row["sampler"] == "ancestral" else 1.3, "color": COLOURS[row["sampler"]]}
        axis.hist(row["perplexity"], bins=edges, density=True, histtype="step", label=row["sampler"], **style)
    axis.set(xscale="log", yscale="log", xlabel="perplexity of a text", ylabel="density")
    axis.legend(frameon=False, fontsize=8)
    return figure
