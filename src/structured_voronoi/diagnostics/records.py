"""What a run left to be judged by, from draws or from texts, and what can be measured of it.

R-hat compares the chains with one another and ESS says how many independent draws theirs are worth (Vehtari et al.
2021). Both are taken of the energy, of every control, and of the number of positions at which a draw differs from the
likeliest one, which tells modes of the same energy apart. A chain that gave a single text is judged by the energies of
its steps: all it must do is to forget its start, which takes fewer of them than a mean does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

if TYPE_CHECKING:
    from xarray import DataTree

    from structured_voronoi.metrics.probability import Probability

MOST_VALUES = 500_000
"""R-hat and ESS of more draws than this are taken of some of the chains, spread evenly: sorting takes long."""
DISTANCE = "positions unlike the likeliest draw"


@dataclass(frozen=True)
class Record:
    """What a run left to be judged by, chain by chain."""

    sampler: str
    energy: Float[ndarray, "chain draw"]
    """Of every draw; where each chain gave one text, of its later steps."""
    one_text: bool = False
    """Each chain gave one text, and ``energy`` is that of the steps on its way there."""
    chains: Sequence[int] = ()
    """Their numbers; 0, 1, … if not given."""
    scores: Mapping[str, Float[ndarray, "chain draw"]] = field(default_factory=dict)
    """What the controls say of every draw."""
    tokens: Int[ndarray, "chain draw n"] | None = None
    counts: Mapping[str, ndarray] = field(default_factory=dict)
    """Fields of Info, (chain, draw, …); where each chain gave one text, those of all its steps as one draw."""
    steps: int = 1
    """Steps of each chain that the counts are about."""
    independent: bool = False
    """Every draw is one of its own, so that nothing has to mix."""
    scale: float | None = None
    """Of SVS, if it took part."""
    asked: int | None = None
    """Draws that were asked for, if the run was interrupted."""
    texts: Sequence[tuple[str, str]] = ()
    """The prompt and the text of every chain that gave one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further figures."""

    @property
    def numbers(self) -> Sequence[int]:
        return self.chains or range(len(self.energy))

    def total(self, name: str) -> ndarray | None:
        """A count summed over the draws, by chain; None if the run has none."""
        return self.counts[name].sum(1) if name in self.counts else None

    def quantities(self) -> dict[str, Float[ndarray, "chain draw"]]:
        """What chains are compared by."""
        found = {"energy": self.energy, **self.scores}
        if self.tokens is not None and np.isfinite(self.energy).any():
            best = np.unravel_index(np.nanargmin(self.energy), self.energy.shape)
            found[DISTANCE] = (self.tokens != self.tokens[best]).sum(-1).astype(float)
        return found

    def share(self, part: str, whole: str) -> float | None:
        """One count over another, of all chains together; None where the run has not both."""
        some, every = self.total(part), self.total(whole)
        return None if some is None or every is None or not every.sum() else float(some.sum() / every.sum())

    @property
    def abandoned(self) -> float:
        """The least share of trajectories that were abandoned: of the steps of a draw it is known whether any was."""
        diverging = self.counts.get("diverging")
        return 0.0 if diverging is None else float(diverging.sum(1).mean() / self.steps)

    @property
    def is_stuck(self) -> Bool[ndarray, " chain"]:
        """Which chains never changed a token; none where that is not known."""
        stuck = np.ones(len(self.energy), dtype=bool)
        swaps = self.total("swaps")
        if swaps is None and (self.tokens is None or self.tokens.shape[1] < 2):
            return ~stuck
        if swaps is not None:
            stuck &= swaps == 0
        if self.tokens is not None:
            stuck &= (self.tokens == self.tokens[:, :1]).all((1, 2))
        return stuck

    def summary_of_weights(self) -> Probability | None:
        """Of the weights of the fresh texts of guided steps; None where there are none."""
        if "log_weights" not in self.counts:
            return None
        from structured_voronoi.metrics.probability import estimate_probability

        log_weight = self.counts["log_weights"].astype(float).ravel()
        largest = np.max(log_weight, initial=0.0, where=np.isfinite(log_weight))
        return estimate_probability(log_weight - largest, len(log_weight))


def record_of_draws(draws: DataTree) -> Record:
    """What `sample` returned, or what was read back from a file."""
    stats, attributes = draws["sample_stats"].to_dataset(), draws.attrs
    counts = {
        str(name): column.values
        for name, column in stats.data_vars.items()
        if name not in ("energy", "log_factors")
        and column.dims[:2] == ("chain", "draw")
        and column.dtype.kind in "biuf"
    }
    scores = {}
    if "log_factors" in stats:
        factors = stats["log_factors"]
        scores = {str(name): factors.sel(factor=name).values for name in factors["factor"].values}
    energy = stats["energy"].values.astype(float)
    settings = json.loads(attributes.get("sampler_settings", "{}"))
    parts = [part["sampler"] for part in settings.get("samplers", ())]
    return Record(
        sampler=name_sampler(str(attributes.get("sampler", "a sampler")), parts),
        energy=energy,
        scores=scores,
        tokens=draws["posterior"].to_dataset()["tokens"].values,
        counts=counts,
        steps=energy.shape[1] * max(1, int(attributes.get("thin", 1))),
        independent=bool(attributes.get("independent", False)),
        scale=find_scale(settings),
        asked=int(attributes["draws"]) if attributes.get("interrupted") else None,
    )


def name_sampler(name: str, parts: Sequence[str]) -> str:
    """A sampler's name, with those of the samplers that it is made of."""
    return f"{name}({', '.join(parts)})" if parts else name


def find_scale(settings: Mapping[str, Any]) -> float | None:
    """The scale of SVS among the settings of a sampler and of those it is made of."""
    scale = settings.get("scale")
    if isinstance(scale, float | int):
        return float(scale)
    scales = [find_scale(part) for part in settings.get("samplers", ()) if isinstance(part, dict)]
    return next((scale for scale in scales if scale is not None), None)


class Mixing(NamedTuple):
    """How a quantity mixed; None where that cannot be told."""

    mean: float
    sd: float
    rhat: float | None
    ess_bulk: float | None
    ess_tail: float | None


def mixing_of(values: Float[ndarray, "chain draw"]) -> Mixing:
    """R-hat and ESS of one quantity; R-hat needs two chains, both need four draws that are not all the same."""
    finite = values[np.isfinite(values)]
    mean, sd = (float(finite.mean()), float(finite.std())) if len(finite) else (math.nan, math.nan)
    if values.shape[1] < 4 or len(finite) < values.size or np.ptp(values) == 0:
        return Mixing(mean, sd, None, None, None)
    from arviz_stats.base import array_stats

    some = values[:: math.ceil(values.size / MOST_VALUES)]
    with np.errstate(all="ignore"):  # chains that do not move have no variance to compare with
        rhat = float(array_stats.rhat(some)) if len(some) > 1 else None
        bulk, tail = (
            float(array_stats.ess(some, method=method, prob=prob)) * len(values) / len(some)
            for method, prob in (("bulk", None), ("tail", (0.05, 0.95)))
        )
    if rhat is not None and math.isnan(rhat):
        rhat = math.inf
    return Mixing(mean, sd, rhat, bulk, tail)
