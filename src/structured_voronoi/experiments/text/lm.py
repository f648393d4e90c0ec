"""The paper's figure of perplexities: texts of gradient-based samplers compared with ancestral texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.core.contracts import Start
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.report import COLOURS, format_interval, new_figure, table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.text import bootstrap_quantiles, perplexity, wasserstein
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _steps() -> dict[str, int]:
    return {"svs+refresh": 50, "svs": 50, "pncg": 100, "gwg": 100}


def _steps_from_random() -> dict[str, int]:
    return {"langevin": 500, "mucola": 500, "svs-paper": 50}


@dataclass(frozen=True)
class Settings:
    runs: int = 100
    """Texts per sampler, one per chain."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    ancestral_texts: int = 1000
    """Ancestral texts for the comparison; at least as many as ``runs``."""
    floor_sets: int = 500
    """Sets of ``runs`` ancestral texts from which the noise floor of the Wasserstein distance is computed."""
    steps: dict[str, int] = field(default_factory=_steps)
    """Steps of samplers that start from ancestral texts."""
    steps_from_random: dict[str, int] = field(default_factory=_steps_from_random)
    """Steps of the paper's methods, from random tokens.

    The paper takes 500 steps; its SVS takes fewer here because it needs about 20 evaluations per step.
    """


def run(settings: Settings, out: Path) -> list[Path]:
    """Compute the perplexities of every sampler's texts and their distance from those of ancestral texts."""
    model = prepare_model(settings.data, settings.text.recipe, settings.progress)
    ancestral = max(settings.runs, settings.ancestral_texts)
    tasks = [("ancestral", ancestral, settings.seed)]
    tasks += [(name, settings.runs, settings.seed) for name in (*settings.steps, *settings.steps_from_random)]
    tasks += [("ancestral", settings.ancestral_texts, settings.seed + 1)]
    work = partial(_draw_texts, model=model, settings=settings)
    *rows, others = map_tasks(work, tasks, "lm", settings.progress, settings.workers)
    truth = np.array(rows[0]["perplexity"])
    for row in rows:
        row["wasserstein"] = wasserstein(truth, np.array(row["perplexity"]))
        row["quantiles"] = bootstrap_quantiles(np.array(row["perplexity"]), (0.05, 0.5, 0.95))
    floor = _wasserstein_floor(truth, np.array(others["perplexity"]), settings.runs, settings.floor_sets)
    results = {"runs": settings.runs, "seed": settings.seed, "ancestral": ancestral, "floor": floor, "rows": rows}
    results |= {"model": model_name(settings.data)}
    stem = report_name("lm", settings.data)
    return write_report(out, stem, results, _markdown(results, stem, settings), {stem: _picture(rows)})


def _wasserstein_floor(truth: np.ndarray, others: np.ndarray, runs: int, sets: int) -> tuple[float, float]:
    """Wasserstein distance between ``runs`` and all ancestral texts: mean and 95 % quantile."""
    source = np.random.default_rng(0)
    distances = [wasserstein(truth, source.choice(others, runs)) for _ in range(sets)]
    return float(np.mean(distances)), float(np.quantile(distances, 0.95))


def _draw_texts(task: tuple[str, int, int], model: str, settings: Settings) -> dict[str, Any]:
    """Perplexities and cost of one sampler's final states."""
    name, count, seed = task
    target = TextTarget(load(model), max_tokens=settings.text.length)
    steps = ({"ancestral": 1} | settings.steps | settings.steps_from_random)[name]
    start: Start = "random" if name in settings.steps_from_random else None
    chains = start_chains(target, text_sampler(name), count, seed, start)
    cost = sum(float(info.evaluations.double().mean()) for _, info in islice(chains, steps))
    last = chains.state.tokens
    return {
        "sampler": name,
        "steps": steps,
        "evaluations": cost,
        "perplexity": perplexity(target.log_prob(last).double().numpy(), settings.text.length).tolist(),
        "example": target.decode(last[0]),
    }


def _markdown(results: dict[str, Any], stem: str, settings: Settings) -> str:
    runs, ancestral = results["runs"], results["ancestral"]
    intro = (
        f"{runs} texts of {settings.text.length} tokens per sampler and {ancestral} ancestral texts; model: "
        f"{results['model']}, seed {results['seed']}. Perplexity of the drawn tokens under the sampled model; 95 % "
        f"bootstrap intervals. The Wasserstein distance between {ancestral} and {runs} ancestral texts is "
        f"{results['floor'][0]:.3g} on average, with 95 % quantile {results['floor'][1]:.3g}. "
        f"{', '.join(settings.steps_from_random)} start from random tokens, the others from ancestral texts."
    )
    body = [
        [
            row["sampler"],
            row["steps"],
            row["evaluations"],
            row["wasserstein"],
            *(format_interval(quantile, ".3g") for quantile in row["quantiles"]),
            row["example"],
        ]
        for row in results["rows"]
    ]
    header = ["sampler", "steps", "evaluations", "Wasserstein", "5 %", "50 %", "95 %", "example"]
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
