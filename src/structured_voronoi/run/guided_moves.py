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

from structured_voronoi.samplers.guided import START_TRIES

LEFTOVER = 0.003
"""The share of guided texts that may still depend on their start, by the weights of proposals. By texts of the model,
which show heavier weights, it was up to three times as much (docs/results/lookahead.md)."""
TRIES = 2
"""Among how many texts guided chains choose: with more, each fresh one counts for less, and all are drawn together."""
LEAST_CHOICES, MOST_CHOICES = 3, 6400
"""How often a guided text is chosen, the start included."""
BEST = 17
"""Texts that a guided one costs if all weights are equal."""
SUMS, GRID, LIGHT = 4096, 128, 1e-12
"""Sums of weights by which r(w) is computed, at most; at how many w it is, between which it is interpolated; and the
least of these, in units of the largest."""


def leftover(log_weight: Float[ndarray, " text"], tries: int, choices: int) -> float:
    """The share of chains that depend on their start after so many choices, by the weights of some proposals."""
    return _missing(*_staying(log_weight, tries), choices)


def guided_choices(log_weight: Float[ndarray, " text"]) -> int:
    """How often a guided chain has to choose, the start included: what leaves so few chains depending on their start,
    or the most that is tried."""
    weight, stays = _staying(log_weight, TRIES)
    enough = range(LEAST_CHOICES, MOST_CHOICES + 1)
    place = bisect_left(enough, -LEFTOVER, key=lambda choices: -_missing(weight, stays, choices))
    return enough[min(place, len(enough) - 1)]


def texts_drawn(choices: int) -> int:
    """Texts that are drawn for one that is chosen so often: for its start, then a suffix and fresh ones."""
    return START_TRIES + 1 + (choices - 1) * (TRIES - 1)


def _missing(weight: Float[ndarray, " some"], stays: Float[ndarray, " some"], choices: int) -> float:
    return float((weight * stays**choices).sum()) if len(weight) else 1.0


def _staying(
    log_weight: Float[ndarray, " text"], tries: int
) -> tuple[Float[ndarray, " some"], Float[ndarray, " some"]]:
    """The target's share of every text that it allows, and the probability to stay there in a choice."""
    if not np.isfinite(log_weight).any():
        return np.zeros(0), np.zeros(0)
    weight = np.exp(log_weight - log_weight.max())
    first = np.arange(0, len(weight), -(-len(weight) // SUMS))
    sums = np.zeros(len(first))
    for place in range(tries - 1):
        sums += weight[(first + place) % len(weight)]
    weight = weight[weight > 0]
    grid = np.geomspace(LIGHT, 1.0, GRID)
    at_grid = (grid[:, None] / (grid[:, None] + sums)).mean(-1)
    return weight / weight.sum(), np.interp(np.log(weight), np.log(grid), at_grid)
