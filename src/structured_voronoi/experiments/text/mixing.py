"""Does SVS with refresh moves keep the distribution of texts, and does it find it from random tokens?"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.base import Sampler
from structured_voronoi.catalogue import TEXT_SCALE
from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model, model_name, named
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.metrics.text import perplexity, wasserstein
from structured_voronoi.run.sampling import steps
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.choices import TEXT_DIMENSIONS, text_sampler
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANCESTRAL, ALONE_STEPS, RANDOM_CHAINS, RANDOM_COST, MOST_STEPS = 2000, 100, 32, 2000, 200
ALONE = text_sampler("svs")
BLOCKS = Cycle(ALONE, Refresh(block=5, suffix=False, moves=5))
"""Without suffix redraws: a redraw from the first position would simply be ancestral sampling."""
PARTS = ("half", "alone", "random, blocks", "random, blocks and suffixes")


def run(out: Path, runs: int = 400, seed: int = 0, progress: bool = True, data: str | None = None) -> list[Path]:
    """``runs`` chains from ancestral texts, and a few from random tokens."""
    name = experiment_model(data, progress)
    work = partial(_part, name=name, runs=runs, seed=seed)
    found = dict(zip(PARTS, side_by_side(work, PARTS, "mixing", progress), strict=True))
    truth = _ancestral(LanguageModel.load(name, length=LENGTH), ANCESTRAL, seed + 1)[1]
    results = {"runs": runs, "seed": seed, "model": model_name(data)}
    results |= {"half": _half(found["half"], truth, name, runs, seed), "alone": found["alone"]}
    results |= {"truth": float(truth.mean()), "random": {part: found[part] for part in PARTS[2:]}}
    stem = named("mixing", data)
    return write_report(out, stem, results, _markdown(results, stem), {stem: _picture(results)})


def _part(part: str, name: str, runs: int, seed: int) -> dict[str, Any]:
    target = LanguageModel.load(name, length=LENGTH)
    if part == "half":
        return _until_half_changed(target, runs, seed)
    if part == "alone":
        return _alone(target, runs, seed)
    sampler = BLOCKS if part == PARTS[2] else text_sampler("svs+refresh")
    return _from_random(target, sampler, seed)


def _ancestral(target: LanguageModel, count: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """Independent texts and their energies."""
    tokens, info = next(steps(target, Ancestral(), count, seed))
    return tokens, info.energy.double().numpy()


def _until_half_changed(target: LanguageModel, runs: int, seed: int) -> dict[str, Any]:
    start, _ = _ancestral(target, runs, seed + 2)
    cost, count = 0.0, 0
    ever = torch.zeros_like(start, dtype=torch.bool)
    for tokens, info in islice(steps(target, BLOCKS, runs, seed, start), MOST_STEPS):
        count += 1
        cost += float(info.evaluations.double().mean())
        ever |= tokens != start
        energy, changed = info.energy, float(ever.double().mean())
        if changed >= 0.5:
            break
    other = float((tokens != start).double().mean())
    energies = energy.double().tolist()
    return {"steps": count, "evaluations": cost, "changed": changed, "other": other, "energies": energies}


def _half(found: dict[str, Any], truth: np.ndarray, name: str, runs: int, seed: int) -> dict[str, Any]:
    """The energies beside ancestral ones: difference in standard errors, Wasserstein distance and its floor."""
    mine = np.array(found["energies"])
    apart, error = difference(mine, truth)
    more = _ancestral(LanguageModel.load(name, length=LENGTH), 10 * runs, seed + 3)[1]
    others = [wasserstein(_perplexity(truth), _perplexity(more[i : i + runs])) for i in range(0, len(more), runs)]
    return {
        **{key: found[key] for key in ("steps", "evaluations", "changed", "other")},
        "energy": float(mine.mean()),
        "difference": apart,
        "error": error,
        "wasserstein": wasserstein(_perplexity(truth), _perplexity(mine)),
        "floor": float(np.mean(others)),
    }


def _perplexity(energy: np.ndarray) -> np.ndarray:
    return perplexity(-energy, LENGTH)


def _alone(target: LanguageModel, runs: int, seed: int) -> dict[str, Any]:
    """SVS without refresh moves: the change of each chain's energy."""
    start, before = _ancestral(target, runs, seed + 4)
    tokens, info = next(islice(steps(target, ALONE, runs, seed, start), ALONE_STEPS - 1, None))
    change = info.energy.double().numpy() - before
    moved = float((tokens != start).double().mean())
    return {"drift": float(change.mean()), "error": float(change.std(ddof=1) / np.sqrt(runs)), "changed": moved}


