"""Texts that end: probabilities, stop strings, controls, samplers and errors."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import structured_voronoi as sv
from endings import END, LENGTH, SPELT, STOPS, EndForFree, ListedTexts, PaddingCounted, listed, network, words
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core import progress
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.metrics.text import perplexity
from structured_voronoi.problem import starts
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers import refresh

EVERY_STOP = pytest.mark.parametrize("stop", STOPS, ids=str)
EVERY_ROW = torch.cartesian_prod(*[torch.arange(len(SPELT))] * LENGTH)


@EVERY_STOP
def test_rows_are_texts_with_padding_or_impossible(stop: tuple[str | int, ...]) -> None:
    target = listed(stop)
    texts, log_prob = target.listed
    torch.testing.assert_close(target.log_prob(texts), log_prob, rtol=0, atol=1e-12)
    torch.testing.assert_close(target.log_prob_and_guide(texts)[0], log_prob, rtol=0, atol=1e-12)
    torch.testing.assert_close(target.log_prob_and_grad(texts)[0], log_prob, rtol=0, atol=1e-12)
    for score in (target.log_prob, lambda rows: target.log_prob_and_guide(rows)[0]):
        possible = EVERY_ROW[score(EVERY_ROW).isfinite()]
        assert sorted(possible.tolist()) == sorted(texts.tolist())
    assert torch.equal(target.is_complete(texts), torch.ones(len(texts), dtype=torch.bool))


@EVERY_STOP
def test_texts_that_may_be_cut_have_probabilities_that_sum_to_one(stop: tuple[str | int, ...]) -> None:
    target = listed(stop, finish="any")
    texts, log_prob = target.listed
    assert float(log_prob.exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert 0 < int(target.is_complete(texts).sum()) < len(texts)
    for score in (target.log_prob, lambda rows: target.log_prob_and_guide(rows)[0]):
        torch.testing.assert_close(score(texts), log_prob, rtol=0, atol=1e-12)
        assert sorted(EVERY_ROW[score(EVERY_ROW).isfinite()].tolist()) == sorted(texts.tolist())
    assert bind(target).ended is None
    assert target.log_factors(texts) == {}
    levels = Rng(5, 64).uniform(LENGTH)
    tokens, log_probs, log_rest = target.redraw(
        torch.zeros(64, LENGTH, dtype=torch.int64), 0, LENGTH, level_choice(levels)
    )
    torch.testing.assert_close(log_probs.sum(-1), target.log_prob(tokens))
    assert (log_rest == 0).all()


@EVERY_STOP
def test_conditionals_are_certain_of_padding_after_the_end(stop: tuple[str | int, ...]) -> None:
    target = listed(stop)
    texts, log_prob = target.listed
    conditionals = target.conditionals(texts, 0)
    torch.testing.assert_close(conditionals.exp().sum(-1), torch.ones(texts.shape, dtype=torch.float64))
    tokens = conditionals.gather(-1, texts[..., None]).squeeze(-1)
    torch.testing.assert_close(tokens.sum(-1), log_prob)
    torch.testing.assert_close(target.token_log_probs(texts), tokens)
    after = torch.arange(LENGTH) >= target.text_lengths(texts)[:, None]
    assert (tokens[after] == 0).all()
    assert (texts[after] == END).all()
    unended = EVERY_ROW[~target.is_complete(EVERY_ROW)]
    assert target.token_log_probs(unended).isfinite().all()


@EVERY_STOP
def test_texts_are_decoded_without_end_and_padding(stop: tuple[str | int, ...]) -> None:
    target = listed(stop)
    for row in target.support():
        assert target.decode(row) == "".join(SPELT[token] for token in row)


def test_fields_are_zero_where_nothing_moves() -> None:
    target = listed(STOPS[1])
    texts = target.support()
    for _, field in (target.log_prob_and_guide(texts), target.log_prob_and_grad(texts)):
        assert (field[texts == END] == 0).all()
        assert (field[texts != END] != 0).any()


def test_the_gradient_leaves_padding_out() -> None:
    """Of a text it is the same in rows of any length: padding that counted would pull."""
    short, long = ListedTexts(length=3), ListedTexts(length=6)
    text = torch.tensor([[1, 4, END]])
    padded = torch.tensor([[1, 4, END, END, END, END]])
    torch.testing.assert_close(long.log_prob_and_grad(padded)[1][:, :3], short.log_prob_and_grad(text)[1])
    assert not torch.allclose(PaddingCounted(length=6).log_prob(padded), PaddingCounted(length=3).log_prob(text)), (
        "and the broken twin is seen"
    )


@pytest.mark.parametrize("length", [4, 5, 8])
def test_a_text_scores_the_same_for_every_length(length: int) -> None:
    """For the model, for classifiers on its tokens, in their gradients, and per token."""
    models = [sv.load("bundled", dtype="float64").target(max_tokens=n, finish="stop") for n in (length, 12)]
    ids = models[0].tokenizer(" cheap pub.", add_special_tokens=False)["input_ids"][: length - 1]
    rows = [torch.tensor([[*ids, *[0] * (model.length - len(ids))]]) for model in models]
    short, long = (model.log_prob(row) for model, row in zip(models, rows, strict=True))
    torch.testing.assert_close(short, long, rtol=0, atol=1e-9)
    lengths = [model.text_lengths(row).numpy() for model, row in zip(models, rows, strict=True)]
    assert lengths[0] == lengths[1] == len(ids) + 1
    assert perplexity(short.numpy(), lengths[0]) == pytest.approx(perplexity(long.numpy(), lengths[1]))
    food = sv.label("price", "cheap")
    found = []
    for model, row in zip(models, rows, strict=True):
        control = food.bind(model)
        score, gradient = control.log_prob_and_grad(row, [""])
        assert (gradient[:, len(ids) :] == 0).all()
        found.append((score, gradient[:, : len(ids)]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-9)


def test_a_probe_reads_no_padding() -> None:
    from structured_voronoi.models.classifiers import Probe, model_identity
    from structured_voronoi.models.loading import Loaded

    torch.manual_seed(0)
    models = [sv.load("bundled").target(max_tokens=n, finish="stop") for n in (5, 9)]
    identity = model_identity(Loaded(models[0].network, models[0].tokenizer))
    config = {"labels": ["a", "b"], "classifier": "probe", "model": identity}
    probe = Classifier(Probe(128, 4, 2).eval().requires_grad_(False), config, "probe", "a")
    scores = []
    for model in models:
        rows = torch.tensor([[300, 310, 320] + [0] * (model.length - 3), [0] * model.length])
        scores.append(probe.bind(model).log_prob(rows, ["", ""]))
    torch.testing.assert_close(scores[0], scores[1])


def level_choice(levels: Tensor) -> Any:
    return lambda n, scores, hidden: inverse_cdf(scores, levels[:, n])


@EVERY_STOP
def test_finished_rows_leave_the_batch_without_changing_others(
    stop: tuple[str | int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws are the same in batches of 8 and of 64, and the model sees fewer and fewer rows."""
    target, levels = listed(stop), Rng(5, 64).uniform(LENGTH)
    blank, seen, run = torch.zeros(64, LENGTH, dtype=torch.int64), [], network().base_model.forward

    def counting(*arguments: Any, **settings: Any) -> Any:
        seen.append(len(settings["input_ids"]))
        return run(*arguments, **settings)

    monkeypatch.setattr(network().base_model, "forward", counting)
    whole = target.redraw(blank, 0, LENGTH, level_choice(levels))
    assert seen[0] == 64
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 64
    assert all(rows % 8 == 0 for rows in seen)
    parts = [target.redraw(blank[i : i + 8], 0, LENGTH, level_choice(levels[i : i + 8])) for i in range(0, 64, 8)]
    for one, other in zip(whole, (torch.cat(column) for column in zip(*parts, strict=True)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole.log_rest.isfinite(), target.is_complete(whole.tokens))
    torch.testing.assert_close(whole.log_probs, target.token_log_probs(whole.tokens))
    seen.clear()
    target.redraw(torch.zeros(8, LENGTH, dtype=torch.int64), 2, LENGTH, level_choice(levels[:8]))
    assert not seen, "texts that have ended need no model"


@EVERY_STOP
def test_a_block_is_scored_with_what_follows_it(stop: tuple[str | int, ...]) -> None:
    target = listed(stop)
    texts = target.support()
    levels = Rng(6, len(texts)).uniform(LENGTH)
    tokens, log_probs, log_rest = target.redraw(texts, 1, 3, level_choice(levels))
    torch.testing.assert_close(log_probs, target.token_log_probs(tokens)[:, 1:])
    total = target.token_log_probs(tokens)[:, 0] + log_probs.sum(-1) + log_rest
    torch.testing.assert_close(total, target.log_prob(tokens))


def test_particles_may_continue_from_finished_rows() -> None:
    """Parents named at every position, over ones and others, lead to texts that are scored as they are."""
    target, levels = listed(STOPS[1]), Rng(7, 16).uniform(LENGTH)
    generator = torch.Generator().manual_seed(2)

    def choose(n: int, scores: Tensor, hidden: Tensor | None) -> Any:
        parents = torch.randint(16, (16,), generator=generator)
        return inverse_cdf(scores[parents], levels[:, n]), parents

    tokens, log_probs, log_rest = target.redraw(torch.zeros(16, LENGTH, dtype=torch.int64), 0, LENGTH, choose)
    torch.testing.assert_close(log_probs, target.token_log_probs(tokens))
    assert torch.equal(log_rest.isfinite(), target.is_complete(tokens))


def test_chains_do_not_depend_on_those_beside_them() -> None:
    model = sv.load("bundled").target(max_tokens=40, finish="stop")
    for sampler in (sv.Ancestral(), sv.Cycle(sv.SVS(0.3, dimensions=32), sv.Refresh())):
        many = sv.sample(model, sampler, chains=11, draws=2, warmup=0, seed=3, progress=False)
        few = sv.sample(model, sampler, chains=3, draws=2, warmup=0, seed=3, progress=False)
        assert (many["posterior"]["tokens"].values[:3] == few["posterior"]["tokens"].values).all()


def refresh_matrix(target: ListedTexts, begin: int, end: int) -> Tensor:
    """K of a redraw of one block, with the target's own numbers and the sampler's own ratio."""
    states = target.support()
    every = sv.Refresh().init(target, Rng(0, len(states)), states)
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    others = torch.cat([states[:, :begin], states[:, end:]], dim=-1)
    drawn = target.conditionals(states, 0).gather(-1, states[..., None]).squeeze(-1)[:, begin:end].sum(-1).exp()
    for i in range(len(states)):
        here = refresh.State(*(part[i : i + 1].expand_as(part) for part in every[:4]), 0)
        same = (others == others[i]).all(-1)
        matrix[i] = torch.where(same, drawn * sv.Refresh().log_ratio(here, every, end).exp().clamp(max=1), 0)
    matrix.fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(-1))


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 3), (0, 3), (2, 4), (0, 4)])
def test_the_truth_is_stationary_under_redraws(begin: int, end: int) -> None:
    truth = listed(STOPS[1]).probabilities()
    assert (truth @ refresh_matrix(listed(STOPS[1]), begin, end) - truth).abs().max() < 1e-12
    if end < LENGTH:
        assert (truth @ refresh_matrix(listed(STOPS[1], EndForFree), begin, end) - truth).abs().max() > 1e-4


