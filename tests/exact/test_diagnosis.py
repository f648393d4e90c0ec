"""Diagnostics: every problem of a run gives its warning with a remedy, and a good run gives none."""

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
from structured_voronoi.core.info import REDRAW_LENGTHS, Info, blank_info
from structured_voronoi.diagnostics.checks import DiagnosticSettings, DiagnosticWarning
from structured_voronoi.diagnostics.diagnosis import Diagnosis, diagnose_record, diagnose_records
from structured_voronoi.diagnostics.records import DISTANCE, Record, mixing_of
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify import random_target

EMBEDDINGS = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def draw(target: Any, sampler: Any, **settings: Any) -> xarray.DataTree:
    return sv.sample(target, sampler, **{"chains": 4, "warmup": 0, "progress": False, "seed": 1, **settings})


def codes(found: Diagnosis) -> list[str]:
    return [warning.code for warning in found.warnings]


def warning(found: Diagnosis, code: str) -> DiagnosticWarning:
    """The only warning with this code."""
    (one,) = [one for one in found.warnings if one.code == code]
    return one


def autoregressive(factor: float, chains: int, draws: int) -> np.ndarray:
    """Stationary chains whose draws are correlated by this factor with the draws before them."""
    values = np.random.default_rng(3).normal(size=(chains, draws))
    values[:, 1:] *= np.sqrt(1 - factor**2)
    for draw in range(1, draws):
        values[:, draw] += factor * values[:, draw - 1]
    return values


def test_a_run_that_mixes_has_no_warnings() -> None:
    draws = draw(random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=1.0), draws=250, warmup=20)
    found = sv.diagnose(draws)
    assert found.ok
    assert found.warnings == []
    assert set(found.mixing) == {"lp", DISTANCE}
    log_prob = found.mixing["lp"]
    assert log_prob.rhat < 1.05
    assert log_prob.ess_bulk > 100
    assert log_prob.mean == pytest.approx(float(draws["sample_stats"]["lp"].mean()))
    assert draws.attrs["diagnosis"] == found.summary() == str(found)
    assert found.summary().endswith("no warnings")
    assert found.figures["states visited"].shape == (4,)
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


def test_chains_without_proposals_need_a_larger_scale() -> None:
    found = sv.diagnose(draw(random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=0.001), draws=30))
    assert not found.ok
    assert codes(found) == ["stuck-chains"], "R-hat says nothing more"
    stuck = warning(found, "stuck-chains")
    assert stuck.message == "all 4 chains did not move in 30 steps: there were no proposals"
    assert "scale=0.002" in stuck.remedy
    assert stuck.arguments == {}, "the scale is an argument of SVS, not of generate"


def test_chains_whose_proposals_are_rejected_need_a_smaller_scale() -> None:
    """Two chains start where all other states are improbable, the others where half of the states are equal."""
    table = torch.full((5, 5), -1e4, dtype=torch.float64)
    table[0, 0], table[2:, 2:] = 0.0, 0.0
    start = torch.tensor([[3, 3], [0, 0], [4, 4], [0, 0]])
    target = sv.TabularTarget(EMBEDDINGS, table)
    found = sv.diagnose(draw(target, sv.SVS(scale=1.0), draws=60, start=start))
    stuck = warning(found, "stuck-chains")
    assert stuck.message.startswith("chains 1 and 3 did not move in 60 steps")
    assert "scale=0.5 or Cycle(…, Refresh())" in stuck.remedy
    assert not found.ok
    few = sv.diagnose(draw(target, sv.SVS(scale=1.0), draws=3, start=start))
    assert few.ok, "three steps are too few"
    assert few.note


def test_modes_of_equal_probability_are_distinguished() -> None:
    table = torch.full((5, 5), -30.0, dtype=torch.float64)
    table[:2, :2] = table[3:, 3:] = torch.tensor([[0.0, -0.5], [-0.5, -1.0]], dtype=torch.float64)
    start = torch.tensor([[0, 0], [0, 1], [3, 3], [4, 4]])
    draws = draw(sv.TabularTarget(EMBEDDINGS, table), sv.GibbsWithGradients(), draws=300, start=start)
    found = sv.diagnose(draws)
    assert found.mixing["lp"].rhat < 1.1, "log p alone does not distinguish them"
    assert not found.ok
    apart = warning(found, "r-hat")
    assert DISTANCE in apart.message
    assert "warmup=1200 and draws=1200" in apart.remedy


