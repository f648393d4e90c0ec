"""Deliberately broken twins of SVS: a check that does not catch them proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from structured_voronoi.base import Rng
from structured_voronoi.geometry import motion
from structured_voronoi.geometry.motion import Walls
from structured_voronoi.samplers.svs import SVS


@dataclass(frozen=True)
class OutwardOnly(SVS):
    """Gates that work in one direction only: not reversible."""

    @property
    def _walls(self) -> Walls:
        return Walls(inward=False, reflect=False)


@dataclass(frozen=True)
class ColdMomentum(SVS):
    """r ~ N(0, εI) with ε = 0.5, as the paper's algorithm prints it, though the kinetic energy is ½‖r‖²."""

    def _momentum(self, rng: Rng, like: Tensor) -> Tensor:
        return super()._momentum(rng, like).mul(0.5**0.5)


@contextlib.contextmanager
def divided_by_square() -> Iterator[None]:
    """Refraction as the paper prints it: r⊥ √(‖r⊥‖² - 2ΔU) / ‖r⊥‖², which does not keep the energy."""
    right = motion.refracted

    def as_printed(speed: Tensor, jump: Tensor) -> Tensor:
        return right(speed, jump) / speed.abs().clamp(min=torch.finfo(speed.dtype).tiny)

    motion.refracted = as_printed
    try:
        yield
    finally:
        motion.refracted = right
