"""Sequential Monte Carlo: reordered rows, independent systems, weights and resampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.baselines.smc import resampled
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.lookahead.reading import REST
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.problem.drawing import redraw_by
from structured_voronoi.problem.problem import bind

Keyword = sv.keyword


def bundled(length: int = 6, dtype: str = "float32", **settings: Any) -> sv.TextTarget:
    return sv.load("bundled", dtype=dtype).target(max_tokens=length, **settings)


class Unordered(sv.ControlledTarget):
    """A target whose redraw does not support parents."""

    reorders = False


@pytest.mark.parametrize("suffix", ["", " in the city"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_redraws_with_parents_agree_with_evaluations(suffix: str, dtype: str) -> None:
    """For any parents the log-probabilities of a redraw are those of an evaluation of its texts."""
    model = bundled(suffix=suffix, dtype=dtype)
    problem, levels = bind(model), sv.Rng(0, 16).uniform(6)
    generator = torch.Generator().manual_seed(0)

    def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Any:
        if n % 3 == 1:
            return log_probs.argmax(-1)
        parents = torch.randint(16, (16,), generator=generator)
        return (log_probs[parents].double().softmax(-1).cumsum(-1) > levels[:, n : n + 1]).int().argmax(-1), parents

    blank = torch.full((16, 6), 300)
    drawn = redraw_by(problem, blank, 0, 6, choose, reorders=True)
    assert len(torch.unique(drawn.tokens[:, 0])) < len(torch.unique(drawn.tokens, dim=0))
    tolerance = 1e-4 if dtype == "float32" else 1e-6
    torch.testing.assert_close(drawn.log_probs, model.token_log_probs(drawn.tokens), atol=tolerance, rtol=0)
    total = drawn.log_probs.sum(-1) + drawn.log_rest
    torch.testing.assert_close(total, model.log_prob(drawn.tokens), atol=tolerance, rtol=1e-5)


def test_targets_that_cannot_reorder_are_redrawn_by_conditionals() -> None:
    """A target that can reorder rows and one that cannot give the same texts, up to rounding."""
    controls = [Keyword("the")]
    found = [
        sv.baselines.SMC.bootstrap(8, threshold=1.0).run(kind(bundled(), controls), sv.Rng(0, 4))
        for kind in (sv.ControlledTarget, Unordered)
    ]
    assert torch.equal(found[0].tokens, found[1].tokens)
    torch.testing.assert_close(found[0].log_weight, found[1].log_weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("particles", [3, 16])
def test_draws_do_not_depend_on_the_split_of_the_chains(particles: int) -> None:
    target = bundled().under([Keyword("the"), sv.label("food", "Italian", weight=0.5)])
    problem = bind(target)
    lookahead = untrained(
        problem,
        dict.fromkeys(target.log_factors(torch.full((1, 6), 300)), "hidden"),
        LookaheadSettings(delta=1.0),
        seed=1,
    )
    sampler = sv.baselines.SMC(lookahead, particles)

    def draw(chains: range) -> tuple[Tensor, Tensor]:
        rng = sv.Rng(3, chains)
        state = sampler.init(problem, rng, None)
        state, _ = sampler.step(problem, rng, state)
        state, info = sampler.step(problem, rng, state)
        return state.tokens, info.energy

    tokens, energy = draw(range(40))
    for part in (range(7), range(7, 23), range(23, 40)):
        some_tokens, some_energy = draw(part)
        assert torch.equal(some_tokens, tokens[part.start : part.stop])
        assert torch.equal(some_energy, energy[part.start : part.stop])
    torch.testing.assert_close(energy, -target.log_prob(tokens).double(), atol=1e-4, rtol=0)


def test_a_single_particle_has_the_weight_of_a_proposal() -> None:
    """Without resampling the product of the factors is p W / q of the whole text."""
    target = sv.verify.sentences(controlled=True)
    lookahead = untrained(bind(target), {REST: "token"}, LookaheadSettings(delta=0.3), seed=0)
    found = sv.baselines.SMC(lookahead, 1, threshold=1.0).run(target, sv.Rng(0, 64))
    scored = lookahead.score(bind(target), found.tokens[:, 0])
    torch.testing.assert_close(found.log_weight[:, 0], scored.log_weight)
    torch.testing.assert_close(found.log_z, found.log_weight[:, 0])
    torch.testing.assert_close(found.energy[:, 0], -target.log_prob(found.tokens[:, 0]))


def test_particles_are_resampled_in_proportion_to_their_weight() -> None:
    weight = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    levels = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    index = resampled(weight.log().repeat(1000, 1), levels.repeat_interleave(2)).view(1000, 2, 4)
    for system in range(2):
        counts = torch.stack([(index[:, system] == particle).sum(-1) for particle in range(4)], dim=-1).double()
        torch.testing.assert_close(counts.mean(0), 4 * weight[system], atol=0.01, rtol=0)
        assert float((counts - 4 * weight[system]).abs().max()) < 1


def test_particles_whose_pattern_cannot_match_are_resampled() -> None:
    """With the control "not the" a particle with "the" has weight 0 at once and is replaced."""
    target = bundled(12).under([~Keyword("the")])
    found = sv.baselines.SMC.bootstrap(32, threshold=0.9).run(target, sv.Rng(0, 4))
    late = sv.baselines.SMC.bootstrap(32, threshold=0.0).run(target, sv.Rng(0, 4))
    assert found.log_weight.isfinite().double().mean() > 1.3 * late.log_weight.isfinite().double().mean()


def test_it_fits_its_own_lookahead_and_refuses_wrong_settings() -> None:
    target = bundled(4).under([Keyword("the")])
    draws = sv.sample(target, sv.baselines.SMC(particles=8, texts=32), chains=3, draws=2, warmup=5, progress=False)
    assert draws.attrs["warmup"] == 0
    assert draws["sample_stats"]["evaluations"].values.tolist() == [[3, 3]] * 3  # one system of 8 particles
    rare = bundled(4).under([Keyword("Italian")])
    with pytest.raises(sv.SamplingError, match="no particle satisfies the controls in 1 of 1 systems of 2"):
        sv.sample(rare, sv.baselines.SMC.bootstrap(2), chains=1, draws=1, progress=False)
    for wrong in ({"particles": 0}, {"threshold": 1.5}, {"threshold": "half"}):
        with pytest.raises(sv.SamplingError) as caught:
            sv.baselines.SMC(**wrong)  # type: ignore[arg-type]
        assert [caught.value.argument] == list(wrong)
    with pytest.raises(sv.SamplingError) as caught:
        sv.baselines.SMC("some")  # type: ignore[arg-type]
    assert caught.value.argument == "lookahead"
    with pytest.raises(sv.SamplingError, match="needs a target with `conditionals"):
        sv.sample(sv.PottsTarget(side=2), sv.baselines.SMC.bootstrap(), progress=False)
