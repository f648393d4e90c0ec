"""`auto`: which sampler it takes for which control, why, and from what; and probabilities beside plain Monte Carlo."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.contracts import Chains
from structured_voronoi.errors import NoStartError
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.rounds import share_of
from structured_voronoi.metrics.divergence import pooled_chi_square
from structured_voronoi.problem import drawing
from structured_voronoi.run import choice, guided_moves, pilots
from structured_voronoi.run.guided_moves import guided_choices, leftover, texts_drawn
from structured_voronoi.run.presets import plan_texts
from structured_voronoi.run.probability import summarise_weights
from structured_voronoi.streams import Rng

Predicate = sv.controls.Predicate
SEED, LEVEL = 3, 1e-4


@pytest.fixture(autouse=True)
def small_pilots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and lookaheads from few texts that are fitted whenever they can be of use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "LOOKAHEAD_TEXTS", 128)
    monkeypatch.setattr(choice, "TRAINING_SECONDS", 0.0)


def under(*controls: Any, length: int = 12) -> sv.Controlled:
    return sv.Controlled(sv.LanguageModel.load("bundled", length=length), dict.fromkeys(controls, 1.0))


def rare() -> sv.Controlled:
    return under(Predicate.keyword("excellent"), length=8)


def refuse_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*arguments: Any, **settings: Any) -> Lookahead:
        raise AssertionError("a lookahead is fitted")

    monkeypatch.setattr(Lookahead, "fit", fit)


def test_frequent_controls_are_left_to_rejection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_fits(monkeypatch)
    plan = plan_texts(under(Predicate.keyword("the")), count=4)
    assert (plan.name, plan.steps) == ("rejection", 1)
    found = re.fullmatch(
        r"rejection \((.+) s a text, (.+) of tries accepted\), because fitting .+ s", plan.reason or ""
    )
    assert found
    assert 0.2 < float(found[2]) <= 1


def test_without_controls_texts_are_ancestral() -> None:
    plan = plan_texts(sv.LanguageModel.load("bundled", length=4))
    assert (plan.name, plan.steps, plan.starts_at_truth) == ("ancestral", 1, True)


def test_few_texts_are_not_worth_a_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text in a few hundred is soon found twice; a thousand texts are another matter."""
    monkeypatch.setattr(choice, "TRAINING_SECONDS", 30.0)
    refuse_fits(monkeypatch)
    assert plan_texts(rare(), count=2).name == "rejection"
    with pytest.raises(AssertionError, match="a lookahead is fitted"):
        plan_texts(rare(), count=10_000)


