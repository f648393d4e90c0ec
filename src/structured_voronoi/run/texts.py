"""Texts from a language model, one chain a text, a few chains at a time so that the first texts come soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.contracts import Chains, Info, Start, blank_info, is_independent, merge_infos, restored_info
from structured_voronoi.problem.drawing import rows_to_redraw
from structured_voronoi.problem.problem import bind
from structured_voronoi.progress import Tick, progress_bar
from structured_voronoi.run.presets import Plan
from structured_voronoi.streams import BLOCK, Rng, widened
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from structured_voronoi.run.checkpoints import Checkpoint
    from structured_voronoi.samplers.ancestral import Tries

CHAINS_AT_A_TIME, DRAWS_AT_A_TIME = 16, 64
ROWS_AT_A_TIME = 512
"""Texts that guided chains draw in one step, all together: more at a time are hardly faster, and come later."""
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
        """The keys and values of its JSONL line: one key a control, at the end. What is no finite number is null."""
        parts = {**self._asdict(), **self.controls}
        del parts["controls"]
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in parts.items()
        }


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

    def stored(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {**self._asdict(), "texts": [text._asdict() for text in self.texts], "info": self.info._asdict()}

    @classmethod
    def restored(cls, parts: dict[str, Any]) -> Batch:
        texts, info = [Text(**text) for text in parts["texts"]], restored_info(parts["info"])
        return cls(**{**parts, "texts": texts, "info": info})


class Watcher(Protocol):
    """Somebody who looks on while texts are drawn, and changes nothing."""

    def planned(self, target: LanguageModel | Controlled, plan: Plan) -> None:
        """Before the first text."""

    def moved(self, target: LanguageModel | Controlled, chains: range, tokens: Tensor, info: Info) -> None:
        """After every step of some chains."""


@dataclass(frozen=True)
class TextRun:
    """The texts of one target, each from a chain of its own: all that they depend on, and who looks on."""

    target: LanguageModel | Controlled
    plan: Plan
    seed: int
    start: Start = None
    kept: Checkpoint | None = None
    watcher: Watcher | None = None

    def draw(self, count: int, progress: bool = False, first_chain: int = 0, label: str = "") -> Iterator[Batch]:
        """``count`` texts; they come in batches, those that were kept first."""
        for numbers in batches_of_chains(self.plan, first_chain, count, self.kept):
            shown = f"{label}texts to {numbers.stop - first_chain} of {count}"
            with progress_bar(self.plan.steps, progress, shown) as tick:
                batch = self.draw_batch(numbers, tick)
            yield batch

    def draw_batch(self, numbers: range, tick: Tick) -> Batch:
        """One text from each of these chains, which may have been kept."""
        return _kept_or_drawn(self.kept, name_of_batch(numbers[0]), partial(self._advance_chains, numbers, tick))

    def _advance_chains(self, numbers: range, tick: Tick) -> Batch:
        """One text from each of the chains; where they are is kept every now and then."""
        problem, kept, steps = bind(self.target), self.kept, self.plan.steps
        chains = Chains(self.plan.sampler, problem, Rng(self.seed, numbers, device=problem.device), self.start)
        first, energies, total = chains.state.tokens.cpu().numpy(), list[Tensor](), None
        bookmark = None if kept is None else kept.bookmark(name_of_place(numbers[0]), chains)
        if bookmark is not None and (counted := bookmark.resume()):
            energies, total = list(counted["energies"].cpu()), restored_info(counted["total"])
        with nullcontext() if kept is None or is_independent(self.plan.sampler) else kept.stopping:
            for state, info in islice(chains, steps - len(energies)):
                energies.append(widened(info.energy).cpu())
                total = info if total is None else merge_infos(total, info)
                if self.watcher is not None:
                    self.watcher.moved(self.target, numbers, state.tokens, info)
                tick(f"energy {float(info.energy.mean()):.2f}")
                if kept is not None and bookmark is not None and len(energies) < steps and kept.is_due:
                    bookmark.put({"energies": torch.stack(energies), "total": total._asdict()})
                    kept.save()
        if bookmark is not None:
            bookmark.remove()
        assert total is not None
        last, path = chains.state.tokens, torch.stack(energies, dim=1).numpy()
        return Batch(_make_texts(self.target, numbers, last, total), path, first, last.cpu().numpy(), total)


def name_of_batch(first_chain: int) -> str:
    """The part of a checkpoint in which a batch is kept."""
    return f"batch-{first_chain:09}"


def name_of_place(first_chain: int) -> str:
    """The bookmark of the chains of a batch that is under way."""
    return f"chains-{first_chain:09}"


def _kept_or_drawn(kept: Checkpoint | None, name: str, draw: Callable[[], Batch]) -> Batch:
    """The batch that was kept under this name; where there is none it is drawn now, and kept."""
    stored = None if kept is None else kept.get(name)
    if stored is not None:
        return Batch.restored(stored)
    batch = draw()
    if kept is not None:
        kept.put(name, batch.stored())
    return batch


def draw_for_prompts(
    models: Sequence[LanguageModel], count: int, seed: int, progress: bool = False, kept: Checkpoint | None = None
) -> Iterator[Batch]:
    """``count`` ancestral texts for each prompt, the same as prompt by prompt; prompts of one length share batches."""
    with progress_bar(len(models) * count, progress, f"texts for {len(models)} prompts") as tick:
        for chains in batches_of_prompts(models, count, 1 if kept is None else kept.split):
            yield draw_together(models, count, chains, seed, kept)
            tick("", len(chains))


def batches_of_prompts(models: Sequence[LanguageModel], count: int, split: int) -> Iterator[list[int]]:
    """Chains whose prompts have as many tokens, a few at a time; the first ``count`` are those of the first prompt."""
    every = range(len(models) * count)
    rows = min(DRAWS_AT_A_TIME, max(BLOCK, rows_to_redraw(bind(models[0]))))
    rows = rows if split == 1 else min(rows, -(-len(every) // split))

    def tokens(chain: int) -> int:
        return int(models[chain // count].before.shape[1])

    for _, group in groupby(sorted(every, key=tokens), key=tokens):
        waiting = list(group)
        while waiting:
            yield waiting[:rows]
            waiting = waiting[rows:]


def draw_together(
    models: Sequence[LanguageModel], count: int, chains: Sequence[int], seed: int, kept: Checkpoint | None
) -> Batch:
    """One ancestral text from each of these chains, which may have been kept."""
    draw = partial(_draw_rows, [models[chain // count] for chain in chains], chains, seed)
    return _kept_or_drawn(kept, name_of_batch(chains[0]), draw)


def _draw_rows(models: Sequence[LanguageModel], chains: Sequence[int], seed: int) -> Batch:
    """One ancestral text for each of these prompts, which are all as long."""
    from structured_voronoi.samplers.ancestral import draw_tries, draw_until_found

    problem, rng = bind(models[0]), Rng(seed, chains, device=models[0].device)

    def draw(rows: Tensor, row_rng: Rng) -> Tries:
        return draw_tries(bind(models[0].with_prompts_of([models[row] for row in rows.tolist()])), row_rng)

    tokens, info = draw_until_found(problem, rng, draw)
    texts = [
        _make_texts(model, [chain], tokens[i : i + 1], blank_info(info.energy[i : i + 1]))[0]
        for i, (model, chain) in enumerate(zip(models, chains, strict=True))
    ]
    last = tokens.cpu().numpy()
    return Batch(texts, info.energy.cpu().numpy()[:, None], np.zeros_like(last), last, info)


def batches_of_chains(plan: Plan, first: int, count: int, kept: Checkpoint | None) -> Iterator[range]:
    """The chains of ``count`` texts from the first on; a run that has grown keeps the batches that it had."""
    split, stages = (1, [range(count)]) if kept is None else (kept.split, kept.stages(count))
    for stage in stages:
        yield from _batches(plan, first + stage.start, len(stage), split)


def _batches(plan: Plan, first: int, count: int, split: int) -> Iterator[range]:
    """Few chains at first, so that something is seen soon, then more at a time; those of workers are alike.

    Independent draws begin with twice as many: a large model takes hardly longer for them.
    """
    independent = is_independent(plan.sampler)
    rows = getattr(plan.sampler, "drawn", 1)  # of a chain, that are drawn together
    most = DRAWS_AT_A_TIME if independent else min(CHAINS_AT_A_TIME, max(1, ROWS_AT_A_TIME // rows))
    size = max(1, BLOCK // rows) if plan.steps < LEAST_STEPS and not independent else CHAINS_AT_A_TIME
    if split > 1:
        size = most = min(most, -(-count // split))
    begin, stop = first, first + count
    while begin < stop:
        size = min(size, most)
        yield range(begin, min(stop, begin + size))
        begin, size = begin + size, 2 * size


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
    return "end" if model.ending is None or int(tokens[-1]) in model.ending.tokens else "stop"


def closing_line(batches: list[Batch], plan: Plan, model: LanguageModel) -> str:
    """Whether the chains mixed, or need not: effective samples, tokens changed, what was accepted, cost."""
    first, last = (np.concatenate(part) for part in zip(*((one.first, one.last) for one in batches), strict=True))
    is_token = np.ones_like(last, dtype=bool) if model.padding is None else (last != model.padding) | (first != last)
    changed = float((last != first)[is_token].mean()) if is_token.any() else 0.0
    evaluations = float(torch.cat([batch.info.evaluations.cpu() for batch in batches]).float().mean())
    lost = sum(int(batch.info.nonfinite.sum()) for batch in batches)
    limit = "" if model.padding is None else "at most "
    parts = [f"{len(last)} text{'s' if len(last) > 1 else ''} of {limit}{model.length} tokens"]
    steps, independent, later = plan.steps, is_independent(plan.sampler), later_energies(batches)
    if plan.mixing:
        parts.append(plan.mixing)
    elif independent:
        parts.append("drawn independently")
        if plan.name == "rejection" and evaluations > 1:
            parts.append(f"{1 / evaluations:.2g} of tries accepted")
        elif evaluations > 2 and model.padding is not None:
            parts.append(f"1 in {evaluations:.0f} ends in time (a longer --length, or a --stop, wastes fewer)")
    elif steps >= LEAST_STEPS:
        from structured_voronoi.run.diagnosis_records import mixing_of

        mixing, half = mixing_of(later), f"in the last half of {steps} steps"
        compared = "" if mixing.rhat is None else f" (R-hat {mixing.rhat:.2f})"
        effective = (
            "unchanged" if mixing.ess_bulk is None else f"{mixing.ess_bulk / len(later):.1f} effective samples a chain"
        )
        parts.append(f"energy: {effective} {half}{compared}")
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


def later_energies(batches: list[Batch]) -> np.ndarray:
    """(chain, step): in the second half of the steps, without the way from the start."""
    energies = np.concatenate([batch.energies for batch in batches])
    return energies[:, energies.shape[1] // 2 :]


def closing_warnings(batches: list[Batch], plan: Plan) -> list[str]:
    """What speaks against the texts, in words with the remedies; a few steps without weights have nothing to tell."""
    if plan.steps < LEAST_STEPS and batches[0].info.log_weights is None:
        return []
    from structured_voronoi.run.diagnosis import diagnose_record
    from structured_voronoi.run.diagnosis_records import record_of_texts

    return diagnose_record(record_of_texts(batches, plan)).warnings
