"""Proposals per accepted text, for random controls and for fixed ones.

    python benchmarks/random_cases.py tuning                     # cases for choosing settings
    python benchmarks/random_cases.py held-out                   # cases to report
    python benchmarks/random_cases.py fixed                      # cases of docs/results/lookahead.md
    python benchmarks/random_cases.py held-out --model smollm2

Random controls are one to five words, regular expressions, labels and functions, after three prompts. The words come
from texts of the model: each occurs in at least 3 of them and in at most a fifth. The engine draws texts for each case
with its default settings. A line gives P(controls), the proposals per accepted text of the last proposal (truncation
error 0.3 %), all tries of the run, and the tries that plain rejection would need for as many texts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import structured_voronoi as sv
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.problem.problem import bind


@dataclass(frozen=True)
class RandomSettings:
    """What the random cases of a language model are made of."""

    prompts: tuple[str, ...]
    lengths: tuple[int, int]
    kinds: tuple[str, ...]
    """Kinds of controls, in turn: "regex", "function", "label", or a number of words."""
    pilot_texts: int
    """Texts of the model from which words are chosen."""


SETTINGS = {
    "bundled": RandomSettings(
        ("", "Near the", "The"), (20, 24), ("1", "2", "3", "regex", "function", "4", "2", "label", "5", "regex"), 500
    ),
    "smollm2": RandomSettings(
        ("My holiday was", "The weather in", "She opened the door and"), (16, 20), ("1", "2", "regex", "function"), 192
    ),
}


@dataclass(frozen=True)
class Case:
    """A prompt and its controls: as on the command line, or a function that asks for ``min_words`` of ``words``."""

    prompt: str
    length: int
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    min_words: int = 0

    def target(self, model: str) -> sv.ControlledTarget:
        language_model = sv.load(model).target(self.prompt, max_tokens=self.length)
        controls: list[Any] = [parse_control(control) for control in self.controls]
        if self.words:
            controls.append(Predicate(self.has_words, name="function"))
        return language_model.under(controls)

    def has_words(self, text: str) -> bool:
        return sum(word in text for word in self.words) >= self.min_words


FIXED = {
    "bundled": [
        Case("", 20, ("keyword=Italian",)),
        Case("", 20, ("keyword=Italian", "keyword=river", "regex=[Ff]amil")),
        Case("", 20, ("food=Italian@1.5",)),
        Case("", 20, words=("family", "riverside", "city", "rating", "pub"), min_words=3),
        Case("", 20, tuple(f"keyword={word}" for word in ("Italian", "river", "family", "pub", "cheap"))),
        Case("", 24, ("keyword=Italian", "keyword=river", "regex=[Ff]amil", "keyword=cheap", "keyword=cathedral")),
    ],
    "smollm2": [Case("My holiday was", 20, ("keyword=beach", "keyword=rain"))],
}


def random_cases(model: str, count: int) -> list[Case]:
    """The random cases of a model; the same in every call."""
    choose, cases, settings = random.Random(24), [], SETTINGS[model]
    words = {prompt: frequent_words(model, prompt) for prompt in settings.prompts}
    labels = ("food=Italian@1.5", "food=French@2", "food=Japanese@1")
    for number in range(count):
        prompt, length = choose.choice(settings.prompts), choose.choice(settings.lengths)
        kind, picked = settings.kinds[number % len(settings.kinds)], choose.sample(words[prompt], 5)
        first, second = picked[:2]
        if kind == "regex":
            patterns = f"regex={first} .* {second}", f"regex={first}.*,", f"regex=^ ?The {first}"
            cases.append(Case(prompt, length, (choose.choice(patterns),)))
        elif kind == "label":
            cases.append(Case(prompt, length, (choose.choice(labels),)))
        elif kind == "function":
            cases.append(Case(prompt, length, words=tuple(picked), min_words=choose.choice([2, 3])))
        else:
            cases.append(Case(prompt, length, tuple(f"keyword={word}" for word in picked[: int(kind)])))
    return cases


def half_of(cases: list[Case], name: str) -> list[Case]:
    """Every second case; both halves have all kinds of controls."""
    return [case for number, case in enumerate(cases) if (number // 10 + number) % 2 == (name == "held-out")]


def frequent_words(model: str, prompt: str) -> list[str]:
    """Words in at least 3 and at most a fifth of texts of the model."""
    target = bind(sv.load(model).target(prompt, max_tokens=20))
    texts = SETTINGS[model].pilot_texts
    counts: Counter[str] = Counter()
    for row in untrained(target).draw(target, Rng(99, texts, "words").uniform(20)).tokens:
        counts.update(set(re.findall(r" ([A-Za-z]{3,})\b", target.decode(row))))
    return sorted(word for word, count in counts.items() if 3 <= count <= texts / 5)


@dataclass
class TimedSource(LocalSource):
    """A source that measures the time of training."""

    training_seconds: float = 0.0

    def learnt(self, name: str, make: Any) -> Lookahead:
        began = time.process_time()
        lookahead = super().learnt(name, make)
        self.training_seconds += time.process_time() - began
        return lookahead


def measure(model: str, case: Case, texts: int, max_tries: int, settings: EngineSettings) -> dict[str, Any]:
    """One run of the engine."""
    target = case.target(model)
    source = TimedSource([target], 0, settings)
    run = Rounds([bind(target)], source, texts, 0, 0.003, settings)
    run.should_stop = lambda: sum(proposal.count() for proposal in run.proposals) >= max_tries
    began, accepted = time.process_time(), 0
    with contextlib.suppress(NoStartError):  # no try satisfied the controls
        accepted = sum(len(batch) for batch in run.run())
    last = run.proposals[run.current]
    tries = sum(proposal.count() for proposal in run.proposals)
    estimate = estimate_probability(last.tries(0).log_weight.numpy(), tries, last.is_plain)
    return {
        "prompt": case.prompt,
        "length": case.length,
        "controls": list(case.controls) or f"{case.min_words} of {', '.join(case.words)}",
        "probability": estimate.value,
        "proposals": 1 / last.acceptance_rate() if last.acceptance_rate() else None,
        "effective_share": round(estimate.effective_share, 4),
        "largest_share": round(estimate.largest_share, 3),
        "updates": len(run.proposals) - 1,
        "accepted": accepted,
        "tries": tries,
        "rejection_tries": accepted / estimate.value if estimate.value else None,
        "training_seconds": round(source.training_seconds, 1),
        "seconds": round(time.process_time() - began, 1),
        "error_bound": round(last.error_bound.get(0, 0.0), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=["tuning", "held-out", "fixed"])
    parser.add_argument("--model", choices=list(SETTINGS), default="bundled")
    parser.add_argument("--count", type=int, default=40, help="random cases, half of which are run")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, within the half")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--max-tries", type=int, default=40_000)
    parser.add_argument("--settings", type=json.loads, default={}, help="engine settings as JSON")
    parser.add_argument("--lookahead", type=json.loads, default={}, help="lookahead settings as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = EngineSettings(**options.settings, lookahead=LookaheadSettings(**options.lookahead))
    if options.cases == "fixed":
        cases = FIXED[options.model]
    else:
        cases = half_of(random_cases(options.model, options.count), options.cases)
    proposals = []
    for number, case in enumerate(cases):
        if options.only and number not in options.only:
            continue
        result = measure(options.model, case, options.texts, options.max_tries, settings)
        proposals.append(result["proposals"] or np.inf)
        print(json.dumps({"number": number, **result}), flush=True)
    median, worst = np.quantile(proposals, [0.5, 0.9])
    mean = np.exp(np.mean(np.log(np.minimum(proposals, 1e6))))
    print(f"median {median:.1f}, 90 % quantile {worst:.0f}, geometric mean {mean:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
