"""Mixing of SVS with refresh moves, from ancestral texts and from random tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.contracts import Sampler
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.metrics.text import perplexity, wasserstein
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.registry import TEXT_DIMENSIONS, TEXT_SCALE, text_sampler
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVS_ALONE = text_sampler("svs")
SVS_AND_BLOCKS = Cycle(SVS_ALONE, Refresh(block=5, suffix=False, moves=5))
"""Without redraws of suffixes, because a redraw from the first position would be ancestral sampling."""
FROM_RANDOM: dict[str, Sampler] = {
    "random, blocks": SVS_AND_BLOCKS,
    "random, blocks and suffixes": text_sampler("svs+refresh"),
}


@dataclass(frozen=True)
class Settings:
    runs: int = 400
    """Chains started from ancestral texts."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    ancestral_texts: int = 2000
    """Ancestral texts, whose energies are the reference."""
    max_steps: int = 200
    """Largest number of steps of SVS and Refresh until half of the tokens have changed."""
    alone_steps: int = 100
    """Steps of SVS without refresh moves."""
    random_chains: int = 32
    """Chains started from random tokens."""
    random_cost: int = 2000
    """Evaluations per chain started from random tokens."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Run chains from ancestral texts and from random tokens."""
    model = prepare_model(settings.data, settings.text.recipe, settings.progress)
    work = partial(_run_part, model=model, settings=settings)
    parts = ("half", "alone", *FROM_RANDOM)
    by_part = dict(zip(parts, map_tasks(work, parts, "mixing", settings.progress, settings.workers), strict=True))
    target, seed = TextTarget(load(model), max_tokens=settings.text.length), settings.seed
    truth = _draw_ancestral(target, settings.ancestral_texts, seed + 1)[1]
    others = _draw_ancestral(target, 10 * settings.runs, seed + 3)[1]
    results: dict[str, Any] = {"runs": settings.runs, "seed": seed, "model": model_name(settings.data)}
    results |= {"half": _compare_energies(by_part["half"], truth, others, settings), "alone": by_part["alone"]}
    results |= {"truth": float(truth.mean()), "random": {part: by_part[part] for part in FROM_RANDOM}}
    stem = report_name("mixing", settings.data)
    return write_report(out, stem, results, _markdown(results, stem, settings), {stem: _picture(results)})


def _run_part(part: str, model: str, settings: Settings) -> dict[str, Any]:
    target = TextTarget(load(model), max_tokens=settings.text.length)
    if part == "half":
        return _run_until_half_changed(target, settings)
    if part == "alone":
        return _run_svs_alone(target, settings)
    return _run_from_random(target, FROM_RANDOM[part], settings)


