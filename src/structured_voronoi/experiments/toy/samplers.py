"""The samplers of the toy and hypercube experiments; each has one setting."""

from __future__ import annotations

from structured_voronoi.baselines.hmc import HMC
from structured_voronoi.baselines.mucola import MuCoLa
from structured_voronoi.baselines.svs_paper import PaperSVS
from structured_voronoi.samplers.svs import SVS

ToySampler = SVS | PaperSVS | HMC | MuCoLa


def voronoi(length: float) -> SVS:
    return SVS(base="uniform", walls="closed", length=length)


def voronoi_as_printed(step_size: float) -> PaperSVS:
    return SVS.paper(step_size, 0.1, base="uniform")


def hmc(step_size: float) -> HMC:
    return HMC(step_size, base="uniform")


def mucola(step_size: float) -> MuCoLa:
    return MuCoLa(step_size, final_step_size=None, metropolis=True)


def describe_setting(sampler: ToySampler) -> str:
    """The setting as reports show it."""
    return f"length {sampler.length:g}" if isinstance(sampler, SVS) else f"step {sampler.step_size:g}"
