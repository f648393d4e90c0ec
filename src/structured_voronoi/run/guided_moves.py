"""How long guided chains have to be.

A chain chooses among K texts, K - 1 of them fresh, by their weights w; in units of their mean, K - 1 fresh texts weigh
K - 1 together. So a chain that holds a text of weight w leaves it with probability of about (K - 1) / (w + K - 1). What
leaves slowly is reached slowly: after t choices, the first text included, the share (w / (w + K - 1))^t of what the
target gives to this text is still missing. Averaged over the target that is the share of texts that depend on their
start. Heavy weights, texts that the lookahead hardly ever proposes, decide it; the effective share does not show them.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from jaxtyping import Float
from numpy import ndarray

LEFTOVER = 0.003
"""The share of guided texts that may still depend on their start, by the weights of proposals. By texts of the model,
which show heavier weights, it was up to three times as much (docs/results/lookahead.md)."""
LEAST_CHOICES, MOST_CHOICES, MOST_TRIES = 3, 100, 64
"""How often a guided text is chosen: at the start, in a step of warm-up and in the last step, or more often; and among
how many at most."""
CALL = 2
"""What choosing once more costs besides, in texts: one more pass from the first token to the last."""
BEST = 21
"""Texts that a guided one costs if all weights are equal."""


def leftover(log_weight: Float[ndarray, " text"], tries: int, choices: int) -> float:
    """The share of chains that depend on their start after so many choices, by the weights of some proposals."""
    if not np.isfinite(log_weight).any():
        return 1.0
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.mean()
    return float((weight * (weight / (weight + tries - 1)) ** choices).mean())


def guided_moves(log_weight: Float[ndarray, " text"]) -> tuple[int, int]:
    """Among how many texts a guided chain chooses, K, and how often it does so, t: what leaves so few chains depending
    on their start at the least cost, (K + CALL) t. The most that is tried, where nothing leaves so little.
    """
    found = {}
    for choices in range(LEAST_CHOICES, MOST_CHOICES + 1):
        if leftover(log_weight, MOST_TRIES, choices) <= LEFTOVER:
            found[choices] = _fewest_tries(log_weight, choices)
    if not found:
        return MOST_TRIES, MOST_CHOICES
    choices = min(found, key=lambda choices: (found[choices] + CALL) * choices)
    return found[choices], choices


def _fewest_tries(log_weight: Float[ndarray, " text"], choices: int) -> int:
    enough = range(2, MOST_TRIES + 1)
    return enough[bisect_left(enough, -LEFTOVER, key=lambda tries: -leftover(log_weight, tries, choices))]
