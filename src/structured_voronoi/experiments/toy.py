"""The paper's toy: four square cells in the plane (figures 1, 2, 5 and 6), at its settings and at equal cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from structured_voronoi.base import Info, Sampler
from structured_voronoi.experiments.chains import Runs, divergence, independent_runs, run_chains
from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.memo import Proposal
from structured_voronoi.geometry.motion import CLOSED, Particle, Straight, travel
from structured_voronoi.run.progress import progress_bar
from structured_voronoi.samplers.hmc import HMC
from structured_voronoi.samplers.mucola import MuCoLa
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.categorical import CategoricalTarget, toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
BURN_IN, DRAWS = 500, 200
ITERATIONS = (100, 500, 1000)
TRAJECTORIES = (1, 2, 4, 8)
LENGTHS, STEP_SIZES = (2.0, 2.5, 4.0), (0.5, 1.0, 2.0, 4.0, 16.0)
BUDGET = 1.0
"""Energy evaluations (or proposals) a draw in the comparisons at equal cost: those of one leapfrog step."""


def voronoi(length: float) -> SVS:
    return SVS(base="uniform", walls="closed", length=length)


def hmc(step_size: float) -> HMC:
    return HMC(step_size, base="uniform")


def mucola(step_size: float) -> MuCoLa:
    return MuCoLa(step_size, final_step_size=None, metropolis=True)


PAPER_SETTINGS: dict[str, Sampler] = {
    "vs": voronoi(0.1),
    "vs_paper": SVS.paper(0.1, 0.1, base="uniform"),
    "hmc": hmc(0.1),
    "mucola": mucola(0.1),
}
GRIDS: dict[str, list[Sampler]] = {
    "vs": [voronoi(length) for length in LENGTHS],
    "vs_paper": [SVS.paper(step, 0.1, base="uniform") for step in STEP_SIZES[:4]],
    "hmc": [hmc(step) for step in STEP_SIZES],
    "mucola": [mucola(step) for step in STEP_SIZES],
}


def run(out: Path, runs: int = 256, seed: int = 0, progress: bool = True) -> list[Path]:
    """All figures of the toy; ``runs`` independent runs of one chain each."""
    with progress_bar(len(TEMPERATURES) * 3 + 1, progress, "toy") as tick:
        rows: list[dict[str, Any]] = []
        for temperature in TEMPERATURES:
            rows += _at_paper_settings(temperature, runs, seed, tick)
            rows += _at_equal_cost(temperature, runs, seed, tick)
            rows += _trajectories_a_draw(temperature, runs, seed, tick)
        iterations, elements = _by_iterations(runs, seed)
        tick(None)
    figures = {
        "toy_trajectory": trajectory_picture(),
        "toy_js": _js_picture(rows),
        "toy_iterations": _iterations_picture(iterations),
        "toy_elements": _elements_picture(elements),
    }
    results = {"runs": runs, "seed": seed, "rows": rows, "iterations": iterations, "elements": elements}
    return write_report(out, "toy", results, _markdown(rows, iterations, runs, seed), figures)


def _row(temperature: float, name: str, setting: str, runs: Runs, tuning: str = "") -> dict[str, Any]:
    js = divergence(toy(temperature), runs)
    return {
        "temperature": temperature,
        "sampler": name,
        "setting": setting,
        "js_mean": js.mean,
        "js_low": js.low,
        "js_high": js.high,
        "energy_evaluations": runs.evaluations,
        "proposals": runs.events,
        "tuning": tuning,
    }


def _at_paper_settings(
    temperature: float, runs: int, seed: int, tick: Callable[[Info | None], None]
) -> list[dict[str, Any]]:
    """ε = α = 0.1, one leapfrog step a draw."""
    target = toy(temperature)
    rows = [_row(temperature, "independent", "paper", independent_runs(target, runs, DRAWS, seed))]
    for name, sampler in PAPER_SETTINGS.items():
        done = run_chains(target, sampler, runs, BURN_IN, DRAWS, [1], seed)[1]
        rows.append(_row(temperature, name, "paper", done, _tuning(sampler, 1)))
    tick(None)
    return rows


def _at_equal_cost(
    temperature: float, runs: int, seed: int, tick: Callable[[Info | None], None]
) -> list[dict[str, Any]]:
    """Each sampler at its best step and with as many steps a draw as the budget allows, two ways of counting."""
    target, rows = toy(temperature), []
    for name, grid in GRIDS.items():
        candidates: dict[str, list[dict[str, Any]]] = {"equal_evaluations": [], "equal_proposals": []}
        for sampler in grid:
            pilot = run_chains(target, sampler, 64, 100, DRAWS, [1], seed + 1)[1]
            # a proposal is an event of VS, a step of the others, whether or not it leaves the cell
            proposals = pilot.events / DRAWS if name == "vs" else 1.0
            thin = {
                "equal_evaluations": _steps_within(pilot.evaluations / DRAWS),
                "equal_proposals": _steps_within(proposals),
            }
            done = run_chains(target, sampler, runs, BURN_IN, DRAWS, sorted(set(thin.values())), seed)
            for setting, every in thin.items():
                candidates[setting].append(_row(temperature, name, setting, done[every], _tuning(sampler, every)))
        for found in candidates.values():
            rows.append(min(found, key=lambda row: float(row["js_mean"])))
            rows[-1]["candidates"] = [[row["tuning"], row["js_mean"], row["energy_evaluations"]] for row in found]
    floor = independent_runs(target, runs, DRAWS, seed)
    rows += [_row(temperature, "independent", setting, floor) for setting in ("equal_evaluations", "equal_proposals")]
    tick(None)
    return rows


def _steps_within(cost_a_step: float) -> int:
    """Steps a draw that cost at most the budget: at least one, at most eight."""
    return int(min(8, max(1, BUDGET * 1.05 // max(cost_a_step, 1e-9))))


def _trajectories_a_draw(
    temperature: float, runs: int, seed: int, tick: Callable[[Info | None], None]
) -> list[dict[str, Any]]:
    """VS with 1, 2, 4 and 8 trajectories a draw."""
    sampler = voronoi(4.0)
    done = run_chains(toy(temperature), sampler, runs, BURN_IN, DRAWS, TRAJECTORIES, seed + 2)
    tick(None)
    return [
        _row(temperature, "vs", f"trajectories_{every}", done[every], _tuning(sampler, every)) for every in TRAJECTORIES
    ]


def _by_iterations(runs: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """JS after 100, 500, 1000 iterations without burn-in, and the elements drawn at T = 0.25; step sizes of 1."""
    samplers: dict[str, Sampler] = {"vs": voronoi(4.0), "hmc": hmc(1.0), "mucola": mucola(1.0)}
    rows, elements = [], []
    for temperature in TEMPERATURES:
        target = toy(temperature)
        truth = target.probabilities().numpy()
        for name, sampler in samplers.items():
            for iterations in ITERATIONS:
                done = run_chains(target, sampler, runs, 0, iterations, [1], seed + 3)[1]
                js = divergence(target, done)
                rows.append(
                    {
                        "temperature": temperature,
                        "sampler": name,
                        "iterations": iterations,
                        "js_mean": js.mean,
                        "js_low": js.low,
                        "js_high": js.high,
                    }
                )
                if temperature == 0.25:
                    share = (done.counts / iterations).mean(0)
                    elements.append({"sampler": name, "iterations": iterations, "share": share.tolist()})
        if temperature == 0.25:
            elements.append({"sampler": "truth", "iterations": 0, "share": truth.tolist()})
    return rows, elements


def _tuning(sampler: Sampler, thin: int) -> str:
    size = sampler.length if isinstance(sampler, SVS) else sampler.step_size  # type: ignore[attr-defined]
    return f"{'length' if isinstance(sampler, SVS) else 'step'} {size:g} × {thin} a draw"


def trajectory_picture(duration: float = 16.0, seed: int = 2) -> Figure:
    """One long exact trajectory through the cells: it refracts where it may, reflects where it must."""
    target = toy(1.0)
    times = torch.linspace(0, duration, 2000, dtype=torch.float64)
    path = trajectory(target, times, seed)
    cells = cells_of(target.embeddings)
    here = cells.nearest(path[:, None])[:, 0]
    figure, axis = new_figure(4.6, 4.6)
    for (x, y), probability in zip(target.embeddings.tolist(), target.probabilities().tolist(), strict=True):
        corner = (min(0.0, 2 * x), min(0.0, 2 * y))
        axis.add_patch(_patch(corner, probability))
        axis.annotate(f"{probability:g}", (1.72 * x, 1.72 * y), ha="center", va="center", fontsize=13, color="#333333")
        axis.plot(x, y, "o", color="#333333", markersize=4)
    axis.plot(*path.T.tolist(), color=COLOURS["vs"], linewidth=1.4)
    changes = (here[1:] != here[:-1]).nonzero().squeeze(-1)
    axis.plot(
        *path[changes].T.tolist(), "o", color="white", markeredgecolor=COLOURS["vs"], markersize=6, label="refraction"
    )
    turned = _turning_points(path, here)
    axis.plot(*path[turned].T.tolist(), "s", color=COLOURS["hmc"], markersize=5, label="reflection")
    axis.plot(*path[0].tolist(), "k^", markersize=8, label="start")
    axis.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    axis.set_title("Voronoi sampling: one trajectory", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def trajectory(target: CategoricalTarget, times: torch.Tensor, seed: int) -> torch.Tensor:
    """The points of one trajectory at the given times: one chain a time, all from the same start."""
    cells = cells_of(target.embeddings)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 1, 2, generator=generator, dtype=torch.float64) + 0.5
    r = torch.randn(1, 1, 2, generator=generator, dtype=torch.float64)
    cell = cells.nearest(x)
    energy = -target.log_prob(cell)
    start = Particle(cell, x, r, energy, x)
    copies = Particle(*(part.expand(len(times), *part.shape[1:]) for part in start))

    def evaluate(cell: torch.Tensor) -> Proposal:
        energy = -target.log_prob(cell)
        return Proposal(energy, cells.points(cell), energy.isfinite())

    box = torch.full((2,), float(target.box or 0), dtype=torch.float64)
    end, _, _ = travel(cells, copies, times, Straight(-box, box), CLOSED, evaluate)
    return end.x[:, 0]


def _turning_points(path: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Where a velocity component changes its sign."""
    velocity = path.diff(dim=0).sign()
    return (velocity[1:] != velocity[:-1]).any(-1).nonzero().squeeze(-1) + 1


