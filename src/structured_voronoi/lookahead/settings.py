"""Settings of lookaheads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from structured_voronoi.lookahead.heads import Head, PatternHead


@dataclass(frozen=True)
class LookaheadSettings:
    """How a lookahead is trained and how far its proposals follow it."""

    delta: float = 0.1
    """Weight of the plain model in the distribution of every token."""
    pattern_power: float = 0.8
    """Exponent of the values of heads for compiled patterns."""
    learnt_power: float = 0.8
    """Exponent of the values of heads that learn from the scores of whole texts."""
    steps: int = 300
    """Training steps of each size of a head; fewer where there are few texts."""
    batch: int = 512
    """Prefixes in a training step."""
    learning_rate: float = 6e-4
    weight_decay: float = 0.1
    max_epochs: int = 40
    """Upper limit on the passes through the training texts."""
    held_out: float = 0.25
    """Share of the texts by which the size of a head is chosen."""
    return_passes: int = 4
    """How often heads with memory recompute their labels."""
    path_share: float = 0.8
    """Share of a text's own path in the labels of later learning."""
    min_hits: int = 8
    """Satisfying texts without which nothing is learnt about a control that is not a pattern."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def power_of(self, head: Head) -> float:
        """The exponent of a head's values."""
        return self.pattern_power if isinstance(head, PatternHead) else self.learnt_power
