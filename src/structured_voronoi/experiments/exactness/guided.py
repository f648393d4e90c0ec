"""Samplers with a lookahead, and broken ones: they must keep the truth whatever the lookahead says."""

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

TEXTS, TRIES, BLOCK = 256, 4, 2
"""Of the pilot of a lookahead; of guided sampling; of redraws in the middle of a text."""
DELTA = 0.1
"""The share of plain model in the proposals of lookaheads that are wrong: without it hardly a chain would move."""
NEVER = 3
"""The token that a blind lookahead never proposes."""
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
    "twin: present text left out",
    "twin: goes on learning",
    "twin: 0 where possible",
    "twin: refresh without q",
)


def lookaheads(target: Target, seed: int) -> dict[str, Lookahead]:
    """A trained one, one of random weights, and one whose weights have the opposite sign of the trained one's."""
    trained = Lookahead.fit(target, texts=TEXTS, seed=seed)
    chance, adverse = (
        replace(copy.deepcopy(trained), settings=replace(trained.settings, delta=DELTA)) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(seed)
    for head in chance.heads.values():
        for weight in head.parameters():
            weight.data.copy_(0.15 * torch.randn(weight.shape, generator=generator))
    for head in adverse.heads.values():
        for weight in head.parameters():
            weight.data.neg_()
    return {"trained": trained, "random": chance, "adverse": adverse}


def guided_samplers(target: Target, seed: int) -> dict[str, Sampler]:
    """Those named above, for one target."""
    known = lookaheads(target, seed)
    trained, chance = known["trained"], known["random"]
    blind = BlindLookahead(trained.heads, trained.settings, trained.identity, never=NEVER)
    return {
        **{f"guided, {kind}": Guided(lookahead, TRIES) for kind, lookahead in known.items()},
        **{f"refresh, {kind}": Refresh(BLOCK, moves=2, lookahead=lookahead) for kind, lookahead in known.items()},
        "twin: weight without q": GuidedWithoutProposal(trained, TRIES),
        "twin: present text left out": GuidedWithoutPresent(chance, TRIES),
        "twin: goes on learning": GuidedStillLearning(trained, TRIES, other=chance),
        "twin: 0 where possible": Guided(blind, TRIES),
        "twin: refresh without q": RefreshWithoutProposal(BLOCK, moves=2, lookahead=trained),
    }
