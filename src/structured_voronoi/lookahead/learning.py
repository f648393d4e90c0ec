"""How heads learn from texts that were drawn before.

Heads of patterns have a label for every prefix (`observing`). The score of a whole text says little about each of its
prefixes. But where ψ is right, its value for a token is the mean of its values at the next position, E_p[ψ_{n+1}], and
the probabilities of the next tokens are known along every text. So heads with memory learn in passes: after the first,
the label of a prefix is a mixture of that mean, as the head computes it by then, and of the text's own
score (λ-returns, Sutton 1988).

Nothing here evaluates the model. Held-out texts decide when training stops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count
from structured_voronoi.lookahead.heads import Head, LearntHead, PatternHead, Reader, Size
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.observing import Observed
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import Problem

MIN_LABEL = 1e-12
"""Labels below it count as 0."""
RETURNED, MEMORY_LEARNING_RATE = 0.2, 3e-3
"""The share λ of the text's own score in its labels, and the learning rate of the memory."""
MIN_STEPS, STEPS_GATHERED = 100, 32
"""The least number of training steps, and the number of steps whose examples are gathered at once."""


def fit_lookahead(problem: Problem, texts: int, seed: int, settings: LookaheadSettings) -> Lookahead:
    """Draw texts from the model and learn from them."""
    check_count(texts=texts)
    log_bound(problem)
    blank = untrained(problem, settings=settings)
    if not blank.heads:
        return replace(blank, learned=True)
    levels = Rng(seed, texts, "lookahead", problem.device).uniform(problem.length)
    from_model = torch.ones(texts, dtype=torch.bool, device=problem.device)
    _, observed = blank.draw_observed(problem, levels, from_model, is_observed=True)
    assert observed is not None
    for k, (name, head) in enumerate(blank.heads.items()):
        if isinstance(head, LearntHead) and float(observed.factors[:, k].max()) <= MIN_LABEL:
            raise SamplingError(
                f"none of {texts:,} texts of the model satisfied {name}, and it is not a pattern that could be "
                "compiled",
                remedy="draw more texts, give a prompt that leads there, or write it as a keyword or regex",
            )
    return learn(problem, observed, settings, seed)


def learn(problem: Problem, observed: Observed, settings: LookaheadSettings, seed: int) -> Lookahead:
    """A lookahead whose heads are trained on these texts, and stop where held-out texts fit them best."""
    blank = untrained(problem, settings=settings)
    held_out = torch.arange(len(observed.tokens)) % max(2, round(1 / settings.held_out)) == 0
    heads: dict[str, Head] = {}
    for k, (name, head) in enumerate(blank.heads.items()):
        heads[name] = _train_sizes(problem, head, observed, k, held_out, settings, seed)
    return replace(blank, heads=heads, learned=True)


def learnable(observed: Observed, lookahead: Lookahead) -> bool:
    """Is there a head that these texts can teach anything?"""
    hits = (observed.factors > MIN_LABEL).sum(0).tolist()
    return any(
        isinstance(head, PatternHead) or count >= lookahead.settings.min_hits
        for head, count in zip(lookahead.heads.values(), hits, strict=True)
    )


def _train_sizes(
    problem: Problem,
    blank: Head,
    observed: Observed,
    k: int,
    held_out: Bool[Tensor, " text"],
    settings: LookaheadSettings,
    seed: int,
) -> Head:
    """The head, trained in growing sizes that each begin with the parameters of the one before."""
    is_pattern = isinstance(blank, PatternHead)
    if not blank.reader.outputs or (
        not is_pattern and int((observed.factors[:, k] > MIN_LABEL).sum()) < settings.min_hits
    ):
        return blank
    training, testing = observed.rows(~held_out), observed.rows(held_out)
    sizes: tuple[Size, ...] = ("position", "hidden", "token") if is_pattern else ("position", "token", "memory")
    smaller: Head | None = None
    for size in sizes:
        head = _resized(problem, blank, size, smaller)
        trainer = _Trainer(head, training, k, settings, seed)
        judge = _Trainer(head, testing, k, settings, seed)
        trainer.train(smaller is None, partial(judge.loss, trainer.scale))
        smaller = head
    assert smaller is not None
    return smaller


def _resized(problem: Problem, head: Head, size: Size, smaller: Head | None) -> Head:
    """A head of another size, which begins with the parameters of a smaller one."""
    old = head.reader
    width = problem.embeddings.shape[1]
    reader = Reader(width, len(old.bias), old.outputs, old.coordinates, size).to(old.coordinates.device)
    if smaller is not None:
        reader.begin_from(smaller.reader)
    return PatternHead(head.automaton, reader) if isinstance(head, PatternHead) else LearntHead(reader)


