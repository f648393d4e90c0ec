"""Efficiency of samplers of text at equal cost, started from ancestral texts.

Cost is the number of token positions that the language model evaluates, divided by N, so that an evaluation of a text
costs 1. An evaluation with a backward pass costs ``gradient_cost``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from structured_voronoi.core.contracts import Sampler
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.report import format_interval, table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks


def _svs_grid() -> list[SVS]:
    settings = ((0.16, 1.0, 32), (0.16, 0.5, 64), (0.22, 1.0, 32), (0.22, 0.5, 32), (0.3, 0.5, 32))
    # remembered states cost no evaluation
    return [SVS(scale, turn=turn, dimensions=dimensions, remember=256) for scale, turn, dimensions in settings]


def _other_grids() -> dict[str, list[Sampler]]:
    return {
        "pncg": [
            *(PNCG(step, guidance="forward") for step in (0.01, 0.015, 0.02, 0.03, 0.045, 0.06, 0.075)),
            *(PNCG(step, guidance="full") for step in (0.015, 0.06)),
        ],
        "gwg": [
            *(GibbsWithGradients(temperature, guidance="forward") for temperature in (1.0, 2.0)),
            GibbsWithGradients(1.0, guidance="full"),
        ],
        "refresh, blocks of 1": [Refresh(block=1, suffix=False)],
        "refresh, blocks ≤ 5": [Refresh(block=5, suffix=False)],
    }


@dataclass(frozen=True)
class Settings:
    runs: int = 32
    """Chains per setting, started from ancestral texts."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    budget: int = 50
    """Mean cost per chain."""
    gradient_cost: float = 2.0
    """Cost of an evaluation with a backward pass."""
    max_steps: int = 1000
    svs_grid: list[SVS] = field(default_factory=_svs_grid)
    other_grids: dict[str, list[Sampler]] = field(default_factory=_other_grids)
    dimensions: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Dimensions in which the best setting of SVS is run, up to those of the embeddings."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Run all settings, the best of each sampler on new chains, and the best SVS with other guidance."""
    model = prepare_model(settings.data, settings.text.recipe, settings.progress)

    def measure_all(tasks: list[tuple[str, Sampler]], label: str, runs: int, seed: int) -> list[dict[str, Any]]:
        work = partial(_measure, model=model, runs=runs, seed=seed, settings=settings)
        return map_tasks(work, tasks, label, settings.progress, settings.workers)

    runs, seed = settings.runs, settings.seed
    grids: dict[str, list[Any]] = {"svs": settings.svs_grid, **settings.other_grids}
    tasks = [(label, sampler) for label, grid in grids.items() for sampler in grid]
    rows = measure_all(tasks, "efficiency", runs, seed)
    winners = {label: grid[_best([row for row in rows if row["sampler"] == label])] for label, grid in grids.items()}
    # measured on new chains, because the winners were selected on the first ones
    best = dict(zip(winners, measure_all(list(winners.items()), "winners", 2 * runs, seed + 1000), strict=True))
    variants = [
        (f"{guidance}, {dimensions}", replace(winners["svs"], guidance=guidance, dimensions=dimensions))
        for guidance in ("forward", "full")
        for dimensions in settings.dimensions
    ]
    guided = measure_all(variants, "guidance and dimensions", runs, seed)
    results = {"runs": runs, "seed": seed, "budget": settings.budget, "rows": rows, "best": best, "guidance": guided}
    results |= {"model": model_name(settings.data)}
    return write_report(out, report_name("efficiency", settings.data), results, _markdown(results, settings), {})


def _best(rows: list[dict[str, Any]]) -> int:
    """The setting with the most distinct states per cost times effective samples."""
    return int(np.argmax([row["distinct_per_cost"] * row["effective"][0] for row in rows]))


