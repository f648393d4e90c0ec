"""How long guided chains have to be.

A chain chooses among K texts, K - 1 of them fresh, by their weights. One that holds a text of weight w stays there with
probability r(w) = E[w / (w + S)], S being the sum of K - 1 weights of proposals. What is left slowly is reached slowly:
after t choices, the first text included, the share r(w)^t of what the target gives to this text is still missing.
Averaged over the target that is the share of texts that depend on their start. Heavy weights, texts that the lookahead
hardly ever proposes, decide it; the effective share does not show them.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from jaxtyping import Float
from numpy import ndarray

LEFTOVER = 0.003
"""The share of guided texts that may still depend on their start, by the weights of proposals. By texts of the model,
which show heavier weights, it was up to three times as much (docs/results/lookahead.md)."""
TRIES = (2, 4, 8)
"""Among how many texts guided chains may choose. Few are best, unless nearly all weights are alike: what counts is how
many fresh texts there are in all."""
LEAST_CHOICES, MOST_DRAWN = 3, 6400
"""How often a guided text is chosen at least, the start included; and how many texts are drawn for it at most."""
BEST = 11
"""Texts that a guided one costs if all weights are equal."""
SUMS, GRID = 4096, 128
"""Sums of weights by which r(w) is computed, at most, and at how many w it is; it is interpolated between them."""


def leftover(log_weight: Float[ndarray, " text"], tries: int, choices: int) -> float:
    """The share of chains that depend on their start after so many choices, by the weights of some proposals."""
    weight, stays = _staying(log_weight, tries)
    return _missing(weight, stays, choices)


def guided_moves(log_weight: Float[ndarray, " text"]) -> tuple[int, int]:
    """Among how many texts a guided chain chooses, K, and how often it does so, t, the start included: what leaves so
    few chains depending on their start with the fewest texts drawn. The most that is tried, where nothing does.
    """
    found = [(tries, _fewest_choices(log_weight, tries)) for tries in TRIES]
    return min(found, key=lambda pair: texts_drawn(*pair))


def texts_drawn(tries: int, choices: int) -> int:
    """Texts that are drawn for one that is chosen so often: K for the start, then a suffix and fresh ones."""
    return tries + 1 + (choices - 1) * (tries - 1)


def _fewest_choices(log_weight: Float[ndarray, " text"], tries: int) -> int:
    """Choices that leave little enough, or as many as may be drawn for."""
    weight, stays = _staying(log_weight, tries)
    enough = range(LEAST_CHOICES, MOST_DRAWN // (tries - 1))
    place = bisect_left(enough, -LEFTOVER, key=lambda choices: -_missing(weight, stays, choices))
    return enough[min(place, len(enough) - 1)]


def _missing(weight: Float[ndarray, " some"], stays: Float[ndarray, " some"], choices: int) -> float:
    return float((weight * stays**choices).sum()) if len(weight) else 1.0


def _staying(
    log_weight: Float[ndarray, " text"], tries: int
) -> tuple[Float[ndarray, " some"], Float[ndarray, " some"]]:
    """The target's share of every text that it allows, and the probability to stay there in a choice."""
    if not np.isfinite(log_weight).any():
        return np.zeros(0), np.zeros(0)
    weight = np.exp(log_weight - log_weight.max())
    sums = np.sum([np.roll(weight, shift) for shift in range(tries - 1)], axis=0) + np.zeros_like(weight)
    sums, weight = sums[:: -(-len(sums) // SUMS)], weight[weight > 0]
    grid = np.geomspace(weight.min(), weight.max(), GRID)
    at_grid = (grid[:, None] / (grid[:, None] + sums)).mean(-1)
    return weight / weight.sum(), np.interp(np.log(weight), np.log(grid), at_grid)
