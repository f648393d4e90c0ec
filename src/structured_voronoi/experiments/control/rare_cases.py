"""The cases of the experiment on rare controls, the budget of each method, and what the methods share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines.smc import Particles, resampled
from structured_voronoi.controls.labels import label
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.controls.texts import keyword, regex
from structured_voronoi.core.contracts import Control
from structured_voronoi.core.streams import Rng
from structured_voronoi.experiments.control.foods import three_controls
from structured_voronoi.experiments.control.guiding import satisfies_all
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.rejection import Rejection, Tries
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget

FOOD = "Italian"
"""Label of the classifier in every case that has one."""
Method = Literal["guided", "rejection", "svs+refresh", "smc", "bootstrap smc", "genlm-control", "fudge"]


@dataclass(frozen=True)
class Case:
    """The controls of one case."""

    kind: Literal["words", "pattern", "classifier", "black box", "three at once"]
    words: tuple[str, ...] = ()
    """Keywords; for a pattern, the regular expression; for a black box, words of which a text must contain three."""
    weight: float = 1.0
    """Weight γ of the classifier."""

    @property
    def name(self) -> str:
        if self.kind == "classifier":
            return f"food={FOOD}@{self.weight:g}"
        if self.kind == "three at once":
            return f"food={FOOD}@{self.weight:g}, {', '.join(self.words)}"
        return f"{'three of ' if self.kind == 'black box' else ''}{', '.join(self.words)}"

    def controls(self, guide: str) -> list[Control]:
        """The controls; ``guide`` is the classifier of food, by name or folder."""
        if self.kind == "words":
            return [keyword(word) for word in self.words]
        if self.kind == "pattern":
            return [regex(self.words[0])]
        if self.kind == "black box":
            return [Predicate(partial(_contains_three, self.words), self.name)]
        if self.kind == "classifier":
            return [label(guide, FOOD, weight=self.weight)]
        return three_controls(guide, self.words, FOOD, self.weight)


def _contains_three(words: tuple[str, ...], text: str) -> bool:
    return sum(word.lower() in text.lower() for word in words) >= 3


class Models(NamedTuple):
    """Names or folders of the models, from which a worker loads them."""

    model: str
    guide: str
    prefix: str | None
    """FUDGE's prefix classifier of food, if there is one."""

    def target(self, case: Case, length: int) -> ControlledTarget:
        return TextTarget(load(self.model), max_tokens=length).under(case.controls(self.guide))


@dataclass(frozen=True)
class Budget:
    """What each method may spend on a case."""

    length: int = 20
    pilot: int = 4096
    """Texts on which a lookahead is fitted."""
    pilot_spread: tuple[int, int] = (100, 1000)
    """Numbers of texts over which the seconds of a pilot are divided in reports."""
    weighted: int = 2048
    """Weighted guided texts, from which probability, effective share and reference energy are computed."""
    tries: int = 2048
    """Tries of rejection."""
    batch_size: int = 64
    """Tries of rejection drawn together."""
    min_accepted: int = 30
    """Accepted tries from which the cost of rejection is measured; with fewer it is extrapolated."""
    chains: int = 16
    """Chains of svs+refresh, and of guided in the race."""
    chain_seconds: float = 20.0
    """Seconds of svs+refresh; the first half is warm-up."""
    min_steps: int = 8
    """Steps of svs+refresh, however long they take."""
    min_chain_probability: float = 1e-3
    """Probability of the control below which svs+refresh is not run."""
    particles: int = 64
    systems: int = 16
    """Systems of particles."""
    slow_systems: int = 4
    """Systems of genlm-control, which is slower; FUDGE draws as many texts as these have particles."""
    threshold: float = 0.5
    """Effective share below which particles are resampled."""
    race_seconds: float = 90.0
    """Seconds of one core for each method in the race, including its pilot."""
    seed: int = 0


class Reference(NamedTuple):
    """Mean energy of the target, estimated from weighted texts, and its standard error."""

    energy: float
    error: float

    def gap(self, means: np.ndarray) -> tuple[float, float]:
        """Mean over independent parts of a run minus the reference, and its standard error."""
        if not len(means):
            return math.nan, math.nan
        error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return float(means.mean()) - self.energy, math.hypot(error, self.error)


def share_satisfied(
    target: ControlledTarget, tokens: Int[Tensor, "text n"], weight: Float[Tensor, " text"] | None = None
) -> float:
    """Share of texts, weighted if weights are given, to which every control gives a probability above ½."""
    met = satisfies_all(target, tokens).double()
    return float(met.mean() if weight is None else (weight * met).sum())


def count_distinct(tokens: Int[Tensor, "text n"]) -> int:
    return len(torch.unique(tokens, dim=0))


def draw_tries(problem: Problem, seed: int, batch: int, batch_size: int) -> Tries:
    """One batch of tries of rejection, each with its own random stream."""
    rng = Rng(seed, range(batch * batch_size, (batch + 1) * batch_size), "rare tries", problem.device)
    return Rejection().tries(problem, rng, torch.zeros_like(rng.chains))


def final_texts(
    particles: Particles, rng: Rng
) -> tuple[Int[Tensor, "system particle n"], Float[Tensor, "system particle"]]:
    """Resampled texts and energies of the systems with positive weights; ``rng`` has one stream per system."""
    alive = particles.log_z.isfinite()
    tokens, energy, log_weight = (part[alive] for part in particles)
    index = resampled(log_weight, rng.uniform()[alive])
    return tokens.gather(1, index[..., None].expand_as(tokens)), energy.gather(1, index)
