"""The data of a run that diagnostics use, and how well its quantities mixed.

R-hat compares the chains with each other, and the effective sample size (ESS) is the number of independent draws that
would estimate a mean as precisely (Vehtari et al. 2021). Both are computed for log p, for every control, and for the
number of positions at which a draw differs from the most probable one, which separates modes of equal probability.
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

LOG_PROB, DISTANCE = "lp", "distance to the most probable draw"
"""Names of the quantities that every run has: log p, and the number of positions that differ."""


@dataclass(frozen=True)
class Record:
    """The data of a run."""

    sampler: str
    log_prob: Float[ndarray, "chain draw"]
    """log p of each draw, unnormalised. If ``one_text``, of each step in the second half of the run."""
    one_text: bool = False
    """Whether each chain gave one text, its last state."""
    chains: Sequence[int] = ()
    """Numbers of the chains; 0, 1, … by default."""
    controls: Mapping[str, Float[ndarray, "chain draw"]] = field(default_factory=dict)
    """Scores of each draw, by control."""
    tokens: Int[ndarray, "chain draw n"] | None = None
    counts: Mapping[str, ndarray] = field(default_factory=dict)
    """Fields of Info, (chain, draw, …). If ``one_text``, there is one draw, with the counts of all steps."""
    steps: int = 1
    """Steps of each chain to which the counts refer."""
    independent: bool = False
    """Whether the draws are independent, so that no chain has to mix."""
    scale: float | None = None
    """Scale of SVS, if the sampler contains it."""
    requested_draws: int | None = None
    """Draws per chain that were requested, if the run was interrupted."""
    texts: Sequence[tuple[str, str]] = ()
    """Prompt and text of each chain that gave one text."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Further figures to report."""

    @property
    def numbers(self) -> Sequence[int]:
        return self.chains or range(len(self.log_prob))

    def total(self, name: str) -> ndarray | None:
        """Sum of a count over the draws of each chain; None if it was not recorded."""
        return self.counts[name].sum(1) if name in self.counts else None

    def quantities(self) -> dict[str, Float[ndarray, "chain draw"]]:
        """The quantities for which mixing is measured, by name."""
        found = {LOG_PROB: self.log_prob, **self.controls}
        if self.tokens is not None and np.isfinite(self.log_prob).any():
            best = np.unravel_index(np.nanargmax(self.log_prob), self.log_prob.shape)
            found[DISTANCE] = (self.tokens != self.tokens[best]).sum(-1).astype(float)
        return found

    def share(self, part: str, whole: str) -> float | None:
        """Ratio of two counts, summed over all chains; None if one was not recorded or the whole is 0."""
        some, every = self.total(part), self.total(whole)
        return None if some is None or every is None or not every.sum() else float(some.sum() / every.sum())

    @property
    def diverging_share(self) -> float:
        """Share of trajectories that diverged. With thinning a lower bound: a draw is counted once."""
        diverging = self.counts.get("diverging")
        return 0.0 if diverging is None else float(diverging.sum(1).mean() / self.steps)

    @property
    def is_stuck(self) -> Bool[ndarray, " chain"]:
        """Whether each chain never changed a token; False if that was not recorded."""
        stuck = np.ones(len(self.log_prob), dtype=bool)
        swaps = self.total("swaps")
        if swaps is None and (self.tokens is None or self.tokens.shape[1] < 2):
            return ~stuck
        if swaps is not None:
            stuck &= swaps == 0
        if self.tokens is not None:
            stuck &= (self.tokens == self.tokens[:, :1]).all((1, 2))
        return stuck

    def weights(self) -> Probability | None:
        """Summary of the weights of the texts that `Guided` proposed; None if there are none."""
        if "log_weights" not in self.counts:
            return None
        from structured_voronoi.metrics.probability import estimate_probability

        log_weight = self.counts["log_weights"].astype(float).ravel()
        largest = np.max(log_weight, initial=0.0, where=np.isfinite(log_weight))
        return estimate_probability(log_weight - largest, len(log_weight))


def record_of_draws(draws: DataTree) -> Record:
    """The data of a result of `sample`."""
    stats, attributes = draws["sample_stats"].to_dataset(), draws.attrs
    counts = {
        str(name): column.values
        for name, column in stats.data_vars.items()
        if name not in (LOG_PROB, "log_factors")
        and column.dims[:2] == ("chain", "draw")
        and column.dtype.kind in "biuf"
    }
    controls = {}
    if "log_factors" in stats:
        factors = stats["log_factors"]
        controls = {str(name): factors.sel(factor=name).values for name in factors["factor"].values}
    log_prob = stats[LOG_PROB].values.astype(float)
    settings = json.loads(attributes.get("sampler_settings", "{}"))
    parts = [part["sampler"] for part in settings.get("samplers", ())]
    return Record(
        sampler=name_sampler(str(attributes.get("sampler", "unknown sampler")), parts),
        log_prob=log_prob,
        controls=controls,
        tokens=draws["posterior"].to_dataset()["tokens"].values,
        counts=counts,
        steps=log_prob.shape[1] * max(1, int(attributes.get("thin", 1))),
        independent=bool(attributes.get("independent", False)),
        scale=find_scale(settings),
        requested_draws=int(attributes["draws"]) if attributes.get("interrupted") else None,
    )


def name_sampler(name: str, parts: Sequence[str]) -> str:
    """The name of a sampler, with those of its parts in brackets."""
    return f"{name}({', '.join(parts)})" if parts else name


def find_scale(settings: Mapping[str, Any]) -> float | None:
    """The scale of SVS in the settings of a sampler or of its parts."""
    scale = settings.get("scale")
    if isinstance(scale, float | int):
        return float(scale)
    scales = [find_scale(part) for part in settings.get("samplers", ()) if isinstance(part, dict)]
    return next((scale for scale in scales if scale is not None), None)


class Mixing(NamedTuple):
    """How well a quantity mixed. R-hat and ESS are None where they cannot be computed."""

    mean: float
    sd: float
    rhat: float | None
    ess_bulk: float | None
    ess_tail: float | None


def mixing_of(values: Float[ndarray, "chain draw"], max_values: int = 500_000) -> Mixing:
    """R-hat and ESS of a quantity.

    R-hat needs two chains, and both need four draws that differ. If there are more than ``max_values`` values, an even
    selection of chains is used, because sorting is slow.
    """
    finite = values[np.isfinite(values)]
    mean, sd = (float(finite.mean()), float(finite.std())) if len(finite) else (math.nan, math.nan)
    if values.shape[1] < 4 or len(finite) < values.size or np.ptp(values) == 0:
        return Mixing(mean, sd, None, None, None)
    from arviz_stats.base import array_stats

    some = values[:: math.ceil(values.size / max_values)]
    with np.errstate(all="ignore"):  # chains that do not move have zero variance
        rhat = float(array_stats.rhat(some)) if len(some) > 1 else None
        bulk, tail = (
            float(array_stats.ess(some, method=method, prob=prob)) * len(values) / len(some)
            for method, prob in (("bulk", None), ("tail", (0.05, 0.95)))
        )
    if rhat is not None and math.isnan(rhat):
        rhat = math.inf
    return Mixing(mean, sd, rhat, bulk, tail)
