"""What a step of a sampler reports."""

from __future__ import annotations

from bisect import bisect
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Info(NamedTuple):
    """Statistics of one step of every chain.

    Over the steps of one thinned draw counts are added, flags are combined by "or", and fields that describe the state
    are those of the last step.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target, sampler, rng = sv.PottsTarget(side=2), sv.PNCG(step_size=1.0), sv.Rng(seed=0, chains=3)
    >>> state, info = sampler.step(target, rng, sampler.init(target, rng, None))
    >>> info.evaluations.shape, info.energy.shape
    (torch.Size([3]), torch.Size([3]))
    """

    energy: Float[Tensor, " chain"]
    """-log p(m) of the state after the step."""
    evaluations: Int[Tensor, " chain"]
    """Evaluations of the target at states other than the current one."""
    gradients: Int[Tensor, " chain"]
    """Evaluations that also computed a steering field."""
    events: Int[Tensor, " chain"]
    """Proposals: walls or gates for SVS, proposed changes of cell for other samplers."""
    swaps: Int[Tensor, " chain"]
    """Positions whose token changed."""
    reflections: Int[Tensor, " chain"]
    """Reflections at walls, including the box."""
    diverging: Bool[Tensor, " chain"]
    """Whether the trajectory had too many events; the chain did not move then."""
    nonfinite: Int[Tensor, " chain"]
    """Proposals without a finite energy, which are rejected."""
    crossings: Int[Tensor, " chain"] | None = None
    """SVS: crossings that changed the token, including those that were reversed."""
    log_mass: Float[Tensor, " chain"] | None = None
    """Closed cells: log of the estimated mass of the current cell."""
    unreliable: Bool[Tensor, " chain"] | None = None
    """Closed cells: whether that mass is estimated from fewer than 50 counts at some position."""
    redraws: Int[Tensor, " chain"] | None = None
    """Refresh: proposed blocks."""
    refreshed: Int[Tensor, " chain"] | None = None
    """Refresh: accepted blocks."""
    redraws_by_length: Int[Tensor, "chain length"] | None = None
    """Refresh: proposed blocks by length, in the classes of REDRAW_LENGTHS."""
    refreshed_by_length: Int[Tensor, "chain length"] | None = None
    """Refresh: accepted blocks by length."""
    log_weights: Float[Tensor, "chain choice fresh"] | None = None
    """Guided: log importance weights of the fresh texts of every choice in the last step."""


STATE_FIELDS = ("energy", "log_mass", "unreliable", "log_weights")
"""Fields that describe the state after a step and are not added over steps."""
REDRAW_LENGTHS = (1, 2, 4, 8, 16, 32)
"""Smallest block of each length class: one token, two or three, four to seven, …, 32 and more."""


def blank_info(energy: Float[Tensor, " chain"]) -> Info:
    """Return the report of a step without events."""
    zero = torch.zeros(len(energy), dtype=torch.int64, device=energy.device)
    return Info(energy, zero, zero, zero, zero, zero, zero.bool(), zero)


def count_redraws(accepted: Bool[Tensor, " chain"], length: int) -> dict[str, Tensor]:
    """Return the fields about one redraw of a block of this length in each chain."""
    by_length = torch.zeros(len(accepted), len(REDRAW_LENGTHS), dtype=torch.int64, device=accepted.device)
    by_length[:, bisect(REDRAW_LENGTHS, length) - 1] = 1
    return {
        "redraws": torch.ones_like(accepted, dtype=torch.int64),
        "refreshed": accepted.long(),
        "redraws_by_length": by_length,
        "refreshed_by_length": by_length * accepted[:, None],
    }


def merge_infos(earlier: Info, later: Info) -> Info:
    """Return the report of two consecutive steps."""
    merged = {}
    for name, value in later._asdict().items():
        before = getattr(earlier, name)
        if name in STATE_FIELDS or before is None or value is None:
            merged[name] = before if value is None else value
        else:
            merged[name] = before | value if value.dtype == torch.bool else before + value
    return type(later)(**merged)


def restored_info(fields: dict[str, Any]) -> Any:
    """Return a report from the fields in a checkpoint; a sampler may define its own Info."""
    return namedtuple("Restored", fields)(**fields)