def _patch(corner: tuple[float, float], probability: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        corner, 2, 2, facecolor=(0.04, 0.43, 0.31, 0.06 + 0.5 * probability), edgecolor="white", linewidth=2
    )


def _js_picture(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure(15, 4, ncols=4, width_ratios=(1, 1, 1, 0.8))
    titles = {
        "paper": "the paper's settings: ε = α = 0.1",
        "equal_evaluations": "best step, one energy evaluation a draw",
        "equal_proposals": "best step, one proposal a draw",
    }
    for axis, (setting, title) in zip(axes, titles.items(), strict=False):
        for name in ("independent", "mucola", "hmc", "vs_paper", "vs"):
            _line(
                axis, [row for row in rows if row["setting"] == setting and row["sampler"] == name], name, "temperature"
            )
        axis.set(yscale="log", xlabel="temperature", ylabel="JS divergence (nats)")
        axis.set_title(title, fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    for shift, temperature in ((-0.25, 0.25), (0, 1.0), (0.25, 2.0)):
        axes[3].bar(
            np.arange(4) + shift, toy(temperature).probabilities().numpy(), width=0.23, label=f"T = {temperature:g}"
        )
    axes[3].set(xlabel="element", ylabel="probability", xticks=range(4))
    axes[3].set_title("reference distributions", fontsize=10)
    axes[3].legend(frameon=False, fontsize=8)
    return figure


def _line(axis: Any, rows: list[dict[str, Any]], name: str, across: str) -> None:
    where, mean = [row[across] for row in rows], np.array([row["js_mean"] for row in rows])
    axis.plot(where, mean, "o-", color=COLOURS[name], label=name, markersize=4)
    axis.fill_between(
        where, [row["js_low"] for row in rows], [row["js_high"] for row in rows], color=COLOURS[name], alpha=0.2
    )


def _iterations_picture(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure(12, 3.6, ncols=3, sharey=True)
    for axis, iterations in zip(axes, ITERATIONS, strict=True):
        for name in ("mucola", "hmc", "vs"):
            chosen = [row for row in rows if row["iterations"] == iterations and row["sampler"] == name]
            _line(axis, chosen, name, "temperature")
        axis.set(yscale="log", xlabel="temperature", title=f"{iterations} iterations")
    axes[0].set_ylabel("JS divergence (nats)")
    axes[0].legend(frameon=False)
    return figure


def _elements_picture(elements: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure(12, 3.6, ncols=3, sharey=True)
    truth = next(row["share"] for row in elements if row["sampler"] == "truth")
    for axis, iterations in zip(axes, ITERATIONS, strict=True):
        axis.bar(np.arange(4) - 0.3, truth, width=0.18, color=COLOURS["independent"], label="truth")
        for shift, name in ((-0.1, "vs"), (0.1, "hmc"), (0.3, "mucola")):
            share = next(r["share"] for r in elements if r["sampler"] == name and r["iterations"] == iterations)
            axis.bar(np.arange(4) + shift, share, width=0.18, color=COLOURS[name], label=name)
        axis.set(xlabel="element", xticks=range(4), title=f"{iterations} iterations, T = 0.25", yscale="log")
    axes[0].set_ylabel("share of draws, mean over runs")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _markdown(rows: list[dict[str, Any]], iterations: list[dict[str, Any]], runs: int, seed: int) -> str:
    parts = [
        "# Toy: four cells in the plane",
        f"Mean JS divergence in nats with 95 % intervals over {runs} independent runs of {BURN_IN} burn-in iterations "
        f"and {DRAWS} draws; seed {seed}. Evaluations and proposals are per run, during the draws. A proposal is an "
        "event of VS and a step of the others; VS remembers what it has evaluated, so its evaluations are fewer.",
    ]
    settings = dict.fromkeys(row["setting"] for row in rows)
    for setting in settings:
        body = [
            [
                row["temperature"],
                row["sampler"],
                row["js_mean"],
                f"{row['js_low']:.3g} – {row['js_high']:.3g}",
                row["energy_evaluations"],
                row["proposals"],
                row["tuning"],
            ]
            for row in rows
            if row["setting"] == setting
        ]
        header = ["T", "sampler", "JS", "95 %", "evaluations", "proposals", "tuning"]
        parts += [f"## {setting}", table(header, body)]
    body = [[r["temperature"], r["sampler"], r["iterations"], r["js_mean"]] for r in iterations]
    parts += ["## By iterations (no burn-in)", table(["T", "sampler", "iterations", "JS"], body)]
    pictures = ("toy_trajectory", "toy_js", "toy_iterations", "toy_elements")
    parts += [f"![{name}]({name}.png)" for name in pictures]
    return "\n\n".join(parts)
