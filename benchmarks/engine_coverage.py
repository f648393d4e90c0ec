"""Coverage of a run's error bound and of its 95 % interval of P(controls), on a target whose texts are enumerated.

    python benchmarks/engine_coverage.py --runs 200 --workers 2

The bundled model is restricted to eight tokens and four positions, so that the exact distribution over all 4,096 texts
is known. Each run draws texts with the default settings and its own seed. Its distance is the exact total variation
distance between the target and the distribution of its texts, given its final proposals and caps.
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

import structured_voronoi as sv
from structured_voronoi.engine.proposals import Proposal
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.experiments.exactness.truth import LENGTH, PROMPT, WORDS, ListedTexts
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.workers.parallel import map_tasks

PATTERNS = ("restaurant.*and a", "cheap.*expensive", "pub diner.*diner", "expensive and.*and", "cheap a.*place")
"""Regular expressions with probabilities of about 1e-1, 1e-2, 1e-3, 1e-4 and 1e-5."""


@cache
def target_of(pattern: str) -> ListedTexts:
    """All texts of the eight tokens, under one regular expression."""
    model = sv.load("bundled")
    tokens = torch.tensor([model.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS])
    text = model.target(PROMPT, max_tokens=LENGTH, allowed=tokens.tolist())
    return ListedTexts(text, tokens, sv.regex(pattern))


def all_texts() -> Tensor:
    return torch.cartesian_prod(*[torch.arange(len(WORDS))] * LENGTH)


def accepted_distribution(target: ListedTexts, proposal: Proposal, cap: float, share: float) -> Tensor:
    """Probability of each text among the accepted texts of a proposal."""
    scored = proposal.lookahead.score(bind(target), all_texts())
    log_q, log_base = scored.log_q.sum(-1), scored.log_base.sum(-1)
    if not proposal.is_plain:
        log_q = torch.logaddexp(log_base + math.log(share), log_q + math.log1p(-share))
    weight = (scored.log_p.sum(-1) + scored.log_rest - log_q).exp().nan_to_num()
    accepted = weight.clamp(max=cap) * log_q.exp()
    return accepted / accepted.sum()


def run_once(task: tuple[str, int], texts: int, tolerance: float = 0.003) -> dict[str, Any]:
    """One run: its error bound and distance, its interval and the exact probability."""
    pattern, seed = task
    target, settings = target_of(pattern), EngineSettings()
    problem = bind(target)
    log_target = target.log_prob(all_texts())
    truth, exact = float(log_target.exp().sum()), log_target.softmax(0)
    run = Rounds([problem], LocalSource([target], seed, settings), texts, seed, tolerance, settings)
    counts = Counter(accepted.proposal for batch in run.run() for accepted in batch)
    mixture, bound = torch.zeros_like(exact), 0.0
    for number, count in counts.items():
        proposal = run.proposals[number]
        cap = 1.0 if proposal.is_plain else min(float(proposal.caps[0].min()), proposal.released_cap.get(0, math.inf))
        mixture += count / counts.total() * accepted_distribution(target, proposal, cap, settings.plain_share)
        bound += count / counts.total() * proposal.error_bound.get(0, 0.0)
    best = run.best_proposal(0)
    tries = sum(proposal.count() for proposal in run.proposals)
    estimate = estimate_probability(best.tries(0).log_weight.numpy(), tries, best.is_plain)
    return {
        "pattern": pattern,
        "truth": truth,
        "distance": float((mixture - exact).abs().sum() / 2),
        "bound": bound,
        "low": estimate.low,
        "high": estimate.high,
        "reliable": estimate.reliable,
        "updates": len(run.proposals) - 1,
        "tries": tries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    for pattern in PATTERNS:
        tasks = [(pattern, seed) for seed in range(options.runs)]
        rows = map_tasks(partial(run_once, texts=options.texts), tasks, pattern, True, options.workers)

        def share(holds: Any, selected: list[dict[str, Any]] = rows) -> float:
            return sum(map(holds, selected)) / max(1, len(selected))

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
                    "mean updates": sum(row["updates"] for row in rows) / len(rows),
                    "mean tries": sum(row["tries"] for row in rows) / len(rows),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
