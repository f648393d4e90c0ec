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
from dataclasses import replace
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
from structured_voronoi.automata.expressions import CannotCompile, CharacterAutomaton
from structured_voronoi.automata.patterns import compile_pattern
from structured_voronoi.automata.vocabulary import TokenAutomaton, can_all_match, token_bytes
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core.contracts import Pattern
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.experiments.exactness.guided import lookaheads
from structured_voronoi.lookahead.heads import PatternHead, Reader
from structured_voronoi.lookahead.learning import RETURNED, _Trainer, learn
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.observing import Observed
from structured_voronoi.lookahead.reading import REST
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.lookahead.weighing import Reading
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.problem.patterns import check_patterns
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.samplers.guided import MIN_START_TRIES
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.twins import GuidedWithoutProposal, RefreshWithoutProposal
from system.commands import svs

SEED, CHAINS = 3, 500
WORDS = (" cheap", " pub", " restaurant", " place", " and", " a")

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
    tokenizer = sv.load("bundled").target().tokenizer
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
        with pytest.raises(CannotCompile, match="does not concatenate the texts"):
            token_bytes(spelling(words, decoder), 3)
    config = transformers.GPT2Config(vocab_size=3, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    network = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    tokenizer = spelling(words, decoders.WordPiece())
    tokenizer.eos_token = "a"
    target = sv.LanguageModel(network, tokenizer).target(max_tokens=3).under([sv.keyword("pubs")])
    assert not isinstance(untrained(bind(target), {"keyword=pubs": "token"}, 0.1).heads["keyword=pubs"], PatternHead)
    with pytest.raises(sv.SamplingError, match=r"cannot search for the stop string .+; use the number of a token"):
        sv.LanguageModel(network, tokenizer).target(max_tokens=3, finish="stop", stop="pub")


BOUNDED = ["words=5..12", "words=..4", "words=3", "words=8..", "words=..0", "characters=20..100", "characters=..30",
           "only=the,a,pub,is,in,and,cheap,café", "not words=5..12", "not only=the,is,a"]  # fmt: skip


@pytest.mark.parametrize("written", BOUNDED)
def test_bounds_and_allowed_words_are_compiled(written: str) -> None:
    """The automaton over tokens agrees with the control on decoded texts, spaces before words and all."""
    control = parse_control(written)
    model, source = sv.load("bundled").target(max_tokens=12), random.Random(1)
    likely = model.tokenizer(" the pub is in a café, and, the cheap  The\n is a a", add_special_tokens=False)[
        "input_ids"
    ]
    known = model.allowed.nonzero().squeeze(-1).tolist()
    automaton = TokenAutomaton.from_bytes(
        compile_pattern(control.pattern), token_bytes(model.tokenizer, 901), 12, "cpu"
    )
    seen = set()
    for _ in range(300):
        rows = [source.choice(likely if source.random() < 0.95 else known) for _ in range(source.randint(0, 24))]
        text = model.decode(torch.tensor(rows, dtype=torch.int64))
        if "\ufffd" not in text:  # no character
            state = automaton.states_after(torch.tensor([rows], dtype=torch.int64))
            assert bool(automaton.accepting[state]) == bool(control.function(text)), text
            seen.add(bool(control.function(text)))
    assert len(seen) == 2


def small_model(length: int = 4, prompt: str = "The Old Mill is a") -> sv.TextTarget:
    """The bundled model over six words, so that every text can be listed."""
    model = sv.load("bundled")
    tokens = [model.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    return sv.TextTarget(model, prompt, length, allowed=tokens)


class Listed(sv.ControlledTarget):
    """A controlled language model of which every text is listed."""

    def support(self) -> Tensor:
        tokens = self.text.allowed.nonzero().squeeze(-1)
        texts = torch.cartesian_prod(*[tokens] * self.length)
        return texts[self.log_prob(texts).isfinite()]

    def probabilities(self) -> Tensor:
        return self.log_prob(self.support()).double().softmax(0)


def likes_pubs(text: str) -> float:
    return 0.9 if text.count("pub") == 2 else 0.1


CONTROLS: dict[str, Any] = {
    "keyword": lambda: [sv.keyword("pub")],
    "regex": lambda: [sv.regex(r"cheap.*place|and a$"), ~sv.keyword("restaurant")],
    "classifier": lambda: [sv.label("price", "cheap", weight=1.5)],
    "black box": lambda: [Predicate(likes_pubs)],
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
    lookahead = untrained(bind(target))
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
    target = Listed(small_model(3), [Predicate(lambda text: text.count("pub") == 2, "two pubs")])
    problem = bind(target)
    sampler = sv.Guided(untrained(problem), tries=2, choices=3)
    together = sampler.init(problem, sv.Rng(5, 32), None)
    alone = [sampler.init(problem, sv.Rng(5, [chain]), None) for chain in range(32)]
    assert torch.equal(together.tokens, torch.cat([state.tokens for state in alone]))
    first = sampler._draw_texts(problem, state_lookahead(sampler), sv.Rng(5, 32).fork("start"), MIN_START_TRIES)
    found = torch.stack([text.log_weight.isfinite() for text in first]).any(0)
    assert 0 < int(found.sum()) < 32  # in the first round


def state_lookahead(sampler: sv.Guided) -> Lookahead:
    assert sampler.lookahead is not None
    return sampler.lookahead


def test_texts_that_have_ended_are_not_read_beside_others() -> None:
    """What is expected of them is 1, in a batch of any size."""
    model = sv.load("bundled").target(max_tokens=4, finish="stop")
    problem = bind(model.under([Predicate(lambda text: "pub" in text, "pub")]))
    lookahead = replace(untrained(problem), learned=True)
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
    lookahead = untrained(problem)
    log_probs = torch.full((8, len(problem.embeddings)), -1e4)
    log_probs[:, 0], log_probs[:, 1] = 0.0, -100.0
    value = torch.full_like(log_probs, 1e-37)
    value[:, 1] = 1.0
    readings = [Reading(torch.zeros(8, 1), value)] * 3
    many = Lookahead(
        {str(number): head for number, head in enumerate([*lookahead.heads.values()] * 3)},
        LookaheadSettings(delta=0.1),
        {},
    )
    weighed = many.combine(log_probs, readings)
    assert weighed.log_q(torch.zeros(8, dtype=torch.int64)).isfinite().all()


class Scaled:
    """Scores that differ by 1 at most, however low they are."""

    name, bound = "scaled", 0.0

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
        return torch.tensor([self.shift - ("pub" in text) for text in texts], dtype=torch.float64)


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


def test_logits_of_some_tokens_are_those_of_all() -> None:
    """Both ways of computing them, which differ in speed."""
    coordinates = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    reader, (level, slope) = Reader(3, 2, 1, coordinates, "token"), (torch.randn(6), torch.randn(6, 4))
    for count in (3, 20):
        tokens = torch.randint(50, (6, count), generator=torch.Generator().manual_seed(1))
        expected = reader.logits(level, slope, None).gather(-1, tokens)
        torch.testing.assert_close(reader.logits_at(level, slope, tokens), expected)


def test_a_lookahead_without_factors_proposes_from_the_model() -> None:
    table = three_alike()
    plain = AutoregressiveTable(table.embeddings, table.model)
    lookahead = Lookahead.fit(plain, texts=32, seed=SEED)
    drawn = lookahead.draw(bind(plain), sv.Rng(1, 8).uniform(5))
    torch.testing.assert_close(drawn.log_p, drawn.log_q)


def test_a_text_drawn_after_a_prefix_keeps_it_and_is_scored_alike() -> None:
    problem = bind(Listed(small_model(4), CONTROLS["black box"]()))
    lookahead = untrained(problem, {"likes_pubs": "memory"}, seed=5)
    prefix = problem.allowed_tokens[torch.tensor([[0, 3], [2, 2], [5, 1]])]
    drawn = lookahead.draw(problem, sv.Rng(1, 9).uniform(4), prefix)
    assert torch.equal(drawn.tokens[:3, :2], prefix)
    assert len(torch.unique(drawn.tokens[3:, 0])) > 1
    scored = lookahead.score(problem, drawn.tokens)
    for kept, said in zip(drawn[1:], scored[1:], strict=True):
        torch.testing.assert_close(kept, said, atol=1e-5, rtol=0)


def test_what_every_text_satisfies_is_certain(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is to be learnt of it: its head has no outputs."""
    target = small_model(4).under([sv.regex("(?s).*")])
    found = sv.probability(target, texts=64, progress=False)
    assert (found.value, found.high) == pytest.approx((1.0, 1.0), abs=1e-4)
    assert 0.9 < found.low <= 1 + 1e-6
    assert found.reliable
    assert not [warning for warning in recwarn if "zero-element" in str(warning.message)]


def test_rare_words_are_found_and_their_probability_is_right() -> None:
    """Two words together, against 4,000 plain texts; a word that the pilot never saw is learnt all the same."""
    model = sv.load("bundled").target(max_tokens=10)
    target = model.under([sv.keyword("Italian"), sv.keyword("river")])
    lookahead = Lookahead.fit(target, texts=256, seed=0)
    found = sv.probability(target, texts=512, seed=1, lookahead=lookahead, progress=False)
    plain = sv.sample(model, sv.Ancestral(), chains=4000, draws=1, seed=2, progress=False)["posterior"]["tokens"].values
    scores = target.control_log_probs(torch.tensor(plain[:, 0]))
    share = float(torch.stack([score.isfinite() for score in scores.values()]).all(0).double().mean())
    error = (share / 4000) ** 0.5
    assert found.low - 3 * error <= share <= found.high + 3 * error
    assert found.effective_share > 5 * share
    assert 256 <= found.texts == found.evaluations <= 512
    assert found.texts == 512 or (found.reliable and found.relative_error <= 0.1)


def test_intervals_hold_the_truth() -> None:
    target = Listed(small_model(3), CONTROLS["black box"]())
    texts = torch.cartesian_prod(*[target.text.allowed.nonzero().squeeze(-1)] * 3)
    truth = float(target.log_prob(texts).double().exp().sum())  # the model is normalised over these texts
    lookahead = lookaheads(target, SEED)["trained"]
    held = 0
    for seed in range(30):
        found = sv.probability(target, texts=128, seed=seed, lookahead=lookahead, progress=False)
        held += found.low <= truth <= found.high
    assert held >= 24  # of 30, where 28 or 29 are expected


def test_lookaheads_are_kept_and_only_for_their_target(tmp_path: Path) -> None:
    target = Listed(small_model(3), CONTROLS["keyword"]())
    lookahead = Lookahead.fit(target, texts=64)
    lookahead.save(tmp_path / "kept")
    again = Lookahead.load(tmp_path / "kept", target)
    levels = sv.Rng(0, 9).uniform(3)
    blank = torch.full((9, 3), int(bind(target).allowed_tokens[0]))
    for part, same in zip(
        lookahead.propose(bind(target), blank, 0, levels), again.propose(bind(target), blank, 0, levels), strict=True
    ):
        assert torch.equal(part, same)
    with pytest.raises(sv.SamplingError, match="fitted to another length"):
        Lookahead.load(tmp_path / "kept", Listed(small_model(4), CONTROLS["keyword"]()))
    with pytest.raises(sv.SamplingError, match="fitted to another factors"):
        Lookahead.load(tmp_path / "kept", Listed(small_model(3), CONTROLS["black box"]()))
    other_prompt = Listed(small_model(3, "The Old Mill was a"), CONTROLS["keyword"]())
    with pytest.raises(sv.SamplingError, match="fitted to another prompt"):
        Lookahead.load(tmp_path / "kept", other_prompt)
    longer = Listed(small_model(4), CONTROLS["keyword"]())
    for sampler in (sv.Guided(lookahead), sv.Refresh(lookahead=lookahead)):
        with pytest.raises(sv.SamplingError, match=r"fitted to another length \(3, not 4\); fit one"):
            sv.sample(longer, sampler, chains=2, draws=1, progress=False)
    size = len(target.embeddings)
    config = transformers.GPT2Config(vocab_size=size, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    narrow = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    other = sv.TextTarget(sv.LanguageModel(narrow, target.tokenizer), max_tokens=3)
    with pytest.raises(sv.SamplingError, match=r"fitted to another width \(\d+, not 8\); fit one"):
        sv.sample(other, sv.Guided(lookahead), 2, 1, progress=False)


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
    untrained(problem, {"keyword=pub": "token"}, LookaheadSettings(delta=0.1)).save(tmp_path / "kept")
    assert Lookahead.load(tmp_path / "kept", problem).settings == LookaheadSettings(delta=0.1)
    damage(tmp_path / "kept")
    with pytest.raises(sv.SamplingError, match=r"kept cannot be loaded .*fit it again") as error:
        Lookahead.load(tmp_path / "kept", problem)
    assert "\n" not in str(error.value)


def test_hopeless_controls_are_refused_before_anything_is_drawn() -> None:
    model = small_model(3)
    with pytest.raises(sv.SamplingError, match="no text of 3 tokens can satisfy keyword=zebra"):
        Lookahead.fit(model.under([sv.keyword("zebra")]), texts=8)
    with pytest.raises(sv.SamplingError, match="none of 8 texts of the model satisfied never"):
        Lookahead.fit(model.under([Predicate(lambda text: False, "never")]), texts=8)
    boundless = model.under([Predicate(len, kind="log_score")])
    with pytest.raises(sv.SamplingError, match="needs controls with a bound"):
        sv.probability(boundless, texts=64, progress=False)
    with pytest.raises(sv.SamplingError, match="has the bound inf"):
        Lookahead.fit(boundless, texts=8)


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (
            "regex=(Italian ){9}",
            "no text of 6 tokens at most can satisfy regex=(Italian ){9}; lengthen the text",
        ),
        ("words=30..", "no text of 6 tokens at most can satisfy words=30..; lengthen the text or loosen the control"),
        ("regex=(a{1,1000}){1000}", "could take exponential time to match"),
        ("regex=" + "(" * 5000 + "a" + ")" * 5000, "…' is nested too deeply; write it with fewer groups"),
    ],
)
@pytest.mark.parametrize("command", ["sample", "probability"])
def test_impossible_patterns_raise_errors_before_sampling(
    command: str, control: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "never.py").write_text("def never(text):\n    return False\n")
    options = ("--texts", "64") if command == "probability" else ("-n", "2")
    done = svs(command, "--max-tokens", "6", "--control", control, *options, code=2, cwd=tmp_path)
    assert said in done.stderr
    assert "svs: " in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_contradictory_automata_are_found() -> None:
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


@pytest.mark.parametrize("finish", ["length", "stop", "any"])
def test_contradictory_controls_raise_an_error(finish: str) -> None:
    model = sv.load("bundled").target(max_tokens=8, finish=finish)
    river = sv.keyword("river")
    for others, is_possible in (
        ([sv.keyword("pub")], True),
        ([~river], False),
        ([sv.regex("^The"), sv.regex("^A")], False),
    ):
        problem = bind(model.under([river, *others]))
        with contextlib.nullcontext() if is_possible else pytest.raises(sv.SamplingError, match="can satisfy all of "):
            check_patterns(problem)
    with pytest.raises(sv.SamplingError, match="can satisfy all of "):
        sv.probability(problem, texts=64, progress=False)


def observed(problem: Problem, lookahead: Lookahead, texts: int) -> Observed:
    levels = sv.Rng(SEED, texts).uniform(problem.length)
    _, seen = lookahead.draw_observed(problem, levels, torch.ones(texts, dtype=torch.bool), is_observed=True)
    assert seen is not None
    return seen


def test_labels_and_values_of_a_pattern() -> None:
    """Labels are probabilities; values are 1 and 0 where the pattern is settled, and impossible tokens are masked."""
    target = bind(Listed(small_model(4), CONTROLS["keyword"]()))
    lookahead = untrained(target)
    head, labels = lookahead.heads["keyword=pub"], observed(target, lookahead, 512).labels[0]
    assert isinstance(head, PatternHead)
    assert 0 <= float(labels.min()) <= float(labels.max()) <= 1 + 1e-5
    pub = next(token for token in target.allowed_tokens.tolist() if target.decode(torch.tensor([token])) == " pub")
    other = next(token for token in target.allowed_tokens.tolist() if token != pub)
    hidden = torch.zeros(2, target.embeddings.shape[1])
    states = head.begin(torch.tensor([[other] * 3, [pub, other, other]]))
    last = head.value(states, hidden, 3, 4)
    assert last[0, pub] > 0.4
    assert last[0, other] == 0
    assert last[1, other] == 1
    possible = head.possible(states, 3, 4)
    assert possible is not None
    assert possible[:, [pub, other]].tolist() == [[True, False], [True, True]]
    assert head.possible(head.begin(torch.zeros(2, 0, dtype=torch.int64)), 0, 4) is None


def test_a_head_with_memory_learns_what_one_without_cannot() -> None:
    """Only the tokens so far tell how many were alike; without its memory the same head costs twice as much."""
    target = three_alike()
    problem = bind(target)
    seen = observed(problem, untrained(problem), 2048)
    lookahead = learn(problem, seen, LookaheadSettings(return_passes=15, delta=0.03), SEED)
    reader = lookahead.heads[REST].reader
    assert reader.size == "memory"
    cost = exact_cost(target, lookahead)
    reader.memory.data[:] = 0
    assert exact_cost(target, lookahead) > 2 * cost


def test_returns_are_the_expected_next_values() -> None:
    """Computed by hand from the values of every token; one text is over before the last position."""
    problem = bind(three_alike())
    lookahead = untrained(problem, {REST: "memory"}, seed=4)
    head, seen = lookahead.heads[REST], observed(problem, lookahead, 16)
    score, live = torch.rand(16, 1, generator=torch.Generator().manual_seed(1)), torch.ones(16, 5, dtype=torch.bool)
    live[3, 3:] = False
    trainer = _Trainer(head, seen._replace(factors=score, live=live), 0, LookaheadSettings(), SEED)
    labels, probabilities = trainer._returns()[..., 0], torch.tensor([0.25, 0.15, 0.35, 0.25])
    for row, length in ((0, 5), (3, 3)):
        label = float(score[row])
        for n in reversed(range(length)):
            assert float(labels[row, n]) == pytest.approx(label, abs=1e-5)
            state = seen.tokens[[row], :n]
            value = head.value(state, head.features(state, seen.hidden[[row], n].float()), n, 5)
            label = (1 - RETURNED) * float((probabilities * value.detach()).sum()) + RETURNED * label


def test_estimates_are_judged() -> None:
    even = estimate_probability(torch.full((200,), -3.0, dtype=torch.float64).numpy(), 200)
    assert (round(even.value, 6), even.reliable, even.effective_share) == (0.049787, True, pytest.approx(1.0))
    heavy = torch.full((200,), -9.0, dtype=torch.float64)
    heavy[0] = 0.0
    assert not estimate_probability(heavy.numpy(), 200).reliable
    nothing = estimate_probability(torch.full((200,), -torch.inf, dtype=torch.float64).numpy(), 200)
    assert (nothing.value, nothing.high, nothing.reliable) == (0.0, 3 / 200, False)
    assert "below 0.015" in nothing.verdict


def test_an_estimate_stops_when_it_is_precise() -> None:
    target = sv.load("bundled").target(controls=[sv.keyword("Italian")], max_tokens=12)
    found = sv.probability(target, texts=4096, seed=3, progress=False)
    assert found.reliable
    assert found.texts < 4096
    assert found.relative_error <= EngineSettings().target_relative_error
    all_texts = EngineSettings(target_relative_error=0.0)
    assert sv.probability(target, texts=512, seed=3, progress=False, settings=all_texts).texts == 512
