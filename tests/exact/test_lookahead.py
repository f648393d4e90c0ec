"""Lookahead: automata against Python's own expressions, labels against enumeration, exactness for any lookahead."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.automata.patterns import compile_pattern
from structured_voronoi.automata.vocabulary import TokenAutomaton, can_all_match, token_bytes
from structured_voronoi.contracts import Pattern
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.experiments.exactness.guided import lookaheads
from structured_voronoi.expressions import CannotCompile, CharacterAutomaton
from structured_voronoi.lookahead import examples as examples_module
from structured_voronoi.lookahead import fitting, rounds, training
from structured_voronoi.lookahead.examples import ENOUGH, Examples, find_examples
from structured_voronoi.lookahead.heads import PatternHead, Reader, Size
from structured_voronoi.lookahead.lookahead import Lookahead, Reading, untrained
from structured_voronoi.lookahead.pilot import draw_pilot
from structured_voronoi.lookahead.reading import REST, check_patterns, factor_names
from structured_voronoi.lookahead.rounds import own_cost, refine_in_rounds, share_of
from structured_voronoi.lookahead.training import train_head
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.run.probability import summarise_weights
from structured_voronoi.samplers.guided import START_TRIES
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.twins import GuidedWithoutProposal, RefreshWithoutProposal
from system.commands import svs

SEED, CHAINS = 3, 500
WORDS = (" cheap", " pub", " restaurant", " place", " and", " a")
Predicate = sv.controls.Predicate

EXPRESSIONS = [
    "river", r"^The", r"(?i)\b(pub|coffee shop)\b", r"\briver\b", "a.b", "x$", "[^a]b", r"\sr\w+", "é", "[a-c]{2,3}",
    r"\Bb", "(Italian ){3}", "(a+)+b", "[]a]b", r"\d\d", "a|b$", r"(?<!\w)river(?!\w)", r"(?i)THE\s+pub", "(?s)a.b",
    r"(?m)^a$", r"a$\n", r"(?P<word>the) pub", r"[^\W_]a", "(?i)É", r"\bé\b", r"b(?=[ac])", r"(?<=\w)\W",
    "(a|b)*a(a|b){3}", r"^(\w\s?)*$", r"(?a)\w\b", "(?x) a b # c", "(?i:The) pub", r"\Athe\Z", "[à-ü]x", "x*?y|a??b",
    "^((a|b)*|c)+$",
]  # fmt: skip
PIECES = [
    "river",
    "River",
    "the",
    "The",
    "pub",
    "the pub",
    "coffee shop",
    " ",
    "a",
    "b",
    "x",
    "c",
    "\n",
    "Italian ",
    "1",
    "]",
    "_",
    ".",
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_automata_match_what_python_matches(expression: str, whole: bool) -> None:
    automaton, opposite = (
        compile_pattern(Pattern(expression, whole=whole, negated=negated)) for negated in (False, True)
    )
    compiled, source, characters = (
        re.compile(expression),
        random.Random(0),
        CharacterAutomaton(Pattern(expression, whole=whole)),
    )
    seen = set()
    for _ in range(800):
        few = source.sample([*PIECES, "é", "É", "£"], 4)  # so that some of them meet often
        text = "".join(source.choice(few) for _ in range(source.randint(0, 6)))
        state = 0
        for byte in text.encode():
            state = automaton.step[state, byte]
        matched = bool(compiled.fullmatch(text) if whole else compiled.search(text))
        assert bool(automaton.accepting[state]) == matched, text
        assert characters.matches(text) == matched, text
        assert not (automaton.satisfied[state] and not matched)
        other = 0
        for byte in text.encode():
            other = opposite.step[other, byte]
        assert bool(opposite.accepting[other]) != matched
        seen.add(matched)
    assert len(seen) == 2 or whole


@pytest.mark.parametrize(
    "expression", ["[\U0001f300-\U0001faff]", "[\u0430-\u0a00]x", "\xa0", "[^\x00-\u2000]", "[€-₿]"]
)
def test_characters_of_many_bytes_are_told_apart(expression: str) -> None:
    """Long ranges by their ends, of which some lie in the middle of what a first byte stands for."""
    automaton, source, seen = compile_pattern(Pattern(expression)), random.Random(0), set()
    pieces = ["😀", "🌀", "🛺", "\U0001faff", "\U00020000", "ж", "А", "अ", "ਗ", "中", "€", "₿", "…", "\xa0", "a", "x"]
    for _ in range(2000):
        text = "".join(source.choice(pieces) for _ in range(source.randint(0, 3)))
        state = 0
        for byte in text.encode():
            state = automaton.step[state, byte]
        matched = re.search(expression, text) is not None
        assert bool(automaton.accepting[state]) == matched, text
        seen.add(matched)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "expression",
    [
        r"(?<!ab)b",
        r"(a)\1",
        "(?=xy)x",
        "(?>a+)a",
        "a++a",
        "(a)?(?(1)b|c)",
        "a(a|b){12}c",
        "(a{1000}){1000}",
        "(){99999999}",
    ],
)
def test_what_has_no_small_automaton_is_left_to_learning(expression: str) -> None:
    with pytest.raises(CannotCompile):
        compile_pattern(Pattern(expression))


def test_tokens_are_spelt_as_they_decode() -> None:
    tokenizer = sv.LanguageModel.load("bundled").tokenizer
    spelt = token_bytes(tokenizer, 901)
    text = "Near the café, “The Mill” serves £5 soup."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(spelt[token] for token in ids).decode() == text


def spelling(inner: Any, decoder: Any) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(inner)
    tokenizer.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_other_tokenizers_are_spelt_or_left_to_learning() -> None:
    piece = models.BPE({"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3}, [], byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    assert token_bytes(spelling(piece, decoders.Sequence(steps)), 4) == [b" a", b"b", b"\xc3", b"\xa9"]
    words = models.WordLevel({"pub": 0, "##s": 1, "a": 2}, unk_token="a")
    for decoder in (decoders.WordPiece(), None):
        with pytest.raises(CannotCompile, match="does not write texts token by token"):
            token_bytes(spelling(words, decoder), 3)
    config = transformers.GPT2Config(vocab_size=3, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    network = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    tokenizer = spelling(words, decoders.WordPiece())
    tokenizer.eos_token = "a"
    target = sv.Controlled(sv.LanguageModel(network, tokenizer, length=3), {Predicate.keyword("pubs"): 1.0})
    assert not isinstance(untrained(bind(target), {"keyword=pubs": "token"}, 0.1).heads["keyword=pubs"], PatternHead)
    with pytest.raises(sv.SamplingError, match=r"cannot be searched for .+; give the number of a token"):
        sv.LanguageModel(network, tokenizer, length=3, ends="anywhere", stop="pub")


BOUNDED = ["words=5..12", "words=..4", "words=3", "words=8..", "words=..0", "characters=20..100", "characters=..30",
           "only=the,a,pub,is,in,and,cheap,café", "not words=5..12", "not only=the,is,a"]  # fmt: skip


@pytest.mark.parametrize("written", BOUNDED)
def test_bounds_and_allowed_words_are_compiled(written: str) -> None:
    """The automaton over tokens agrees with the control on decoded texts, spaces before words and all."""
    control, _ = parse_control(written)
    model, source = sv.LanguageModel.load("bundled", length=12), random.Random(1)
    likely = model.tokenizer(" the pub is in a café, and, the cheap  The\n is a a", add_special_tokens=False)[
        "input_ids"
    ]
    known = model.allowed.nonzero().squeeze(-1).tolist()
    automaton = TokenAutomaton.spelt(compile_pattern(control.pattern), token_bytes(model.tokenizer, 901), 12, "cpu")
    seen = set()
    for _ in range(300):
        rows = [source.choice(likely if source.random() < 0.95 else known) for _ in range(source.randint(0, 24))]
        text = model.decode(torch.tensor(rows, dtype=torch.int64))
        if "\ufffd" not in text:  # no character
            state = automaton.states_after(torch.tensor([rows], dtype=torch.int64))
            assert bool(automaton.accepting[state]) == bool(control.function(text)), text
            seen.add(bool(control.function(text)))
    assert len(seen) == 2


def small_model(length: int = 4, prompt: str = "The Old Mill is a") -> sv.LanguageModel:
    """The bundled model over six words, so that every text can be listed."""
    loaded = sv.LanguageModel.load("bundled")
    tokens = [loaded.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    return sv.LanguageModel(loaded.model, loaded.tokenizer, prompt, length, allowed=tokens)


class Listed(sv.Controlled):
    """A controlled language model of which every text is listed."""

    def support(self) -> Tensor:
        tokens = self.model.allowed.nonzero().squeeze(-1)
        texts = torch.cartesian_prod(*[tokens] * self.length)
        return texts[self.log_prob(texts).isfinite()]

    def probabilities(self) -> Tensor:
        return self.log_prob(self.support()).double().softmax(0)


def likes_pubs(text: str) -> float:
    return 0.9 if text.count("pub") == 2 else 0.1


CONTROLS: dict[str, Any] = {
    "keyword": lambda: {Predicate.keyword("pub"): 1.0},
    "regex": lambda: {Predicate.regex(r"cheap.*place|and a$"): 1.0, ~Predicate.keyword("restaurant"): 1.0},
    "classifier": lambda: {sv.controls.Classifier.load("price", "cheap"): 1.5},
    "black box": lambda: {Predicate(likes_pubs): 1.0},
}


def test_a_language_model_of_its_own_kind_is_followed_too() -> None:
    """Keys and values kept, rows in blocks: what test_guided.py looks up is computed here."""
    target = Listed(small_model(3), CONTROLS["keyword"]())
    adverse = lookaheads(target, SEED)["adverse"]
    sampler = sv.Cycle(sv.Guided(adverse, tries=2), sv.Refresh(2, lookahead=adverse))
    twin = sv.Cycle(GuidedWithoutProposal(adverse, tries=2), RefreshWithoutProposal(2, lookahead=adverse))
    check_stationarity(target, sampler, twin, chains=CHAINS, steps=2, seed=SEED)


def test_what_is_kept_of_a_text_is_what_the_lookahead_says_of_it() -> None:
    """After blocks in the middle and moves of others there may be nothing kept, but never anything else."""
    target = bind(Listed(small_model(4), CONTROLS["black box"]()))
    lookahead = lookaheads(target, SEED)["random"]
    sampler, rng = sv.Refresh(2, lookahead=lookahead), sv.Rng(1, 16)
    state, kept, redrawn = sampler.init(target, rng, None), 0, 0
    for step in range(12):
        if step % 3 == 2:
            other = state.tokens.roll(1, 0)
            state = sampler.synchronise(target, rng, state, other, -target.target.log_prob(other).double()).state
        state, info = sampler.step(target, rng, state)
        known = ~state.log_q.isnan().any(-1)
        scored = lookahead.score(target, state.tokens)
        torch.testing.assert_close(state.log_q[known], scored.log_q[known], atol=1e-4, rtol=0)
        torch.testing.assert_close(state.log_probs, scored.log_p, atol=1e-4, rtol=0)
        torch.testing.assert_close(state.energy, -target.target.log_prob(state.tokens).double(), atol=1e-4, rtol=0)
        kept, redrawn = kept + int(known.sum()), redrawn + int(info.refreshed.sum())
    assert kept
    assert redrawn


def test_guided_chains_start_from_possible_texts() -> None:
    target = Listed(small_model(3), CONTROLS["keyword"]())
    lookahead = untrained(bind(target), {"keyword=pub": "position"}, 0.1)
    start = torch.cat([target.support()[:1], bind(target).allowed_tokens[:1].expand(1, 3)])
    assert target.log_prob(start).isfinite().tolist() == [True, False]
    with pytest.raises(sv.SamplingError, match=r"the start of chain 1, .+ has no finite energy"):
        sv.sample(target, sv.Guided(lookahead), chains=2, draws=1, start=start, progress=False)


def test_a_chain_does_not_depend_on_the_chains_beside_it() -> None:
    target = Listed(small_model(4), CONTROLS["keyword"]())
    lookahead = lookaheads(target, SEED)["trained"]
    many, few = (
        sv.sample(target, sv.Guided(lookahead, tries=4), chains=chains, draws=3, warmup=1, seed=1, progress=False)
        for chains in (11, 3)
    )
    assert (many["posterior"]["tokens"].values[:3] == few["posterior"]["tokens"].values).all()


def test_a_start_does_not_depend_on_chains_that_are_still_looking() -> None:
    """One proposal in many is possible, so that chains find theirs in different rounds."""
    target = Listed(small_model(3), {Predicate(lambda text: text.count("pub") == 2, "two pubs"): 1.0})
    problem = bind(target)
    sampler = sv.Guided(untrained(problem, {"two pubs": "position"}, 0.1), tries=2, choices=3)
    together = sampler.init(problem, sv.Rng(5, 32), None)
    alone = [sampler.init(problem, sv.Rng(5, [chain]), None) for chain in range(32)]
    assert torch.equal(together.tokens, torch.cat([state.tokens for state in alone]))
    first = sampler._draw_texts(problem, state_lookahead(sampler), sv.Rng(5, 32).fork("start"), START_TRIES)
    found = torch.stack([text.log_weight.isfinite() for text in first]).any(0)
    assert 0 < int(found.sum()) < 32  # in the first round


def state_lookahead(sampler: sv.Guided) -> Lookahead:
    assert sampler.lookahead is not None
    return sampler.lookahead


def test_texts_that_have_ended_are_not_read_beside_others() -> None:
    """What is expected of them is 1, in a batch of any size."""
    model = sv.LanguageModel.load("bundled", length=4, ends="anywhere")
    problem = bind(sv.Controlled(model, {Predicate(lambda text: "pub" in text, "pub"): 1.0}))
    lookahead = untrained(problem, {"ends": "position", "pub": "position"}, 0.1)
    assert problem.padding is not None
    log_probs = torch.zeros(8, len(problem.embeddings)).log_softmax(-1)
    log_probs[3:] = -torch.inf
    log_probs[3:, problem.padding] = 0.0
    states = {name: head.begin(torch.zeros(8, 0, dtype=torch.int64)) for name, head in lookahead.heads.items()}
    expected = lookahead.weigh(problem, states, 0, log_probs, torch.zeros(8, problem.embeddings.shape[1])).log_expected
    assert (expected[:3] < -0.1).all()
    assert (expected[3:] == 0).all()


def test_values_below_all_numbers_leave_everything_possible() -> None:
    """Several heads that think nearly everything hopeless: what q then is may be poor, but not 0."""
    problem = bind(Listed(small_model(3), CONTROLS["black box"]()))
    lookahead = untrained(problem, {"likes_pubs": "position"}, 0.1)
    log_probs = torch.full((8, len(problem.embeddings)), -1e4)
    log_probs[:, 0], log_probs[:, 1] = 0.0, -100.0
    value = torch.full_like(log_probs, 1e-37)
    value[:, 1] = 1.0
    readings = [Reading(torch.zeros(8, 1), value)] * 3
    many = Lookahead({str(number): head for number, head in enumerate([*lookahead.heads.values()] * 3)}, 0.1, {})
    weighed = many.combine(log_probs, readings)
    assert weighed.log_q(torch.zeros(8, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("size", ["token", "said"])
def test_no_bit_of_a_proposal_depends_on_the_rows_beside_it(size: Size) -> None:
    model = sv.LanguageModel.load("bundled", length=12, ends="anywhere")
    problem = bind(sv.Controlled(model, {sv.controls.Classifier.load("food", "Italian"): 1.5}))
    lookahead = untrained(problem, {"food=Italian": size, "the text ends": "token"}, 0.1, seed=1)
    levels = sv.Rng(1, 40).uniform(12)
    whole = lookahead.draw(problem, levels)
    for rows in (slice(5, 9), slice(0, 24), slice(16, 40)):
        for part, same in zip(lookahead.draw(problem, levels[rows]), whole, strict=True):
            assert torch.equal(part, same[rows])


def stumbles(text: str) -> float:
    """Made for whole texts: it fails on short ones and on those that begin with " a"."""
    if len(text.split()) < 2 or text.startswith(" a"):
        raise ValueError("too short")
    return likes_pubs(text)


def test_a_control_that_stumbles_over_prefixes_is_read_where_it_can_be() -> None:
    """What it says does not depend on the rows beside, so that a text proposed and a text scored have the same q."""
    target = bind(Listed(small_model(4), {Predicate(stumbles_but_not_on_texts): 1.0}))
    lookahead = untrained(target, {"stumbles_but_not_on_texts": "prefix"}, 0.1, seed=5)
    assert lookahead.heads["stumbles_but_not_on_texts"].is_readable
    blank = target.allowed_tokens[:1].expand(24, 4).clone()
    drawn = lookahead.propose(target, blank, 0, sv.Rng(2, 24).uniform(4))
    assert drawn.log_weight.isfinite().all()
    for rows in (slice(None), slice(3, 4), slice(5, 11)):
        scored = lookahead.score(target, drawn.tokens[rows])
        torch.testing.assert_close(scored.log_q, drawn.log_q[rows], atol=1e-5, rtol=0)
    slow = bind(Listed(small_model(4), {Predicate(likes_pubs, reads_prefixes=False): 1.0}))
    assert not untrained(slow, {"likes_pubs": "token"}, 0.1).heads["likes_pubs"].is_readable


def stumbles_but_not_on_texts(text: str) -> float:
    return likes_pubs(text) if len(text.split()) == 4 else stumbles(text)


def test_a_prefix_is_read_as_the_control_reads_it() -> None:
    target = Listed(small_model(4), CONTROLS["black box"]())
    pub, other = (
        next(
            token
            for token in target.model.allowed.nonzero().ravel().tolist()
            if target.decode(torch.tensor([token])) == word
        )
        for word in (" pub", " place")
    )
    said = target.prefix_factor("likes_pubs", torch.tensor([[pub, pub], [pub, other]])).exp().tolist()
    assert said == pytest.approx([0.9, 0.1])


def examples_of(target: Problem, texts: int = 2048) -> Examples:
    found = find_examples(target, sv.Rng(2, texts).uniform(target.length), first=texts // 4)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["keyword", "classifier", "black box"])
def test_examples_say_what_a_lookahead_costs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all texts of the target do, also if only some of the examples are taken."""
    listed = Listed(small_model(4), CONTROLS[name]())
    target, truth = bind(listed), listed.probabilities()
    lookahead = untrained(target, dict.fromkeys(factor_names(target), "token"), 1.0, seed=1)
    weight = lookahead.score(target, listed.support()).log_weight.double().exp()
    exact = float((truth * weight.sqrt()).sum() ** 2 / listed.log_prob(listed.support()).double().exp().sum())
    monkeypatch.setattr(examples_module, "ENOUGH", 100)
    for most in (4096, 512):
        monkeypatch.setattr(examples_module, "MOST", most)
        assert examples_of(target, 2048).cost(target, lookahead) == pytest.approx(exact, rel=0.15)
    assert own_cost(target, 4096, SEED, lookahead) == pytest.approx(exact, rel=0.15)


