"""Rounds: a lookahead refined on its own draws, as long as it gets better.

Where ψ is right, what it says of a token equals the mean of what it says at the next position, E_p[ψ_{n+1} | prefix].
So each head is drawn towards that mean, and at the end towards the control's own answer. The
draws are those that count, where the pilot had hardly any; each takes part by a tempered weight, as what matters is
the target and not the proposal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from structured_voronoi.lookahead.lookahead import Lookahead, Proposal
from structured_voronoi.lookahead.reading import hidden_features, live_positions, log_factors
from structured_voronoi.problem.drawing import redraw_by, rows_to_redraw
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import Tick
from structured_voronoi.streams import BLOCK, Rng, in_blocks, widened

ROUNDS = 3
STEPS, BATCH, LEARNING_RATE = 200, 512, 3e-4
LEAST_SHARE = 0.5
"""Weights are tempered until their effective share is this."""
LEAST_VALUE = 1e-6
QUICK, LEAST_QUICK = 4, 64
"""One in so many texts of a round, but not fewer than these, shows whether one is needed at all."""
CHEAP = 6.0
"""Cost of a lookahead that is good enough: a round takes as long as some hundred texts that follow the target."""


class Round(NamedTuple):
    """Draws of a lookahead and, for each of its heads in turn, what it read and what it should have said."""

    tokens: Int[Tensor, "text n"]
    log_weight: Float[Tensor, " text"]
    features: list[Float[Tensor, "text n d"]]
    outputs: list[Int[Tensor, "text n"]]
    """Which output of the head is meant; -1 where nothing is left to be said."""
    labels: list[Float[Tensor, "text n"]]


def refine_in_rounds(
    problem: Problem,
    lookahead: Lookahead,
    texts: int,
    seed: int,
    tick: Tick,
    judge: Callable[[Lookahead], float] | None,
    deadline: float = math.inf,
) -> Lookahead:
    """The best lookahead of a few rounds, each of which learns from the draws of the one before.

    The best is that which costs least, by the judge or, without one, by its draws, of which each has others. There is
    no round if that is little already, and none is begun after the deadline.
    """
    late = perf_counter() > deadline
    if judge is None and (late or own_cost(problem, max(LEAST_QUICK, texts // QUICK), seed, lookahead) <= CHEAP):
        return lookahead
    best, least, rounds = lookahead, math.inf, list[Round]()
    for number in range(ROUNDS + 1):
        rng = Rng(seed, texts, f"lookahead round {number}", problem.device)
        drawn: Round | None = None
        if judge is None:
            drawn = draw_round(problem, lookahead, texts, rng)
            cost = drawn_cost(drawn.log_weight)
        else:
            cost = judge(lookahead)
        if not cost < least:
            break
        best, least = lookahead, cost
        if cost <= CHEAP or number == ROUNDS or perf_counter() > deadline:
            break
        rounds.append(drawn or draw_round(problem, lookahead, texts, rng))
        lookahead = _refine(lookahead, rounds, seed)
        tick(f"cost {cost:.2g} before this round")
    return best


def own_cost(problem: Problem, texts: int, seed: int, lookahead: Lookahead) -> float:
    """What a lookahead costs by so many draws of its own."""
    levels = Rng(seed, max(1, texts), "lookahead cost", problem.device).uniform(problem.length)
    return drawn_cost(lookahead.draw(problem, levels).log_weight)


def drawn_cost(log_weight: Float[Tensor, " text"]) -> float:
    """(E_π[√w])² / E_p[W], as `Examples.cost`, by its own draws, which do not show what it hardly ever draws."""
    sums = [(power * log_weight).logsumexp(0) - math.log(len(log_weight)) for power in (1.0, 1.5)]
    return float((2 * sums[1] - 3 * sums[0]).exp().nan_to_num(nan=math.inf))


def draw_round(problem: Problem, lookahead: Lookahead, texts: int, rng: Rng) -> Round:
    """Texts from the lookahead's proposal, each position labelled by what the heads say at the next one."""
    heads = list(lookahead.heads.values())

    def draw_block(levels: Tensor) -> tuple[Tensor, ...]:
        blank = problem.allowed_tokens[:1].expand(levels.shape).clone()
        states = {name: head.begin(blank[:, :0]) for name, head in lookahead.heads.items()}
        log_q = widened(torch.zeros(levels.shape, device=levels.device))
        features, outputs, expected = ([list[Tensor]() for _ in heads] for _ in range(3))

        def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Tensor:
            readings = lookahead.read(problem, states, n, hidden_features(problem, hidden, len(log_probs)))
            weighed, p = lookahead.combine(log_probs, readings), log_probs.softmax(-1)
            token = weighed.draw(levels[:, n])
            log_q[:, n] = weighed.log_q(token)
            for k, (name, head) in enumerate(lookahead.heads.items()):
                states[name] = head.advance(states[name], token)
                features[k].append(readings[k].features)
                expected[k].append((p * readings[k].value).sum(-1))
                outputs[k].append(head.output_after(states[name]))
            return token

        tokens, log_probs, log_rest = redraw_by(problem, blank, 0, problem.length, choose)
        factors = log_factors(problem, tokens, widened(log_rest))
        ends = [factors[name].exp().nan_to_num(0.0).clamp(max=1.0) for name in lookahead.heads]
        live = live_positions(problem, tokens)
        last = torch.cat([~live[:, 1:], torch.ones_like(live[:, :1])], dim=1)
        labels = [
            torch.where(last, end.to(means[0])[:, None], torch.stack([*means[1:], means[0]], dim=1))
            for means, end in zip(expected, ends, strict=True)
        ]
        drawn = Proposal(tokens, widened(log_probs), log_q, widened(log_rest))
        read = [torch.stack(column, dim=1) for column in features]
        meant = [torch.where(live, torch.stack(column, dim=1), -1) for column in outputs]
        return tokens, drawn.log_weight, *read, *meant, *labels

    rows = max(BLOCK, rows_to_redraw(problem) // (2 + len(heads)))  # every head has a number for each row and token
    tokens, log_weight, *parts = in_blocks(draw_block, rng.uniform(problem.length), rows_at_a_time=rows)
    count = len(heads)
    return Round(tokens, log_weight, parts[:count], parts[count : 2 * count], parts[2 * count :])


def _refine(lookahead: Lookahead, rounds: list[Round], seed: int) -> Lookahead:
    """A copy whose heads are drawn towards the labels; the mean of the last half of the steps, which is calmer."""
    heads = copy.deepcopy(lookahead.heads)
    chances = torch.cat([_tempered(drawn.log_weight) for drawn in rounds]).cpu()
    for k, head in enumerate(heads.values()):
        if not head.reader.outputs:
            continue
        tokens, features, outputs, labels = (
            torch.cat(column)
            for column in zip(
                *((one.tokens, one.features[k], one.outputs[k], one.labels[k]) for one in rounds), strict=True
            )
        )
        # what was said is remembered as before: these features are of the draws
        parameters = [parameter for name, parameter in head.reader.named_parameters() if name != "said"]
        generator = torch.Generator().manual_seed(seed)
        optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        places = (outputs >= 0).nonzero()
        if not len(places):
            continue
        sums_of_chances = chances[places[:, 0].cpu()].double().cumsum(0)  # multinomial would take 2^24 at most
        levels = torch.rand(STEPS * BATCH, generator=generator, dtype=torch.float64) * sums_of_chances[-1]
        drawn = torch.searchsorted(sums_of_chances, levels).clamp(max=len(places) - 1).to(tokens.device)
        head.requires_grad_(True)
        with torch.enable_grad():
            for step, some in enumerate(drawn.view(STEPS, BATCH)):
                rows, position = places[some].unbind(-1)
                output, label = outputs[rows, position], labels[rows, position]
                logits = head.reader.at_token(features[rows, position], position, tokens[rows, position])
                logit = logits.gather(-1, output[:, None]).squeeze(-1)
                loss = nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="none")
                relative = loss / (logit.detach().sigmoid() + label).clamp(min=LEAST_VALUE)
                optimiser.zero_grad(set_to_none=True)
                torch.autograd.backward(relative.mean())
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                if step >= STEPS // 2:
                    for total, parameter in zip(sums, parameters, strict=True):
                        total += parameter.detach()
        head.requires_grad_(False)
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.data = total / (STEPS - STEPS // 2)
    return Lookahead(heads, lookahead.delta, lookahead.identity)


def _tempered(log_weight: Float[Tensor, " text"]) -> Float[Tensor, " text"]:
    """Weights to a power of at most 1 at which their effective share, among those that have one, is large enough."""
    finite = log_weight.isfinite()
    if not finite.any():
        return torch.ones_like(log_weight)
    relative, power = log_weight - log_weight[finite].max(), 1.0
    while power > 0.01 and share_of(power * relative[finite]) < LEAST_SHARE:
        power *= 0.9
    weight = torch.where(finite, (power * relative).exp(), 0.0)
    return weight / weight.mean()


def share_of(log_weight: Float[Tensor, " text"]) -> float:
    """The effective share (Σw)² / (n Σw²) of weights that are known but for a constant; 0 where there are none."""
    if not log_weight.isfinite().any():
        return 0.0
    weight = (log_weight - log_weight.max()).exp()
    return float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
