"""Sequential Monte Carlo: rows that go on from others, systems that do not see each other, weights by hand."""

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

Keyword = sv.controls.Predicate.keyword


def bundled(length: int = 6, **settings: Any) -> sv.LanguageModel:
    return sv.LanguageModel.load("bundled", length=length, **settings)


class Unordered(sv.Controlled):
    """A target whose own redraw does not know of parents."""

    reorders = False


@pytest.mark.parametrize("suffix", ["", " in the city"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_go_on_from_others(suffix: str, dtype: str) -> None:
    """Whatever the parents, a redraw says of its texts what an evaluation says of them."""
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


def test_a_redraw_without_parents_is_done_by_conditionals() -> None:
    """The same texts, up to what rounding moves, from a target that can reorder and from one that cannot."""
    controls = {Keyword("the"): 1.0}
    found = [
        sv.SMC.bootstrap(8, threshold=1.0).run(kind(bundled(), controls), sv.Rng(0, 4))
        for kind in (sv.Controlled, Unordered)
    ]
    assert torch.equal(found[0].tokens, found[1].tokens)
    torch.testing.assert_close(found[0].log_weight, found[1].log_weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("particles", [3, 16])
def test_draws_do_not_depend_on_how_chains_are_split(particles: int) -> None:
    target = sv.Controlled(bundled(), {Keyword("the"): 1.0, sv.controls.Classifier.load("food", "Italian"): 0.5})
    problem = bind(target)
    lookahead = untrained(
        problem,
        dict.fromkeys(target.log_factors(torch.full((1, 6), 300)), "hidden"),
        LookaheadSettings(delta=1.0),
        seed=1,
    )
    sampler = sv.SMC(lookahead, particles)

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


def test_one_particle_has_the_weight_of_a_proposal() -> None:
    """Without others to be resampled from, p W / q of the whole text is what the factors multiply to."""
    target = sv.verify.sentences(controlled=True)
    lookahead = untrained(bind(target), {REST: "token"}, LookaheadSettings(delta=0.3), seed=0)
    found = sv.SMC(lookahead, 1, threshold=1.0).run(target, sv.Rng(0, 64))
    scored = lookahead.score(bind(target), found.tokens[:, 0])
    torch.testing.assert_close(found.log_weight[:, 0], scored.log_weight)
    torch.testing.assert_close(found.log_z, found.log_weight[:, 0])
    torch.testing.assert_close(found.energy[:, 0], -target.log_prob(found.tokens[:, 0]))


def test_particles_are_resampled_as_often_as_they_weigh() -> None:
    weight = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    levels = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    index = resampled(weight.log().repeat(1000, 1), levels.repeat_interleave(2)).view(1000, 2, 4)
    for system in range(2):
        counts = torch.stack([(index[:, system] == particle).sum(-1) for particle in range(4)], dim=-1).double()
        torch.testing.assert_close(counts.mean(0), 4 * weight[system], atol=0.01, rtol=0)
        assert float((counts - 4 * weight[system]).abs().max()) < 1


def test_patterns_out_of_reach_end_a_particle() -> None:
    """Under "not the" a particle that says it weighs nothing from then on, so that others take its place."""
    target = sv.Controlled(bundled(12), {~Keyword("the"): 1.0})
    found = sv.SMC.bootstrap(32, threshold=0.9).run(target, sv.Rng(0, 4))
    late = sv.SMC.bootstrap(32, threshold=0.0).run(target, sv.Rng(0, 4))
    assert found.log_weight.isfinite().double().mean() > 1.3 * late.log_weight.isfinite().double().mean()


def test_it_fits_its_own_lookahead_and_says_what_is_wrong() -> None:
    target = sv.Controlled(bundled(4), {Keyword("the"): 1.0})
    draws = sv.sample(target, sv.SMC(particles=8, texts=32), chains=3, draws=2, warmup=5, progress=False)
    assert draws.attrs["warmup"] == 0
    assert draws["sample_stats"]["evaluations"].values.tolist() == [[3, 3]] * 3  # the system of 8 is run as a whole
    rare = sv.Controlled(bundled(4), {Keyword("Italian"): 1.0})
    with pytest.raises(sv.SamplingError, match="none of the 2 particles of 1 of 1 systems has a weight"):
        sv.sample(rare, sv.SMC.bootstrap(2), chains=1, draws=1, progress=False)
    for wrong in ({"particles": 0}, {"threshold": 1.5}, {"threshold": "half"}):
        with pytest.raises(sv.SamplingError, match=next(iter(wrong))):
            sv.SMC(**wrong)  # type: ignore[arg-type]
    with pytest.raises(sv.SamplingError, match=r"lookahead = 'some'"):
        sv.SMC("some")  # type: ignore[arg-type]
    with pytest.raises(sv.SamplingError, match="needs a target with `conditionals"):
        sv.sample(sv.PottsTarget(side=2), sv.SMC.bootstrap(), progress=False)
