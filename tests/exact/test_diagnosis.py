"""Whether to trust a run: every way in which one fails is told with its remedy, and one that does not is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xarray
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.core.contracts import REDRAW_LENGTHS, Info, blank_info
from structured_voronoi.diagnostics import records as diagnosis_records
from structured_voronoi.diagnostics.diagnosis import Diagnosis, diagnose_record
from structured_voronoi.diagnostics.records import DISTANCE, Record, mixing_of
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify import random_target

EMBEDDINGS = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def draw(target: Any, sampler: Any, **settings: Any) -> xarray.DataTree:
    return sv.sample(target, sampler, **{"chains": 4, "warmup": 0, "progress": False, "seed": 1, **settings})


def warning(found: Diagnosis, words: str) -> str:
    """The one warning that has these words."""
    (told,) = [told for told in found.warnings if words in told]
    return told


def autoregressive(factor: float, chains: int, draws: int) -> np.ndarray:
    """Chains that carry this share of where they are from one draw to the next, at their stationary distribution."""
    values = np.random.default_rng(3).normal(size=(chains, draws))
    values[:, 1:] *= np.sqrt(1 - factor**2)
    for draw in range(1, draws):
        values[:, draw] += factor * values[:, draw - 1]
    return values


def test_a_run_that_mixes_is_left_alone() -> None:
    draws = draw(random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=1.0), draws=250, warmup=20)
    found = sv.diagnose(draws)
    assert found.trusted
    assert found.warnings == []
    assert {"energy", DISTANCE} <= set(found.mixing)
    energy = found.mixing["energy"]
    assert energy.rhat < 1.05
    assert energy.ess_bulk > 100
    assert energy.mean == pytest.approx(float(draws["sample_stats"]["energy"].mean()))
    assert draws.attrs["diagnosis"] == str(found)
    assert "nothing speaks against it" in str(found)
    assert found.figures["states visited"].shape == (4,)
    assert json.loads(json.dumps(found.to_dict()))["trusted"] is True


def test_chains_that_meet_nothing_are_told_to_reach_farther() -> None:
    found = sv.diagnose(draw(random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=0.001), draws=30))
    assert not found.trusted
    told = warning(found, "never moved")
    assert "all 4 chains never moved in 30 steps (nothing was proposed)" in told
    assert "scale=0.002" in told
    assert not [other for other in found.warnings if "disagree" in other], "said once"


def test_chains_that_are_refused_everything_are_named_and_told_to_reach_less_far() -> None:
    """Two chains stand where all else is far less probable; the others where half of the states are even."""
    table = torch.full((5, 5), -1e4, dtype=torch.float64)
    table[0, 0], table[2:, 2:] = 0.0, 0.0
    start = torch.tensor([[3, 3], [0, 0], [4, 4], [0, 0]])
    target = sv.TabularTarget(EMBEDDINGS, table)
    found = sv.diagnose(draw(target, sv.SVS(scale=1.0), draws=60, start=start))
    told = warning(found, "never moved")
    assert told.startswith("chains 1 and 3 never moved in 60 steps (every proposal was refused)")
    assert "scale=0.5 or Cycle(…, Refresh())" in told
    assert not found.trusted
    few = sv.diagnose(draw(target, sv.SVS(scale=1.0), draws=3, start=start))
    assert few.trusted, "three steps prove nothing"
    assert "too few to say" in few.verdict


def test_modes_of_the_same_energy_are_told_apart() -> None:
    table = torch.full((5, 5), -30.0, dtype=torch.float64)
    table[:2, :2] = table[3:, 3:] = torch.tensor([[0.0, -0.5], [-0.5, -1.0]], dtype=torch.float64)
    start = torch.tensor([[0, 0], [0, 1], [3, 3], [4, 4]])
    draws = draw(sv.TabularTarget(EMBEDDINGS, table), sv.GibbsWithGradients(), draws=300, start=start)
    found = sv.diagnose(draws)
    assert found.mixing["energy"].rhat < 1.1, "the energy alone sees nothing"
    assert not found.trusted
    told = warning(found, "disagree")
    assert "positions unlike the likeliest draw" in told
    assert "warmup=1200" in told


def test_draws_without_a_finite_energy_and_proposals_without_one() -> None:
    class Lost(NamedTuple):
        tokens: Tensor

    class Careless:
        """A user's sampler that takes whatever it finds."""

        def init(self, target: Any, rng: sv.Rng, start: Any) -> Lost:
            return Lost(torch.zeros(len(rng), 2, dtype=torch.int64))

        def step(self, target: Any, rng: sv.Rng, state: Lost) -> tuple[Lost, Info]:
            tokens = (rng.uniform(2) * 5).long()
            return Lost(tokens), blank_info(-target.log_prob(tokens))

    table = torch.zeros(5, 5, dtype=torch.float64)
    table[1:] = -torch.inf
    target = sv.TabularTarget(EMBEDDINGS, table)
    found = sv.diagnose(draw(target, Careless(), draws=30))
    assert not found.trusted
    assert "`start` that is possible" in warning(found, "have no finite energy")
    assert found.mixing["energy"].rhat is None

    table[1:] = torch.nan
    start = torch.zeros(4, 2, dtype=torch.int64)
    found = sv.diagnose(draw(target, sv.SVS(scale=1.5), draws=100, start=start))
    assert "look for NaN in `log_prob`" in warning(found, "of proposals had no finite energy")
    assert found.trusted, "what is refused harms nobody"