def test_impossible_draws_and_impossible_proposals() -> None:
    class State(NamedTuple):
        tokens: Tensor

    class Unchecked:
        """A user's sampler that accepts every proposal."""

        def init(self, target: Any, rng: sv.Rng, start: Any) -> State:
            return State(torch.zeros(len(rng), 2, dtype=torch.int64))

        def step(self, target: Any, rng: sv.Rng, state: State) -> tuple[State, Info]:
            tokens = (rng.uniform(2) * 5).long()
            return State(tokens), blank_info(-target.log_prob(tokens))

    table = torch.zeros(5, 5, dtype=torch.float64)
    table[1:] = -torch.inf
    target = sv.TabularTarget(EMBEDDINGS, table)
    found = sv.diagnose(draw(target, Unchecked(), draws=30))
    assert not found.ok
    assert "`start`" in warning(found, "impossible-draws").remedy
    assert found.mixing["lp"].rhat is None

    table[1:] = torch.nan
    start = torch.zeros(4, 2, dtype=torch.int64)
    found = sv.diagnose(draw(target, sv.SVS(scale=1.5), draws=100, start=start))
    assert "`log_prob` for NaN" in warning(found, "impossible-proposals").remedy
    assert found.ok, "proposals that are rejected do no harm"


def test_uneven_weights_of_guided_texts() -> None:
    """The lookahead is untrained, and a few texts have nearly all of the weight."""
    generator = torch.Generator().manual_seed(2)
    scores = -80 * torch.rand(8, 8, 8, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    model = torch.zeros(8, 8, 8, dtype=torch.float64) - 3 * np.log(8)
    targets = {
        True: AutoregressiveTable(embeddings, model, None, scores),
        False: AutoregressiveTable(embeddings, model),
    }
    for uneven, target in targets.items():
        lookahead = untrained(bind(target))
        draws = draw(target, sv.Guided(lookahead, tries=2), draws=25, chains=8)
        found = sv.diagnose(draws)
        assert draws["sample_stats"]["log_weights"].shape == (8, 25, 1, 1)
        assert (found.figures["effective share of weights"] < 0.1) is uneven
        if uneven:
            assert warning(found, "uneven-weights").serious
        else:
            assert not {"uneven-weights", "heavy-weights"} & {*codes(found)}


def test_heavy_weights_and_harmless_ones() -> None:
    heavy = np.random.default_rng(0).pareto(0.6, size=(4, 50, 1, 15)) + 1
    few = np.random.default_rng(3).lognormal(0, 0.9, size=(1, 3, 1, 23))  # 69 weights, the largest 4 % of the sum
    for weights, is_heavy in ((heavy, True), (1 + heavy**0.2, False), (few, False)):
        log_prob = np.random.default_rng(1).normal(size=weights.shape[:2])
        counts = {"log_weights": np.log(weights)}
        found = diagnose_record(Record("Guided", log_prob, counts=counts, steps=log_prob.shape[1]))
        assert ("heavy-weights" in codes(found)) is is_heavy
        assert ("Pareto k of weights" in found.figures) is (weights.size >= 200)
        assert found.ok


def test_redraws_are_counted_by_length() -> None:
    target = sv.verify.sentences(controlled=True)
    draws = draw(target, sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2, moves=3)), draws=40)
    stats = draws["sample_stats"]
    assert stats["redraws_by_length"].shape == (4, 40, len(REDRAW_LENGTHS))
    assert (stats["redraws_by_length"].values.sum(-1) == stats["redraws"].values).all()
    assert (stats["refreshed_by_length"].values.sum(-1) == stats["refreshed"].values).all()
    assert stats["redraws_by_length"].values[..., 2:].sum() == 0, "the texts have three tokens"
    found = sv.diagnose(draws)
    assert set(found.figures["redrawn blocks accepted, by length"]) == {"1", "2–3"}
    assert found.run.startswith("Cycle(SVS, Refresh)")


