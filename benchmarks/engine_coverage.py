"""How often the error bound of a run and its 95 % interval of P(controls) hold, where all texts can be listed.

    python benchmarks/engine_coverage.py --runs 200 --workers 2

The bundled model is restricted to eight tokens and four positions, so that the exact distribution over all 4,096 texts
is known. Each run draws texts with the default settings and its own seed. Its distance is the exact total variation
distance of the distribution that its texts come from, given the proposals and caps it ended with.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.engine.proposals import Proposal
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.experiments.exactness.truth import LENGTH, PROMPT, WORDS, ListedTexts
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.language_model import LanguageModel
from structured_voronoi.workers.parallel import map_tasks

PATTERNS = ("restaurant.*and a", "cheap.*expensive", "pub diner.*diner", "expensive and.*and", "cheap a.*place")
"""Regular expressions with probabilities of about 1e-1, 1e-2, 1e-3, 1e-4 and 1e-5."""
TOLERANCE = 0.003


@cache
def target_of(pattern: str) -> ListedTexts:
    """All texts of the eight tokens, under one regular expression."""
    loaded = load("bundled").target(max_tokens=LENGTH)
    tokens = torch.tensor([loaded.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS])
    model = LanguageModel(loaded.model, loaded.tokenizer).target(PROMPT, max_tokens=LENGTH, allowed=tokens.tolist())
    return ListedTexts(model, tokens, regex(pattern))


def all_texts() -> Tensor:
    return torch.cartesian_prod(*[torch.arange(len(WORDS))] * LENGTH)


def capped(target: ListedTexts, proposal: Proposal, cap: float, share: float) -> Tensor:
    """The distribution of the texts that a proposal accepts, over all texts."""
    scored = proposal.lookahead.score(bind(target), all_texts())
    log_q, log_base = scored.log_q.sum(-1), scored.log_base.sum(-1)
    if not proposal.is_plain:
        log_q = torch.logaddexp(log_base + math.log(share), log_q + math.log1p(-share))
    weight = (scored.log_p.sum(-1) + scored.log_rest - log_q).exp().nan_to_num()
    accepted = weight.clamp(max=cap) * log_q.exp()
    return accepted / accepted.sum()


def run_once(task: tuple[str, int], texts: int) -> dict[str, Any]:
    """One run: its error bound and distance, its interval and the truth."""
    pattern, seed = task
    target, settings = target_of(pattern), EngineSettings()
    problem = bind(target)
    log_target = target.log_prob(all_texts())
    truth, exact = float(log_target.exp().sum()), log_target.softmax(0)
    run = Rounds([problem], LocalSource([target], seed, settings), texts, seed, TOLERANCE, settings)
    found = Counter(one.proposal for part in run.run() for one in part)
    mixture, bound = torch.zeros_like(exact), 0.0
    for number, count in found.items():
        proposal = run.proposals[number]
        cap = 1.0 if proposal.is_plain else min(float(proposal.caps[0].min()), proposal.released_cap.get(0, math.inf))
        mixture += count / found.total() * capped(target, proposal, cap, settings.plain_share)
        bound += count / found.total() * proposal.error_bound.get(0, 0.0)
    best = run.best_proposal(0)
    tries = sum(one.count() for one in run.proposals)
    estimate = estimate_probability(best.tries(0).log_weight.numpy(), tries, best.is_plain)
    return {
        "pattern": pattern,
        "truth": truth,
        "distance": float((mixture - exact).abs().sum() / 2),
        "bound": bound,
        "low": estimate.low,
        "high": estimate.high,
        "reliable": estimate.reliable,
        "learnings": len(run.proposals) - 1,
        "tries": tries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    for pattern in PATTERNS:
        tasks = [(pattern, seed) for seed in range(asked.runs)]
        rows = map_tasks(partial(run_once, texts=asked.texts), tasks, pattern, True, asked.workers)

        def share(holds: Any, some: list[dict[str, Any]] = rows) -> float:
            return sum(map(holds, some)) / max(1, len(some))

        reliable = [row for row in rows if row["reliable"]]
        print(
            json.dumps(
                {
                    "pattern": pattern,
                    "truth": rows[0]["truth"],
                    "bound holds": share(lambda row: row["distance"] <= row["bound"] + 1e-9),
                    "interval holds": share(lambda row: row["low"] <= row["truth"] <= row["high"]),
                    "reliable": len(reliable) / len(rows),
                    "interval holds where reliable": share(
                        lambda row: row["low"] <= row["truth"] <= row["high"], reliable
                    ),
                    "mean distance": sum(row["distance"] for row in rows) / len(rows),
                    "mean bound": sum(row["bound"] for row in rows) / len(rows),
                    "mean learnings": sum(row["learnings"] for row in rows) / len(rows),
                    "mean tries": sum(row["tries"] for row in rows) / len(rows),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
