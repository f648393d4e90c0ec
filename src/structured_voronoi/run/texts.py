"""Texts from a language model, one chain a text, a few chains at a time so that the first texts come soon."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from structured_voronoi.base import Info, Rng, Sampler, Start, added, is_independent
from structured_voronoi.run.progress import progress_bar
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

CHAINS_AT_A_TIME, DRAWS_AT_A_TIME = 16, 4
"""Independent draws may each take long: they are shown a few at a time."""
LEAST_STEPS = 20


class Text(NamedTuple):
    """One draw, as it is written to a JSONL file."""

    chain: int
    draw: int
    text: str
    tokens: list[int]
    log_prob: float
    """Of the language model alone."""
    energy: float
    """U, with everything that weighs on the draw."""
    controls: dict[str, float]
    """p(t | m) of every control, by name."""

    def line(self) -> dict[str, Any]:
        """The keys and values of its JSONL line: one key a control, at the end."""
        parts = self._asdict()
        del parts["controls"]
        return {**parts, **self.controls}


class Batch(NamedTuple):
    """The texts of some chains, and what their way there was like."""

    texts: list[Text]
    energies: np.ndarray
    """(chain, step): to see whether the chains mixed."""
    first: np.ndarray
    """(chain, position): the tokens they started from."""
    info: Info


def draw_texts(
    target: LanguageModel | Controlled,
    sampler: Sampler,
    count: int,
    steps: int,
    seed: int,
    start: Start = None,
    progress: bool = False,
) -> Iterator[Batch]:
    """``count`` texts, each after ``steps`` steps of a chain of its own."""
    if hasattr(sampler, "tuned"):
        sampler = sampler.tuned(target, seed, start)
    together = DRAWS_AT_A_TIME if is_independent(sampler) else CHAINS_AT_A_TIME
    ahead = 1 if steps < LEAST_STEPS else together  # where it comes soon, the first text comes alone
    for begin, end in pairwise([0, *range(ahead, count, together), count]):
        chains = range(begin, end)
        rng = Rng(seed, list(chains), device=target.embeddings.device)
        with progress_bar(steps, progress, f"texts to {end} of {count}") as tick:
            state: Any = sampler.init(target, rng, start)
            first, total, energies = state.tokens.cpu().numpy(), None, []
            for _ in range(steps):
                state, info = sampler.step(target, rng, state)
                total = info if total is None else added(total, info)
                energies.append(info.energy.double().cpu().numpy())
                tick(f"energy {float(info.energy.mean()):.2f}")
        assert total is not None
        language_model = target.model if isinstance(target, Controlled) else target
        log_prob = language_model.log_prob(state.tokens).tolist()
        scores = target.control_log_probs(state.tokens) if isinstance(target, Controlled) else {}
        columns = {control.name: score.double().exp().tolist() for control, score in scores.items()}
        texts = [
            Text(
                chain,
                0,
                target.decode(tokens),
                tokens.tolist(),
                log_prob[i],
                float(total.energy[i]),
                {name: values[i] for name, values in columns.items()},
            )
            for i, (chain, tokens) in enumerate(zip(chains, state.tokens, strict=True))
        ]
        yield Batch(texts, np.stack(energies, axis=1), first, total)


def closing_line(batches: list[Batch], length: int, independent: bool = False, at_truth: bool = False) -> str:
    """Whether the chains mixed, or need not: effective samples, tokens changed, what was accepted, cost."""
    energies = np.concatenate([batch.energies for batch in batches])
    last = np.array([text.tokens for batch in batches for text in batch.texts])
    changed = float((last != np.concatenate([batch.first for batch in batches])).mean())
    evaluations = float(torch.cat([batch.info.evaluations for batch in batches]).double().mean())
    lost = int(torch.cat([batch.info.nonfinite for batch in batches]).sum())
    parts = [f"{len(last)} text{'s' if len(last) > 1 else ''} of {length} tokens"]
    steps = energies.shape[1]
    later = energies[:, steps // 2 :]  # without the way from the start
    if independent:
        parts.append("drawn independently")
        if evaluations > 1:
            parts.append(f"{1 / evaluations:.2g} of tries accepted")
    elif steps >= LEAST_STEPS and np.ptp(later) > 0:
        import arviz_stats

        effective = float(arviz_stats.ess(later)) / len(later)
        parts.append(f"energy: {effective:.1f} effective samples a chain in the last half of {steps} steps")
    elif at_truth:
        parts.append("chains start from draws of the target, so they need not mix (--warmup 100 shows how they do)")
    else:
        parts.append(f"{steps} step{'s' if steps > 1 else ''}, too few to say whether the chains mixed")
    if not independent:
        parts.append(f"{changed:.0%} of tokens changed since the start")
    redraws, refreshed = (
        sum(int(count.sum()) for batch in batches if (count := getattr(batch.info, name)) is not None)
        for name in ("redraws", "refreshed")
    )
    if redraws:
        parts.append(f"{refreshed / redraws:.0%} of redraws accepted")
    parts.append(f"{evaluations:.0f} evaluation{'s' if evaluations > 1 else ''} a text")
    if lost:
        parts.append(f"{lost} proposals were impossible (no finite energy) and refused")
    return "; ".join(parts) + "."