def test_guided_texts_with_poor_weights() -> None:
    """The lookahead knows nothing, and a few of the texts weigh all there is."""
    generator = torch.Generator().manual_seed(2)
    scores = -80 * torch.rand(8, 8, 8, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    model = torch.zeros(8, 8, 8, dtype=torch.float64) - 3 * np.log(8)
    targets = {
        True: AutoregressiveTable(embeddings, model, None, scores),
        False: AutoregressiveTable(embeddings, model),
    }
    for poor, target in targets.items():
        lookahead = untrained(bind(target))
        draws = draw(target, sv.Guided(lookahead, tries=2), draws=25, chains=8)
        found = sv.diagnose(draws)
        assert draws["sample_stats"]["log_weights"].shape == (8, 25, 1, 1)
        assert (found.figures["effective share of weights"] < 0.1) is poor
        if poor:
            assert not found.trusted
            assert "Lookahead.fit(target, texts=8192)" in warning(found, "too few to forget the start")
        else:
            assert not [told for told in found.warnings if "weights" in told]


def test_a_heavy_tail_of_weights_is_told() -> None:
    weights = np.random.default_rng(0).pareto(0.6, size=(4, 50, 1, 15)) + 1
    energy = np.random.default_rng(1).normal(size=(4, 50))
    found = diagnose_record(Record("Guided", energy, counts={"log_weights": np.log(weights)}, steps=50))
    assert "texts which the lookahead misses may be missing" in warning(found, "tail of guided weights is heavy")
    light = diagnose_record(Record("Guided", energy, counts={"log_weights": np.log(1 + weights**0.2)}, steps=50))
    assert light.trusted


def test_redraws_are_counted_by_length() -> None:
    target = sv.verify.sentences(controlled=True)
    draws = draw(target, sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2, moves=3)), draws=40)
    stats = draws["sample_stats"]
    assert stats["redraws_by_length"].shape == (4, 40, len(REDRAW_LENGTHS))
    assert (stats["redraws_by_length"].values.sum(-1) == stats["redraws"].values).all()
    assert (stats["refreshed_by_length"].values.sum(-1) == stats["refreshed"].values).all()
    assert stats["redraws_by_length"].values[..., 2:].sum() == 0, "the texts have three tokens"
    shares = sv.diagnose(draws).figures["redraws accepted, by tokens"]
    assert set(shares) == {"1", "2–3"}
    assert "Cycle(SVS, Refresh)" in draws.attrs["diagnosis"]


def test_trajectories_abandoned_unreliable_masses_and_interruptions() -> None:
    energy = np.random.default_rng(0).normal(size=(4, 100))
    counts = {"diverging": np.arange(400).reshape(4, 100) % 10 == 0, "unreliable": np.ones((4, 100), dtype=bool)}
    found = diagnose_record(Record("SVS", energy, counts=counts, scale=0.5, steps=100, asked=500))
    assert "raise max_events, or scale=0.25" in warning(found, "10% of trajectories were abandoned")
    assert "raise mass_draws" in warning(found, "fewer than 50 counts")
    assert "interrupted after 100 of 500 draws" in warning(found, "interrupted")
    assert found.trusted


def test_few_effective_samples_say_how_many_draws_would_do() -> None:
    found = diagnose_record(Record("SVS", autoregressive(0.9, chains=4, draws=300), steps=300))
    told = warning(found, "effective samples of the energy")
    assert int(told.split("draws=")[1].split()[0]) > 300
    assert found.trusted


def test_independent_draws_need_not_mix() -> None:
    draws = draw(sv.verify.sentences(controlled=False), sv.Ancestral(), draws=30)
    found = sv.diagnose(draws)
    assert "drawn independently" in found.verdict
    assert found.warnings == []


def test_one_text_a_chain_is_judged_by_its_steps() -> None:
    """Less is asked for than of draws that are averaged: that 1 % of the start is left, not that 30 % is."""
    energies = {left: autoregressive(left ** (1 / 100), chains=8, draws=101)[:, 50:] for left in (0.01, 0.3)}
    assert not diagnose_record(Record("SVS", energies[0.01], steps=51)).trusted
    assert diagnose_record(Record("svs", energies[0.01], one_text=True, steps=100)).trusted
    left = Record("svs", energies[0.3], one_text=True, chains=range(8, 16), steps=100)
    told = warning(diagnose_record(left), "disagree")
    assert all(8 <= int(part.split()[0].strip(",);")) < 16 for part in told.split("in chain ")[1:]), told
    assert "--warmup 400, --sampler svs+refresh or --sampler adaptive" in told