@EVERY_STOP
def test_the_automaton_of_the_end_is_that_of_the_texts(stop: tuple[str | int, ...]) -> None:
    """And a pattern is read up to the end only."""
    target = listed(stop)
    controlled = bind(target.under([sv.regex("[^d]*b", full=True)]))
    made = untrained(controlled, dict.fromkeys(controlled.patterns, "position"), LookaheadSettings(delta=0.1))
    ends, pattern = made.heads["the text ends"], made.heads["regex=[^d]*b"]
    for rows in (target.support(), EVERY_ROW[~target.is_complete(EVERY_ROW)]):
        assert torch.equal(ends.automaton.accepting[ends.begin(rows)], target.is_complete(rows))
        matches = controlled.log_factors(rows)["regex=[^d]*b"].isfinite()
        assert torch.equal(pattern.automaton.accepting[pattern.begin(rows)], matches)


def test_the_probability_is_that_of_whole_texts() -> None:
    control = sv.regex("b|d")
    target = listed(STOPS[1]).under([control])
    rows, log_prob = listed(STOPS[1]).listed
    met = control.log_prob(rows, [listed().decode(row) for row in rows]).isfinite()
    truth = float(log_prob[met].exp().sum() / log_prob.exp().sum())
    found = sv.probability(target, texts=1024, seed=1, progress=False, monte_carlo=True)
    assert found.low <= truth <= found.high
    assert found.ending is not None
    assert found.ending.mean == pytest.approx(float(log_prob.exp().sum()), abs=0.08)  # 3.6 standard errors
    assert found.monte_carlo is not None
    assert found.monte_carlo.low <= truth <= found.monte_carlo.high


