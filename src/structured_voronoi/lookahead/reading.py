"""What a lookahead is told of its target: the factors and their patterns, the hidden states, and which target it is."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.problem.drawing import log_bound, token_log_probs
from structured_voronoi.problem.problem import Problem

REST = "rest"
"""The name of the only factor of a target that does not list its own."""


def factor_names(problem: Problem) -> list[str]:
    """What a lookahead learns of this target, by name."""
    if problem.log_factors is None:
        return [] if problem.normalised else [REST]
    return list(problem.log_factors(problem.allowed_tokens[:1].expand(1, problem.length)))


def log_factors(problem: Problem, tokens: Int[Tensor, "row n"], log_rest: Tensor) -> dict[str, Float[Tensor, " row"]]:
    """log of every factor W_k ≤ 1 of each text."""
    if problem.log_factors is None:
        return {REST: log_rest - log_bound(problem)}
    factors: dict[str, Tensor] = problem.log_factors(tokens)
    return factors


def live_positions(problem: Problem, tokens: Int[Tensor, "row n"]) -> Bool[Tensor, "row n"]:
    """All but the padding after the first: nothing is to be learnt of a text that has ended."""
    is_padding = torch.zeros_like(tokens) if problem.padding is None else (tokens == problem.padding).long()
    return is_padding.cumsum(-1) - is_padding == 0


def feature_width(problem: Problem) -> int:
    return int(problem.embeddings.shape[1])


def hidden_features(problem: Problem, hidden: Tensor | None, rows: int) -> Float[Tensor, "row d"]:
    """Hidden states as heads read them; zeros where the target has none."""
    if hidden is None:
        return torch.zeros(rows, feature_width(problem), device=problem.device)
    length = hidden.float().norm(dim=-1, keepdim=True).clamp(min=1e-6)
    features: Tensor = hidden.float() / length * hidden.shape[-1] ** 0.5
    return features


def identify(problem: Problem) -> dict[str, Any]:
    """What a lookahead depends on, as JSON keeps it; models, weights and classifiers are told apart by what they say
    of a few texts."""
    table, rows = problem.embeddings.detach().float(), few_texts(problem)
    factors = problem.log_factors(rows) if problem.log_factors is not None else {}
    likely = token_log_probs(problem, rows).sum(-1) if problem.is_autoregressive else rows[:0, 0]
    return {
        **sizes_of(problem),
        "prompt": str(getattr(problem, "prompt", "")),
        "system message": str(getattr(problem, "system", "")),
        "stop": [str(stop) for stop in getattr(problem, "stop", ())],
        "factors": sorted(factor_names(problem)),
        "model": [f"{value:.3g}" for value in (*table[:: max(1, len(table) // 7), 0][:8], *likely.tolist())],
        "scores": {name: [f"{value:.3g}" for value in scores.tolist()] for name, scores in sorted(factors.items())},
    }


def sizes_of(problem: Problem) -> dict[str, int]:
    """What a lookahead must share with a target to be used on it at all."""
    return {"vocabulary": len(problem.embeddings), "length": problem.length, "width": feature_width(problem)}


def few_texts(problem: Problem) -> Int[Tensor, "row n"]:
    """Texts of no sense by which targets are told apart."""
    tokens = problem.allowed_tokens
    return torch.stack([tokens[(torch.arange(problem.length) * step + step) % len(tokens)] for step in (1, 7, 31)])