class _Trainer:
    """One head and the texts that it learns from."""

    def __init__(self, head: Head, observed: Observed, k: int, settings: LookaheadSettings, seed: int) -> None:
        self.head, self.observed, self.number, self.settings = head, observed, k, settings
        self.score, self.labels = observed.factors[:, k, None], observed.labels[k]
        self.live = observed.live
        self.places = self.live.nonzero()
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def scale(self) -> Float[Tensor, " output"]:
        """1 / the mean label of each output: otherwise rare ones would be ignored."""
        return 1 / self.labels[tuple(self.places.T)].mean(0).clamp(min=MIN_LABEL)

    def train(self, begin: bool, judge: Callable[[], float]) -> None:
        """Fit the head to the labels; ``begin`` with the mean label at every position.

        Of all parameters on the way those are taken that have the least loss on held-out texts.
        """
        size, settings = self.head.reader.size, self.settings
        if begin:
            live = self.live[..., None].float()
            mean = (self.labels * live).sum(0) / live.sum(0).clamp(min=1)
            self.head.reader.bias.data = mean.clamp(min=MIN_LABEL, max=1 - 1e-6).logit()
        if size == "position":
            return
        steps = min(settings.steps, max(MIN_STEPS, settings.max_epochs * len(self.places) // settings.batch))
        for number in range(settings.return_passes if size == "memory" else 1):
            if number:
                self.labels = self._returns()
            self._descend(steps, judge if size != "memory" else None)
        self.head.requires_grad_(False)

    @torch.no_grad()
    def loss(self, scale: Float[Tensor, " output"]) -> float:
        """The mean loss over all places."""
        reader, total = self.head.reader, 0.0
        for places in torch.split(self.places, 8192):
            rows, position = places.T
            features = self._features(rows, position)
            logits = reader.at_token(features, position, self.observed.tokens[rows, position])
            label = self.labels[rows, position]
            loss = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
            total += float((loss * scale).mean(-1).sum())
        return total / max(1, len(self.places))

    def _features(self, rows: Int[Tensor, " place"], position: Int[Tensor, " place"]) -> Float[Tensor, "place d"]:
        """The input of the head at some places."""
        hidden, reader = self.observed.hidden[rows, position].float(), self.head.reader
        if reader.size != "memory":
            return hidden
        before = torch.arange(self.observed.tokens.shape[1], device=rows.device) < position[:, None]
        said = nn.functional.embedding(self.observed.tokens[rows], reader.memory) * before[..., None]
        return torch.cat([hidden, said.sum(1)], dim=-1)

    def log_value(self, rows: Int[Tensor, " place"], position: Int[Tensor, " place"]) -> Float[Tensor, " place"]:
        """log ψ of the tokens at some places; 0 where the state after them is settled."""
        output = self.observed.outputs[rows, position, self.number]
        if not self.head.reader.outputs:
            return torch.zeros(len(rows), device=rows.device)
        features = self._features(rows, position).detach()
        logits = self.head.reader.at_token(features, position, self.observed.tokens[rows, position])
        logit = logits.gather(-1, output.clamp(min=0)[:, None]).squeeze(-1)
        return torch.where(output >= 0, nn.functional.logsigmoid(logit), 0.0)

    @torch.enable_grad()
    def _descend(self, steps: int, judge: Callable[[], float] | None) -> None:
        """Minimise the soft binary cross-entropy, and keep the best parameters by the judge, if there is one."""
        reader, settings, tokens = self.head.reader, self.settings, self.observed.tokens
        self.head.requires_grad_(True)
        memory = [reader.memory] if reader.size == "memory" else []
        others = [parameter for name, parameter in reader.named_parameters() if name != "memory"]
        groups: list[dict[str, Any]] = [{"params": others}]
        if memory:
            groups.append({"params": memory, "lr": MEMORY_LEARNING_RATE})
        optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        scale, gradient_scale = self.scale, self.observed.hidden.shape[-1] ** -0.5
        chosen = torch.randint(len(self.places), (steps, settings.batch), generator=self.generator)
        best, least = copy.deepcopy(reader.state_dict()), judge() if judge else 0.0
        for some in torch.split(chosen.to(tokens.device), STEPS_GATHERED):  # one gathering for several steps is faster
            rows, position = self.places[some.flatten()].T
            hidden = None if memory else self.observed.hidden[rows, position].float()
            label, token = self.labels[rows, position], tokens[rows, position]
            for begin in range(0, some.numel(), settings.batch):
                step = slice(begin, begin + settings.batch)
                features = self._features(rows[step], position[step]) if hidden is None else hidden[step]
                logits = reader.at_token(features, position[step], token[step])
                loss = nn.functional.binary_cross_entropy_with_logits(logits, label[step], reduction="none")
                optimiser.zero_grad(set_to_none=True)
                torch.autograd.backward((loss * scale).mean() * gradient_scale)
                nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
                optimiser.step()
                schedule.step()
            if judge is not None and (loss_now := judge()) < least:
                best, least = copy.deepcopy(reader.state_dict()), loss_now
        if judge is not None:
            reader.load_state_dict(best)

    @torch.no_grad()
    def _returns(self) -> Float[Tensor, "text n 1"]:
        """Labels from the end of the texts backwards: the score, and before that the mean of the next values."""
        expected, value = self._expected(), self.score[:, 0]
        labels = torch.empty(self.live.shape, dtype=value.dtype, device=value.device)
        for n in reversed(range(self.live.shape[1])):
            labels[:, n] = value
            value = torch.where(self.live[:, n], (1 - RETURNED) * expected[:, n] + RETURNED * value, value)
        return labels[..., None]

    def _expected(self) -> Float[Tensor, "text n"]:
        """E_p[ψ] at every place, over the likely tokens."""
        expected, reader = torch.zeros(self.live.shape, device=self.live.device), self.head.reader
        for places in torch.split(self.places, 4096):
            rows, position = places.T
            level, slope = reader.parts(self._features(rows, position), position)
            assert slope is not None
            likely, chances = self.observed.likely[rows, position].long(), self.observed.chances[rows, position]
            value = reader.logits_at(level[:, 0], slope[:, 0], likely).sigmoid()
            expected[rows, position] = (chances * value).sum(-1)
        return expected


def refine(
    lookahead: Lookahead, observed: Observed, log_weight: Float[Tensor, " text"], settings: LookaheadSettings, seed: int
) -> Lookahead:
    """A copy whose heads are trained together, on texts that were drawn by lookaheads.

    The value of a prefix, Π_k ψ_k of its last token, is moved towards its mean at the next position, E_p[Π_k ψ_k], and
    at the end towards W. Texts of the model hardly show what happens near the target, and heads that were trained one
    by one do not know of each other.
    """
    heads = copy.deepcopy(lookahead.heads)
    trainers = [_Trainer(head, observed, k, settings, seed) for k, head in enumerate(heads.values())]
    labels = _path_labels(observed, settings.path_share)
    places = (observed.outputs >= 0).any(-1).nonzero()
    if not len(places):
        return lookahead
    parameters = [
        parameter
        for head in heads.values()
        for name, parameter in head.reader.named_parameters()
        if name != "memory" and head.reader.outputs
    ]
    optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate / 2, weight_decay=0.0, fused=True)
    cumulative = _text_shares(log_weight).cpu().double()[places[:, 0].cpu()].cumsum(0)
    generator, steps = torch.Generator().manual_seed(seed), settings.steps
    levels = torch.rand(steps * settings.batch, generator=generator, dtype=torch.float64) * cumulative[-1]
    drawn = torch.searchsorted(cumulative, levels).clamp(max=len(places) - 1).to(places.device)
    means = [torch.zeros_like(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    with torch.enable_grad():
        for step, some in enumerate(drawn.view(steps, settings.batch)):
            rows, position = places[some].T
            log_value = torch.stack([trainer.log_value(rows, position) for trainer in trainers]).sum(0)
            label, value = labels[rows, position], log_value.detach().exp()
            slope = (value - label) / (value + label).clamp(min=1e-30)
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward((slope * log_value).mean())
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if step >= steps // 2:
                for mean, parameter in zip(means, parameters, strict=True):
                    mean += parameter.detach() / (steps - steps // 2)
    for mean, parameter in zip(means, parameters, strict=True):
        parameter.data = mean
        parameter.requires_grad_(False)
    return replace(lookahead, heads=heads)


def _path_labels(observed: Observed, share: float) -> Float[Tensor, "text n"]:
    """The value of every prefix as its text shows it: the score of the text, and before that a mixture.

    One part is the mean value at the next position, E_p[Π_k ψ_k]. The other is the label of the next token times p / q,
    whose mean is the same where heads are right.
    """
    value = observed.factors.prod(-1)
    labels = torch.empty_like(observed.expected)
    ratio = observed.log_ratio.exp()
    for n in reversed(range(labels.shape[1])):
        labels[:, n] = value
        before = (1 - share) * observed.expected[:, n] + share * ratio[:, n] * value
        value = torch.where(observed.live[:, n], before.clamp(max=1.0), value)
    return labels


def _text_shares(log_weight: Float[Tensor, " text"]) -> Float[Tensor, " text"]:
    """How often texts are trained on: half of the time each alike, half of the time by weight.

    Weights are raised to a power of at most 1 at which they are not too unequal.
    """
    finite = log_weight.isfinite()
    if not finite.any():
        return torch.ones_like(log_weight)
    relative, power = log_weight - log_weight[finite].max(), 1.0
    while power > 0.01 and _effective_share(power * relative[finite]) < 0.5:
        power *= 0.9
    weight = torch.where(finite, (power * relative).exp(), 0.0)
    return (1 + weight / weight.mean()) / 2


def _effective_share(log_weight: Float[Tensor, " text"]) -> float:
    weight = (log_weight - log_weight.max()).exp()
    return float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