def test_a_lookahead_that_cannot_draw_the_examples_costs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    target = bind(Listed(small_model(4), CONTROLS["keyword"]()))
    examples, lookahead = examples_of(target), untrained(target, {"keyword=pub": "token"}, 0.1, seed=1)
    scored = lookahead.score(target, examples.tokens)
    for odd in (-math.inf, math.nan):
        monkeypatch.setattr(Lookahead, "score", lambda *_, odd=odd: scored._replace(log_q=scored.log_q + odd))
        assert examples.cost(target, lookahead) == math.inf


def test_examples_do_not_depend_on_the_scale_of_scores() -> None:
    """Nor do they underflow."""
    plain, shifted = (bind(Listed(small_model(4), {Scaled(shift): 1.0})) for shift in (0.0, -900.0))
    one, other = examples_of(plain), examples_of(shifted)
    assert torch.equal(one.tokens, other.tokens)
    lookahead = untrained(plain, {"scaled": "token"}, 0.1, seed=1)
    assert one.cost(plain, lookahead) == pytest.approx(other.cost(shifted, lookahead))


class Scaled:
    """Scores that differ by 1 at most, however low they are."""

    name, bound = "scaled", 0.0

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
        return torch.tensor([self.shift - ("pub" in text) for text in texts], dtype=torch.float64)