def test_an_event_that_no_proposal_satisfies_has_probability_zero() -> None:
    problem = bind(listed().under([Predicate(lambda text: False, "never")]))
    lookahead = untrained(problem, dict.fromkeys(["never", "the text ends"], "position"), LookaheadSettings(delta=0.1))
    found = sv.probability(problem, texts=64, lookahead=lookahead, progress=False)
    assert (found.value, found.low, found.high, found.reliable) == (0.0, 0.0, pytest.approx(3 / found.texts), False)
    assert found.ending is not None
    assert str(found).startswith("0 (95 %: 0")


def test_particles_estimate_what_ends() -> None:
    """The mean weight of a system is E_p[W]: here the probability that a text ends."""
    target = listed(STOPS[2])
    for sampler in (sv.baselines.SMC.bootstrap(32), sv.baselines.SMC(particles=32, texts=256)):
        estimate = sampler.run(target, Rng(2, 200)).log_z.exp()
        apart = (estimate.mean() - target.listed[1].exp().sum()).abs()
        assert apart < 4 * estimate.std() / 200**0.5


def test_fudge_scores_texts_without_their_end() -> None:
    """Prefixes hold no end; a text that would end is judged by what stands before it."""
    asked = []

    def predictor(prefixes: Tensor) -> Tensor:
        asked.append(prefixes)
        return torch.where(prefixes[:, -1] == 4, 0.0, -6.0)

    tokens = sv.sample(listed(), sv.baselines.Fudge(predictor), chains=400, draws=1, progress=False)["posterior"][
        "tokens"
    ]
    assert not any((prefixes == END).any() for prefixes in asked)
    texts = torch.tensor(tokens.values)[:, 0]
    contents = listed().content_lengths(texts)
    last = texts.gather(-1, (contents - 1).clamp(min=0)[:, None]).squeeze(-1)
    some = (contents > 0) & (contents < LENGTH)
    assert some.any()
    assert (last[some] == 4).double().mean() > 0.9