def test_rare_controls_are_guided_by_a_lookahead_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_texts(rare(), count=1000)
    assert plan.name == "guided", plan.reason
    numbers = r"guided [\d.e+-]+ s \(effective share [\d.]+; its lookahead took [\d.]+ s and is kept\)"
    assert re.search(
        rf"by seconds a text in a pilot: {numbers}, rejection [\d.e+]+ s \(.+ accepted\)", plan.reason or ""
    )
    assert isinstance(plan.sampler, sv.Guided)
    assert plan.sampler.lookahead is not None
    assert plan.steps == 1  # all choices are made in one step
    said = f"each chosen {plan.sampler.choices + 1} times among {plan.sampler.tries}: about 0.0"
    assert (plan.mixing or "").startswith(said)
    refuse_fits(monkeypatch)
    for seed, count in ((0, 1), (1, 1000)):  # one that is kept costs nothing, whatever the seed
        again = plan_texts(rare(), count=count, seed=seed)
        assert again.name == "guided", again.reason
        assert "its lookahead was kept" in (again.reason or "")
    assert plan_texts(rare(), "guided").name == "guided"
    for warmup, thin, steps in ((7, 2, 9), (None, 3, 3)):
        asked = plan_texts(rare(), "guided", warmup=warmup, thin=thin)
        assert isinstance(asked.sampler, sv.Guided)
        assert asked.steps == steps
        assert asked.sampler.choices == -(-plan.sampler.choices // steps)


def test_a_pilot_is_kept_with_its_lookahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run draws no pilot; one that is damaged is drawn anew."""
    plan, draw = plan_texts(rare(), count=1000), pilots.draw_in_waves
    drawn: list[range] = []

    def count(problem: Any, weigh: Any, numbers: range, seed: int, *wave: int) -> pilots.Draws:
        drawn.append(numbers)
        return draw(problem, weigh, numbers, seed, *wave)

    monkeypatch.setattr(pilots, "draw_in_waves", count)
    for name in ("auto", "guided"):
        again = plan_texts(rare(), name, count=1000)
        assert not drawn
        assert (again.name, again.steps, again.mixing) == (plan.name, plan.steps, plan.mixing)
    notes = [*tmp_path.rglob("lookahead-*/tries.json"), *tmp_path.rglob("lookahead-*/guided.json")]
    assert [note.name for note in notes] == ["tries.json", "guided.json"]
    for note, damage in zip(notes, ('{"log_weight": ["no"]}', "[1, 2"), strict=True):
        note.write_text(damage)
    assert plan_texts(rare(), count=1000).name == "guided"
    assert drawn


def test_a_function_that_has_changed_under_its_name_gets_another_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the share of the old one would say how often texts of the new one are chosen."""
    plan = plan_texts(under(Predicate(lambda text: "Italian" in text, "mine")), "guided")
    refuse_fits(monkeypatch)
    again = plan_texts(under(Predicate(lambda text: "Italian" in text, "mine")), "guided")
    assert again.mixing == plan.mixing
    with pytest.raises(AssertionError, match="a lookahead is fitted"):
        plan_texts(under(Predicate(lambda text: "river" in text, "mine")), "guided")


def test_the_lookahead_of_one_prompt_serves_another_where_it_does_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_texts(rare(), "guided")
    assert isinstance(first.sampler, sv.Guided)
    lookahead = first.sampler.lookahead
    assert lookahead is not None
    model = sv.LanguageModel.load("bundled", length=8, prompt="Near the old bridge")
    target = sv.Controlled(model, {Predicate.keyword("excellent"): 1.0})
    refuse_fits(monkeypatch)
    monkeypatch.setattr(choice, "SHARED", 0.0)
    with pytest.raises(AssertionError, match="a lookahead is fitted"):  # worth it for so many texts
        plan_texts(target, "guided", count=100_000, other=lookahead)
    monkeypatch.setattr(choice, "FITTED", 1e6)
    plan = plan_texts(target, "auto", count=100_000, other=lookahead)
    assert plan.name == "guided", plan.reason
    assert "its lookahead is that of the first prompt" in (plan.reason or "")
    assert isinstance(plan.sampler, sv.Guided)
    assert plan.sampler.lookahead is not None
    assert plan.sampler.lookahead.identity["prompt"] == "Near the old bridge"
    monkeypatch.setattr(choice, "SHARED", 1.1)
    with pytest.raises(AssertionError, match="a lookahead is fitted"):
        plan_texts(target, "guided", other=lookahead)


def test_all_three_are_measured_where_the_lookahead_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "UNSURE", math.inf)
    monkeypatch.setattr(choice, "TYPICAL", 0)
    plan = plan_texts(under(Predicate.keyword("river"), length=8), count=100_000, warmup=2)
    seconds = {name: float(said) for name, said in re.findall(r"(\S+) ([\d.e+-]+) s \(", plan.reason or "")}
    assert list(seconds) == ["guided", "rejection", "svs+refresh"]
    assert seconds[plan.name] == min(seconds.values())  # they are rounded, and two may be said to take the same
    assert "(3 steps)" in (plan.reason or "")


class Second:
    """A control of one's own: the second token is a certain one, or else the score is low."""

    name = "second"

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
        return torch.where(tokens[:, 1] == 310, 1.0, -1.0)


@pytest.mark.parametrize(("bound", "said"), [(math.inf, "has the bound inf"), (-2.0, "above its bound of -2")])
def test_scores_without_a_bound_leave_chains(bound: float, said: str) -> None:
    """And they have no probability."""
    target = under(Second(bound), length=3)
    plan = plan_texts(target)
    assert (plan.name, plan.steps) == ("svs+refresh", 101)
    assert said in (plan.reason or "")
    with pytest.raises(sv.SamplingError, match=rf"{said}.*; a probability needs a `bound`, too: declare one"):
        sv.probability(target, texts=64, progress=False)