def _measure(task: tuple[str, Sampler], model: str, runs: int, seed: int, settings: Settings) -> dict[str, Any]:
    """Run one sampler until the mean cost of its chains reaches the budget."""
    label, sampler = task
    target = TextTarget(load(model), max_tokens=settings.text.length)
    first, info = next(start_chains(target, Ancestral(), runs, seed + 1))
    start, start_energy = first.tokens, info.energy.double().numpy()
    has_gradients = getattr(sampler, "guidance", None) == "full"
    visited = [{tuple(tokens)} for tokens in start.tolist()]
    energies, cost, began = [], 0.0, time.process_time()
    for state, info in start_chains(target, sampler, runs, seed, start):
        cost += float(info.evaluations.double().mean()) * (settings.gradient_cost if has_gradients else 1.0)
        energies.append(info.energy.double().numpy())
        for states, tokens in zip(visited, state.tokens.tolist(), strict=True):
            states.add(tuple(tokens))
        if cost >= settings.budget or len(energies) == settings.max_steps:
            break
    seconds = time.process_time() - began
    distinct = float(np.mean([len(states) for states in visited])) - 1
    return {
        "sampler": label,
        "settings": _describe(sampler),
        "steps": len(energies),
        "cost": cost,
        "hamming": float((state.tokens != start).sum(-1).double().mean()),
        "distinct": distinct,
        "effective": list(_effective_samples(start_energy, np.mean(energies, axis=0))),
        "distinct_per_cost": distinct / cost,
        "seconds": seconds,
        "gradient_ratio": _measure_gradient_cost(target, start) if has_gradients else None,
    }


def _effective_samples(starts: np.ndarray, means: np.ndarray) -> Interval:
    """Var(energy) / Var(mean energy of a chain), with a 95 % bootstrap interval over chains."""
    rows = np.random.default_rng(0).integers(len(starts), size=(1000, len(starts)))
    rows = rows[np.ptp(rows, axis=-1) > 0]  # a single chain has no variance
    draws = starts[rows].var(-1) / means[rows].var(-1)
    return Interval(float(starts.var() / means.var()), *np.quantile(draws, (0.025, 0.975)).tolist())


def _measure_gradient_cost(target: TextTarget, tokens: Tensor) -> float:
    """Time of an evaluation with a backward pass divided by that of one without."""
    ratios = []
    for _ in range(3):
        times = []
        for function in (target.log_prob_and_guide, target.log_prob_and_grad):
            began = time.perf_counter()
            function(tokens)
            times.append(time.perf_counter() - began)
        ratios.append(times[1] / times[0])
    return float(np.median(ratios))


def _columns(row: dict[str, Any]) -> list[Any]:
    return [
        *(row[key] for key in ("steps", "cost", "hamming", "distinct", "distinct_per_cost")),
        format_interval(row["effective"]),
        row["seconds"],
    ]


def _describe(sampler: Sampler) -> str:
    """The settings that the grid varies."""
    if not isinstance(sampler, SVS):
        return f"`{sampler!r}`"
    return f"`SVS({sampler.scale}, {sampler.guidance!r}, turn={sampler.turn}, dimensions={sampler.dimensions})`"


def _markdown(results: dict[str, Any], settings: Settings) -> str:
    ratios = [row["gradient_ratio"] for row in [*results["rows"], *results["guidance"]] if row["gradient_ratio"]]
    intro = (
        f"Model: {results['model']}, N = {settings.text.length}, {results['runs']} chains from ancestral texts, seed "
        f"{results['seed']}, until a cost of {results['budget']} per chain or {settings.max_steps} steps. An "
        f"evaluation with a backward pass counts {settings.gradient_cost:.0f} (measured: {np.median(ratios):.2f} times "
        "one without). Distinct states are states after a step, without the start. Effective samples per chain: "
        "variance of the starts' energies divided by that of the chains' mean energies, with 95 % intervals; 1 means "
        "that a chain adds nothing to its start. Seconds are of one core."
    )
    header = [
        "",
        "steps",
        "cost",
        "Hamming",
        "distinct states",
        "distinct states per cost",
        "effective samples",
        "seconds",
    ]
    best = [[f"{label}: {row['settings']}", *_columns(row)] for label, row in results["best"].items()]
    guided = [[row["sampler"], *_columns(row)] for row in results["guidance"]]
    all_settings = [[row["settings"], *_columns(row)] for row in results["rows"]]
    parts = [
        "# Efficiency on text",
        intro,
        f"Best setting of each sampler (by distinct states per cost × effective samples), on {2 * results['runs']} "
        "new chains:",
        table(header, best),
        "SVS by guidance and dimensions:",
        table(header, guided),
        "All settings:",
        table(header, all_settings),
    ]
    return "\n\n".join(parts)
