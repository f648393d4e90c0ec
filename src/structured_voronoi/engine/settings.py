"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from structured_voronoi.lookahead.settings import LookaheadSettings


@dataclass(frozen=True)
class EngineSettings:
    """How tries are divided into rounds, and when the proposal learns."""

    learns: bool = True
    """False for plain rejection."""
    first_round: int = 64
    """Largest number of tries in the first round."""
    max_round: int = 4096
    """Largest number of tries in a round."""
    batch_rows: int = 256
    """Largest number of tries that are drawn together."""
    min_learning_tries: int = 256
    """Tries without which nothing is learnt; more if many texts are wanted, because a better proposal pays then."""
    max_learning_tries: int = 2048
    """Tries that are recorded for learning."""
    max_learnings: int = 4
    """How often the proposal learns."""
    plain_share: float = 0.05
    """Share of tries that a learnt proposal takes from the model itself, so that no weight exceeds its inverse."""
    release_margin: float = 2.0
    """A text of a learnt proposal is released early if a cap this many times larger would still accept it."""
    max_fruitless_tries: int = 10_000
    """Give up after this many tries if none satisfied the controls."""
    target_relative_error: float = 0.1
    """The estimate of a probability is finished when it is reliable and its relative standard error is below this."""
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
