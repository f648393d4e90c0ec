"""How heads learn from a pilot.

Heads of patterns have labels for every prefix. A score of a whole text says little of each of its prefixes, and of a
rare control only few texts say anything at all. But where ψ is right, what it says of a token is the mean of what it
says at the next position, E_p[ψ_{n+1}], and the probabilities of the next tokens are known all along the pilot. So
heads that remember what was said learn in passes: after the first, a prefix is labelled by that mean, as the head has
it by then, or by what came of the text, the further away the less so (λ-returns, Sutton 1988). A head without memory
cannot agree with itself, and gets worse by it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from structured_voronoi.lookahead.heads import Head, Size
from structured_voronoi.lookahead.pilot import ROWS, Pilot

STEPS: dict[Size, int] = {"hidden": 200, "token": 400, "said": 300, "prefix": 400}
"""Of the training of a head, which begins with what the largest below it, up to the next token, learnt."""
BATCH, LEARNING_RATE, WEIGHT_DECAY = 512, 6e-4, 0.1
"""Of every step; a batch is so many prefixes, each of some text."""
LEAST_STEPS, MOST_PASSES = 100, 40
"""Where the pilot is small, there are only as many steps as take so many passes through it."""
PASSES, RETURNED, SAID_LEARNING_RATE = 6, 0.2, 3e-3
"""Of heads that remember what was said: how often labels are computed and the steps taken; the share λ of what follows;
and the learning rate of the memory."""
GATHERED = 32
"""Steps whose examples are gathered at once."""
LEAST_LABEL = 1e-12
"""Labels below it count as none."""


def train_head(
    head: Head,
    pilot: Pilot,
    labels: Float[Tensor, "text n output"],
    live: Float[Tensor, "text n"],
    seed: int,
    smaller: Head | None,
) -> None:
    """Train a head to the labels of the pilot's prefixes, where its texts were not over.

    It begins with what a smaller one learnt, if there is one.
    """
    if smaller is not None:
        head.reader.begin_from(smaller.reader)
    else:
        mean = (labels * live[..., None]).sum(0) / live.sum(0).clamp(min=1)[:, None]
        head.reader.bias.data = mean.clamp(min=LEAST_LABEL, max=1 - 1e-6).logit()
    if head.reader.size == "position":
        return
    places = live.nonzero()
    steps = min(STEPS[head.reader.size], max(LEAST_STEPS, MOST_PASSES * len(places) // BATCH))
    generator = torch.Generator().manual_seed(seed)
    score = labels[:, -1]
    for number in range(PASSES if head.reader.size == "said" else 1):
        labels = labels if not number else _returns(head, pilot, score, live)
        _descend(head, pilot, labels, places, steps, generator)
    head.requires_grad_(False)


@torch.enable_grad()
def _descend(
    head: Head,
    pilot: Pilot,
    labels: Float[Tensor, "text n output"],
    places: Int[Tensor, "place 2"],
    steps: int,
    generator: torch.Generator,
) -> None:
    """Soft binary cross-entropy, each output's divided by its mean label, else rare ones are ignored."""
    reader, tokens = head.reader, pilot.tokens
    memory = [reader.said] if reader.size == "said" else []
    others = [parameter for name, parameter in reader.named_parameters() if name != "said"]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": memory, "lr": SAID_LEARNING_RATE}]
    optimiser = torch.optim.AdamW(groups[: 1 + len(memory)], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    weight = 1 / labels[tuple(places.T)].mean(0).clamp(min=LEAST_LABEL)
    scale = pilot.hidden.shape[-1] ** -0.5
    features = (_features(head, pilot) if reader.size == "prefix" else pilot.hidden).flatten(0, 1)
    before, length = torch.arange(tokens.shape[1], device=tokens.device), tokens.shape[1]
    chosen = torch.randint(len(places), (steps, BATCH), generator=generator).to(tokens.device)
    parts = [features, tokens.flatten(), labels.flatten(0, 1)]
    for some in torch.split(chosen, GATHERED):  # one gathering for several steps is faster
        rows, position = places[some.flatten()].T
        place = rows * length + position
        gathered = [position, *(part.index_select(0, place) for part in parts), tokens.index_select(0, rows)]
        for at, read, token, label, text in zip(*(torch.split(part, BATCH) for part in gathered), strict=True):
            if memory:
                is_said = (before < at[:, None]).to(read)
                said = nn.functional.embedding(text, reader.said) * is_said[..., None]
                read = torch.cat([read, said.sum(1)], dim=-1)
            logits = reader.at_token(read, at, token)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward((loss * weight).mean() * scale)
            nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
            optimiser.step()
            schedule.step()


@torch.no_grad()
def _features(head: Head, pilot: Pilot) -> Float[Tensor, "text n d"]:
    """What a head reads at every position of the pilot's texts."""
    positions = range(pilot.tokens.shape[1])
    return torch.stack([head.features(pilot.tokens[:, :n], pilot.hidden[:, n]) for n in positions], dim=1)


@torch.no_grad()
def _returns(
    head: Head, pilot: Pilot, score: Float[Tensor, "text 1"], live: Float[Tensor, "text n"]
) -> Float[Tensor, "text n 1"]:
    """Labels from the end of the texts backwards: the score, and before that what was expected at the next position."""
    expected, labels, value = _expected(head, pilot), torch.empty_like(live), score[:, 0]
    for n in reversed(range(live.shape[1])):
        labels[:, n] = value
        value = torch.where(live[:, n] > 0, (1 - RETURNED) * expected[:, n] + RETURNED * value, value)
    return labels[..., None]


def _expected(head: Head, pilot: Pilot) -> Float[Tensor, "text n"]:
    """E_p[ψ_n] at every position of the pilot's texts, over the likely tokens."""
    expected = torch.empty_like(pilot.chances[..., 0])
    for begin in range(0, len(expected), ROWS):
        rows = slice(begin, begin + ROWS)
        features = _features(head, pilot._replace(tokens=pilot.tokens[rows], hidden=pilot.hidden[rows]))
        for n in range(expected.shape[1]):
            position = torch.full((len(features),), n, device=expected.device)
            level, slope = head.reader.parts(features[:, n], position)
            assert slope is not None
            value = head.reader.logits_at(level[:, 0], slope[:, 0], pilot.likely[rows, n].long()).sigmoid()
            expected[rows, n] = (pilot.chances[rows, n] * value).sum(-1)
    return expected
