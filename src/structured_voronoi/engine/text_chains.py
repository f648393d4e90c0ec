"""Texts from a language model, one chain a text, a few chains at a time so that the first texts come soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.contracts import (
    Chains,
    Info,
    Start,
    describe_settings,
    is_independent,
    merge_infos,
    restored_info,
)
from structured_voronoi.core.progress import Tick, progress_bar
from structured_voronoi.core.streams import BLOCK, Rng, widened
from structured_voronoi.diagnostics.diagnosis import diagnose_record
from structured_voronoi.diagnostics.records import Record, find_scale, mixing_of
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.texts import Text, make_texts
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from structured_voronoi.engine.checkpoint import Checkpoint

CHAINS_AT_A_TIME = 16
LEAST_STEPS = 20
"""With fewer steps the chains' energies say nothing about mixing, and batches begin small."""


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
    """Read-only observer of a run."""

    def planned(self, target: LanguageModel | Controlled, sampler: str, steps: int) -> None:
        """Called before the first text with the name of the sampler and the steps of a chain."""

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
            with progress_bar(self.plan.steps, progress, shown, stage="texts") as tick:
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
        with nullcontext() if kept is None else kept.stopping:
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
        log_target = -total.energy
        log_prob = self.target.model.log_prob(last) if isinstance(self.target, Controlled) else log_target
        texts = make_texts(self.target, numbers, last, log_prob, log_target)
        return Batch(texts, path, first, last.cpu().numpy(), total)


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


def batches_of_chains(plan: Plan, first: int, count: int, kept: Checkpoint | None) -> Iterator[range]:
    """The chains of ``count`` texts from the first on; a run that has grown keeps the batches that it had."""
    split, stages = (1, [range(count)]) if kept is None else (kept.split, kept.stages(count))
    for stage in stages:
        yield from _batches(plan, first + stage.start, len(stage), split)


def _batches(plan: Plan, first: int, count: int, split: int) -> Iterator[range]:
    """Few chains at first, so that something is seen soon, then more at a time; those of workers are alike."""
    most = CHAINS_AT_A_TIME
    size = BLOCK if plan.steps < LEAST_STEPS else CHAINS_AT_A_TIME
    if split > 1:
        size = most = min(most, -(-count // split))
    begin, stop = first, first + count
    while begin < stop:
        size = min(size, most)
        yield range(begin, min(stop, begin + size))
        begin, size = begin + size, 2 * size


def closing_line(batches: list[Batch], plan: Plan, model: LanguageModel) -> str:
    """Whether the chains mixed, or need not: effective samples, tokens changed, what was accepted, cost."""
    first, last = (np.concatenate(part) for part in zip(*((one.first, one.last) for one in batches), strict=True))
    is_token = np.ones_like(last, dtype=bool) if model.padding is None else (last != model.padding) | (first != last)
    changed = float((last != first)[is_token].mean()) if is_token.any() else 0.0
    evaluations = float(torch.cat([batch.info.evaluations.cpu() for batch in batches]).float().mean())
    lost = sum(int(batch.info.nonfinite.sum()) for batch in batches)
    limit = "" if model.padding is None else "at most "
    parts = [f"{len(last)} text{'s' if len(last) > 1 else ''} of {limit}{model.length} tokens"]
    steps, later = plan.steps, later_energies(batches)
    if steps >= LEAST_STEPS:
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


def record_of_texts(batches: list[Batch], plan: Plan) -> Record:
    """Texts of chains that gave one each."""
    infos = [batch.info._asdict() for batch in batches]
    counts = {
        name: np.concatenate([info[name].cpu().numpy() for info in infos])[:, None]
        for name, part in infos[0].items()
        if part is not None and name != "energy"
    }
    return Record(
        sampler=plan.name,
        energy=later_energies(batches),
        one_text=True,
        chains=[text.chain for batch in batches for text in batch.texts],
        counts=counts,
        steps=plan.steps,
        independent=is_independent(plan.sampler),
        scale=find_scale(describe_settings(plan.sampler)),
    )


def closing_warnings(batches: list[Batch], plan: Plan) -> list[str]:
    """What speaks against the texts, in words with the remedies; a few steps without weights have nothing to tell."""
    if plan.steps < LEAST_STEPS and batches[0].info.log_weights is None:
        return []
    return diagnose_record(record_of_texts(batches, plan)).warnings