def test_rounds_keep_the_better_lookahead_and_leave_the_first_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "CHEAP", 1.0)
    target = bind(Listed(small_model(4), CONTROLS["keyword"]()))
    first, examples = lookaheads(target, SEED)["random"], examples_of(target)
    before = [parameter.clone() for head in first.heads.values() for parameter in head.parameters()]
    refined = refine_in_rounds(target, first, 256, 1, lambda *_: None, partial(examples.cost, target))
    after = [parameter for head in first.heads.values() for parameter in head.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    blank = target.allowed_tokens[:1].expand(1024, 4).clone()
    shares = [
        share_of(lookahead.propose(target, blank, 0, sv.Rng(3, 1024).uniform(4)).log_weight)
        for lookahead in (first, refined)
    ]
    assert shares[1] > shares[0]
    assert examples.cost(target, refined) < examples.cost(target, first)
    monkeypatch.setattr(rounds, "_refine", lambda *_: first)
    for judge in (partial(examples.cost, target), None):
        again = refine_in_rounds(target, refined, 64, 1, lambda *_: None, judge)
        assert again is refined  # what is worse is dropped


@pytest.mark.parametrize(
    ("controls", "cheap", "enough", "is_refined"),
    [
        (["black box"], 1e9, 0, False),
        (["black box"], 0.0, 1e9, False),  # by its own draws alone it is not judged
        (["black box"], 0.0, 0, True),
        (["keyword"], 1e9, 1e9, False),
        (["keyword"], 0.0, 1e9, True),
        (["keyword"], 0.0, 0, True),
        (["keyword", "black box"], 0.0, 0, False),
    ],
)
def test_which_lookaheads_are_refined(
    controls: list[str], cheap: float, enough: float, is_refined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, done = Listed(small_model(4), {one: w for name in controls for one, w in CONTROLS[name]().items()}), []
    refine = rounds._refine
    monkeypatch.setattr(rounds, "_refine", lambda *given: done.append(1) or refine(*given))
    monkeypatch.setattr(rounds, "CHEAP", cheap)
    monkeypatch.setattr(examples_module, "ENOUGH", enough)
    found = Lookahead.fit(target, texts=64, seed=SEED, progress=False)
    assert bool(done) == is_refined
    if controls == ["black box"] and enough:
        assert found.delta == fitting.DELTAS[-1]


def test_labels_and_values_of_a_pattern() -> None:
    """Labels lie in [0, 1], their mean at the first position is the probability; values are 1 and 0 where they must."""
    target = bind(Listed(small_model(4), CONTROLS["keyword"]()))
    lookahead = untrained(target, {"keyword=pub": "token"}, 1e-3)
    pilot = draw_pilot(target, lookahead, 512, SEED)
    head, labels = lookahead.heads["keyword=pub"], pilot.labels["keyword=pub"]
    assert isinstance(head, PatternHead)
    assert 0 <= float(labels.min()) <= float(labels.max()) <= 1 + 1e-5
    pub = next(token for token in target.allowed_tokens.tolist() if target.decode(torch.tensor([token])) == " pub")
    other = next(token for token in target.allowed_tokens.tolist() if token != pub)
    hidden = torch.zeros(2, target.embeddings.shape[1])
    last = head.value(head.begin(torch.tensor([[other] * 3, [pub, other, other]])), hidden, 3, 4)
    assert last[0, pub] > 0.4  # accepting, though a letter could still follow in a longer text
    assert last[0, other] == 0
    assert last[1, other] == 1


def three_alike() -> AutoregressiveTable:
    """Five independent tokens of four, of which three must be the first: one text in eleven."""
    single = torch.tensor([0.25, 0.15, 0.35, 0.25], dtype=torch.float64).log()
    places = torch.stack(torch.meshgrid(*[torch.arange(4)] * 5, indexing="ij"), dim=-1)
    scores = torch.where((places == 0).sum(-1) == 3, 0.0, -torch.inf).double()
    embeddings = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return AutoregressiveTable(embeddings, single[places].sum(-1), None, scores)


def exact_cost(target: AutoregressiveTable, lookahead: Lookahead) -> float:
    """E_π[w] / E_p[W] of all texts, evaluations that an effective text takes."""
    texts, share = target.support(), target.probabilities()
    log_z = float(target.log_prob(texts).logsumexp(0))
    return float((share * lookahead.score(bind(target), texts).log_weight.exp()).sum()) / math.exp(log_z)


def test_a_head_that_remembers_knows_what_one_without_memory_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the tokens so far says how many were alike. Made to forget them, it is as bad."""
    monkeypatch.setattr(training, "STEPS", {"token": 600, "said": 200})
    monkeypatch.setattr(training, "PASSES", 15)
    target = three_alike()
    problem, costs = bind(target), {}
    for size in ("token", "said"):
        lookahead = untrained(problem, {REST: size}, 0.03)
        head, pilot = lookahead.heads[REST], draw_pilot(problem, lookahead, 2048, SEED)
        train_head(head, pilot, pilot.labels[REST], torch.ones(2048, 5), SEED, None)
        costs[size] = exact_cost(target, lookahead)
    head.reader.said.data[:] = 0
    assert costs["said"] < 0.6 * costs["token"]
    assert exact_cost(target, lookahead) > 2 * costs["said"]


def test_passes_label_prefixes_by_what_is_expected_next() -> None:
    """By hand, from what the head says of every token; one text is over before the last position."""
    problem = bind(three_alike())
    lookahead = untrained(problem, {REST: "said"}, 0.03, seed=4)
    head, pilot = lookahead.heads[REST], draw_pilot(problem, lookahead, 16, SEED)
    score, live = torch.rand(16, 1, generator=torch.Generator().manual_seed(1)), torch.ones(16, 5)
    live[3, 3:] = 0
    labels, share = training._returns(head, pilot, score, live)[..., 0], training.RETURNED
    probabilities = torch.tensor([0.25, 0.15, 0.35, 0.25])
    for row, length in ((0, 5), (3, 3)):
        label = float(score[row])
        for n in reversed(range(length)):
            assert float(labels[row, n]) == pytest.approx(label, abs=1e-6)
            state = pilot.tokens[[row], :n]
            value = head.value(state, head.features(state, pilot.hidden[[row], n]), n, 5)
            label = (1 - share) * float((probabilities * value.detach()).sum()) + share * label


def test_logits_of_some_tokens_are_those_of_all() -> None:
    """Both ways of computing them, which differ in speed."""
    coordinates = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    reader, (level, slope) = Reader(3, 2, 1, coordinates, "token"), (torch.randn(6), torch.randn(6, 4))
    for count in (3, 20):
        tokens = torch.randint(50, (6, count), generator=torch.Generator().manual_seed(1))
        expected = reader.logits(level, slope, None).gather(-1, tokens)
        torch.testing.assert_close(reader.logits_at(level, slope, tokens), expected)


def test_a_target_that_nothing_weighs_on_has_a_lookahead_that_changes_nothing() -> None:
    table = three_alike()
    plain = AutoregressiveTable(table.embeddings, table.model)
    lookahead = Lookahead.fit(plain, texts=32, seed=SEED, progress=False)
    drawn = lookahead.draw(bind(plain), sv.Rng(1, 8).uniform(5))
    torch.testing.assert_close(drawn.log_p, drawn.log_q)


def test_a_text_drawn_after_a_prefix_keeps_it_and_is_scored_alike() -> None:
    problem = bind(Listed(small_model(4), CONTROLS["black box"]()))
    lookahead = untrained(problem, {"likes_pubs": "said"}, 0.1, seed=5)
    prefix = problem.allowed_tokens[torch.tensor([[0, 3], [2, 2], [5, 1]])]
    drawn = lookahead.draw(problem, sv.Rng(1, 9).uniform(4), prefix)
    assert torch.equal(drawn.tokens[:3, :2], prefix)
    assert len(torch.unique(drawn.tokens[3:, 0])) > 1
    scored = lookahead.score(problem, drawn.tokens)
    for kept, said in zip(drawn[1:], scored[1:], strict=True):
        torch.testing.assert_close(kept, said, atol=1e-5, rtol=0)


def test_more_examples_are_looked_for_until_enough_are_found() -> None:
    """Of 64 texts a third, or so, likes pubs much; of the first 32 half as many."""
    problem = bind(Listed(small_model(4), CONTROLS["keyword"]()))
    levels = sv.Rng(2, 128).uniform(4)
    few, many = (find_examples(problem, levels, 32, wanted) for wanted in (ENOUGH, 1000))
    assert few is not None
    assert many is not None
    assert ENOUGH <= len(few.tokens) <= 32 < len(many.tokens)


def test_what_every_text_satisfies_is_certain(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is to be learnt of it: its head has no outputs."""
    target = sv.Controlled(small_model(4), {Predicate.regex("(?s).*"): 1.0})
    found = sv.probability(target, texts=64, progress=False)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)
    assert found.trusted
    assert not [warning for warning in recwarn if "zero-element" in str(warning.message)]


def test_rare_words_are_found_and_their_probability_is_right() -> None:
    """Two words together, against 4,000 plain texts; a word that the pilot never saw is learnt all the same."""
    model = sv.LanguageModel.load("bundled", length=10)
    target = sv.Controlled(model, {Predicate.keyword("Italian"): 1.0, Predicate.keyword("river"): 1.0})
    lookahead = Lookahead.fit(target, texts=256, seed=0, progress=False)
    found = sv.probability(target, texts=512, seed=1, lookahead=lookahead, progress=False)
    plain = sv.sample(model, sv.Ancestral(), chains=4000, draws=1, seed=2, progress=False)["posterior"]["tokens"].values
    scores = target.control_log_probs(torch.tensor(plain[:, 0]))
    share = float(torch.stack([score.isfinite() for score in scores.values()]).all(0).double().mean())
    error = (share / 4000) ** 0.5
    assert found.low - 3 * error <= share <= found.high + 3 * error
    assert found.effective_share > 5 * share
    assert found.evaluations == 512


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    target = Listed(small_model(3), CONTROLS["black box"]())
    texts = torch.cartesian_prod(*[target.model.allowed.nonzero().squeeze(-1)] * 3)
    truth = float(target.log_prob(texts).double().exp().sum())  # the model is normalised over these texts
    lookahead = lookaheads(target, SEED)["trained"]
    held = 0
    for seed in range(30):
        found = sv.probability(target, texts=128, seed=seed, lookahead=lookahead, progress=False)
        held += found.low <= truth <= found.high
    assert held >= 24  # of 30, where 28 or 29 are expected


def test_weights_are_judged() -> None:
    even = summarise_weights(torch.full((200,), -3.0, dtype=torch.float64).numpy())
    assert (round(even.value, 6), even.trusted, even.effective_share) == (0.049787, True, pytest.approx(1.0))
    heavy = torch.full((200,), -9.0, dtype=torch.float64)
    heavy[0] = 0.0
    assert not summarise_weights(heavy.numpy()).trusted
    nothing = summarise_weights(torch.full((200,), -torch.inf, dtype=torch.float64).numpy())
    assert (nothing.value, nothing.high, nothing.trusted) == (0.0, 1.0, False)
    assert "none of 200 proposals" in nothing.verdict
    assert share_of(torch.full((5,), -torch.inf)) == 0


def test_lookaheads_are_kept_and_only_for_their_target(tmp_path: Path) -> None:
    target = Listed(small_model(3), CONTROLS["keyword"]())
    lookahead = Lookahead.fit(target, texts=64, progress=False)
    lookahead.save(tmp_path / "kept")
    again = Lookahead.load(tmp_path / "kept", target)
    levels = sv.Rng(0, 9).uniform(3)
    blank = torch.full((9, 3), int(bind(target).allowed_tokens[0]))
    for part, same in zip(
        lookahead.propose(bind(target), blank, 0, levels), again.propose(bind(target), blank, 0, levels), strict=True
    ):
        assert torch.equal(part, same)
    with pytest.raises(sv.SamplingError, match="made for another length"):
        Lookahead.load(tmp_path / "kept", Listed(small_model(4), CONTROLS["keyword"]()))
    with pytest.raises(sv.SamplingError, match="made for another factors"):
        Lookahead.load(tmp_path / "kept", Listed(small_model(3), CONTROLS["black box"]()))
    other_prompt = Listed(small_model(3, "The Old Mill was a"), CONTROLS["keyword"]())
    with pytest.raises(sv.SamplingError, match="made for another prompt"):
        Lookahead.load(tmp_path / "kept", other_prompt)
    longer = Listed(small_model(4), CONTROLS["keyword"]())
    for sampler in (sv.Guided(lookahead), sv.Refresh(lookahead=lookahead)):
        with pytest.raises(sv.SamplingError, match=r"made for another length \(3, not 4\); fit one"):
            sv.sample(longer, sampler, chains=2, draws=1, progress=False)
    size = len(target.embeddings)
    config = transformers.GPT2Config(vocab_size=size, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    narrow = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with pytest.raises(sv.SamplingError, match=r"made for another width \(\d+, not 8\); fit one"):
        sv.sample(sv.LanguageModel(narrow, target.tokenizer, length=3), sv.Guided(lookahead), 2, 1, progress=False)


def damage_settings(folder: Path, settings: str) -> None:
    (folder / "lookahead.json").write_text(settings)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no folder": shutil.rmtree,
    "no weights": lambda folder: (folder / "lookahead.safetensors").unlink(),
    "no settings": lambda folder: (folder / "lookahead.json").unlink(),
    "half of the weights": lambda folder: os.truncate(folder / "lookahead.safetensors", 900),
    "weights that are none": lambda folder: (folder / "lookahead.safetensors").write_bytes(b"damaged"),
    "settings that are no JSON": lambda folder: damage_settings(folder, "{"),
    "settings that are a list": lambda folder: damage_settings(folder, "[1, 2]"),
    "settings without an identity": lambda folder: damage_settings(folder, json.dumps({"factors": {}})),
    "an identity that is none": lambda folder: damage_settings(
        folder, json.dumps({"factors": {}, "delta": 0.1, "identity": 3})
    ),
    "weights of other heads": lambda folder: save_file({"0.bias": torch.zeros(2)}, folder / "lookahead.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_lookaheads_are_refused_in_one_line(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    problem = bind(Listed(small_model(3), CONTROLS["keyword"]()))
    untrained(problem, {"keyword=pub": "token"}, 0.1).save(tmp_path / "kept")
    assert Lookahead.load(tmp_path / "kept", problem).delta == 0.1
    damage(tmp_path / "kept")
    with pytest.raises(sv.SamplingError, match=r"kept cannot be loaded .*fit it again") as error:
        Lookahead.load(tmp_path / "kept", problem)
    assert "\n" not in str(error.value)


def test_hopeless_controls_are_refused_before_anything_is_drawn() -> None:
    model = small_model(3)
    with pytest.raises(sv.SamplingError, match="no text of 3 tokens can satisfy keyword=zebra"):
        Lookahead.fit(sv.Controlled(model, {Predicate.keyword("zebra"): 1.0}), texts=8, progress=False)
    with pytest.raises(sv.SamplingError, match="satisfied by none of 8 texts of the model, and it is no pattern"):
        Lookahead.fit(sv.Controlled(model, {Predicate(lambda text: False, "never"): 1.0}), texts=8, progress=False)
    boundless = sv.Controlled(model, {Predicate(len, kind="log_score"): 1.0})
    with pytest.raises(sv.SamplingError, match="has the bound inf"):
        sv.probability(boundless, texts=64, progress=False)
    with pytest.raises(sv.SamplingError, match="has the bound inf"):
        Lookahead.fit(boundless, texts=8, progress=False)


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (
            "regex=(Italian ){9}",
            "no text of 6 tokens at most can satisfy regex=(Italian ){9}; lengthen the text",
        ),
        ("words=30..", "no text of 6 tokens at most can satisfy words=30..; lengthen the text or loosen the control"),
        ("regex=(a{1,1000}){1000}", "could take for ever to match"),
        ("regex=" + "(" * 5000 + "a" + ")" * 5000, "…' is nested too deeply; write it with fewer groups"),
        ("never:never", "satisfied by none of"),
    ],
)
@pytest.mark.parametrize("command", ["sample", "probability"])
def test_what_no_text_can_satisfy_is_said_before_sampling(
    command: str, control: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "never.py").write_text("def never(text):\n    return False\n")
    options = ("--texts", "64") if command == "probability" else ("--sampler", "guided", "-n", "2")
    done = svs(command, "--length", "6", "--control", control, *options, code=2, cwd=tmp_path)
    assert said in done.stderr
    assert "svs: " in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_the_second_plan_takes_the_lookahead_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another weight is another lookahead; a damaged one is made anew."""
    from structured_voronoi.lookahead.kept import kept_lookahead

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = bind(Listed(small_model(3), CONTROLS["keyword"]()))

    def weights() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("structured-voronoi/*/lookahead.safetensors")}

    kept_lookahead(problem, 32, SEED, progress=False)
    first = weights()
    kept_lookahead(problem, 32, SEED, progress=False)
    assert weights() == first
    kept_lookahead(bind(Listed(small_model(3), {Predicate(likes_pubs): 2.0})), 32, SEED, progress=False)
    kept_lookahead(bind(Listed(small_model(3), {Predicate(likes_pubs): 1.0})), 32, SEED, progress=False)
    assert len(weights()) == 3
    (path,) = first
    path.write_bytes(b"damaged")
    kept_lookahead(problem, 32, SEED, progress=False)
    assert path.stat().st_size > 1000


def test_a_limit_in_seconds_makes_the_pilot_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    draw = fitting.draw_pilot
    monkeypatch.setattr(fitting, "_seconds_of_a_text", lambda *_: 1.0)
    monkeypatch.setattr(fitting, "draw_pilot", lambda *given: drawn.append(given[2]) or draw(*given))
    target = Listed(small_model(3), {Predicate(likes_pubs): 1.0})
    Lookahead.fit(target, texts=512, progress=False, seconds=1e-9)
    assert drawn == [fitting.LEAST_TEXTS]
    with pytest.raises(sv.SamplingError, match="seconds"):
        Lookahead.fit(target, texts=512, progress=False, seconds=-1.0)


def test_whether_several_patterns_go_together_is_known_before_anything_is_drawn() -> None:
    """As a search through all texts finds it, of random automata, some of which contradict each other."""
    found = []
    for seed in range(60):
        source = torch.Generator().manual_seed(seed)
        automata = [
            TokenAutomaton(
                torch.randint(4, (4, 3), generator=source, dtype=torch.int32),
                torch.rand(4, generator=source) < 0.3,
                torch.zeros(4, dtype=torch.bool),
                length=4,
            )
            for _ in range(2)
        ]
        texts = torch.cartesian_prod(*[torch.arange(3)] * 4)
        match = [automaton.accepting[automaton.states_after(texts)] for automaton in automata]
        found.append(bool((match[0] & match[1]).any()))
        assert can_all_match(automata, 4) == found[-1]
    assert 10 < sum(found) < 50


@pytest.mark.parametrize("ends", ["never", "anywhere"])
def test_controls_that_contradict_each_other_are_refused(ends: str) -> None:
    model = sv.LanguageModel.load("bundled", length=8, ends=ends)
    river = Predicate.keyword("river")
    for others, is_possible in (
        ([Predicate.keyword("pub")], True),
        ([~river], False),
        ([Predicate.regex("^The"), Predicate.regex("^A")], False),
    ):
        problem = bind(sv.Controlled(model, dict.fromkeys([river, *others], 1.0)))
        with contextlib.nullcontext() if is_possible else pytest.raises(sv.SamplingError, match="can satisfy all of "):
            check_patterns(problem)
    with pytest.raises(sv.SamplingError, match="can satisfy all of "):
        sv.probability(problem, texts=64, progress=False)
