"""Samplers by the names that the command line uses, with settings that suit text."""

from __future__ import annotations

from typing import Literal

from structured_voronoi.base import Sampler
from structured_voronoi.catalogue import TEXT_SCALE
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.langevin import Langevin
from structured_voronoi.samplers.mucola import MuCoLa
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS

TEXT_DIMENSIONS = 32
"""Of SVS on text: fewer cost evaluations, more cost time."""


def text_sampler(name: str, scale: float | Literal["auto"] = TEXT_SCALE, width: int = TEXT_DIMENSIONS) -> Sampler:
    """A sampler for text whose embeddings have at least ``width`` dimensions; the paper's methods have the paper's
    settings for language models."""
    svs = SVS(scale, dimensions=min(width, TEXT_DIMENSIONS), remember=64)
    samplers: dict[str, Sampler] = {
        "svs+refresh": Cycle(svs, Refresh(moves=5)),  # redraws mix globally
        "svs": svs,
        "refresh": Refresh(),
        "ancestral": Ancestral(),
        "rejection": Rejection(),
        "svs-paper": SVS.paper(1.0, 0.4, metropolis=False),
        "langevin": Langevin(1.0),
        "mucola": MuCoLa(1.0),
        "pncg": PNCG(0.04, guidance="forward"),
        "gwg": GibbsWithGradients(guidance="forward"),
    }
    return samplers[name]
