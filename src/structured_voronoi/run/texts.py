"""Texts from a language model, one chain a text, a few chains at a time so that the first texts come soon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import groupby, islice, pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.contracts import Chains, Info, Start, blank_info, is_independent, merge_infos
from structured_voronoi.problem.drawing import ancestral_draw, refuse_endless, rows_to_redraw, seconds_of_work
from structured_voronoi.problem.problem import bind
from structured_voronoi.progress import progress_bar
from structured_voronoi.run.presets import Plan
from structured_voronoi.streams import BLOCK, Rng, widened
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

CHAINS_AT_A_TIME, DRAWS_AT_A_TIME = 16, 64
Ended = Literal["end", "stop", "no"]
"""How a text ends: with the end-of-text token, with a stop string, or not at all."""
LEAST_STEPS = 20
"""With fewer steps the chains' energies say nothing about mixing, and batches begin small."""


class Text(NamedTuple):
    """One draw, as it is written to a JSONL file."""

    chain: int
    draw: int
    prompt: str
    text: str
    tokens: list[int]
    """With its end and without padding."""
    ended: Ended
    log_prob: float
    """log p under the language model alone."""
    energy: float
    """U(m) of the target, with suffix, end and controls."""
    controls: dict[str, float]
    """p(t | m) of every control, by name."""

    def line(self) -> dict[str, Any]:
        """The keys and values of its JSONL line: one key a control, at the end."""
        parts = self._asdict()
        del parts["controls"]
        return {**parts, **self.controls}


class Batch(NamedTuple):
    """The texts of some chains, and the statistics of their runs."""

    texts: list[Text]
    energies: np.ndarray
    """(chain, step): to see whether the chains mixed."""
    first: np.ndarray
    """(chain, position): the tokens they started from."""
    last: np.ndarray
    """(chain, position): those of their texts, and padding."""
    info: Info


class Watcher(Protocol):
    """Somebody who looks on while texts are drawn, and changes nothing."""

    def planned(self, target: LanguageModel | Controlled, plan: Plan) -> None:
        """Before the first text."""

    def moved(self, target: LanguageModel | Controlled, chains: range, tokens: Tensor, info: Info) -> None:
        """After every step of some chains."""


def draw_texts(
    target: LanguageModel | Controlled,
    plan: Plan,
    count: int,
    seed: int,
    start: Start = None,
    progress: bool = False,
    first_chain: int = 0,
    label: str = "",
    watcher: Watcher | None = None,
) -> Iterator[Batch]:
    """``count`` texts, each from a chain of its own; they come in batches."""
    problem = bind(target)
    for begin, end in pairwise(_batch_ends(count, is_independent(plan.sampler), plan.steps)):
        numbers = range(first_chain + begin, first_chain + end)
        rng = Rng(seed, numbers, device=problem.device)
        with progress_bar(plan.steps, progress, f"{label}texts to {end} of {count}") as tick:
            chains = Chains(plan.sampler, problem, rng, start)
            first, infos = chains.state.tokens.cpu().numpy(), []
            for state, info in islice(chains, plan.steps):
                infos.append(info)
                if watcher is not None:
                    watcher.moved(target, numbers, state.tokens, info)
                tick(f"energy {float(info.energy.mean()):.2f}")
        total = reduce(merge_infos, infos)
        energies = np.stack([widened(info.energy).cpu().numpy() for info in infos], axis=1)
        last = chains.state.tokens
        yield Batch(_make_texts(target, numbers, last, total), energies, first, last.cpu().numpy(), total)


def draw_for_prompts(models: Sequence[LanguageModel], count: int, seed: int, progress: bool = False) -> Iterator[Batch]:
    """``count`` ancestral texts for each prompt, the same as prompt by prompt; prompts of one length share batches."""
    chains = [(model, i * count + k) for i, model in enumerate(models) for k in range(count)]
    rows = min(DRAWS_AT_A_TIME, max(BLOCK, rows_to_redraw(bind(models[0]))))
    with progress_bar(len(chains), progress, f"texts for {len(models)} prompts") as tick:
        for _, group in groupby(sorted(chains, key=_prompt_tokens), key=_prompt_tokens):
            waiting = list(group)
            while waiting:
                some, waiting = waiting[:rows], waiting[rows:]
                yield _draw_together([model for model, _ in some], [chain for _, chain in some], seed)
                tick("", len(some))


def _prompt_tokens(chain: tuple[LanguageModel, int]) -> int:
    return int(chain[0].before.shape[1])


