"""The bundled model restricted to eight tokens and four positions, so that every text can be listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.experiments.exactness.truth import DIMENSIONS, tabulated
from structured_voronoi.verify.twins import (
    GibbsWithoutReverse,
    OutwardOnly,
    PNCGWithoutReverse,
    RefreshBlindToControls,
    RefreshWithoutRatio,
    RejectionOfNothing,
)

CHAINS, STEPS, SEED = 4000, 12, 4
"""So many that twins fail at p < 1e-10 with other seeds, too."""

BLOCKS: dict[str, Any] = {"block": 2, "suffix": False}
ONE = sv.Refresh(block=1, suffix=False)
SVS = sv.SVS(0.5, dimensions=DIMENSIONS)
OUTWARD = OutwardOnly(0.5, dimensions=DIMENSIONS)

PLAIN: dict[str, tuple[Any, list[Any]]] = {
    "svs": (SVS, [OUTWARD]),
    "svs in three dimensions": (
        sv.SVS(0.5, dimensions=3, guidance="none"),
        [OutwardOnly(0.5, dimensions=3, guidance="none")],
    ),
    "pncg": (sv.PNCG(4.0), [PNCGWithoutReverse(4.0)]),
    "gwg": (sv.GibbsWithGradients(), [GibbsWithoutReverse()]),
    "refresh": (sv.Refresh(**BLOCKS), [RefreshWithoutRatio(**BLOCKS)]),
    "svs + refresh": (
        sv.Cycle(SVS, ONE),
        [sv.Cycle(OUTWARD, ONE), sv.Cycle(SVS, RefreshWithoutRatio(block=1, suffix=False))],
    ),
}


@pytest.mark.parametrize(("sampler", "twins"), PLAIN.values(), ids=PLAIN.keys())
def test_samplers_keep_the_distribution_of_texts(sampler: Any, twins: list[Any]) -> None:
    check_stationarity(tabulated(), sampler, *twins, chains=CHAINS, steps=STEPS, seed=SEED)


CONTROLLED: dict[str, tuple[Any, list[Any], int]] = {
    "svs": (SVS, [OUTWARD], STEPS),
    "refresh": (sv.Refresh(**BLOCKS), [RefreshBlindToControls(**BLOCKS)], STEPS),
    "svs + refresh": (
        sv.Cycle(SVS, sv.Refresh(**BLOCKS)),
        [sv.Cycle(SVS, RefreshBlindToControls(**BLOCKS))],
        6,
    ),
    "rejection": (sv.Rejection(batch_size=4096), [RejectionOfNothing(batch_size=4096)], 1),
}


@pytest.mark.parametrize("control", ["classifier", "black box"])
@pytest.mark.parametrize(("sampler", "twins", "steps"), CONTROLLED.values(), ids=CONTROLLED.keys())
def test_samplers_keep_the_distribution_of_controlled_texts(
    control: str, sampler: Any, twins: list[Any], steps: int
) -> None:
    """Twins leave the control out of what stands on the right, or accept all tries."""
    check_stationarity(tabulated(control), sampler, *twins, chains=CHAINS, steps=steps, seed=SEED)


def drift(sampler: Any) -> tuple[float, float]:
    """How the energies of ancestral texts change in 20 steps, chain by chain, in standard errors; and who moved."""
    model = sv.load("bundled").target(max_tokens=8)
    drawn = sv.sample(model, sv.Ancestral(), chains=128, draws=1, warmup=0, seed=1, progress=False)
    start = torch.tensor(drawn["posterior"]["tokens"].values)[:, 0]
    tree = sv.sample(model, sampler, chains=128, draws=1, warmup=20, seed=2, start=start, progress=False)
    change = model.log_prob(start).double() - torch.tensor(tree["sample_stats"]["lp"].values)[:, 0]
    return float(change.mean() / change.std()) * 128**0.5, float((change != 0).double().mean())


def test_svs_from_ancestral_texts_does_not_drift() -> None:
    """Over the whole vocabulary; Langevin steps, which nothing corrects, drift away at once."""
    far, moved = drift(sv.SVS(0.3, dimensions=32))
    assert moved > 0.3
    assert abs(far) < 4
    assert abs(drift(sv.baselines.Langevin(0.5))[0]) > 10
