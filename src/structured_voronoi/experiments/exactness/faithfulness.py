"""Tests of SVS on enumerated targets: stationarity compared with broken twins, energy error and round trips."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.tabular import TabularTarget
from structured_voronoi.verify.round_trips import round_trip
from structured_voronoi.verify.stationary import stationarity
from structured_voronoi.verify.truths import random_target
from structured_voronoi.verify.twins import ColdMomentum, DividedBySquare, OutwardOnly
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Setting(NamedTuple):
    """A random target and the scale of the sampler on it."""

    tokens: int
    positions: int
    dimensions: int
    field_sd: float
    """Standard deviation of the guidance field."""
    scale: float

    def make_target(self, seed: int, dtype: torch.dtype = torch.float64) -> TabularTarget:
        return random_target(seed, self.tokens, self.positions, self.dimensions, self.field_sd, dtype)


OPEN_SETTINGS = (
    Setting(6, 2, 3, 0.2, 1.0),
    Setting(6, 2, 3, 0.2, 0.5),
    Setting(8, 2, 2, 0.3, 1.5),
    Setting(5, 3, 4, 0.2, 1.0),
    Setting(10, 2, 8, 0.1, 1.5),
    Setting(4, 4, 2, 0.3, 0.7),
    Setting(10, 3, 3, 0.2, 0.8),
    Setting(30, 2, 5, 0.3, 1.2),
    Setting(12, 1, 6, 0.3, 1.0),
)
"""Settings in which most chains move."""
CLOSED_SETTINGS = (
    Setting(6, 2, 3, 0.2, 0.1),
    Setting(6, 2, 3, 0.2, 0.3),
    Setting(6, 2, 3, 0.2, 0.5),
    Setting(8, 2, 2, 0.3, 0.4),
    Setting(5, 3, 4, 0.2, 0.5),
)


@dataclass(frozen=True)
class Settings:
    runs: int = 100_000
    """Chains per setting with open walls and its outward-only twin; a fifth or a tenth of it in the other tests."""
    seed: int = 1
    progress: bool = True
    workers: int | None = None
    steps: int = 12
    open_walls: tuple[Setting, ...] = OPEN_SETTINGS
    hard: tuple[Setting, ...] = (Setting(6, 2, 3, 0.2, 0.1), Setting(6, 2, 3, 2.0, 1.0), Setting(10, 2, 8, 5.0, 1.0))
    """Settings with open walls in which few chains move or the guidance field misleads."""
    closed_walls: tuple[Setting, ...] = CLOSED_SETTINGS
    precisions: tuple[torch.dtype, ...] = (torch.float64, torch.float32)


def run(settings: Settings, out: Path) -> list[Path]:
    """Test open walls and twins, closed walls by their masses, and the motion in both precisions."""
    tasks = [("open", number) for number in range(len(settings.open_walls + settings.hard))]
    tasks += [("closed", number) for number in range(len(settings.closed_walls))]
    tasks += [("motion", number) for number in range(len(settings.precisions))]
    work = partial(_check, settings=settings)
    rows = map_tasks(work, tasks, "faithfulness", settings.progress, settings.workers)
    parts = {kind: [row for task, row in zip(tasks, rows, strict=True) if task[0] == kind] for kind, _ in tasks}
    results = {"chains": settings.runs, "steps": settings.steps, "seed": settings.seed, **parts}
    return write_report(out, "faithfulness", results, _markdown(results), {"faithfulness": _picture(parts["open"])})


def _check(task: tuple[str, int], settings: Settings) -> dict[str, Any]:
    kind, number = task
    if kind == "open":
        return _check_open(number, (settings.open_walls + settings.hard)[number], settings)
    if kind == "closed":
        return _check_closed(number, settings.closed_walls[number], settings)
    return _check_motion(settings.precisions[number], settings)


def _check_open(number: int, setting: Setting, settings: Settings) -> dict[str, Any]:
    """Open walls: stationarity and round trips of the exact sampler and its twins."""
    target, scale, chains = setting.make_target(number), setting.scale, settings.runs
    check = partial(stationarity, target=target, steps=settings.steps, seed=settings.seed)
    go_and_return = partial(round_trip, target=target, chains=min(chains, 10_000), seed=settings.seed)
    max_distance = 1e-6
    exact, outward = check(SVS(scale), chains=chains), check(OutwardOnly(scale), chains=chains)
    return {
        **setting._asdict(),
        "tv": exact.tv,
        "floor": exact.floor,
        "ratio": exact.ratio,
        "p_value": exact.p_value,
        "moved": exact.moved,
        "evaluations": exact.evaluations,
        "outward_only_p": outward.p_value,
        "outward_only_ratio": outward.ratio,
        "cold_momentum_p": check(ColdMomentum(scale), chains=chains // 5).p_value,
        "round_trips_failed": go_and_return(SVS(scale)).failures(max_distance),
        "round_trips_failed_outward_only": go_and_return(OutwardOnly(scale)).failures(max_distance),
        "divided_by_square_p": check(DividedBySquare(scale), chains=chains // 5).p_value,
        "round_trips_failed_divided": go_and_return(DividedBySquare(scale)).failures(max_distance),
    }


def _check_closed(number: int, setting: Setting, settings: Settings) -> dict[str, Any]:
    """Closed walls with estimated and with equal masses."""
    target, scale, chains = setting.make_target(100 + number), setting.scale, settings.runs // 5
    check = partial(stationarity, target=target, chains=chains, steps=settings.steps, seed=settings.seed)
    estimated, equal = check(SVS(scale, walls="closed", masses="estimated")), check(SVS(scale, walls="closed"))
    return {
        **setting._asdict(),
        "floor": estimated.floor,
        "estimated_tv": estimated.tv,
        "estimated_ratio": estimated.ratio,
        "estimated_moved": estimated.moved,
        "equal_tv": equal.tv,
        "equal_ratio": equal.ratio,
    }


def _check_motion(dtype: torch.dtype, settings: Settings) -> dict[str, Any]:
    """Energy error and distance after a round trip over random trajectories of all settings with open walls."""
    errors, distances = [], []
    trajectories = 1 + settings.runs // 10 // len(settings.open_walls)
    for number, setting in enumerate(settings.open_walls):
        trip = round_trip(SVS(setting.scale), setting.make_target(number, dtype), trajectories, settings.seed)
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
        "# Exactness of SVS",
        f"{results['chains']:,} chains (a fifth for closed walls and the last two twins) started in the target "
        f"distribution, {results['steps']} steps, seed {results['seed']}; "
        "chi-square p-values with states pooled to expected counts of at least 5. Floor: mean total variation of as "
        "many independent draws. Twins: outward gates only, r ~ N(0, ½I), refraction "
        "divided by ‖r⊥‖². Round trips: share of trajectories with swaps that do not return within 1e-6 σ.",
    ]
    for name in ("open", "closed", "motion"):
        rows = results[name]
        parts += [f"## {name}", table(list(rows[0]), [list(row.values()) for row in rows])]
    return "\n\n".join([*parts, "![faithfulness](faithfulness.png)"])


def _picture(rows: list[dict[str, Any]]) -> Figure:
    figure, axis = new_figure(8, 3.6)
    labels = [
        f"{row['tokens']}^{row['positions']} d{row['dimensions']}\n±{row['field_sd']:g} s{row['scale']:g}"
        for row in rows
    ]
    places = range(len(rows))
    axis.plot(places, [row["ratio"] for row in rows], "o", color="#0b6e4f", label="SVS, open walls")
    axis.plot(places, [row["outward_only_ratio"] for row in rows], "x", color="#c8553d", label="outward only")
    axis.axhline(1, color="#555555", linewidth=1, linestyle="--", label="independent draws")
    axis.set(yscale="log", ylabel="total variation / floor")
    axis.set_xticks(places, labels, fontsize=7)
    axis.legend(frameon=False)
    return figure