def test_targets_without_redraws_are_left_to_svs() -> None:
    plan = plan_texts(sv.verify.random_target(0))
    assert (plan.name, plan.reason) == ("svs", "svs, because the tokens of this target cannot be redrawn")


def never() -> Predicate:
    return Predicate(lambda text: False, "never")


def test_what_nothing_leads_to_is_given_up_after_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their number and the bound that follows; no lookahead is fitted, and no start is looked for."""
    refuse_fits(monkeypatch)
    monkeypatch.setattr(choice, "_offer_of_svs", None)
    monkeypatch.setattr(pilots, "LEAST_TRIES", 64)
    monkeypatch.setattr(pilots, "LEAST_SECONDS", math.inf)
    monkeypatch.setattr(choice, "PART", 0.0)
    said = r"none of 128 texts of the model satisfied never, so that at most 1 in 43 does \(95 %\), .*; loosen it, give"
    for controls in ([never()], [Second(0.0), never()], [Predicate.keyword("the"), never()]):
        with pytest.raises(NoStartError, match=said):
            plan_texts(under(*controls))


def test_what_others_may_lead_to_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rare word may be met first, and a few tries in vain say little: all samplers are asked."""
    monkeypatch.setattr(drawing, "RELAXED_TRIES", 20)
    monkeypatch.setattr(pilots, "LEAST_TRIES", 64)
    said = r"no sampler found .*guided not possible \(never was satisfied by none of 128.*no start found\); loosen"
    with pytest.raises(NoStartError, match=said):
        plan_texts(under(Predicate.keyword("excellent"), never(), length=3))
    monkeypatch.setattr(pilots, "LEAST_TRIES", math.inf)
    with pytest.raises(NoStartError, match=said):
        plan_texts(under(never(), length=3))


