"""The choice of `auto`: the exact sampler that costs fewest evaluations of the language model a text."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from structured_voronoi.base import Rng, Target
from structured_voronoi.catalogue import TEXT_SCALE
from structured_voronoi.samplers.choices import text_sampler
from structured_voronoi.samplers.evaluation import NoStartError
from structured_voronoi.samplers.rejection import NoBoundError, acceptance

PILOT_TRIES, PILOT_CHAINS, PILOT_STEPS = 128, 8, 2


class Choice(NamedTuple):
    name: str
    """As `text_sampler` knows it."""
    reason: str
    """One sentence with the numbers."""


def choose(target: Target, seed: int, steps: int, scale: float | Literal["auto"] = TEXT_SCALE) -> Choice:
    """Ancestral where it is the truth; else rejection or ``steps`` steps of svs+refresh, whichever is cheaper."""
    if getattr(target, "normalised", True):
        return Choice("ancestral", "ancestral, because nothing weighs on the language model's own draws")
    try:
        share = acceptance(target, seed, PILOT_TRIES)
    except NoBoundError as error:
        return Choice("svs+refresh", f"svs+refresh, because {str(error).split(';')[0]}")
    tries = 1 / share if share > 0 else math.inf
    cost = steps * chain_cost(target, seed, scale)
    if math.isinf(cost):
        return Choice("rejection", f"rejection ({_said(tries)}), because no start for svs+refresh was found")
    costs = f"rejection needs {_said(tries)}, {steps} steps of svs+refresh {_said(cost)}"
    name = "rejection" if tries <= cost else "svs+refresh"
    return Choice(name, f"{name}, by the evaluations a text costs in a pilot: {costs}")


def chain_cost(target: Target, seed: int, scale: float | Literal["auto"] = TEXT_SCALE) -> float:
    """Evaluations of a chain in one step of svs+refresh; infinite where no chain can be started."""
    sampler = text_sampler("svs+refresh", scale, target.embeddings.shape[1])
    rng = Rng(seed, PILOT_CHAINS, "choice", target.embeddings.device)
    try:
        state = sampler.init(target, rng, None)
    except NoStartError:
        return math.inf
    evaluations = 0
    for _ in range(PILOT_STEPS):
        state, info = sampler.step(target, rng, state)
        evaluations += int(info.evaluations.sum())
    return evaluations / PILOT_CHAINS / PILOT_STEPS


def _said(evaluations: float) -> str:
    if math.isinf(evaluations):
        return f"none of {PILOT_TRIES} tries possible"
    return f"about {evaluations:.3g}"