def test_divergences_unreliable_masses_rejected_redraws_and_interruptions() -> None:
    log_prob = np.random.default_rng(0).normal(size=(4, 100))
    counts = {
        "diverging": np.arange(400).reshape(4, 100) % 10 == 0,
        "unreliable": np.ones((4, 100), dtype=bool),
        "redraws": np.full((4, 100), 100),
        "refreshed": np.ones((4, 100), dtype=int),
    }
    record = Record("SVS", log_prob, counts=counts, scale=0.5, steps=100, requested_draws=500)
    found = diagnose_record(record)
    assert codes(found) == ["diverging", "unreliable-masses", "low-acceptance", "interrupted"]
    assert "scale=0.25" in warning(found, "diverging").remedy
    assert "100 of 500 draws" in warning(found, "interrupted").message
    assert found.ok
    tolerant = DiagnosticSettings(max_diverging_share=0.2, max_unreliable_share=1.0, min_accepted_share=0.0)
    assert codes(diagnose_record(record, tolerant)) == ["interrupted"]


def test_low_effective_sample_size_suggests_a_number_of_draws() -> None:
    found = diagnose_record(Record("SVS", autoregressive(0.9, chains=4, draws=300), steps=300))
    low = warning(found, "low-ess")
    assert int(low.remedy.split("draws=")[1].split()[0]) > 300
    assert found.ok


def test_independent_draws_need_not_mix() -> None:
    found = sv.diagnose(draw(sv.verify.sentences(controlled=False), sv.Ancestral(), draws=30))
    assert found.note == "independent draws"
    assert found.warnings == []


def test_steps_before_single_texts_have_their_own_thresholds() -> None:
    """A text may keep 1 % of its start, but not 30 %; draws that are averaged may not."""
    log_probs = {kept: autoregressive(kept ** (1 / 100), chains=8, draws=101)[:, 50:] for kept in (0.01, 0.3)}
    assert not diagnose_record(Record("SVS", log_probs[0.01], steps=51)).ok
    found = diagnose_record(Record("svs", log_probs[0.01], one_text=True, steps=100))
    assert found.ok
    assert codes(found) == ["r-hat"], "a warning that is not serious"
    found = diagnose_record(Record("svs", log_probs[0.3], one_text=True, chains=range(8, 16), steps=100))
    apart = warning(found, "r-hat")
    assert apart.serious
    assert all(8 <= int(part.split()[0].strip(",);")) < 16 for part in apart.message.split("in chain ")[1:])
    assert apart.remedy == 'use warmup=400, sampler="svs+refresh" or sampler="adaptive"'
    assert apart.arguments == {"warmup": 400, "sampler": "svs+refresh"}


def test_steps_before_single_texts_have_a_least_effective_sample_size() -> None:
    for factor, expected in ((0.97, ["low-ess"]), (0.2, [])):
        record = Record("svs", autoregressive(factor, chains=3, draws=60), one_text=True, steps=120)
        assert codes(diagnose_record(record, DiagnosticSettings(max_rhat=3.0))) == expected


def test_many_draws_are_summarised_by_some_of_the_chains() -> None:
    values = np.random.default_rng(0).normal(size=(64, 50))
    every, some = mixing_of(values), mixing_of(values, max_values=400)
    assert some.mean == every.mean
    assert some.rhat != every.rhat
    assert some.ess_bulk == pytest.approx(every.ess_bulk, rel=0.3)


def test_one_chain_has_no_r_hat() -> None:
    found = diagnose_record(Record("SVS", np.random.default_rng(0).normal(size=(1, 200)), steps=200))
    assert found.mixing["lp"].rhat is None
    assert "two chains" in found.note


def test_several_runs_are_diagnosed_by_name() -> None:
    good, short = (np.random.default_rng(0).normal(size=(4, draws)) for draws in (200, 5))
    found = diagnose_records({"a": Record("SVS", good), "b": Record("SVS", short, requested_draws=9)})
    assert set(found.mixing) == {"a: lp", "b: lp"}
    assert warning(found, "interrupted").message.startswith("b: ")
    assert found.note.startswith("b: ")


