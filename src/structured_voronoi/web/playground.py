"""The playground: tokens in the plane, trajectories of SVS among their cells, and samplers side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from structured_voronoi.baselines.hmc import HMC
from structured_voronoi.baselines.langevin import Langevin
from structured_voronoi.baselines.mucola import MuCoLa
from structured_voronoi.core.contracts import Chains, Sampler
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.geometry.flows import Rotation
from structured_voronoi.geometry.segments import Segment, segments
from structured_voronoi.metrics.divergence import jensen_shannon
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.categorical import CategoricalTarget, slopes
from structured_voronoi.web.forms import Race, Scene, Trajectories

Say = Callable[[dict[str, Any]], None]
"""Takes what the browser is told."""
DISCONTINUITY_STEP = 0.2
"""α of the paper's SVS."""
SHOWN = 32
"""Chains whose points are shown."""
INDEPENDENT_SETS = 200
"""Sets of independent draws by which the noise floor is known."""
GROWTH = 1.12
"""The divergence is told after so many times more steps than the last time, the points every so many seconds."""
SECONDS = 0.15


def show_trajectories(form: Trajectories, say: Say) -> None:
    """Trajectories of one chain of SVS, leg by leg: where each begins, how it turns, and what it meets."""
    problem, rng, sampler = bind(make_target(form)), Rng(form.seed, 1), make_svs(form)
    state = sampler.init(problem, rng, torch.tensor([[form.start]]))
    assert isinstance(state.space.flow, Rotation)
    sigma, origin = state.space.flow.sigma, state.space.cells.origin
    for _ in range(form.count):
        trajectory = sampler.trajectory(problem, copy.copy(rng), state)  # the one that the step is going to take
        told = [_tell(leg, sigma, origin) for leg in segments(trajectory)]
        state, _ = sampler.step(problem, rng, state)
        say({"kind": "trajectory", "legs": told, "cell": int(state.tokens)})


def _tell(leg: Segment, sigma: float, origin: Tensor) -> dict[str, Any]:
    """The circle's centre, the way from it to the point and what it turns towards: x = c + a cos θ + b sin θ."""
    begin = leg.begin
    return {
        "cell": int(begin.cell),
        "centre": (begin.centre + origin).flatten().tolist(),
        "a": (begin.x - begin.centre).flatten().tolist(),
        "b": (sigma * begin.r).flatten().tolist(),
        "angle": leg.time,
        "meets": leg.meets,
        "wall": leg.wall,
    }


def race(form: Race, say: Say) -> None:
    """Samplers side by side: how far the draws of each are from the truth, and how far independent ones would be.

    Counted are the draws of the latter half of the steps, so that the way from the start is forgotten.
    """
    target = make_target(form)
    truth, rng = target.probabilities().numpy(), np.random.default_rng(form.seed)
    running = {
        name: start_chains(target, sampler, form.chains, form.seed, "random")
        for name, sampler in make_samplers(form).items()
    }
    seen = {name: np.zeros((form.steps + 1, len(truth)), dtype=np.int64) for name in running}
    told, next_report = monotonic(), 1.0
    for step in range(1, form.steps + 1):
        for name, chains in running.items():
            next(chains)
            drawn = np.bincount(chains.state.tokens[:, 0].numpy(), minlength=len(truth))
            seen[name][step] = seen[name][step - 1] + drawn
        if step >= next_report or step == form.steps:
            counts = np.stack([seen[name][step] - seen[name][step // 2] for name in running])
            report = dict(zip(running, jensen_shannon(counts, truth).tolist(), strict=True))
            shares = dict(zip(running, (counts / counts.sum(-1, keepdims=True)).tolist(), strict=True))
            draws = int(counts[0].sum())
            say({"kind": "divergence", "step": step, "js": report, "shares": shares, **_floor(rng, truth, draws)})
            next_report = max(step + 1, step * GROWTH)
        if monotonic() - told > SECONDS:
            told = monotonic()
            points = {name: _points(chains, target).tolist() for name, chains in running.items()}
            say({"kind": "points", "step": step, "steps": form.steps, "points": points})


def _floor(rng: np.random.Generator, truth: ndarray, draws: int) -> dict[str, float]:
    """The divergence of as many independent draws: its mean, and what one set in forty exceeds."""
    js = jensen_shannon(rng.multinomial(draws, truth, size=INDEPENDENT_SETS), truth)
    return {"draws": draws, "floor": float(js.mean()), "floor_high": float(np.quantile(js, 0.975))}


def _points(chains: Chains, target: CategoricalTarget) -> Tensor:
    """Where the first chains are: a sampler without a point is at the embedding of its token."""
    state, x = chains.state, target.embeddings[chains.state.tokens[:SHOWN, 0]]
    if hasattr(state, "point"):
        x = state.point.x[:SHOWN, 0] + state.measure.cells.origin
    elif hasattr(state, "x"):
        x = state.x[:SHOWN, 0] + state.space.cells.origin
    return (x * 1000).round() / 1000


def make_target(form: Scene) -> CategoricalTarget:
    """The distribution; where there is guidance, the slope of log p among neighbours steers."""
    embeddings = torch.tensor(form.points, dtype=torch.float64)
    log_prob = torch.tensor(form.weights, dtype=torch.float64).log().log_softmax(0)
    return CategoricalTarget(embeddings, log_prob, gradient=form.guidance * slopes(embeddings, log_prob))


def make_svs(form: Scene) -> SVS:
    if form.walls == "open":
        return SVS(form.scale, turn=form.turn)
    return SVS(form.scale, walls="closed", masses="estimated" if form.walls == "closed" else "equal", turn=form.turn)


def make_samplers(form: Race) -> dict[str, Sampler]:
    """Those that are compared; step sizes stay as they are, so that a bias stays, too."""
    return {
        "svs": make_svs(form),
        "svs-paper": SVS.paper(form.step_size, DISCONTINUITY_STEP),
        "hmc": HMC(form.step_size),
        "langevin": Langevin(form.step_size, final_step_size=None),
        "mucola": MuCoLa(form.step_size, final_step_size=None),
    }
