"""Exact Voronoi sampling of token sequences.

>>> import structured_voronoi as sv
>>> draws = sv.sample(sv.PottsTarget(side=2), sv.SVS(scale=0.5), chains=2, draws=10, progress=False)
>>> draws["posterior"]["tokens"].dims
('chain', 'draw', 'position')
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structured_voronoi import controls as controls
    from structured_voronoi import verify as verify
    from structured_voronoi.baselines.cold import COLD as COLD
    from structured_voronoi.baselines.fudge import Fudge as Fudge
    from structured_voronoi.baselines.hmc import HMC as HMC
    from structured_voronoi.baselines.langevin import Langevin as Langevin
    from structured_voronoi.baselines.mucola import MuCoLa as MuCoLa
    from structured_voronoi.baselines.smc import SMC as SMC
    from structured_voronoi.core.contracts import Info as Info
    from structured_voronoi.core.errors import SamplingError as SamplingError
    from structured_voronoi.core.streams import Rng as Rng
    from structured_voronoi.engine.generation import generate as generate
    from structured_voronoi.engine.probability import probability as probability
    from structured_voronoi.engine.sampling import sample as sample
    from structured_voronoi.engine.stored_runs import diagnose as diagnose
    from structured_voronoi.lookahead.lookahead import Lookahead as Lookahead
    from structured_voronoi.samplers.ancestral import Ancestral as Ancestral
    from structured_voronoi.samplers.cycle import Cycle as Cycle
    from structured_voronoi.samplers.guided import Guided as Guided
    from structured_voronoi.samplers.gwg import GibbsWithGradients as GibbsWithGradients
    from structured_voronoi.samplers.pncg import PNCG as PNCG
    from structured_voronoi.samplers.refresh import Refresh as Refresh
    from structured_voronoi.samplers.rejection import Rejection as Rejection
    from structured_voronoi.samplers.svs import SVS as SVS
    from structured_voronoi.targets.categorical import CategoricalTarget as CategoricalTarget
    from structured_voronoi.targets.controlled import Controlled as Controlled
    from structured_voronoi.targets.language_model import LanguageModel as LanguageModel
    from structured_voronoi.targets.potts import PottsTarget as PottsTarget
    from structured_voronoi.targets.tabular import TabularTarget as TabularTarget

# imported when first used, so that the command line answers at once
_HOMES = {
    "Rng": "core.streams",
    "SamplingError": "core.errors",
    "Info": "core.contracts",
    "sample": "engine.sampling",
    "generate": "engine.generation",
    "diagnose": "engine.stored_runs",
    "probability": "engine.probability",
    "SVS": "samplers.svs",
    "HMC": "baselines.hmc",
    "Langevin": "baselines.langevin",
    "MuCoLa": "baselines.mucola",
    "COLD": "baselines.cold",
    "PNCG": "samplers.pncg",
    "GibbsWithGradients": "samplers.gwg",
    "Ancestral": "samplers.ancestral",
    "Refresh": "samplers.refresh",
    "Rejection": "samplers.rejection",
    "Fudge": "baselines.fudge",
    "Cycle": "samplers.cycle",
    "Guided": "samplers.guided",
    "SMC": "baselines.smc",
    "Lookahead": "lookahead.lookahead",
    "CategoricalTarget": "targets.categorical",
    "TabularTarget": "targets.tabular",
    "PottsTarget": "targets.potts",
    "Controlled": "targets.controlled",
    "LanguageModel": "targets.language_model",
}
_ROOMS = ("controls", "verify")
__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"structured_voronoi.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'structured_voronoi' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"structured_voronoi.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
