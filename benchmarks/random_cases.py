"""Proposals per accepted text, on random controls and on fixed ones.

    python benchmarks/random_cases.py tuning                     # cases on which settings may be chosen
    python benchmarks/random_cases.py held-out                   # cases to report
    python benchmarks/random_cases.py fixed                      # the cases of docs/results/lookahead.md
    python benchmarks/random_cases.py held-out --model smollm2

Random controls are one to five words, regular expressions, labels and functions, after three prompts. The words come
from the model's own texts: each is in at least 3 of them and in at most a fifth. The engine draws texts for each case
with its default settings. A line gives P(controls), the proposals per accepted text of the last proposal (an error of
0.3 %), all tries of the run, and the tries that plain rejection would need for as many texts.
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

PROMPTS = {
    "bundled": ["", "Near the", "The"],
    "smollm2": ["My holiday was", "The weather in", "She opened the door and"],
}
LENGTHS = {"bundled": (20, 24), "smollm2": (16, 20)}
KINDS = {
    "bundled": ["1", "2", "3", "regex", "function", "4", "2", "label", "5", "regex"],
    "smollm2": ["1", "2", "regex", "function"],
}
"""Kinds of controls, in turn: a number of words, or what they say."""
LABELS = ["food=Italian@1.5", "food=French@2", "food=Japanese@1"]


@dataclass(frozen=True)
class Case:
    """A prompt and controls: written ones, or at least ``least`` of some words."""

    prompt: str
    length: int
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    least: int = 0

    def target(self, model: str) -> sv.ControlledTarget:
        language_model = sv.load(model).target(self.prompt, max_tokens=self.length)
        controls = dict(parse_control(control, "cpu") for control in self.controls)
        if self.words:
            controls[Predicate(self.has_words, name="function")] = 1.0
        return language_model.under(controls)

    def has_words(self, text: str) -> bool:
        return sum(word in text for word in self.words) >= self.least


FIXED = {
    "bundled": [
        Case("", 20, ("keyword=Italian",)),
        Case("", 20, ("keyword=Italian", "keyword=river", "regex=[Ff]amil")),
        Case("", 20, ("food=Italian@1.5",)),
        Case("", 20, words=("family", "riverside", "city", "rating", "pub"), least=3),
        Case("", 20, tuple(f"keyword={word}" for word in ("Italian", "river", "family", "pub", "cheap"))),
        Case("", 24, ("keyword=Italian", "keyword=river", "regex=[Ff]amil", "keyword=cheap", "keyword=cathedral")),
    ],
    "smollm2": [Case("My holiday was", 20, ("keyword=beach", "keyword=rain"))],
}


def random_cases(model: str, count: int) -> list[Case]:
    """The same cases in every call."""
    choose, cases = random.Random(24), []
    words = {prompt: frequent_words(model, prompt) for prompt in PROMPTS[model]}
    for number in range(count):
        prompt, length = choose.choice(PROMPTS[model]), choose.choice(LENGTHS[model])
        kind, picked = KINDS[model][number % len(KINDS[model])], choose.sample(words[prompt], 5)
        first, second = picked[:2]
        if kind == "regex":
            patterns = f"regex={first} .* {second}", f"regex={first}.*,", f"regex=^ ?The {first}"
            cases.append(Case(prompt, length, (choose.choice(patterns),)))
        elif kind == "label":
            cases.append(Case(prompt, length, (choose.choice(LABELS),)))
        elif kind == "function":
            cases.append(Case(prompt, length, words=tuple(picked), least=choose.choice([2, 3])))
        else:
            cases.append(Case(prompt, length, tuple(f"keyword={word}" for word in picked[: int(kind)])))
    return cases


def half_of(cases: list[Case], name: str) -> list[Case]:
    """Every second case, so that both halves have all kinds."""
    return [case for number, case in enumerate(cases) if (number // 10 + number) % 2 == (name == "held-out")]


def frequent_words(model: str, prompt: str) -> list[str]:
    """Words that are neither rare nor common in texts of the model."""
    target = bind(sv.load(model).target(prompt, max_tokens=20))
    texts = 500 if model == "bundled" else 192
    counts: Counter[str] = Counter()
    for row in untrained(target).draw(target, Rng(99, texts, "words").uniform(20)).tokens:
        counts.update(set(re.findall(r" ([A-Za-z]{3,})\b", target.decode(row))))
    return sorted(word for word, count in counts.items() if 3 <= count <= texts / 5)


@dataclass
class TimedSource(LocalSource):
    """Measures the time of learning."""

    learning_seconds: float = 0.0

    def learnt(self, name: str, make: Any) -> Lookahead:
        began = time.process_time()
        made = super().learnt(name, make)
        self.learning_seconds += time.process_time() - began
        return made


def measure(model: str, case: Case, texts: int, max_tries: int, settings: EngineSettings) -> dict[str, Any]:
    """One run of the engine."""
    target = case.target(model)
    source = TimedSource([target], 0, settings)
    run = Rounds([bind(target)], source, texts, 0, 0.003, settings)
    run.should_stop = lambda: sum(one.count() for one in run.proposals) >= max_tries
    began, accepted = time.process_time(), 0
    with contextlib.suppress(NoStartError):  # no try satisfied the controls
        accepted = sum(len(part) for part in run.run())
    last = run.proposals[run.current]
    tries = sum(one.count() for one in run.proposals)
    found = estimate_probability(last.tries(0).log_weight.numpy(), tries, last.is_plain)
    return {
        "prompt": case.prompt,
        "length": case.length,
        "controls": list(case.controls) or f"{case.least} of {', '.join(case.words)}",
        "probability": found.value,
        "proposals": 1 / last.acceptance_rate() if last.acceptance_rate() else None,
        "share": round(found.effective_share, 4),
        "largest": round(found.largest_share, 3),
        "learnings": len(run.proposals) - 1,
        "accepted": accepted,
        "tries": tries,
        "rejection": accepted / found.value if found.value else None,
        "learning_seconds": round(source.learning_seconds, 1),
        "seconds": round(time.process_time() - began, 1),
        "error_bound": round(last.error_bound.get(0, 0.0), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=["tuning", "held-out", "fixed"])
    parser.add_argument("--model", choices=list(PROMPTS), default="bundled")
    parser.add_argument("--count", type=int, default=40, help="random cases, of which a half is run")
    parser.add_argument("--only", type=int, nargs="*", help="numbers within the half")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--max-tries", type=int, default=40_000)
    parser.add_argument("--settings", type=json.loads, default={}, help="engine settings as JSON")
    parser.add_argument("--lookahead", type=json.loads, default={}, help="lookahead settings as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    settings = EngineSettings(**asked.settings, lookahead=LookaheadSettings(**asked.lookahead))
    cases = (
        FIXED[asked.model] if asked.cases == "fixed" else half_of(random_cases(asked.model, asked.count), asked.cases)
    )
    proposals = []
    for number, case in enumerate(cases):
        if asked.only and number not in asked.only:
            continue
        found = measure(asked.model, case, asked.texts, asked.max_tries, settings)
        proposals.append(found["proposals"] or np.inf)
        print(json.dumps({"number": number, **found}), flush=True)
    median, worst = np.quantile(proposals, [0.5, 0.9])
    mean = np.exp(np.mean(np.log(np.minimum(proposals, 1e6))))
    print(f"median {median:.1f}, worst tenth {worst:.0f}, geometric mean {mean:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