def test_many_draws_are_judged_by_some_of_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(64, 50))
    every = mixing_of(values)
    monkeypatch.setattr(diagnosis_records, "MOST_VALUES", 400)
    some = mixing_of(values)
    assert some.mean == every.mean
    assert some.rhat != every.rhat
    assert some.ess_bulk == pytest.approx(every.ess_bulk, rel=0.3)


def test_one_chain_is_not_compared() -> None:
    found = diagnose_record(Record("SVS", np.random.default_rng(0).normal(size=(1, 200)), steps=200))
    assert found.mixing["energy"].rhat is None
    assert "run four or more" in found.verdict


def test_warmup_is_kept_if_asked_for_and_changes_no_draw(tmp_path: Path) -> None:
    target, sampler = random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=1.0)
    plain = draw(target, sampler, draws=20, warmup=7, thin=2)
    kept = draw(target, sampler, draws=20, warmup=7, thin=2, keep_warmup=True)
    for group in ("posterior", "sample_stats"):
        assert kept[group].to_dataset().identical(plain[group].to_dataset())
    assert "warmup_posterior" not in plain.children
    assert kept["warmup_posterior"]["tokens"].shape == (4, 7, 2)
    assert kept["warmup_sample_stats"]["energy"].dims == ("chain", "draw")
    every = draw(target, sampler, draws=47, warmup=0)
    warm = kept["warmup_posterior"]["tokens"].values
    assert (warm == every["posterior"]["tokens"].values[:, :7]).all()
    kept.to_netcdf(tmp_path / "kept.nc", engine="h5netcdf")
    assert sv.diagnose(tmp_path / "kept.nc").to_dict() == sv.diagnose(kept).to_dict()
    independent = draw(sv.verify.sentences(controlled=False), sv.Ancestral(), draws=2, warmup=7, keep_warmup=True)
    assert set(independent.children) == {"posterior", "sample_stats"}


class Spoken:
    """A target that reads its tokens out, and whose two terms are controls of its own."""

    embeddings, length = EMBEDDINGS, 2

    def log_prob(self, tokens: Tensor) -> Tensor:
        return sum(self.log_factors(tokens).values())

    def log_factors(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"./few/small": -tokens.sum(-1).double(), "even": -(tokens % 2).sum(-1).double()}

    def decode(self, tokens: Tensor) -> str:
        return "<b>" + " ".join("abcde"[token] for token in tokens.tolist())


class Mumbling(Spoken):
    def decode(self, tokens: Tensor) -> str:
        raise KeyError("no\nidea")


def test_controls_are_diagnosed_by_name_and_a_notebook_shows_texts(tmp_path: Path) -> None:
    draws = draw(Spoken(), sv.SVS(scale=1.0), draws=50)
    assert isinstance(draws, xarray.DataTree)
    found = sv.diagnose(draws)
    assert {"energy", "./few/small", "even", DISTANCE} == set(found.mixing)
    factors = draws["sample_stats"]["log_factors"]
    assert np.allclose(factors.sum("factor").values, -draws["sample_stats"]["energy"].values)
    shown = draws._repr_html_()
    last = draws["posterior"]["tokens"].values[0, -1]
    assert "&lt;b&gt;" + " ".join("abcde"[token] for token in last) in shown
    assert draws.attrs["diagnosis"].split(":")[0] in shown
    assert "<p>" not in draws["posterior"]._repr_html_()
    assert "<p>" in draws.copy()._repr_html_()
    assert type(draws.sel(chain=[0, 1])["posterior"]["tokens"]) is xarray.DataArray
    draws.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    assert sv.diagnose(str(tmp_path / "draws.nc")).to_dict() == found.to_dict()


def test_a_target_that_fails_after_the_run_costs_no_draw() -> None:
    draws = draw(Mumbling(), sv.SVS(scale=1.0), draws=5)
    assert draws["posterior"]["tokens"].shape == (4, 5, 2)
    assert "could say no more of its draws ('no\\nidea')" in draws.attrs["diagnosis"]
    assert "<p>" in draws._repr_html_()


def test_warnings_are_told_to_whoever_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(3, tokens=5, length=2, dimensions=3)
    draw(target, sv.SVS(scale=0.001), draws=30, progress=True)
    assert capsys.readouterr().err == "", "nobody watches"
    monkeypatch.setattr("structured_voronoi.engine.conclusion.is_watched", lambda: True)
    draw(target, sv.SVS(scale=0.001), draws=30)
    assert capsys.readouterr().err == ""
    draw(target, sv.SVS(scale=0.001), draws=30, progress=True)
    assert "sample: warning: all 4 chains never moved" in capsys.readouterr().err
