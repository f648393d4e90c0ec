"""The trajectory of one chain as a list of segments between events, for pictures of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from structured_voronoi.geometry.flows import Particle
from structured_voronoi.geometry.motion import Motion, Trajectory

Event = Literal["refraction", "reflection", "passage", "end"]
"""The token changes, the point is reflected, nothing changes, or the time is over."""


class Segment(NamedTuple):
    """The part of a trajectory up to its next event."""

    begin: Particle
    time: float
    """Its duration."""
    meets: Event
    """The event at its end."""
    wall: int
    """The cell on the other side of the bisector at its end; -1 for a side of the box or none."""


def segments(trajectory: Trajectory) -> Iterator[Segment]:
    """The segments of a single chain's trajectory, in order, as `simulate` follows them.

    A trajectory with more than ``max_events`` events stops at the last of them.
    """
    motion, rows = Motion(trajectory, None), torch.zeros_like(trajectory.start.cell[:, 0])
    begin, remaining = trajectory.start, trajectory.duration
    while len(rows):
        hit = motion.next_crossing(rows)
        time = hit.time.minimum(motion.remaining)  # from the beginning of the current arc
        x, r = motion.flow.advance(motion.p, time)
        left, counts = motion.remaining - time, motion.counts.clone()
        rows = motion.advance(rows)
        if int(motion.met) > trajectory.max_events:
            return
        if not len(rows):
            yield Segment(begin, float(remaining), "end", -1)
            return
        _, _, crossings, reflections, _ = (motion.counts - counts)[0].tolist()
        meets: Event = "refraction" if crossings else "reflection" if reflections else "passage"
        yield Segment(begin, float(remaining - left), meets, max(int(hit.cell), -1))
        now = motion.p._replace(x=x, r=r) if meets == "passage" else motion.p
        begin, remaining = Particle(*(part.clone() for part in now)), left
