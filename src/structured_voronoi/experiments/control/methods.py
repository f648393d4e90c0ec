"""Every method of controlled generation at the best setting of its grid, on every target, side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from structured_voronoi.experiments.control.draws import DrawAll, Draws, DrawTask, MethodSetting
from structured_voronoi.metrics.text import distinct, perplexity

ENERGY_WEIGHT = 1.5
"""γ at which the energies of all methods are compared, whatever γ they were drawn at."""


@dataclass(frozen=True)
class ComparisonSettings:
    """Which methods are compared, and what they may spend."""

    methods: tuple[str, ...] = (
        "ancestral", "fudge", "mucola", "langevin", "cold", "svs-paper", "svs", "svs+refresh", "pncg", "guided",
        "rejection",
    )  # fmt: skip
    """Ancestral texts must be among them: the grid search measures perplexities by theirs."""
    seconds: float = 25.0
    """Time of one core that a chain-based method has for a batch in the table."""
    grid_seconds: float = 6.0
    """The same in the grid search."""
    grid_texts: int = 8
    weights: tuple[float, ...] = (1.5, 2.5, 4.0)
    """γ of rejection, guided and SVS with open walls, in the grid search."""
    pncg_steps: tuple[float, ...] = (0.02, 0.04)
    """α of p-NCG in the grid search: a length, so that it depends on the model's embeddings."""
    pilot: int = 4096
    """Texts that a lookahead of guided sampling learns from."""
    prompts: tuple[str, ...] = ("",)
    """Beginnings, each of them for all texts of a batch; the grid search takes the first."""


def compare_methods(
    draw: DrawAll,
    targets: tuple[str, ...],
    grid_targets: tuple[str, ...],
    count: int,
    length: int,
    seed: int,
    settings: ComparisonSettings,
) -> dict[str, Any]:
    """What a report of controlled generation is made of: the grids, and every method's numbers on every target.

    A method draws ``count`` texts of a target for each prompt.
    """
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
    batches, together = draw(tasks, "every method on every target"), len(settings.prompts)
    rows = [_summarise(_joined(batches[i : i + together]), length) for i in range(0, len(batches), together)]
    return {"seed": seed, "grid": grids, "rows": rows}


def setting_grid(method: str, weights: tuple[float, ...], pncg_steps: tuple[float, ...]) -> list[MethodSetting]:
    """The settings that are tried for a method."""
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
    """Each method's settings, scored on some targets by the guide's own opinion and the perplexity, and the best.

    A single setting is not tried, but for that of ancestral texts, by whose perplexity the others are scored.
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


def _joined(batches: list[Draws]) -> Draws:
    """The draws of several prompts as if they were of one: all texts, and the mean of what they cost."""
    joined = dict(batches[0])
    for key in ("texts", "tokens", "log_prob", "energy", "guide", "judged"):
        joined[key] = [value for batch in batches for value in batch[key]]
    for key in ("evaluations", "control_evaluations", "steps_taken", "seconds_taken", "pilot_seconds"):
        joined[key] = sum(batch[key] for batch in batches) / len(batches)
    return joined


def _summarise(draws: Draws, length: int) -> dict[str, Any]:
    """The numbers of one method on one target."""
    log_prob, guide = np.array(draws["log_prob"]), np.log(np.maximum(draws["guide"], 1e-300))
    return {
        **{key: draws[key] for key in ("method", "target", "weight", "step_size", "start", "steps_taken")},
        **{key: draws[key] for key in ("evaluations", "control_evaluations", "seconds_taken", "pilot_seconds")},
        "successes": sum(label == draws["target"] for label in draws["judged"]),
        "count": len(draws["judged"]),
        "perplexities": _perplexities(draws, length).tolist(),
        "energy": float(np.mean(-log_prob - ENERGY_WEIGHT * guide)),
        "distinct": [distinct(draws["tokens"], n) for n in (1, 2, 3)],
        "example": draws["texts"][0],
    }
