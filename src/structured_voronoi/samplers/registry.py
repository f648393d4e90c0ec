"""The list of samplers: their names, classes and descriptions, and the settings in which they draw texts.

Nothing is imported until a sampler is used, so that `svs ls` and `svs --help` start quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from structured_voronoi.core.errors import SamplingError, did_you_mean

if TYPE_CHECKING:
    from structured_voronoi.core.contracts import Sampler

TEXT_SCALE = 0.22
"""Default scale of SVS on text (docs/results/efficiency.md)."""
TEXT_DIMENSIONS = 32
"""Dimensions of SVS on text: fewer cost more evaluations, more cost more time."""

Scale = float | Literal["auto"]
TextSettings = Callable[[Any, Scale, int], Any]
"""(class, scale of SVS, dimensions of the embeddings) -> the sampler as it draws texts."""


@dataclass(frozen=True)
class SamplerEntry:
    """A sampler as `svs ls` lists it."""

    name: str
    """On the command line."""
    home: str
    """Module and class, for example ``samplers.svs:SVS``."""
    exact: bool
    help: str
    for_text: TextSettings | None = None
    """None if `svs sample` does not offer it."""
    independent: bool = False
    """Texts are drawn by the engine, independently of each other."""

    @property
    def class_name(self) -> str:
        return self.home.partition(":")[2]

    def load(self) -> Any:
        """The class."""
        module, _, name = self.home.partition(":")
        return getattr(importlib.import_module(f"structured_voronoi.{module}"), name)


def _svs(cls: Any, scale: Scale, width: int) -> Sampler:
    sampler: Sampler = cls(scale, dimensions=min(width, TEXT_DIMENSIONS), remember=64)
    return sampler


def _svs_and_refresh(cls: Any, scale: Scale, width: int) -> Sampler:
    refresh = find_sampler("refresh").load()(moves=5)
    cycle: Sampler = cls(_svs(find_sampler("svs").load(), scale, width), refresh)
    return cycle


def _defaults(cls: Any, scale: Scale, width: int) -> Sampler:
    sampler: Sampler = cls()
    return sampler


SAMPLERS = (
    SamplerEntry(
        "adaptive",
        "engine.rounds:Rounds",
        True,
        "rejection whose proposal learns; error at most `tolerance`; needs bounded controls",
        _defaults,
        independent=True,
    ),
    SamplerEntry(
        "rejection", "samplers.rejection:Rejection", True, "rejection from the model", _defaults, independent=True
    ),
    SamplerEntry(
        "ancestral",
        "samplers.ancestral:Ancestral",
        True,
        "tokens drawn from left to right; for models without controls or suffix",
        _defaults,
        independent=True,
    ),
    SamplerEntry(
        "svs+refresh", "samplers.cycle:Cycle", True, "SVS and Refresh in turn; for any target", _svs_and_refresh
    ),
    SamplerEntry("svs", "samplers.svs:SVS", True, "structured Voronoi sampling by exact motion", _svs),
    SamplerEntry(
        "refresh", "samplers.refresh:Refresh", True, "blocks of tokens redrawn from the language model", _defaults
    ),
    SamplerEntry("guided", "samplers.guided:Guided", True, "texts proposed by a lookahead and chosen by weight"),
    SamplerEntry(
        "pncg",
        "samplers.pncg:PNCG",
        True,
        "norm-constrained gradient proposal with Metropolis",
        lambda cls, scale, width: cls(0.04, guidance="forward"),
    ),
    SamplerEntry(
        "gwg",
        "samplers.gwg:GibbsWithGradients",
        True,
        "one position at a time, proposed by the gradient",
        lambda cls, scale, width: cls(guidance="forward"),
    ),
    SamplerEntry(
        "svs-paper",
        "baselines.svs_paper:PaperSVS",
        False,
        "the paper's algorithm: leapfrog and a grid of discontinuity steps",
        lambda cls, scale, width: cls(1.0, 0.4, metropolis=False),
    ),
    SamplerEntry("hmc", "baselines.hmc:HMC", False, "Hamiltonian Monte Carlo on the Voronoi measure"),
    SamplerEntry(
        "langevin",
        "baselines.langevin:Langevin",
        False,
        "Langevin dynamics on the Voronoi measure",
        lambda cls, scale, width: cls(1.0),
    ),
    SamplerEntry(
        "mucola",
        "baselines.mucola:MuCoLa",
        False,
        "Langevin steps projected to embeddings",
        lambda cls, scale, width: cls(1.0),
    ),
    SamplerEntry("cold", "baselines.cold:COLD", False, "Langevin dynamics on the logits of a soft text", _defaults),
    SamplerEntry("fudge", "baselines.fudge:Fudge", False, "each token weighted by a classifier of prefixes"),
    SamplerEntry("smc", "baselines.smc:SMC", False, "particles; biased with finitely many"),
)
"""All samplers."""
TEXT_SAMPLERS = {
    "auto": "ancestral without controls, adaptive with bounded ones, svs+refresh otherwise; the default",
    **{
        entry.name: f"{entry.help}; {'exact' if entry.exact else 'not exact'}"
        for entry in SAMPLERS
        if entry.for_text is not None
    },
}
"""Names that `generate` and `svs sample` take, with their descriptions."""


def find_sampler(name: str) -> SamplerEntry:
    """The entry of a name."""
    for entry in SAMPLERS:
        if entry.name == name:
            return entry
    known = [entry.name for entry in SAMPLERS]
    raise SamplingError(f"sampler = {name!r} is unknown", remedy=did_you_mean(str(name), known))


def check_sampler_name(name: object) -> None:
    """Raise an error unless this is ``auto`` or the name of a sampler of texts."""
    if not isinstance(name, str) or name not in TEXT_SAMPLERS:
        raise SamplingError(f"sampler = {name!r} is unknown", remedy=did_you_mean(str(name), TEXT_SAMPLERS))


def text_sampler(name: str, scale: Scale = TEXT_SCALE, width: int = TEXT_DIMENSIONS) -> Sampler:
    """The sampler of this name as it draws texts from a model whose embeddings have ``width`` dimensions."""
    entry = find_sampler(name)
    make = entry.for_text or _defaults
    sampler: Sampler = make(entry.load(), scale, width)
    return sampler