def _draw_together(models: Sequence[LanguageModel], chains: Sequence[int], seed: int) -> Batch:
    """One ancestral text for each of these prompts, which are all as long; those that do not end are drawn again."""
    rng, rows = Rng(seed, chains, device=models[0].device), torch.arange(len(models), device=models[0].device)
    tokens = rows.new_zeros(len(models), models[0].length)
    energy, tries = widened(torch.full_like(rows, torch.inf, dtype=torch.float32)), torch.zeros_like(rows)
    began = seconds_of_work()
    while len(rows):
        asked = rng.select(rows)
        batch = [models[row] for row in rows.tolist()]
        batch += batch[-1:] * (-len(batch) % BLOCK)  # rows are drawn in whole blocks
        problem = bind(models[0].with_prompts_of(batch))
        drawn = ancestral_draw(problem, asked)
        rng.catch_up(rows, asked)
        tokens[rows], energy[rows] = drawn.tokens, -(widened(drawn.log_probs).sum(-1) + widened(drawn.log_rest))
        tries[rows] += 1
        rows = (~energy.isfinite()).nonzero().squeeze(-1)
        refuse_endless(problem, int(tries.sum()), len(models) - len(rows), began)
    info = blank_info(energy)._replace(evaluations=tries, events=torch.ones_like(tries))
    texts = [
        _make_texts(model, [chain], tokens[i : i + 1], blank_info(energy[i : i + 1]))[0]
        for i, (model, chain) in enumerate(zip(models, chains, strict=True))
    ]
    last = tokens.cpu().numpy()
    return Batch(texts, energy.cpu().numpy()[:, None], np.zeros_like(last), last, info)


def _batch_ends(count: int, is_independent: bool, steps: int) -> list[int]:
    """Where batches end: few chains at first, so that something is seen soon, then more at a time.

    Independent draws begin with twice as many: a large model takes hardly longer for them.
    """
    ends, size = [0], BLOCK if steps < LEAST_STEPS and not is_independent else CHAINS_AT_A_TIME
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + size))
        size = min(2 * size, DRAWS_AT_A_TIME if is_independent else CHAINS_AT_A_TIME)
    return ends


def _make_texts(target: LanguageModel | Controlled, chains: Sequence[int], tokens: Tensor, info: Info) -> list[Text]:
    language_model = target.model if isinstance(target, Controlled) else target
    log_prob = language_model.log_prob(tokens) if isinstance(target, Controlled) else -info.energy
    scores = target.control_log_probs(tokens) if isinstance(target, Controlled) else {}
    columns = {control.name: widened(score).exp().tolist() for control, score in scores.items()}
    lengths = language_model.text_lengths(tokens).tolist()
    return [
        Text(
            chain=chain,
            draw=0,
            prompt=language_model.prompt,
            text=target.decode(row),
            tokens=row[: lengths[i]].tolist(),
            ended=_how_it_ended(language_model, row[: lengths[i]]),
            log_prob=float(log_prob[i]),
            energy=float(info.energy[i]),
            controls={name: values[i] for name, values in columns.items()},
        )
        for i, (chain, row) in enumerate(zip(chains, tokens, strict=True))
    ]


def _how_it_ended(model: LanguageModel, tokens: Int[Tensor, " n"]) -> Ended:
    if model.ends == "never":
        return "no"
    return "end" if model.ends == "at length" or int(tokens[-1]) == model.padding else "stop"


def closing_line(batches: list[Batch], plan: Plan, model: LanguageModel) -> str:
    """Whether the chains mixed, or need not: effective samples, tokens changed, what was accepted, cost."""
    energies = np.concatenate([batch.energies for batch in batches])
    first, last = (np.concatenate(part) for part in zip(*((one.first, one.last) for one in batches), strict=True))
    is_token = np.ones_like(last, dtype=bool) if model.padding is None else (last != model.padding) | (first != last)
    changed = float((last != first)[is_token].mean()) if is_token.any() else 0.0
    evaluations = float(torch.cat([batch.info.evaluations for batch in batches]).float().mean())
    lost = int(torch.cat([batch.info.nonfinite for batch in batches]).sum())
    limit = "" if model.padding is None else "at most "
    parts = [f"{len(last)} text{'s' if len(last) > 1 else ''} of {limit}{model.length} tokens"]
    steps, independent = energies.shape[1], is_independent(plan.sampler)
    later = energies[:, steps // 2 :]  # without the way from the start
    if plan.mixing:
        parts.append(plan.mixing)
    elif independent:
        parts.append("drawn independently")
        if plan.name == "rejection" and evaluations > 1:
            parts.append(f"{1 / evaluations:.2g} of tries accepted")
    elif steps >= LEAST_STEPS and np.ptp(later) > 0:
        import arviz_stats

        effective = float(arviz_stats.ess(later)) / len(later)
        parts.append(f"energy: {effective:.1f} effective samples a chain in the last half of {steps} steps")
    elif plan.starts_at_truth:
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
    parts.append("one evaluation a text" if evaluations == 1 else f"{evaluations:.3g} evaluations a text")
    if lost:
        parts.append(f"{lost} proposals were impossible (no finite energy) and refused")
    return "; ".join(parts) + ("." if plan.is_exact else ". This sampler is not exact.")