def test_what_a_pilot_never_saw_may_still_have_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries find nothing and the lookahead refuses, but chains have a start."""
    from structured_voronoi.run.pilots import Draws

    def fit(*arguments: Any, **settings: Any) -> Lookahead:
        raise sv.SamplingError("nothing can be learnt; do something else")

    monkeypatch.setattr(Lookahead, "fit", fit)
    monkeypatch.setattr(choice, "draw_tries", lambda *_, **__: Draws(np.full(64, -math.inf), 1e-3))
    plan = plan_texts(under(Predicate.keyword("the"), length=6), warmup=1)
    assert plan.name == "svs+refresh"
    assert "guided not possible (nothing can be learnt)" in (plan.reason or "")


WEIGHTS = {
    "equal": np.zeros(100),
    "one in ten": np.log(np.arange(100) % 10 == 0, where=np.arange(100) % 10 == 0, out=np.full(100, -np.inf)),
    "log-normal": 1.5 * np.random.default_rng(3).standard_normal(512),
    "one of all": np.array([0.0] + [-np.inf] * 511),
}


@pytest.mark.parametrize("log_weight", WEIGHTS.values(), ids=list(WEIGHTS))
def test_guided_chains_choose_as_often_as_leaves_so_little(log_weight: np.ndarray) -> None:
    choices, tries = guided_choices(log_weight), guided_moves.TRIES
    assert leftover(log_weight, tries, choices) <= guided_moves.LEFTOVER == 0.003
    assert leftover(log_weight, tries, choices - 1) > guided_moves.LEFTOVER


@pytest.mark.parametrize("tries", [4, 8, 32])
def test_few_tries_are_best(tries: int) -> None:
    """As many fresh texts leave more chains where they were, if they are offered in fewer choices."""
    log_weight = WEIGHTS["log-normal"]
    choices = guided_choices(log_weight)
    fewer = 1 + (choices - 1) * (guided_moves.TRIES - 1) // (tries - 1)
    assert leftover(log_weight, tries, fewer) > leftover(log_weight, guided_moves.TRIES, choices)


def test_guided_choices_at_their_best_and_without_a_weight() -> None:
    assert texts_drawn(guided_choices(np.zeros(64))) == guided_moves.BEST
    assert guided_choices(np.full(64, -np.inf)) == guided_moves.MOST_CHOICES


def test_a_weight_of_nearly_nothing_changes_nothing() -> None:
    log_weight = WEIGHTS["log-normal"]
    light = np.append(log_weight, -600.0)
    assert leftover(light, 2, 20) == pytest.approx(leftover(log_weight, 2, 20), rel=0.01)


@pytest.mark.parametrize(("tries", "choices"), [(2, 40), (8, 5)])
def test_leftover_is_what_is_missing_of_heavy_weights(tries: int, choices: int) -> None:
    """Chains on a list of proposals, half of them impossible and one as heavy as 60: its share after t choices."""
    source, chains = np.random.default_rng(5), 200_000
    weight = np.where(np.arange(300) == 0, 60.0, np.arange(300) % 2)
    text = np.zeros(0, dtype=int)
    for number in range(choices):
        offered = source.integers(300, size=(chains, tries))
        if number:
            offered[:, 0] = text
        chosen = (weight[offered].cumsum(1) < source.random((chains, 1)) * weight[offered].sum(1, keepdims=True)).sum(1)
        text = offered[np.arange(chains), chosen]
    heavy = 60 / weight.sum()
    missing = heavy - (text == 0).mean()
    with np.errstate(divide="ignore"):
        assert missing == pytest.approx(leftover(source.permutation(np.log(weight)), tries, choices), rel=0.2)


def test_texts_of_a_guided_plan_follow_the_target() -> None:
    """Three tokens out of five, listed; with the tries and the steps that the pilot derives."""
    loaded = sv.LanguageModel.load("bundled")
    words = [loaded.tokenizer.encode(word)[0] for word in (" cheap", " pub", " restaurant", " place", " and")]
    model = sv.LanguageModel.load("bundled", length=3, prompt="Near the", allowed=words)
    target = sv.Controlled(model, {Predicate(lambda text: 0.05 + 0.95 * (text.count("pub") == 2), "two pubs"): 1.0})
    plan = plan_texts(target, "guided")
    chains = Chains(plan.sampler, target, Rng(SEED, 500))
    for _ in range(plan.steps):
        next(chains)
    states = torch.cartesian_prod(*[torch.tensor(words)] * 3)
    found = (chains.state.tokens[:, None] == states).all(-1).sum(0)
    assert pooled_chi_square(found.numpy(), target.log_prob(states).double().softmax(0).numpy()) >= LEVEL


def test_plain_monte_carlo_stands_beside_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    target = under(Predicate.keyword("pub"), length=8)
    found = sv.probability(target, texts=256, progress=False, keep=True, monte_carlo=True)
    assert (found.evaluations, found.pilot) == (256, 256)
    assert found.monte_carlo is not None
    mean, low, high = found.monte_carlo
    assert max(low, found.low) <= min(high, found.high)
    hits = round(mean * 512)
    assert f"with as many texts (512): {mean:.3g}" in found.comparison
    assert f"from {hits} texts that fit" in found.comparison
    refuse_fits(monkeypatch)
    again = sv.probability(target, texts=256, progress=False, keep=True)
    assert (again.value, again.monte_carlo) == (found.value, None)
    error = math.sqrt((1 - again.value) / again.value / 512)
    assert (
        f"about {512 * again.value:.2g} that fit and have a relative standard error of {error:.2g}" in again.comparison
    )
    assert "computed, not drawn" in again.comparison


def test_equal_weights_have_no_tail() -> None:
    """One text was drawn again and again, others a few times."""
    repeated = np.concatenate([np.zeros(300), np.linspace(-5, -1, 100)])
    assert summarise_weights(repeated).pareto_k <= 0


def test_probabilities_below_all_floating_point_numbers() -> None:
    """Their logarithm is known, and they are written as powers of ten."""
    weights = np.log(10) * (-400 + np.random.default_rng(0).normal(0, 0.1, 400))
    found = summarise_weights(weights)
    assert found.value == 0
    assert found.trusted
    assert found.log10_value == pytest.approx(-400, abs=0.05)
    assert re.fullmatch(r"10\^-(400|399)\.\d\d \(95 %: 10\^-\S+ – 10\^-\S+\)", str(found))
    assert "400 texts" not in found.verdict
    assert "to be trusted" in found.verdict
    assert "see about 0 that fit" in found.comparison
    same = summarise_weights(weights + 390 * np.log(10))
    assert same.value == pytest.approx(1e-10, rel=0.1)
    assert same.relative_error == pytest.approx(found.relative_error)
    assert same.low < same.value < same.high
    assert share_of(torch.from_numpy(weights)) == pytest.approx(same.effective_share)
