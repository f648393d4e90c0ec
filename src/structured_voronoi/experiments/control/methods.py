"""Comparison of the methods of controlled generation, each at the best setting of its grid search."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from structured_voronoi.experiments.control.draws import DrawAll, Draws, DrawTask, MethodSetting
from structured_voronoi.metrics.text import distinct, perplexity


@dataclass(frozen=True)
class ComparisonSettings:
    """Which methods are compared, and their budgets."""

    methods: tuple[str, ...] = (
        "ancestral", "fudge", "mucola", "langevin", "cold", "svs-paper", "svs", "svs+refresh", "pncg", "guided",
        "rejection",
    )  # fmt: skip
    """Must include "ancestral", whose perplexity the grid search needs."""
    seconds: float = 25.0
    """Seconds of one core per batch of a chain-based method."""
    grid_seconds: float = 6.0
    """Seconds of one core per batch in the grid search."""
    grid_texts: int = 8
    """Texts per target in the grid search."""
    weights: tuple[float, ...] = (1.5, 2.5, 4.0)
    """Weights γ of rejection, guided and SVS with open walls in the grid search."""
    pncg_steps: tuple[float, ...] = (0.02, 0.04)
    """Step sizes α of p-NCG in the grid search, in the units of the model's embeddings."""
    pilot: int = 4096
    """Texts on which the lookahead of guided sampling is fitted."""
    prompts: tuple[str, ...] = ("",)
    """One batch of texts is drawn for each prompt; the grid search uses the first."""
    energy_weight: float = 1.5
    """Weight γ at which the energies of all methods are compared."""


def compare_methods(
    draw: DrawAll,
    targets: tuple[str, ...],
    grid_targets: tuple[str, ...],
    count: int,
    length: int,
    seed: int,
    settings: ComparisonSettings,
) -> dict[str, Any]:
    """Run the grid search, then every method on every target, with ``count`` texts per prompt."""
    grids = search_grids(draw, grid_targets, length, seed + 100, settings)
    tasks = [
        DrawTask(
            method,
            target,
            count,
            length,
            _winner(grids[method]),
            seconds=settings.seconds,
            seed=seed,
            pilot=settings.pilot,
            prompt=prompt,
            pilot_prompt=settings.prompts[0],
        )
        for method in settings.methods
        for target in targets
        for prompt in settings.prompts
    ]
    batches, prompts = draw(tasks, "every method on every target"), len(settings.prompts)
    joined = [_join_prompts(batches[i : i + prompts]) for i in range(0, len(batches), prompts)]
    rows = [_summarise(draws, length, settings.energy_weight) for draws in joined]
    return {"seed": seed, "grid": grids, "rows": rows}


def setting_grid(method: str, weights: tuple[float, ...], pncg_steps: tuple[float, ...]) -> list[MethodSetting]:
    """The settings of a method in the grid search."""
    if method == "ancestral":
        return [MethodSetting()]
    if method in ("rejection", "svs", "svs+refresh", "guided"):
        return [MethodSetting(weight) for weight in weights]
    if method == "fudge":
        return [MethodSetting(weight) for weight in (1.0, 3.0)]
    if method == "pncg":
        return [MethodSetting(weight, step_size) for step_size in pncg_steps for weight in (1.5, 4.0)]
    if method == "cold":
        return [MethodSetting(weight, step_size) for step_size in (0.1, 0.2) for weight in (1.5, 4.0)]
    # the paper's ε and γ
    step_size, weight = {"mucola": (1.0, 2.0), "langevin": (1.5, 1.5), "svs-paper": (1.5, 1.5)}[method]
    return [
        MethodSetting(weight, step, start) for step in (step_size, step_size / 5) for start in ("random", "ancestral")
    ]


def search_grids(
    draw: DrawAll, targets: tuple[str, ...], length: int, seed: int, settings: ComparisonSettings
) -> dict[str, dict[str, Any]]:
    """Score each method's settings on some targets by the guide's success rate and the perplexity; find the best.

    Methods with a single setting are skipped, except ancestral, whose perplexity is the reference.
    """
    of_method = {method: setting_grid(method, settings.weights, settings.pncg_steps) for method in settings.methods}
    searched = {method: grid for method, grid in of_method.items() if len(grid) > 1 or method == "ancestral"}
    tried = [(method, setting) for method, grid in searched.items() for setting in grid]
    tasks = [
        DrawTask(
            method,
            target,
            settings.grid_texts,
            length,
            setting,
            seconds=settings.grid_seconds,
            seed=seed,
            pilot=settings.pilot,
            prompt=settings.prompts[0],
            pilot_prompt=settings.prompts[0],
        )
        for method, setting in tried
        for target in targets
    ]
    batches = draw(tasks, "grid search")
    ancestral = _mean_perplexity([batch for batch in batches if batch["method"] == "ancestral"], length)
    grids: dict[str, dict[str, Any]] = {
        method: {"grid": [] if method in searched else [asdict(setting) for setting in grid], "winner": 0}
        for method, grid in of_method.items()
    }
    for i, (method, setting) in enumerate(tried):
        on_targets = batches[i * len(targets) : (i + 1) * len(targets)]
        success = float(np.mean([np.mean(np.array(batch["guide"]) > 0.5) for batch in on_targets]))
        mean = _mean_perplexity(on_targets, length)
        score = success - float(np.log10(mean / ancestral))
        row = {**asdict(setting), "success": success, "perplexity": mean, "score": score}
        grids[method]["grid"].append(row)
    for method in searched:
        grids[method]["winner"] = int(np.argmax([row["score"] for row in grids[method]["grid"]]))
    return grids


def _winner(grid: dict[str, Any]) -> MethodSetting:
    row = grid["grid"][grid["winner"]]
    return MethodSetting(row["weight"], row["step_size"], row["start"])


def _mean_perplexity(batches: list[Draws], length: int) -> float:
    return float(np.mean([_perplexities(batch, length).mean() for batch in batches]))


def _perplexities(draws: Draws, length: int) -> np.ndarray:
    return perplexity(np.array(draws["log_prob"]), length)


def _join_prompts(batches: list[Draws]) -> Draws:
    """The draws of several prompts as one batch: all texts, and mean costs."""
    joined = dict(batches[0])
    for key in ("texts", "tokens", "log_prob", "energy", "guide", "judged"):
        joined[key] = [value for batch in batches for value in batch[key]]
    for key in ("evaluations", "control_evaluations", "steps_taken", "seconds_taken", "pilot_seconds"):
        joined[key] = sum(batch[key] for batch in batches) / len(batches)
    return joined


def _summarise(draws: Draws, length: int, energy_weight: float) -> dict[str, Any]:
    """Results of one method on one target."""
    log_prob, guide = np.array(draws["log_prob"]), np.log(np.maximum(draws["guide"], 1e-300))
    return {
        **{key: draws[key] for key in ("method", "target", "weight", "step_size", "start", "steps_taken")},
        **{key: draws[key] for key in ("evaluations", "control_evaluations", "seconds_taken", "pilot_seconds")},
        "successes": sum(label == draws["target"] for label in draws["judged"]),
        "count": len(draws["judged"]),
        "perplexities": _perplexities(draws, length).tolist(),
        "energy": float(np.mean(-log_prob - energy_weight * guide)),
        "distinct": [distinct(draws["tokens"], n) for n in (1, 2, 3)],
        "example": draws["texts"][0],
    }