def test_stop_strings_are_found_across_tokens_and_inside_them() -> None:
    model = sv.load("bundled").target(max_tokens=12, finish="stop", stop=("cheap pub", "ily"))
    encode = model.tokenizer

    def how_long(text: str) -> int:
        ids = encode(text, add_special_tokens=False)["input_ids"]
        row = torch.tensor([[*ids, *[0] * (12 - len(ids))]])
        assert bool(model.is_complete(row))
        return int(model.text_lengths(row)) - len(ids)

    assert how_long(" a cheap pub") == 0, "it ends with the string"
    assert how_long(" a cheap place") == 1, "it ends with the end token"
    assert how_long(" a family") == 0


@pytest.mark.parametrize("how", ["its configuration says so", "by its name", "by its number"])
def test_a_model_may_have_several_end_tokens(how: str) -> None:
    """As one for texts and one for turns in a conversation: neither is part of a text."""
    tokenizer, model = words(), network()
    tokenizer.add_special_tokens({"unk_token": "c"})
    if how == "its configuration says so":
        model = copy.copy(model)
        model.generation_config = transformers.GenerationConfig(eos_token_id=[END, 3, 99])
    stop = {"by its name": ["c"], "by its number": 3}.get(how, ())
    target = sv.LanguageModel(model, tokenizer).target(max_tokens=4, finish="stop", stop=stop)
    row = torch.tensor([[1, 2, 3, END], [1, 3, 2, END], [1, 2, END, END], [1, 1, 1, 3]])
    assert target.log_prob(row).isfinite().tolist() == [True, False, True, True]
    assert [target.decode(one) for one in row[[0, 2, 3]]] == ["ab", "ab", "aaa"]
    assert target.text_lengths(row).tolist()[::2] == [3, 3]
    owner = sv.LanguageModel(model, tokenizer)
    drawn = sv.generate(owner, n=40, max_tokens=4, finish="stop", stop=stop, progress=False).draws
    assert {text.finish_reason for text in drawn} == {"stop"}
    assert {text.tokens[-1] for text in drawn} == {END, 3}


