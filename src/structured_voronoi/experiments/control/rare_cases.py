"""Controls from common to very rare, and what is asked of every method that draws texts under them."""

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
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.rejection import Rejection, Tries
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget

FOOD = "Italian"
GUIDED, REJECTION, CHAINS, SMC, BOOTSTRAP, FUDGE = "guided", "rejection", "svs+refresh", "smc", "bootstrap smc", "fudge"
GENLM = "genlm-control"
WAVE = 64
"""Tries of rejection that are drawn at a time."""


@dataclass(frozen=True)
class Case:
    """What is asked of a text."""

    kind: Literal["words", "pattern", "classifier", "black box", "three at once"]
    words: tuple[str, ...] = ()
    """Words that must be there; of a pattern, the regular expression; of a black box, words of which three must be."""
    weight: float = 1.0
    """γ of the classifier."""

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
            return [Predicate(partial(_holds_three, self.words), self.name)]
        food: list[Control] = [label(guide, FOOD, weight=self.weight)]
        if self.kind == "classifier":
            return food
        first, second = self.words
        return [*food, keyword(first), regex(rf"(?i)\b{second}\b")]


def _holds_three(words: tuple[str, ...], text: str) -> bool:
    return sum(word.lower() in text.lower() for word in words) >= 3


class Models(NamedTuple):
    """Where the models are: what a process of its own needs."""

    model: str
    guide: str
    prefix: str | None
    """FUDGE's predictor of food, if there is one."""

    def target(self, case: Case, length: int) -> ControlledTarget:
        return TextTarget(load(self.model), max_tokens=length).under(case.controls(self.guide))


@dataclass(frozen=True)
class Budget:
    """What every method may spend on a case."""

    length: int = 20
    pilot: int = 4096
    """Texts that a lookahead learns from."""
    weighted: int = 2048
    """Guided texts that are weighted: the probability, the effective share and the truth of the energy."""
    tries: int = 2048
    """Of rejection."""
    chains: int = 16
    """Of svs+refresh, and of guided in the race."""
    chain_seconds: float = 20.0
    """Of svs+refresh, whose first half counts as warm-up."""
    chain_rate: float = 1e-3
    """Base rate below which svs+refresh is left out."""
    particles: int = 64
    systems: int = 16
    """Of particles."""
    slow_systems: int = 4
    """The same of genlm-control, and of FUDGE as many texts as these have particles: both are slower."""
    threshold: float = 0.5
    """Effective share below which particles are resampled."""
    race_seconds: float = 90.0
    """Time of one core that each method has in the race, its pilot included."""
    seed: int = 0


class Truth(NamedTuple):
    """The mean energy of the target, from weighted texts, and its standard error."""

    energy: float
    error: float

    def gap(self, means: np.ndarray) -> tuple[float, float]:
        """How far the mean of independent parts of a run lies from the truth, and the standard error of that."""
        if not len(means):
            return math.nan, math.nan
        error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return float(means.mean()) - self.energy, math.hypot(error, self.error)


def share_satisfied(
    target: ControlledTarget, tokens: Int[Tensor, "text n"], weight: Float[Tensor, " text"] | None = None
) -> float:
    """The share of texts, by weight if they have any, to which every control gives more than ½."""
    scores = target.control_log_probs(tokens)
    met = torch.stack([score.double().exp() > 0.5 for score in scores.values()]).all(0).double()
    return float(met.mean() if weight is None else (weight * met).sum())


def count_distinct(tokens: Int[Tensor, "text n"]) -> int:
    return len(torch.unique(tokens, dim=0))


def draw_tries(problem: Problem, seed: int, wave: int) -> Tries:
    """So many tries of rejection, each of a stream of its own."""
    rng = Rng(seed, range(wave * WAVE, (wave + 1) * WAVE), "rare tries", problem.device)
    return Rejection().tries(problem, rng, torch.zeros_like(rng.chains))


def last_texts(found: Particles, rng: Rng) -> tuple[Int[Tensor, "system particle n"], Float[Tensor, "system particle"]]:
    """The unweighted texts of the systems that have any, and their energies; ``rng`` has a stream a system."""
    alive = found.log_z.isfinite()
    tokens, energy, log_weight = (part[alive] for part in found)
    index = resampled(log_weight, rng.uniform()[alive])
    return tokens.gather(1, index[..., None].expand_as(tokens)), energy.gather(1, index)
