"""Sequential Monte Carlo against the enumerated truth: Z is unbiased, texts are exact in the limit only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import MIN_P_VALUE
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.reading import REST
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.metrics.divergence import pooled_chi_square
from structured_voronoi.problem.problem import bind

WORDS = (" cheap", " pub", " restaurant", " place", " and", " a")
SEED = 3


@dataclass(frozen=True, eq=False)
class WithoutLast(sv.baselines.SMC):
    """Broken twin: the weight is not divided by ψ_{n-1}."""

    def log_increment(self, log_expected: Tensor, log_value: Tensor) -> Tensor:
        return log_expected


def z_score(sampler: sv.baselines.SMC, target: Any, truth: float, systems: int) -> float:
    """Distance of the mean estimate of Z from the truth in standard errors."""
    z = sampler.run(target, sv.Rng(SEED, systems)).log_z.exp()
    return float((z.mean() - truth) / (z.std() / systems**0.5))


def texts_of(words: sv.TextTarget) -> Tensor:
    return torch.cartesian_prod(*[words.allowed.nonzero().squeeze(-1)] * words.length)


@pytest.mark.parametrize("particles", [2, 16])
@pytest.mark.parametrize("lookahead", ["trained", "random", "none"])
def test_z_is_unbiased_on_a_table(lookahead: str, particles: int) -> None:
    """Particles are resampled at every position; the twin fails at the same settings."""
    target = sv.verify.sentences(controlled=True)
    truth = float(target.log_prob(target.support()).exp().sum())
    made: Any = lookahead
    if lookahead == "trained":
        made = Lookahead.fit(target, texts=256)
    elif lookahead == "random":
        made = untrained(bind(target), {REST: "token"}, LookaheadSettings(delta=1.0), seed=SEED)
    assert abs(z_score(sv.baselines.SMC(made, particles, 1.0), target, truth, 4000)) < 4
    if made != "none":
        assert abs(z_score(WithoutLast(made, particles, 1.0), target, truth, 4000)) > 8


@pytest.mark.slow
def test_z_is_unbiased_on_texts() -> None:
    """The cache of the decoder follows its particles; the controls are two patterns and a black box."""
    model = sv.load("bundled")
    tokens = [model.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    words = sv.TextTarget(model, "The Old Mill is a", max_tokens=3, allowed=tokens)
    pubs = Predicate(lambda text: 0.9 if text.count("pub") == 2 else 0.1, "pubs")
    controls = [~sv.keyword("restaurant"), sv.regex("cheap|and a$"), pubs]
    target = words.under(controls)
    truth = float(target.log_prob(texts_of(words)).double().exp().sum())
    sizes = dict.fromkeys((control.name for control in controls), "hidden")
    lookaheads: list[Any] = [
        Lookahead.fit(target, texts=128),
        untrained(bind(target), sizes, LookaheadSettings(delta=1.0), seed=SEED),  # type: ignore[arg-type]
        "none",
    ]
    for lookahead in lookaheads:
        assert abs(z_score(sv.baselines.SMC(lookahead, 4, 1.0), target, truth, 1000)) < 4


def one_text_a_system(sampler: sv.baselines.SMC, target: Any, systems: int) -> np.ndarray:
    """Counts of every text from one chain of each system, so that draws are independent."""
    rng = sv.Rng(SEED, [system * sampler.particles + system % sampler.particles for system in range(systems)])
    state, _ = sampler.step(target, rng, sampler.init(target, rng, None))
    support = target.support()
    index = (state.tokens[:, None] == support).all(-1).int().argmax(-1)
    return np.bincount(index.numpy(), minlength=len(support))


@pytest.mark.parametrize("lookahead", ["random", "none"])
def test_texts_are_exact_in_the_limit_of_many_particles(lookahead: str) -> None:
    """Draws of 2,000 systems agree with the truth for 512 particles and not for 2."""
    target = sv.verify.sentences(controlled=True)
    made: Any = (
        untrained(bind(target), {REST: "token"}, LookaheadSettings(delta=1.0), seed=SEED)
        if lookahead == "random"
        else "none"
    )
    truth = target.probabilities().numpy()
    many, few = (
        pooled_chi_square(one_text_a_system(sv.baselines.SMC(made, particles), target, 2000), truth)
        for particles in (512, 2)
    )
    assert many >= MIN_P_VALUE
    assert few < MIN_P_VALUE
