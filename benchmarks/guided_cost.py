"""Seconds per effective text of guided sampling and of rejection, under the three controls of `svs reproduce combined`.

    python benchmarks/guided_cost.py --data FOLDER

With a folder of the E2E files, the language model is trained on them; without, it is the bundled one. The script fits a
lookahead, times guided texts and tries of rejection alternately, and compares the texts of both. The evaluations per
effective guided text are computed from the texts of rejection as E_π[w] / Z, because the lookahead's own texts do not
show what it hardly ever proposes.
"""

from __future__ import annotations

import argparse
import math
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


def time_texts(
    target: sv.ControlledTarget, lookahead: sv.Lookahead, repeats: int = 4, guided_texts: int = 512, texts: int = 24
) -> dict[str, float]:
    """Median seconds of a guided text and of a try of rejection with two batch sizes."""
    seconds: dict[str, list[float]] = {}
    problem = bind(target)
    for repeat in range(repeats):
        began = process_time()
        lookahead.draw(problem, sv.Rng(100 + repeat, guided_texts, "cost").uniform(problem.length))
        seconds.setdefault("guided", []).append((process_time() - began) / guided_texts)
        for batch_size in (64, 256):
            began = process_time()
            _, info = next(start_chains(target, sv.Rejection(batch_size=batch_size), texts, 50 + repeat))
            per_try = (process_time() - began) / float(info.evaluations.sum())
            seconds.setdefault(f"rejection, batches of {batch_size}", []).append(per_try)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the E2E files")
    parser.add_argument("--texts", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(data=options.data)
    model, guide = prepare_model(options.data, settings.text.recipe, True), "food"
    if options.data is not None:
        guide = train_food_guide(options.data, model, settings.classifiers, settings.text.length, True)
    language_model = sv.load(model).target(max_tokens=settings.text.length)
    target = language_model.under(make_controls(CASES[0], guide, settings))
    problem, began = bind(target), process_time()
    lookahead = sv.Lookahead.fit(target, settings.pilot, settings.seed)
    fit = process_time() - began
    cost = time_texts(target, lookahead)
    guided = measure_guided(lookahead, target, settings.pilot, settings.seed).sampler
    samplers = (guided, sv.Rejection())
    draws = [next(start_chains(target, sampler, options.texts, settings.seed)) for sampler in samplers]
    energies = [info.energy.double().numpy() for _, info in draws]
    satisfied = [
        np.all([score.exp().numpy() > 0.5 for score in target.control_log_probs(state.tokens).values()], axis=0)
        for state, _ in draws
    ]
    tries = float(draws[1][1].evaluations.double().mean())
    weight = lookahead.score(problem, draws[1][0].tokens).log_weight - log_bound(problem)
    evaluations = tries * weight.double().exp().numpy()
    print(f"fit {fit:.1f} s; cap {math.exp(guided.log_cap):.3g}; {tries:.0f} tries per text of rejection")
    error, (gap, gap_error) = evaluations.std() / len(evaluations) ** 0.5, difference(*energies)
    print(f"evaluations per effective text {evaluations.mean():.2f} ± {error:.2f}, largest {evaluations.max():.0f}")
    print(f"success {satisfied[0].mean():.3f} / {satisfied[1].mean():.3f}, energy {gap:+.2f} ± {gap_error:.2f}")
    print(f"Kolmogorov–Smirnov p = {stats.ks_2samp(*energies).pvalue:.2f}")
    for name, seconds in cost.items():
        line = f"{name}: {1e3 * seconds:.2f} ms"
        if name != "guided":
            per_text, pilot = evaluations.mean() * cost["guided"], fit / options.texts
            line += f"; guided is {tries * seconds / per_text:.1f} times as fast, "
            line += f"{tries * seconds / (per_text + pilot):.1f} times with its pilot"
        print(line)


if __name__ == "__main__":
    main()
