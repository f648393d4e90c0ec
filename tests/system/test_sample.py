"""`sv.sample`: a result for ArviZ, the same draws for every division of the work, and no draw lost on Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.core.info import Info


class Pairs:
    """A user's target without a base class and without a gradient."""

    length = 2

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embeddings = torch.randn(5, 2, generator=generator)
        self.table = torch.randn(5, 5, generator=generator)

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens[:, 0], tokens[:, 1]]


def draws(**settings: object) -> object:
    usual = {"chains": 4, "draws": 50, "warmup": 5, "progress": False}
    return sv.sample(Pairs(), sv.SVS(scale=0.5), **{**usual, **settings})


def test_arviz_reads_the_result(tmp_path: Path) -> None:
    import arviz_stats
    import xarray

    tree = draws()
    assert tree["posterior"]["tokens"].dims == ("chain", "draw", "position")
    lp = tree["sample_stats"].to_dataset()[["lp"]]
    assert float(arviz_stats.rhat(lp)["lp"]) < 1.2
    assert float(arviz_stats.ess(lp)["lp"]) > 10
    summary = arviz_stats.summary(lp)
    assert float(summary["mean"].iloc[0]) == pytest.approx(float(lp["lp"].mean()), abs=0.01)
    tree.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    again = xarray.open_datatree(tmp_path / "draws.nc", engine="h5netcdf")
    assert again["posterior"]["tokens"].equals(tree["posterior"]["tokens"])
    assert again.attrs["seed"] == 0
    again.close()


def test_attributes_hold_settings_and_versions() -> None:
    tree = sv.sample(Pairs(), sv.SVS(), chains=2, draws=3, warmup=0, seed=5, progress=False)
    settings = json.loads(tree.attrs["sampler_settings"])
    assert isinstance(settings["scale"], float), "the tuned scale"
    assert tree.attrs["sampler"] == "SVS"
    assert tree.attrs["version_torch"]


def test_lp_is_log_p_of_the_draw_and_counts_are_added_over_thinned_steps() -> None:
    tree = draws(thin=3, warmup=0, draws=20)
    log_prob = Pairs().log_prob(torch.tensor(tree["posterior"]["tokens"].values).flatten(0, 1)).view(4, 20)
    np.testing.assert_allclose(tree["sample_stats"]["lp"].values, log_prob.numpy(), rtol=1e-5)
    assert {"evaluations", "swaps", "diverging"} <= set(tree["sample_stats"].data_vars)
    assert "energy" not in tree["sample_stats"]
    every = draws(thin=1, warmup=0, draws=60)
    np.testing.assert_array_equal(tree["posterior"]["tokens"].values, every["posterior"]["tokens"].values[:, 2::3])
    total = every["sample_stats"]["events"].values.reshape(4, 20, 3).sum(-1)
    np.testing.assert_array_equal(tree["sample_stats"]["events"].values, total)


def test_ctrl_c_returns_the_draws_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, step, calls = draws(), sv.SVS.step, []

    def interrupted(self: sv.SVS, *arguments: object) -> tuple[object, Info]:
        calls.append(1)
        if len(calls) > 25:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(sv.SVS, "step", interrupted)
    part = draws()
    assert part["posterior"]["tokens"].shape == (4, 20, 2)
    assert part.attrs["interrupted"] == 1
    np.testing.assert_array_equal(part["posterior"]["tokens"].values, whole["posterior"]["tokens"].values[:, :20])


def test_the_tuned_scale_does_not_depend_on_the_number_of_chains() -> None:
    scale = sv.SVS().tuned(Pairs(), seed=3).scale
    for chains in (2, 5):
        tree = sv.sample(Pairs(), sv.SVS(), chains=chains, draws=2, warmup=3, seed=3, progress=False)
        assert json.loads(tree.attrs["sampler_settings"])["scale"] == scale
    assert sv.SVS(scale=0.3).tuned(Pairs(), seed=3).scale == 0.3


def test_tuning_begins_at_the_given_start() -> None:
    """Random starts have probability 0: the only possible states are 30 of 27,000."""
    embeddings = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = torch.full((30,) * 3, -torch.inf, dtype=torch.float64)
    table[0, 0, :] = 0.0
    start = torch.zeros(4, 3, dtype=torch.int64)
    tree = sv.sample(sv.TabularTarget(embeddings, table), sv.SVS(), chains=4, draws=5, start=start, progress=False)
    assert (tree["posterior"]["tokens"].values[..., :2] == 0).all()


@pytest.mark.parametrize(
    "wrong", [lambda lp: lp[:1], lambda lp: lp[:, None], lambda lp: lp.sum(), lambda lp: lp.tolist()]
)
def test_a_log_prob_of_the_wrong_shape_is_an_error(wrong: object) -> None:
    class Wrong(Pairs):
        def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
            return wrong(super().log_prob(tokens))

    with pytest.raises(sv.SamplingError, match="log_prob of Wrong has"):
        sv.sample(Wrong(), sv.SVS(scale=0.5), chains=4, draws=2, progress=False)


def test_half_precision_embeddings_with_a_precise_log_prob() -> None:
    """Embeddings in bfloat16 move in float32, and log p is compared in float64."""

    class Precise(Pairs):
        def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
            return 1e8 + 2.0 * (tokens == 0).double().sum(-1)

    target = Precise()
    target.embeddings = target.embeddings.bfloat16()
    tree = sv.sample(target, sv.SVS(scale=1.0), chains=500, draws=1, warmup=20, progress=False)
    share = (tree["posterior"]["tokens"].values == 0).mean()
    truth = np.exp(2) / (np.exp(2) + 4)
    assert abs(share - truth) < 0.06
