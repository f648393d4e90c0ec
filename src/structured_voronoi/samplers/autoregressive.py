"""What the samplers that redraw tokens ask of an autoregressive target."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import BLOCK, Autoregressive, Redrawn, Rng, SamplingError, Target, in_blocks, inverse_cdf

RESTART = 40
"""Redraws after which a chain without a start begins anew."""


def autoregressive(target: Target, what: str) -> Autoregressive:
    """The target, or an error if its tokens cannot be redrawn."""
    if not hasattr(target, "conditionals"):
        raise SamplingError(
            f"{what} needs a target with `conditionals(tokens, start)`, a language model for example, and "
            f"{type(target).__name__} has none; use another sampler or start"
        )
    temperature = getattr(target, "temperature", 1.0)
    if temperature != 1.0:  # the conditionals of p^(1/T) are not those of p
        raise SamplingError(f"{what} does not know temperatures, and this target has {temperature}; use SVS alone")
    return target  # type: ignore[return-value]


def redraw(
    target: Autoregressive, tokens: Int[Tensor, "chain n"], start: int, stop: int, levels: Float[Tensor, "chain count"]
) -> Redrawn:
    """The tokens with positions ``start`` to ``stop`` drawn from the target given those before them."""
    rows, extra = len(tokens), -len(tokens) % BLOCK
    if extra:  # padded to whole blocks, so that a chain's tokens do not depend on the chains beside it
        tokens = torch.cat([tokens, tokens[-1:].expand(extra, -1)])
        levels = torch.cat([levels, levels[-1:].expand(extra, -1)])
    if hasattr(target, "redraw"):
        found = target.redraw(tokens, start, stop, levels)
    else:
        tokens = tokens.clone()
        for n in range(start, stop):
            tokens[:, n] = inverse_cdf(target.conditionals(tokens, n)[:, 0], levels[:, n - start])
        log_probs = token_log_probs(target, tokens)
        found = Redrawn(tokens, log_probs[:, start:], target.log_prob(tokens) - log_probs.sum(-1))
    return Redrawn(*(part[:rows] for part in found))


def token_log_probs(target: Autoregressive, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
    """log p of each token given those before it."""

    def of(block: Tensor) -> Tensor:
        if hasattr(target, "token_log_probs"):
            return target.token_log_probs(block)  # type: ignore[no-any-return]
        return target.conditionals(block, 0).gather(-1, block[..., None]).squeeze(-1)

    scored: Tensor = in_blocks(of, tokens)
    return scored


def satisfying(target: Target, rng: Rng, tokens: Int[Tensor, "chain n"], tries: int) -> Int[Tensor, "chain n"]:
    """The tokens, where their energy is not finite replaced by ones found through suffix redraws, if any were.

    The redraws follow a target in which an impossible text is merely improbable, so that controls are met one by one.
    """
    soft, tokens = target.softened(), tokens.clone()  # type: ignore[attr-defined]
    lost = (~in_blocks(target.log_prob, tokens).isfinite()).nonzero().squeeze(-1)
    right = torch.full((len(tokens),), -torch.inf, dtype=torch.float64, device=tokens.device)
    for step in range(tries):
        if not len(lost):
            break
        anew = step % RESTART == 0  # a chain that has met one control in a place that leaves none for another is stuck
        place = 0 if anew else int(Rng(rng.seed, [step], "start places").uniform()[0] * target.length)
        levels, accept_level = rng.uniform(target.length - place)[lost], rng.uniform()[lost]
        new = redraw(soft, tokens[lost], place, target.length, levels)
        accepted = anew | (accept_level.log() < new.right - right[lost])
        changed = lost[accepted]
        tokens[changed], right[changed] = new.tokens[accepted], new.right[accepted].double()
        if len(changed):
            found = changed[in_blocks(target.log_prob, tokens[changed]).isfinite()]
            lost = lost[~torch.isin(lost, found)]
    return tokens


def ancestral_draw(target: Target, rng: Rng) -> Redrawn:
    """Independent draws from an autoregressive target, one a chain."""
    return draw_all(target, rng.uniform(target.length), "an ancestral start")


def draw_all(target: Target, levels: Float[Tensor, "chain n"], what: str) -> Redrawn:
    """Every token of every row drawn from the target given those before it; ``what`` needs them."""
    model = autoregressive(target, what)
    some = int(torch.as_tensor(getattr(target, "allowed", torch.ones(1))).long().argmax())
    blank = torch.full(levels.shape, some, device=target.embeddings.device)
    return redraw(model, blank, 0, target.length, levels)