def _from_random(target: LanguageModel, sampler: Sampler, seed: int) -> dict[str, Any]:
    """Mean energy by cost."""
    total = torch.zeros(RANDOM_CHAINS)
    costs, energies = [], []
    for _, info in steps(target, sampler, RANDOM_CHAINS, seed, "random"):
        total = total + info.evaluations
        costs.append(float(total.mean()))
        energies.append(float(info.energy.mean()))
        if costs[-1] >= RANDOM_COST:
            break
    error = float(info.energy.double().std() / RANDOM_CHAINS**0.5)
    return {"cost": costs, "energy": energies, "last_error": error}


def _markdown(results: dict[str, Any], stem: str) -> str:
    half, alone = results["half"], results["alone"]
    said = [
        "# Mixing",
        f"Model: {results['model']}, N = {LENGTH}, seed {results['seed']}, SVS with scale {TEXT_SCALE} in "
        f"{TEXT_DIMENSIONS} dimensions. The mean energy of {ANCESTRAL:,} ancestral texts is {results['truth']:.2f}.",
        f"**From ancestral texts**, SVS and Refresh (five blocks a step, at most 5 tokens, no suffix), "
        f"{results['runs']} chains: {half['changed']:.0%} of tokens had changed (some back again: "
        f"{half['other']:.0%} are other ones than at the start) after {half['steps']} steps "
        f"({half['evaluations']:.0f} evaluations a chain). Mean energy {half['energy']:.2f}: {half['difference']:+.2f} "
        f"± {half['error']:.2f} (standard error) from the ancestral texts, "
        f"{abs(half['difference']) / half['error']:.1f} errors. Wasserstein distance of perplexities "
        f"{half['wasserstein']:.3f}; between two ancestral sets of these sizes {half['floor']:.3f} on average, ratio "
        f"{half['wasserstein'] / half['floor']:.2f}.",
        f"**SVS alone**, {ALONE_STEPS} steps: {alone['changed']:.0%} of tokens changed, drift of the energy "
        f"{alone['drift']:+.3f} ± {alone['error']:.3f}, {abs(alone['drift']) / alone['error']:.1f} errors.",
        f"**From random tokens**, {RANDOM_CHAINS} chains, mean energy by cost (– where the first step costs more):",
    ]
    marks = (50, 100, 200, 500, 1000, RANDOM_COST)
    rows = [[part, *(_at(curve, mark) for mark in marks)] for part, curve in results["random"].items()]
    said.append(table(["moves", *(f"{mark:,}" for mark in marks)], rows))
    return "\n\n".join([*said, f"![{stem}]({stem}.png)"])


def _at(curve: dict[str, Any], cost: float) -> str:
    if cost >= RANDOM_COST:
        return f"{curve['energy'][-1]:.1f} ± {curve['last_error']:.1f}"
    steps = int(np.searchsorted(curve["cost"], cost, side="right"))  # those that this much pays for
    return f"{curve['energy'][steps - 1]:.1f}" if steps else "–"


def _picture(results: dict[str, Any]) -> Figure:
    figure, axis = new_figure(6, 3.5)
    for part, curve in results["random"].items():
        axis.plot(curve["cost"], curve["energy"], label=part)
    axis.axhline(results["truth"], color="#555555", linestyle="--", label="ancestral texts")
    axis.set(xlabel="evaluations a chain", ylabel="mean energy", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return figure