def _draw_ancestral(target: TextTarget, count: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """Independent texts and their energies."""
    state, info = next(start_chains(target, Ancestral(), count, seed))
    return state.tokens, info.energy.double().numpy()


def _run_until_half_changed(target: TextTarget, settings: Settings) -> dict[str, Any]:
    """Run SVS and Refresh from ancestral texts until half of the tokens have changed at least once."""
    start, _ = _draw_ancestral(target, settings.runs, settings.seed + 2)
    chains = start_chains(target, SVS_AND_BLOCKS, settings.runs, settings.seed, start)
    ever_changed, cost = torch.zeros_like(start, dtype=torch.bool), 0.0
    for steps, (state, info) in enumerate(islice(chains, settings.max_steps), 1):
        cost += float(info.evaluations.double().mean())
        ever_changed |= state.tokens != start
        row = {"steps": steps, "evaluations": cost, "changed": float(ever_changed.double().mean())}
        if row["changed"] >= 0.5:
            break
    other = float((state.tokens != start).double().mean())
    return {**row, "other": other, "energies": info.energy.double().tolist()}


def _compare_energies(row: dict[str, Any], truth: np.ndarray, others: np.ndarray, settings: Settings) -> dict[str, Any]:
    """Compare energies with those of ancestral texts: difference, Wasserstein distance and its floor."""
    energies, runs = np.array(row.pop("energies")), settings.runs

    def distance_from_truth(energy: np.ndarray) -> float:
        length = settings.text.length
        return wasserstein(perplexity(-truth, length), perplexity(-energy, length))

    gap, error = difference(energies, truth)
    return {
        **row,
        "energy": float(energies.mean()),
        "difference": gap,
        "error": error,
        "wasserstein": distance_from_truth(energies),
        "floor": float(np.mean([distance_from_truth(others[i : i + runs]) for i in range(0, len(others), runs)])),
    }


def _run_svs_alone(target: TextTarget, settings: Settings) -> dict[str, Any]:
    """Run SVS without refresh moves and measure the change of each chain's energy."""
    start, before = _draw_ancestral(target, settings.runs, settings.seed + 4)
    chains = start_chains(target, SVS_ALONE, settings.runs, settings.seed, start)
    state, info = next(islice(chains, settings.alone_steps - 1, None))
    change = info.energy.double().numpy() - before
    error = float(change.std(ddof=1) / np.sqrt(len(change)))
    return {"drift": float(change.mean()), "error": error, "changed": float((state.tokens != start).double().mean())}


def _run_from_random(target: TextTarget, sampler: Sampler, settings: Settings) -> dict[str, Any]:
    """Run chains from random tokens and record the mean energy by cost."""
    total = torch.zeros(settings.random_chains)
    costs, energies = [], []
    for _, info in start_chains(target, sampler, settings.random_chains, settings.seed, "random"):
        total = total + info.evaluations
        costs.append(float(total.mean()))
        energies.append(float(info.energy.mean()))
        if costs[-1] >= settings.random_cost:
            break
    error = float(info.energy.double().std() / settings.random_chains**0.5)
    return {"cost": costs, "energy": energies, "last_error": error}


def _markdown(results: dict[str, Any], stem: str, settings: Settings) -> str:
    half, alone = results["half"], results["alone"]
    parts = [
        "# Mixing",
        f"Model: {results['model']}, N = {settings.text.length}, seed {results['seed']}, SVS with scale {TEXT_SCALE} "
        f"in {TEXT_DIMENSIONS} dimensions. The mean energy of {settings.ancestral_texts:,} ancestral texts is "
        f"{results['truth']:.2f}.",
        f"**From ancestral texts**, SVS and Refresh (five blocks per step, at most 5 tokens, no suffix), "
        f"{results['runs']} chains: {half['changed']:.0%} of tokens had changed at least once "
        f"({half['other']:.0%} differ from the start) after {half['steps']} steps "
        f"({half['evaluations']:.0f} evaluations per chain). Mean energy {half['energy']:.2f}: "
        f"{half['difference']:+.2f} ± {half['error']:.2f} (standard error) from the ancestral texts, "
        f"{abs(half['difference']) / half['error']:.1f} standard errors. Wasserstein distance of perplexities "
        f"{half['wasserstein']:.3f}; mean between two sets of ancestral texts of these sizes {half['floor']:.3f}; "
        f"ratio {half['wasserstein'] / half['floor']:.2f}.",
        f"**SVS alone**, {settings.alone_steps} steps: {alone['changed']:.0%} of tokens changed; drift of the energy "
        f"{alone['drift']:+.3f} ± {alone['error']:.3f}, {abs(alone['drift']) / alone['error']:.1f} standard errors.",
        f"**From random tokens**, {settings.random_chains} chains, mean energy by evaluations per chain (– if the "
        "first step costs more):",
    ]
    costs = (50, 100, 200, 500, 1000)
    rows = [
        [part, *(_energy_at(curve, cost) for cost in costs), f"{curve['energy'][-1]:.1f} ± {curve['last_error']:.1f}"]
        for part, curve in results["random"].items()
    ]
    parts.append(table(["moves", *(f"{cost:,}" for cost in (*costs, settings.random_cost))], rows))
    return "\n\n".join([*parts, f"![{stem}]({stem}.png)"])


def _energy_at(curve: dict[str, Any], cost: float) -> str:
    """The mean energy after the last step within a cost."""
    steps = int(np.searchsorted(curve["cost"], cost, side="right"))
    return f"{curve['energy'][steps - 1]:.1f}" if steps else "–"


def _picture(results: dict[str, Any]) -> Figure:
    figure, axis = new_figure(6, 3.5)
    for part, curve in results["random"].items():
        axis.plot(curve["cost"], curve["energy"], label=part)
    axis.axhline(results["truth"], color="#555555", linestyle="--", label="ancestral texts")
    axis.set(xlabel="evaluations per chain", ylabel="mean energy", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return figure
