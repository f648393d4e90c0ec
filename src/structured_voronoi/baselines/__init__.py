"""Samplers to compare with, which are not exact or slower: `sv.baselines`.

>>> import structured_voronoi as sv
>>> sv.baselines.HMC(step_size=0.5).leapfrog_steps
1
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structured_voronoi.baselines.cold import COLD as COLD
    from structured_voronoi.baselines.fudge import Fudge as Fudge
    from structured_voronoi.baselines.hmc import HMC as HMC
    from structured_voronoi.baselines.langevin import Langevin as Langevin
    from structured_voronoi.baselines.mucola import MuCoLa as MuCoLa
    from structured_voronoi.baselines.smc import SMC as SMC

__all__ = ["COLD", "HMC", "SMC", "Fudge", "Langevin", "MuCoLa"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'structured_voronoi.baselines' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"structured_voronoi.baselines.{name.lower()}"), name)


def __dir__() -> list[str]:
    return __all__
