"""The playground: trajectories of SVS among cells in the plane, and a comparison of samplers."""

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

Report = Callable[[dict[str, Any]], None]
"""Function that sends an event to the browser."""
POINTS_SECONDS = 0.15
"""Minimum time between two reports of points."""


def show_trajectories(form: Trajectories, report: Report) -> None:
    """Report trajectories of one chain of SVS. Each leg has its start, its ellipse and the event at its end."""
    problem, rng, sampler = bind(make_target(form)), Rng(form.seed, 1), make_svs(form)
    state = sampler.init(problem, rng, torch.tensor([[form.start]]))
    assert isinstance(state.space.flow, Rotation)
    sigma, origin = state.space.flow.sigma, state.space.cells.origin
    for _ in range(form.count):
        trajectory = sampler.trajectory(problem, copy.copy(rng), state)  # the trajectory of the next step
        legs = [_leg(leg, sigma, origin) for leg in segments(trajectory)]
        state, _ = sampler.step(problem, rng, state)
        report({"kind": "trajectory", "legs": legs, "cell": int(state.tokens)})


def _leg(leg: Segment, sigma: float, origin: Tensor) -> dict[str, Any]:
    """Parameters of the ellipse x = centre + a cos θ + b sin θ, the final angle and the event there."""
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


def race(form: Race, report: Report) -> None:
    """Report the divergence of several samplers from the distribution, and the noise floor of independent draws.

    The draws of the second half of the steps count; the first half is warm-up.
    """
    growth = 1.12  # of the number of steps between two reports of the divergence
    target = make_target(form)
    truth, rng = target.probabilities().numpy(), np.random.default_rng(form.seed)
    running = {
        name: start_chains(target, sampler, form.chains, form.seed, "random")
        for name, sampler in make_samplers(form).items()
    }
    seen = {name: np.zeros((form.steps + 1, len(truth)), dtype=np.int64) for name in running}
    last_points, next_divergence = monotonic(), 1.0
    for step in range(1, form.steps + 1):
        for name, chains in running.items():
            next(chains)
            drawn = np.bincount(chains.state.tokens[:, 0].numpy(), minlength=len(truth))
            seen[name][step] = seen[name][step - 1] + drawn
        if step >= next_divergence or step == form.steps:
            counts = np.stack([seen[name][step] - seen[name][step // 2] for name in running])
            js = dict(zip(running, jensen_shannon(counts, truth).tolist(), strict=True))
            shares = dict(zip(running, (counts / counts.sum(-1, keepdims=True)).tolist(), strict=True))
            draws = int(counts[0].sum())
            report({"kind": "divergence", "step": step, "js": js, "shares": shares, **_floor(rng, truth, draws)})
            next_divergence = max(step + 1, step * growth)
        if monotonic() - last_points > POINTS_SECONDS:
            last_points = monotonic()
            points = {name: _points(chains, target).tolist() for name, chains in running.items()}
            report({"kind": "points", "step": step, "steps": form.steps, "points": points})


def _floor(rng: np.random.Generator, truth: ndarray, draws: int) -> dict[str, float]:
    """Divergence of the same number of independent draws: mean and 97.5 % quantile of 200 sets."""
    js = jensen_shannon(rng.multinomial(draws, truth, size=200), truth)
    return {"draws": draws, "floor": float(js.mean()), "floor_high": float(np.quantile(js, 0.975))}


def _points(chains: Chains, target: CategoricalTarget) -> Tensor:
    """Positions of the first 32 chains; the embedding of the token for samplers without continuous state."""
    shown = 32
    state, x = chains.state, target.embeddings[chains.state.tokens[:shown, 0]]
    if hasattr(state, "point"):
        x = state.point.x[:shown, 0] + state.measure.cells.origin
    elif hasattr(state, "x"):
        x = state.x[:shown, 0] + state.space.cells.origin
    return (x * 1000).round() / 1000


def make_target(form: Scene) -> CategoricalTarget:
    """The distribution; guidance scales the slope of log p between neighbouring cells."""
    embeddings = torch.tensor(form.points, dtype=torch.float64)
    log_prob = torch.tensor(form.weights, dtype=torch.float64).log().log_softmax(0)
    return CategoricalTarget(embeddings, log_prob, gradient=form.guidance * slopes(embeddings, log_prob))


def make_svs(form: Scene) -> SVS:
    if form.walls == "open":
        return SVS(form.scale, turn=form.turn)
    return SVS(form.scale, walls="closed", masses="estimated" if form.walls == "closed" else "equal", turn=form.turn)


def make_samplers(form: Race) -> dict[str, Sampler]:
    """The samplers to compare, with constant step sizes."""
    discontinuity_step = 0.2  # α of the paper
    return {
        "svs": make_svs(form),
        "svs-paper": SVS.paper(form.step_size, discontinuity_step),
        "hmc": HMC(form.step_size),
        "langevin": Langevin(form.step_size, final_step_size=None),
        "mucola": MuCoLa(form.step_size, final_step_size=None),
    }
