"""Proposals per accepted text on random controls, half of them for choosing settings and half for reporting.

    python benchmarks/random_cases.py --half tuning            # choose settings on these
    python benchmarks/random_cases.py --half held-out          # report these once
    python benchmarks/random_cases.py --model smollm2 --half tuning

Words come from the model's own texts: each is in 3 of 500 texts at least and in one of five at most. Controls are one
to five of them, regular expressions, labels and functions, after three prompts. Each line has the probability of the
controls, the proposals per accepted text at an error of 0.3 %, and the number of tries that plain rejection would take.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time

import numpy as np
import torch

import structured_voronoi as sv
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.engine import weights
from structured_voronoi.lookahead.learning import learn, refine
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import bind
from structured_voronoi.streams import Rng

PROMPTS = {
    "bundled": ["", "Near the", "The"],
    "smollm2": ["My holiday was", "The weather in", "She opened the door and"],
}
LENGTHS = {"bundled": (20, 24), "smollm2": (16, 20)}


def make_cases(model: str, count: int) -> list[dict]:
    """Random controls, the same for every call."""
    choose, cases = random.Random(24), []
    words = {prompt: frequent_words(model, prompt) for prompt in PROMPTS[model]}
    kinds = ["word", "words2", "words3", "regex", "function", "words4", "words2", "label", "words5", "regex"]
    if model != "bundled":
        kinds = ["word", "words2", "regex", "function"]
    for number in range(count):
        prompt, length = choose.choice(PROMPTS[model]), choose.choice(LENGTHS[model])
        kind, known = kinds[number % len(kinds)], words[prompt]
        picked = choose.sample(known, 5)
        if kind.startswith("word"):
            controls = [f"keyword={word}" for word in picked[: int(kind[5:] or 1)]]
        elif kind == "regex":
            controls = [
                choose.choice(
                    [f"regex={picked[0]} .* {picked[1]}", f"regex={picked[0]}.*,", f"regex=^ ?The {picked[0]}"]
                )
            ]
        elif kind == "label":
            controls = [choose.choice(["food=Italian@1.5", "food=French@2", "food=Japanese@1"])]
        else:
            controls = [("function", picked, choose.choice([2, 3]))]
        cases.append({"number": number, "prompt": prompt, "length": length, "controls": controls})
    return cases


def frequent_words(model: str, prompt: str) -> list[str]:
    target = bind(sv.LanguageModel.load(model, prompt=prompt, length=20))
    texts, counts = 500 if model == "bundled" else 192, {}
    levels = Rng(99, texts, "words").uniform(20)
    drawn = untrained(target).draw(target, levels).tokens
    for row in drawn:
        for word in set(re.findall(r" ([A-Za-z]{3,})\b", target.decode(row))):
            counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, seen in counts.items() if 3 <= seen <= texts / 5)


def target_of(model: str, case: dict) -> sv.Controlled:
    language_model = sv.LanguageModel.load(model, prompt=case["prompt"], length=case["length"])
    controls = {}
    for control in case["controls"]:
        if isinstance(control, str):
            made, weight = parse_control(control, "cpu")
        else:
            _, words, least = control
            made, weight = (
                Predicate(lambda text, w=tuple(words), k=least: sum(x in text for x in w) >= k, name="function"),
                1.0,
            )
        controls[made] = weight
    return sv.Controlled(language_model, controls)


def draw(problem, lookahead, seed, numbers, plain, observed=False):
    levels = Rng(seed, numbers, "tries").uniform(problem.length + 1)
    from_model = levels[:, -1] < plain
    drawn, seen = lookahead.draw_observed(problem, levels[:, :-1], from_model, observed)
    log_q = torch.logaddexp(
        drawn.log_base.sum(-1) + np.log(max(plain, 1e-300)), drawn.log_q.sum(-1) + np.log(max(1 - plain, 1e-300))
    )
    log_weight = drawn.log_p.sum(-1) + drawn.log_rest - log_bound(problem) - log_q
    return torch.where(log_weight.isfinite(), log_weight, -torch.inf), seen


def proposals(log_weight: np.ndarray, plain: float) -> tuple[float, float, float]:
    """Proposals per text at 0.3 %, the probability, and the effective share."""
    most = log_weight.max()
    if not np.isfinite(most):
        return np.inf, 0.0, 0.0
    weight = np.exp(log_weight - most)
    caps = weights.find_caps(weight, 0.003, float(np.exp(-most)) / plain)
    accepted = np.minimum(1, weight / caps.cap).mean()
    return 1 / accepted if accepted else np.inf, weight.mean() * np.exp(most), weights.effective_share(weight)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="bundled")
    options.add_argument("--half", choices=["tuning", "held-out"], required=True)
    options.add_argument("--cases", type=int, default=40)
    options.add_argument("--first", type=int, default=256)
    options.add_argument("--second", type=int, default=0)
    options.add_argument("--judged", type=int, default=2048)
    options.add_argument("--plain", type=float, default=0.05)
    options.add_argument("--only", type=int, nargs="*")
    options.add_argument("--settings", type=json.loads, default={})
    asked = options.parse_args()
    settings, found = LookaheadSettings(**asked.settings), []
    for case in make_cases(asked.model, asked.cases):
        if (case["number"] // 10 + case["number"]) % 2 != (asked.half == "held-out") or (
            asked.only and case["number"] not in asked.only
        ):
            continue
        problem = bind(target_of(asked.model, case))
        began = time.perf_counter()
        first, seen = draw(problem, untrained(problem, settings=settings), 1, range(asked.first), 1.0, True)
        drawn = time.perf_counter()
        lookahead = learn(problem, seen, settings, 0)
        learnt = time.perf_counter()
        if asked.second:
            log_weight, more = draw(problem, lookahead, 2, range(asked.second), asked.plain, True)
            lookahead = refine(lookahead, more, log_weight, settings, 0)
        log_weight, _ = draw(problem, lookahead, 3, range(asked.judged), asked.plain)
        cost, value, share = proposals(log_weight.numpy(), asked.plain)
        sizes = [head.reader.size for head in lookahead.heads.values()]
        found.append(cost)
        hits, largest = int((first > -np.inf).sum()), float((log_weight.max() - log_weight.logsumexp(0)).exp())
        print(
            f"{case['number']:3} {value:8.2g} {cost:8.1f} share {share:6.3f} hits {hits:4} largest {largest:.3f} "
            f"draw {drawn - began:5.1f} learn {learnt - drawn:5.1f} {sizes} {case['prompt']!r} {case['controls']}",
            flush=True,
        )
    median, worst, mean = np.median(found), np.quantile(found, 0.9), np.mean(np.log10(np.minimum(found, 1e6)))
    print(f"median {median:.1f}, worst tenth {worst:.0f}, mean log10 {mean:.3f}")


if __name__ == "__main__":
    sys.exit(main())
