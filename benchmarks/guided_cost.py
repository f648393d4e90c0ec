"""Guided texts against rejection under the three controls of `svs reproduce combined`: seconds of an effective text.

`python benchmarks/guided_cost.py --data FOLDER` (E2E; without it the bundled model) fits a lookahead, then draws guided
texts and tries of rejection in turns, and compares the texts of both. What an effective guided text costs is measured
on the texts of rejection, E_π[w] / Z evaluations, as a lookahead's own draws do not show what it hardly ever draws.
"""

from __future__ import annotations

import argparse
from time import process_time

import numpy as np
import torch
from scipy import stats

import structured_voronoi as sv
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.combined import CASES, Settings, make_controls
from structured_voronoi.experiments.control.foods import train_food_guide
from structured_voronoi.experiments.control.guiding import measure_guided
from structured_voronoi.experiments.text.models import prepare_model
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import bind

TURNS, TOGETHER, TRIED = 4, 512, 24
"""How often both are timed; guided texts that are drawn together, and texts of rejection."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the E2E files")
    parser.add_argument("--texts", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(data=asked.data)
    model, guide = prepare_model(asked.data, settings.text.recipe, True), "food"
    if asked.data is not None:
        guide = train_food_guide(asked.data, model, settings.classifiers, settings.text.length, True)
    lm = sv.load(model).target(max_tokens=settings.text.length)
    target = lm.under(make_controls(CASES[0], guide, settings))
    problem, began = bind(target), process_time()
    lookahead = sv.Lookahead.fit(target, settings.pilot, settings.seed)
    fit = process_time() - began
    seconds: dict[str, list[float]] = {"guided": [], "rejection, waves of 64": [], "rejection, waves of 256": []}
    for turn in range(TURNS):
        began = process_time()
        lookahead.draw(problem, sv.Rng(100 + turn, TOGETHER, "cost").uniform(problem.length))
        seconds["guided"].append((process_time() - began) / TOGETHER)
        for batch_size in (64, 256):
            began = process_time()
            _, info = next(start_chains(target, sv.Rejection(batch_size=batch_size), TRIED, 50 + turn))
            seconds[f"rejection, batches of {batch_size}"].append((process_time() - began) / float(info.evaluations.sum()))
    guided = measure_guided(lookahead, target, settings.pilot, settings.seed).sampler
    drawn = [next(start_chains(target, one, asked.texts, settings.seed)) for one in (guided, sv.Rejection())]
    energies = [info.energy.double().numpy() for _, info in drawn]
    met = [
        np.all([score.exp().numpy() > 0.5 for score in target.control_log_probs(state.tokens).values()], axis=0)
        for state, _ in drawn
    ]
    tries = float(drawn[1][1].evaluations.double().mean())
    weight = lookahead.score(problem, drawn[1][0].tokens).log_weight - log_bound(problem)
    evaluations = tries * weight.double().exp().numpy()
    print(f"fit {fit:.1f} s; a chain chooses {guided.choices + 1} times; rejection has {tries:.0f} tries")
    error, (gap, gap_error) = evaluations.std() / len(evaluations) ** 0.5, difference(*energies)
    print(f"evaluations {evaluations.mean():.2f} ± {error:.2f}, at most {evaluations.max():.0f}")
    print(f"success {met[0].mean():.3f} / {met[1].mean():.3f}, energy {gap:+.2f} ± {gap_error:.2f}")
    print(f"Kolmogorov–Smirnov p = {stats.ks_2samp(*energies).pvalue:.2f}")
    cost = {name: float(np.median(values)) for name, values in seconds.items()}
    for name, one in cost.items():
        print(f"{name}: {1e3 * one:.2f} ms", end="; ")
        if name != "guided":
            alone, spread, other = evaluations.mean() * cost["guided"], fit / asked.texts, tries * one
            print(f"guided is {other / alone:.1f} times as fast, {other / (alone + spread):.1f} times with its pilot")


if __name__ == "__main__":
    main()
