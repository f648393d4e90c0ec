"""The tries of each proposal: which are accepted, at what cost, and what they say about the probability."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from structured_voronoi.engine.tries import Tries
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.metrics import weights

MIN_OWN_TRIES = 256
"""Tries of a prompt from which its own caps are computed; with fewer, those of all prompts are pooled."""


@dataclass
class Proposal:
    """A proposal and its tries so far, prompt by prompt."""

    lookahead: Lookahead
    max_weight: float
    """No weight exceeds it: 1 for the model itself."""
    label: str
    batches: dict[int, list[Tries]] = field(default_factory=dict)
    caps: dict[int, Float[ndarray, " try"]] = field(default_factory=dict)
    released_cap: dict[int, float] = field(default_factory=dict)
    """The smallest cap at which texts were released while tries were still being drawn."""
    error_bound: dict[int, float] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return not self.lookahead.learned

    def add(self, prompt: int, batch: Tries) -> None:
        self.batches.setdefault(prompt, []).append(batch)

    def tries(self, prompt: int) -> Tries:
        """All tries of a prompt."""
        joined = Tries.joined(self.batches[prompt])
        self.batches[prompt] = [joined]
        return joined

    def count(self, prompt: int | None = None) -> int:
        prompts = self.batches if prompt is None else [prompt]
        return sum(len(batch.number) for one in prompts for batch in self.batches.get(one, []))

    def weight(self, prompt: int | None = None) -> Float[ndarray, " try"]:
        """The weights of a prompt, or of all prompts."""
        prompts = sorted(self.batches) if prompt is None else [prompt]
        parts = [batch.weight for one in prompts for batch in self.batches.get(one, [])]
        return np.concatenate(parts) if parts else np.zeros(0)

    def find_caps(self, tolerance: float) -> None:
        """Compute the caps of all tries from the weights of the others."""
        pooled: weights.Caps | None = None
        begin = 0
        for prompt in sorted(self.batches):
            own = self.weight(prompt)
            if self.is_plain:
                self.caps[prompt], self.error_bound[prompt] = np.ones(len(own)), 0.0
                continue
            if len(own) >= MIN_OWN_TRIES or len(self.batches) == 1:
                caps = weights.find_caps(own, tolerance, self.max_weight, self.released_cap.get(prompt, math.inf))
                self.caps[prompt], self.error_bound[prompt] = caps
            else:
                smallest = min(self.released_cap.values(), default=math.inf)
                pooled = pooled or weights.find_caps(self.weight(), tolerance, self.max_weight, smallest)
                self.caps[prompt] = pooled.cap[begin : begin + len(own)]
                self.error_bound[prompt] = pooled.error_bound
            begin += len(own)

    def accepted(self, prompt: int, margin: float = 1.0) -> Bool[ndarray, " try"]:
        """The tries of a prompt that are accepted, also if caps were ``margin`` times as large."""
        if prompt not in self.batches:
            return np.zeros(0, dtype=bool)
        tries = self.tries(prompt)
        cap = np.ones(len(tries.number)) if self.is_plain else np.minimum(margin * self.caps[prompt], self.max_weight)
        return weights.is_accepted(tries.weight, tries.level.numpy(), cap)

    def acceptance_rate(self) -> float:
        """The mean probability of acceptance over all tries; 0 where no try has a weight."""
        if self.is_plain:
            weight = self.weight()
            return float(weight.mean()) if len(weight) else 0.0
        chances = [np.minimum(1.0, self.weight(prompt) / self.caps[prompt]) for prompt in sorted(self.batches)]
        return float(np.concatenate(chances).mean()) if chances else 0.0
