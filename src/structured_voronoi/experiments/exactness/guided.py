"""Samplers with a lookahead, which must leave the target invariant for any lookahead, and broken twins."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from structured_voronoi.core.contracts import Sampler, Target
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.verify.twins import (
    BlindLookahead,
    GuidedStillLearning,
    GuidedWithoutPresent,
    GuidedWithoutProposal,
    RefreshWithoutProposal,
)

GUIDED = (
    "guided, trained",
    "guided, random",
    "guided, adverse",
    "refresh, trained",
    "refresh, random",
    "refresh, adverse",
)
GUIDED_TWINS = (
    "twin: weight without q",
    "twin: without the current text",
    "twin: continued training",
    "twin: zero proposal probability",
    "twin: refresh without q",
)


def lookaheads(target: Target, seed: int) -> dict[str, Lookahead]:
    """Lookaheads with trained weights, with random weights, and with the negated trained weights."""
    trained = Lookahead.fit(target, texts=256, seed=seed)
    # with a smaller delta, chains with wrong lookaheads would hardly move
    chance, adverse = (replace(copy.deepcopy(trained), settings=replace(trained.settings, delta=0.1)) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for head in chance.heads.values():
        for weight in head.parameters():
            weight.data.copy_(0.15 * torch.randn(weight.shape, generator=generator))
    for head in adverse.heads.values():
        for weight in head.parameters():
            weight.data.neg_()
    return {"trained": trained, "random": chance, "adverse": adverse}


def guided_samplers(target: Target, seed: int) -> dict[str, Sampler]:
    """The samplers of ``GUIDED`` and ``GUIDED_TWINS`` for one target."""
    tries, block = 4, 2
    known = lookaheads(target, seed)
    trained, chance = known["trained"], known["random"]
    blind = BlindLookahead(trained.heads, trained.settings, trained.identity, never=3)
    return {
        **{f"guided, {kind}": Guided(lookahead, tries) for kind, lookahead in known.items()},
        **{f"refresh, {kind}": Refresh(block, moves=2, lookahead=lookahead) for kind, lookahead in known.items()},
        "twin: weight without q": GuidedWithoutProposal(trained, tries),
        "twin: without the current text": GuidedWithoutPresent(chance, tries),
        "twin: continued training": GuidedStillLearning(trained, tries, other=chance),
        "twin: zero proposal probability": Guided(blind, tries),
        "twin: refresh without q": RefreshWithoutProposal(block, moves=2, lookahead=trained),
    }
