"""Samplers of text after the same cost, started at the truth: how far they get, how many states they see.

Cost is token positions through the language model ÷ N: an evaluation is 1, one with a backward pass what it takes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structured_voronoi.base import Sampler
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model, model_name, named
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.run.sampling import steps
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.language_model import LanguageModel

BUDGET, GRADIENT_COST, MOST_STEPS = 50, 2.0, 1000
REMEMBER = 256
"""So many evaluated states a chain of SVS remembers: those it meets again cost nothing."""
ALL = 128
"""Dimensions of the embeddings of both models."""

GRID: dict[str, list[Sampler]] = {
    "svs": [
        SVS(scale, turn=turn, dimensions=dimensions, remember=REMEMBER)
        for scale, turn, dimensions in (
            (0.16, 1.0, 32),
            (0.16, 0.5, 64),
            (0.22, 1.0, 32),
            (0.22, 0.5, 32),
            (0.3, 0.5, 32),
        )
    ],
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
DIMENSIONS = (8, 16, 32, 64, ALL)


def run(out: Path, runs: int = 32, seed: int = 0, progress: bool = True, data: str | None = None) -> list[Path]:
    """``runs`` chains of each setting, from ancestral texts."""
    name = experiment_model(data, progress)
    tasks = [(label, sampler) for label, samplers in GRID.items() for sampler in samplers]
    work = partial(_follow, name=name, runs=runs, seed=seed)
    rows = side_by_side(work, tasks, "efficiency", progress)
    winners = {}
    for label, samplers in GRID.items():
        worth = [_worth(row) for row in rows if row["sampler"] == label]
        winners[label] = samplers[int(np.argmax(worth))]
    again = partial(_follow, name=name, runs=2 * runs, seed=seed + 1000)  # the winners are judged on other chains
    best = dict(zip(winners, side_by_side(again, list(winners.items()), "winners", progress), strict=True))
    chosen = winners["svs"]
    assert isinstance(chosen, SVS)
    variants = [
        (f"{guidance}, {dimensions}", replace(chosen, guidance=guidance, dimensions=dimensions))
        for guidance in ("forward", "full")
        for dimensions in DIMENSIONS
    ]
    guided = side_by_side(work, variants, "guidance and dimensions", progress)
    results = {"runs": runs, "seed": seed, "budget": BUDGET, "rows": rows, "best": best, "guidance": guided}
    results |= {"model": model_name(data)}
    stem = named("efficiency", data)
    return write_report(out, stem, results, _markdown(results), {})


def _worth(row: dict[str, Any]) -> float:
    return float(row["distinct_per_cost"] * row["effective"][0])


def _follow(task: tuple[str, Sampler], name: str, runs: int, seed: int) -> dict[str, Any]:
    """One sampler until its chains have spent the budget on average."""
    label, sampler = task
    target = LanguageModel.load(name, length=LENGTH)
    start, first = next(steps(target, Ancestral(), runs, seed + 1))
    full = getattr(sampler, "guidance", None) == "full"
    seen = [{tuple(row)} for row in start.tolist()]
    energies, cost, begun = [], 0.0, time.process_time()
    for tokens, info in steps(target, sampler, runs, seed, start):
        cost += float(info.evaluations.double().mean()) * (GRADIENT_COST if full else 1.0)
        energies.append(info.energy.double().numpy())
        for states, row in zip(seen, tokens.tolist(), strict=True):
            states.add(tuple(row))
        if cost >= BUDGET or len(energies) == MOST_STEPS:
            break
    seconds = time.process_time() - begun
    return {
        "sampler": label,
        "settings": _named(sampler),
        "steps": len(energies),
        "cost": cost,
        "hamming": float((tokens != start).sum(-1).double().mean()),
        "distinct": float(np.mean([len(states) for states in seen])) - 1,
        "effective": list(_effective(first.energy.double().numpy(), np.mean(energies, axis=0))),
        "distinct_per_cost": (float(np.mean([len(states) for states in seen])) - 1) / cost,
        "seconds": seconds,
        "gradient_ratio": _gradient_ratio(target, start) if full else None,
    }


def _effective(starts: np.ndarray, means: np.ndarray) -> Interval:
    """Var(energy) / Var(mean energy of a chain), with its 95 % bootstrap interval over chains."""
    rows = np.random.default_rng(0).integers(len(starts), size=(1000, len(starts)))
    rows = rows[np.ptp(rows, axis=-1) > 0]  # a single chain has no variance
    draws = starts[rows].var(-1) / means[rows].var(-1)
    return Interval(float(starts.var() / means.var()), *np.quantile(draws, (0.025, 0.975)).tolist())


def _gradient_ratio(target: LanguageModel, tokens: torch.Tensor) -> float:
    """How much longer an evaluation with a backward pass takes, measured side by side."""
    ratios = []
    for _ in range(3):
        times = []
        for function in (target.log_prob_and_guide, target.log_prob_and_grad):
            begun = time.perf_counter()
            function(tokens)
            times.append(time.perf_counter() - begun)
        ratios.append(times[1] / times[0])
    return float(np.median(ratios))


def _cells(row: dict[str, Any]) -> list[Any]:
    effective = "{:.2f} ({:.2f} – {:.2f})".format(*row["effective"])
    return [
        *(row[key] for key in ("steps", "cost", "hamming", "distinct", "distinct_per_cost")),
        effective,
        row["seconds"],
    ]


def _named(sampler: Sampler) -> str:
    """The settings that vary."""
    if not isinstance(sampler, SVS):
        return f"`{sampler!r}`"
    return f"`SVS({sampler.scale}, {sampler.guidance!r}, turn={sampler.turn}, dimensions={sampler.dimensions})`"


def _markdown(results: dict[str, Any]) -> str:
    ratios = [row["gradient_ratio"] for row in [*results["rows"], *results["guidance"]] if row["gradient_ratio"]]
    intro = (
        f"Model: {results['model']}, N = {LENGTH}, {results['runs']} chains from ancestral texts, seed "
        f"{results['seed']}, until a cost of {results['budget']} a chain or {MOST_STEPS} steps. An evaluation with a "
        "backward pass counts "
        f"{GRADIENT_COST:.0f} (measured: {np.median(ratios):.2f} times one without). Distinct states are those at the "
        "ends of steps, the start left out. Effective samples a chain are the variance of the starts' energies over "
        "that of the chains' mean energies, with 95 % intervals: 1 says that a chain is worth its start. Seconds "
        "are of one core."
    )
    header = ["", "steps", "cost", "Hamming", "distinct states", "a cost of 1", "effective samples", "seconds"]
    best = [[f"{label}: {row['settings']}", *_cells(row)] for label, row in results["best"].items()]
    guided = [[row["sampler"], *_cells(row)] for row in results["guidance"]]
    every = [[row["settings"], *_cells(row)] for row in results["rows"]]
    parts = [
        "# Efficiency on text",
        intro,
        f"The best setting of each (by distinct states a cost of 1 × effective samples), on {2 * results['runs']} "
        "other chains:",
        table(header, best),
        "SVS: guidance and dimensions.",
        table(header, guided),
        "Every setting.",
        table(header, every),
    ]
    return "\n\n".join(parts)