def test_warmup_is_kept_on_request_and_changes_no_draw(tmp_path: Path) -> None:
    target, sampler = random_target(3, tokens=5, length=2, dimensions=3), sv.SVS(scale=1.0)
    plain = draw(target, sampler, draws=20, warmup=7, thin=2)
    kept = draw(target, sampler, draws=20, warmup=7, thin=2, keep_warmup=True)
    for group in ("posterior", "sample_stats"):
        assert kept[group].to_dataset().identical(plain[group].to_dataset())
    assert "warmup_posterior" not in plain.children
    assert kept["warmup_posterior"]["tokens"].shape == (4, 7, 2)
    assert kept["warmup_sample_stats"]["lp"].dims == ("chain", "draw")
    every = draw(target, sampler, draws=47, warmup=0)
    warm = kept["warmup_posterior"]["tokens"].values
    assert (warm == every["posterior"]["tokens"].values[:, :7]).all()
    kept.to_netcdf(tmp_path / "kept.nc", engine="h5netcdf")
    assert sv.diagnose(tmp_path / "kept.nc").to_dict() == sv.diagnose(kept).to_dict()
    independent = draw(sv.verify.sentences(controlled=False), sv.Ancestral(), draws=2, warmup=7, keep_warmup=True)
    assert set(independent.children) == {"posterior", "sample_stats"}


class Letters:
    """A target whose tokens are letters, and whose log p has two terms with names."""

    embeddings, length = EMBEDDINGS, 2

    def log_prob(self, tokens: Tensor) -> Tensor:
        return sum(self.log_factors(tokens).values())

    def log_factors(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"./few/small": -tokens.sum(-1).double(), "even": -(tokens % 2).sum(-1).double()}

    def decode(self, tokens: Tensor) -> str:
        return "<b>" + " ".join("abcde"[token] for token in tokens.tolist())


class Undecodable(Letters):
    def decode(self, tokens: Tensor) -> str:
        raise KeyError("no\nletter")


def test_controls_are_diagnosed_by_name_and_notebooks_show_texts(tmp_path: Path) -> None:
    draws = draw(Letters(), sv.SVS(scale=1.0), draws=50)
    assert isinstance(draws, xarray.DataTree)
    found = sv.diagnose(draws)
    assert set(found.mixing) == {"lp", "./few/small", "even", DISTANCE}
    factors = draws["sample_stats"]["log_factors"]
    assert np.allclose(factors.sum("factor").values, draws["sample_stats"]["lp"].values)
    shown = draws._repr_html_()
    last = draws["posterior"]["tokens"].values[0, -1]
    assert "&lt;b&gt;" + " ".join("abcde"[token] for token in last) in shown
    assert found.run in shown
    assert "<p>" not in draws["posterior"]._repr_html_()
    assert "<p>" in draws.copy()._repr_html_()
    assert type(draws.sel(chain=[0, 1])["posterior"]["tokens"]) is xarray.DataArray
    draws.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    assert sv.diagnose(str(tmp_path / "draws.nc")).to_dict() == found.to_dict()


def test_a_target_that_fails_after_the_run_loses_no_draw() -> None:
    draws = draw(Undecodable(), sv.SVS(scale=1.0), draws=5)
    assert draws["posterior"]["tokens"].shape == (4, 5, 2)
    assert "warning (no-scores)" in draws.attrs["diagnosis"]
    assert r"'no\nletter'" in draws.attrs["diagnosis"]
    assert "<p>" in draws._repr_html_()


def test_warnings_are_printed_on_a_terminal_with_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(3, tokens=5, length=2, dimensions=3)
    draw(target, sv.SVS(scale=0.001), draws=30, progress=True)
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr("structured_voronoi.engine.summary.is_interactive", lambda: True)
    draw(target, sv.SVS(scale=0.001), draws=30)
    assert capsys.readouterr().err == ""
    draw(target, sv.SVS(scale=0.001), draws=30, progress=True)
    assert capsys.readouterr().err.startswith("sample: warning: all 4 chains did not move")