def test_a_stop_string_may_be_given_alone() -> None:
    assert ListedTexts(stop=("ab",)).stop == ("ab",)
    alone = sv.LanguageModel(network(), words()).target(max_tokens=4, finish="stop", stop="ab")
    assert torch.equal(alone.log_prob(EVERY_ROW), ListedTexts(stop=("ab",)).log_prob(EVERY_ROW))
    assert sv.LanguageModel(network(), words()).target(max_tokens=4).finish == "length"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop": ("Ω",)}, "the stop string 'Ω' is impossible"),
        ({"stop": ("aaaaa",)}, "the stop string 'aaaaa' is impossible: no 4 tokens"),
        ({"stop": ("b",), "allowed": [1, 3]}, "the stop string 'b' is impossible"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": (99,)}, "stop holds 99"),
        ({"stop": (None,)}, "stop holds None"),
        ({"stop": b"."}, "is no text and no list of texts"),
        ({"allowed": ["a"]}, "allowed holds token 'a'"),
        ({"stop": (".",), "finish": "length"}, "use finish='stop' or finish='any'"),
        ({"finish": "stopp"}, "finish = 'stopp' is unknown; did you mean 'stop'"),
        ({"suffix": "a"}, "leave out the suffix, or use finish='length'"),
    ],
)
def test_wrong_endings_raise_errors(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        sv.LanguageModel(network(), words()).target(**{"max_tokens": 4, "finish": "stop", **settings})


def test_a_tokenizer_without_an_end_is_refused() -> None:
    nameless = words()
    nameless.eos_token = None
    for finish in ("stop", "any"):
        with pytest.raises(sv.SamplingError, match=f"finish = '{finish}' needs an end-of-text token"):
            sv.LanguageModel(network(), nameless).target("c", max_tokens=4, finish=finish)


@pytest.mark.parametrize(
    "sampler", [sv.Ancestral(), sv.Rejection(), sv.Refresh(), sv.SVS(0.3, dimensions=8)], ids=lambda s: type(s).__name__
)
def test_a_length_in_which_no_text_ends_is_refused_with_the_share(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "SEARCH_LIMITS", starts.SearchLimits(seconds=0.0))
    model = sv.load("bundled").target(max_tokens=3, finish="stop")
    targets = [model] if isinstance(sampler, sv.Ancestral) else [model, model.under([Predicate(bool)])]
    for target in targets:
        with pytest.raises(sv.SamplingError, match=r"^0 of 2\d\d texts ended within 3 tokens; raise max_tokens"):
            sv.sample(target, sampler, chains=4, draws=1, progress=False)


def test_progress_shows_how_rarely_texts_end() -> None:
    notes: list[str] = []
    shown = progress._current_tick.set(lambda note="", steps=1: notes.append(note))
    try:
        sv.sample(ListedTexts(length=1), sv.Ancestral(), chains=20, draws=1, seed=1, progress=False)
    finally:
        progress._current_tick.reset(shown)
    assert re.match(r"\d+ of \d+ tries ended within 1 tokens, about \d+ s left", notes[-1])


def test_random_starts_are_texts() -> None:
    tree = sv.sample(listed(), sv.SVS(0.6), chains=50, draws=1, warmup=1, start="random", seed=1, progress=False)
    tokens = torch.tensor(tree["posterior"]["tokens"].values)[:, 0]
    assert listed().log_prob(tokens).isfinite().all()
    assert len(listed().content_lengths(tokens).unique()) == LENGTH


def test_a_user_target_may_have_padding() -> None:
    """Half of its texts are one token long; what is padding stays, and nothing becomes it."""
    random = sv.verify.random_target(4, 5, 2, 3, 0.2)
    possible = (torch.arange(5) != 2)[:, None] & torch.ones(5, dtype=torch.bool)

    class Padded(sv.TabularTarget):
        padding = 2

    target = Padded(random.embeddings, random.table.where(possible, -torch.inf), random.gradient)
    states, truth = target.support(), target.probabilities()
    start = states[truth > 0]
    for sampler in (sv.SVS(0.6), sv.PNCG(4.0), sv.GibbsWithGradients(), sv.SVS(0.6, dimensions=2)):
        found = sv.sample(target, sampler, chains=len(start), draws=20, warmup=0, start=start, progress=False)
        tokens = torch.tensor(found["posterior"]["tokens"].values)
        assert torch.equal(tokens == 2, (start == 2)[:, None].expand_as(tokens))
        assert (tokens[:, -1] != start).any()
        assert int(found["sample_stats"]["nonfinite"].sum()) == 0, "no move is tried in vain"
    target.allowed = torch.arange(5) != 2
    with pytest.raises(sv.SamplingError, match="`padding` is 2"):
        bind(target)


def test_inexact_samplers_keep_the_end() -> None:
    base = sv.baselines
    samplers = (
        base.Langevin(0.5),
        base.MuCoLa(1.5),
        base.HMC(0.3),
        sv.SVS.paper(0.5, 0.2),
        sv.SVS(0.6, walls="closed"),
    )
    for sampler in samplers:
        rng, start = Rng(1, 200), listed().support()[:200]
        state = sampler.init(listed(), rng, start)
        for _ in range(4):
            state, _ = sampler.step(listed(), rng, state)
        assert torch.equal(state.tokens == END, start == END)
        assert (state.tokens != start).any(), sampler
