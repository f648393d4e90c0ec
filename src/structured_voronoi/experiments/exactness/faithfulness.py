"""How faithful SVS is, in numbers: stationarity on enumerated targets beside broken twins, energy, round trips."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from structured_voronoi.experiments.checks import random_target, round_trip, stationarity
from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.experiments.twins import ColdMomentum, OutwardOnly, divided_by_square
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.samplers.svs import SVS

OPEN_SETTINGS = (
    # tokens, positions, dimensions, sd of the field, scale
    (6, 2, 3, 0.2, 1.0),
    (6, 2, 3, 0.2, 0.5),
    (8, 2, 2, 0.3, 1.5),
    (5, 3, 4, 0.2, 1.0),
    (10, 2, 8, 0.1, 1.5),
    (4, 4, 2, 0.3, 0.7),
    (10, 3, 3, 0.2, 0.8),
    (30, 2, 5, 0.3, 1.2),
    (12, 1, 6, 0.3, 1.0),
)
OTHER_SETTINGS = ((6, 2, 3, 0.2, 0.1), (6, 2, 3, 2.0, 1.0), (10, 2, 8, 5.0, 1.0))
CLOSED_SETTINGS = (
    (6, 2, 3, 0.2, 0.1),
    (6, 2, 3, 0.2, 0.3),
    (6, 2, 3, 0.2, 0.5),
    (8, 2, 2, 0.3, 0.4),
    (5, 3, 4, 0.2, 0.5),
)
PRECISIONS = (torch.float64, torch.float32)
STEPS = 12

Task = tuple[str, int]
Setting = tuple[int, int, int, float, float]


def run(out: Path, runs: int = 100_000, seed: int = 1, progress: bool = True) -> list[Path]:
    """``runs`` chains for each open setting and its outward-only twin, a fifth of it for the rest."""
    tasks: list[Task] = [("open", number) for number in range(len(OPEN_SETTINGS + OTHER_SETTINGS))]
    tasks += [("closed", number) for number in range(len(CLOSED_SETTINGS))]
    tasks += [("motion", number) for number in range(len(PRECISIONS))]
    rows = side_by_side(partial(_row, runs=runs, seed=seed), tasks, "faithfulness", progress)
    parts = {kind: [row for task, row in zip(tasks, rows, strict=True) if task[0] == kind] for kind, _ in tasks}
    results = {"chains": runs, "steps": STEPS, "seed": seed, **parts}
    return write_report(out, "faithfulness", results, _markdown(results), {"faithfulness": _picture(parts["open"])})


def _row(task: Task, runs: int, seed: int) -> dict[str, Any]:
    kind, number = task
    if kind == "open":
        return _open(number, (OPEN_SETTINGS + OTHER_SETTINGS)[number], runs, seed)
    if kind == "closed":
        return _closed(number, CLOSED_SETTINGS[number], runs // 5, seed)
    return _motion(PRECISIONS[number], runs // 10, seed)


def _name(setting: Setting) -> dict[str, Any]:
    return dict(zip(("tokens", "positions", "dimensions", "field_sd", "scale"), setting, strict=True))


def _open(number: int, setting: Setting, chains: int, seed: int) -> dict[str, Any]:
    """Open walls: the right sampler, its twins, and the round trips of all of them."""
    tokens, length, dimensions, field_sd, scale = setting
    target = random_target(number, tokens, length, dimensions, field_sd)
    right = stationarity(target, SVS(scale), chains, STEPS, seed)
    twin = stationarity(target, OutwardOnly(scale), chains, STEPS, seed)
    cold = stationarity(target, ColdMomentum(scale), chains // 5, STEPS, seed)
    trips = min(chains, 10_000)
    row = {
        **_name(setting),
        "tv": right.fit.tv,
        "floor": right.fit.floor,
        "ratio": right.fit.ratio,
        "p_value": right.fit.p_value,
        "moved": right.moved,
        "evaluations": right.evaluations,
        "outward_only_p": twin.fit.p_value,
        "outward_only_ratio": twin.fit.ratio,
        "cold_momentum_p": cold.fit.p_value,
        "round_trips_failed": round_trip(target, SVS(scale), trips, seed).failures(1e-6),
        "round_trips_failed_outward_only": round_trip(target, OutwardOnly(scale), trips, seed).failures(1e-6),
    }
    with divided_by_square():
        row["divided_by_square_p"] = stationarity(target, SVS(scale), chains // 5, STEPS, seed).fit.p_value
        row["round_trips_failed_divided"] = round_trip(target, SVS(scale), trips, seed).failures(1e-6)
    return row


def _closed(number: int, setting: Setting, chains: int, seed: int) -> dict[str, Any]:
    """Closed walls with estimated and with equal masses."""
    tokens, length, dimensions, field_sd, scale = setting
    target = random_target(100 + number, tokens, length, dimensions, field_sd)
    estimated = stationarity(target, SVS(scale, walls="closed", masses="estimated"), chains, STEPS, seed)
    equal = stationarity(target, SVS(scale, walls="closed"), chains, STEPS, seed)
    return {
        **_name(setting),
        "floor": estimated.fit.floor,
        "estimated_tv": estimated.fit.tv,
        "estimated_ratio": estimated.fit.ratio,
        "estimated_moved": estimated.moved,
        "equal_tv": equal.fit.tv,
        "equal_ratio": equal.fit.ratio,
    }


def _motion(dtype: torch.dtype, trips: int, seed: int) -> dict[str, Any]:
    """Energy error and way back over random trajectories of all open settings."""
    errors, distances = [], []
    for number, (tokens, length, dimensions, field_sd, scale) in enumerate(OPEN_SETTINGS):
        target = random_target(number, tokens, length, dimensions, field_sd, dtype)
        trip = round_trip(target, SVS(scale), 1 + trips // len(OPEN_SETTINGS), seed)
        errors.append(trip.energy_error.double())
        distances.append(trip.distance.double())
    error, distance = torch.cat(errors), torch.cat(distances)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "trajectories": len(error),
        "largest_energy_error": float(error.max()),
        "median_distance": float(distance.median()),
        "distance_99.9%": float(distance.quantile(0.999)),
        "largest_distance": float(distance.max()),
    }


def _markdown(results: dict[str, Any]) -> str:
    parts = [
        "# Faithfulness of SVS",
        f"{results['chains']:,} chains (a fifth of it for closed walls and the last two twins) started at the truth, "
        f"{results['steps']} steps, seed {results['seed']}; "
        "chi-square p-values with states pooled to expected counts of at least 5; the floor is the mean total "
        "variation of as many independent draws. Twins: gates that work outward only, r ~ N(0, ½I), refraction "
        "divided by ‖r⊥‖². Round trips: share of swapping trajectories that do not return within 1e-6 σ.",
    ]
    for name in ("open", "closed", "motion"):
        rows = results[name]
        parts += [f"## {name}", table(list(rows[0]), [list(row.values()) for row in rows])]
    return "\n\n".join([*parts, "![faithfulness](faithfulness.png)"])


def _picture(rows: list[dict[str, Any]]) -> Any:
    figure, axis = new_figure(8, 3.6)
    labels = [f"{r['tokens']}^{r['positions']} d{r['dimensions']}\n±{r['field_sd']:g} s{r['scale']:g}" for r in rows]
    axis.plot(range(len(rows)), [row["ratio"] for row in rows], "o", color="#0b6e4f", label="SVS, open walls")
    axis.plot(range(len(rows)), [row["outward_only_ratio"] for row in rows], "x", color="#c8553d", label="outward only")
    axis.axhline(1, color="#555555", linewidth=1, linestyle="--", label="independent draws")
    axis.set(yscale="log", ylabel="total variation / floor")
    axis.set_xticks(range(len(rows)), labels, fontsize=7)
    axis.legend(frameon=False)
    return figure
