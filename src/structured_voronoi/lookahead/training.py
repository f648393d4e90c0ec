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

from structured_voronoi.lookahead.heads import Head
from structured_voronoi.lookahead.pilot import ROWS, Pilot

STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 600, 512, 6e-4, 0.1
"""Of the training of a head; a batch is so many prefixes, each of some text."""
LEAST_STEPS, MOST_PASSES = 100, 40
"""Where the pilot is small, steps end after so many passes through it."""
PASSES, STEPS_PART, RETURNED, SAID_LEARNING_RATE = 15, 1 / 3, 0.2, 3e-3
"""Of heads that remember what was said: labels are computed so often, each time for a part of the steps; the share λ of
what follows; and the learning rate of the memory."""
LEAST_LABEL = 1e-12
"""Labels below it count as none."""


def train_head(head: Head, pilot: Pilot, labels: Float[Tensor, "text n output"], live: Tensor, seed: int) -> None:
    """Train a head to the labels of the pilot's prefixes, where its texts were not over."""
    mean = (labels * live[..., None]).sum(0) / live.sum(0).clamp(min=1)[:, None]
    head.reader.bias.data = mean.clamp(min=LEAST_LABEL, max=1 - 1e-6).logit()
    if head.reader.size == "position":
        return
    places = live.nonzero()
    steps = min(STEPS, max(LEAST_STEPS, MOST_PASSES * len(places) // BATCH))
    generator = torch.Generator().manual_seed(seed)
    if head.reader.size != "said":
        _descend(head, pilot, labels, places, steps, generator)
    else:
        score = labels[:, -1]
        for number in range(PASSES):
            labels = labels if not number else _returns(head, pilot, score, live)
            _descend(head, pilot, labels, places, max(1, int(STEPS_PART * steps)), generator)
    head.requires_grad_(False)


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
    optimiser = torch.optim.AdamW(groups[: 1 + len(memory)], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    weight = 1 / labels[tuple(places.T)].mean(0).clamp(min=LEAST_LABEL)
    scale = pilot.hidden.shape[-1] ** -0.5
    all_features = _features(head, pilot) if reader.size == "prefix" else pilot.hidden
    before = torch.arange(tokens.shape[1], device=tokens.device)
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(len(places), (BATCH,), generator=generator)
            rows, position = places[some.to(tokens.device)].unbind(-1)
            features = all_features[rows, position]
            if memory:
                is_said = (before < position[:, None]).to(features)
                said = nn.functional.embedding(tokens[rows], reader.said) * is_said[..., None]
                features = torch.cat([features, said.sum(1)], dim=-1)
            logits = reader.at_token(features, position, tokens[rows, position])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[rows, position], reduction="none")
            loss = (loss * weight).mean() * scale
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
            optimiser.step()
            schedule.step()


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
