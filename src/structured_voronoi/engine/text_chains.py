"""Texts of Markov chains, one text per chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.contracts import Chains, Start, describe_settings, is_independent
from structured_voronoi.core.info import Info, merge_infos, restored_info
from structured_voronoi.core.progress import Tick, progress_bar
from structured_voronoi.core.streams import BLOCK, Rng, widened
from structured_voronoi.diagnostics.checks import DiagnosticWarning
from structured_voronoi.diagnostics.diagnosis import diagnose_record
from structured_voronoi.diagnostics.records import Record, find_scale, mixing_of
from structured_voronoi.engine.chains import advance_chains
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.texts import Text, make_texts
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.text import TextTarget

MIN_STEPS_FOR_MIXING = 20
"""Mixing is not assessed if chains have fewer steps."""


class Batch(NamedTuple):
    """The texts of some chains and the statistics of the chains."""

    texts: list[Text]
    energies: np.ndarray
    """(chain, step): -log p after each step."""
    first: np.ndarray
    """(chain, position): tokens at the start."""
    last: np.ndarray
    """(chain, position): tokens of the texts, with padding."""
    info: Info

    def as_data(self) -> dict[str, Any]:
        """The batch as a checkpoint saves it."""
        return {**self._asdict(), "texts": [vars(text) for text in self.texts], "info": self.info._asdict()}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Batch:
        """The batch from a checkpoint."""
        texts, info = [Text(**text) for text in data["texts"]], restored_info(data["info"])
        return cls(**{**data, "texts": texts, "info": info})


class Observer(Protocol):
    """Read-only observer of a run."""

    def planned(self, target: TextTarget | ControlledTarget, sampler: str, steps: int) -> None:
        """Called before the first text with the name of the sampler and the number of steps of a chain."""

    def moved(self, target: TextTarget | ControlledTarget, chains: range, tokens: Tensor, info: Info) -> None:
        """Called after every step of some chains."""


class _TextRecord:
    """The energies and statistics of chains whose last states become texts."""

    def __init__(self, run: TextChains, numbers: range, first: Tensor, chains: Chains) -> None:
        self._run, self._numbers, self._first, self._chains = run, numbers, first.cpu().numpy(), chains
        self._energies: list[Tensor] = []
        self._total: Any = None

    @property
    def steps(self) -> int:
        return len(self._energies)

    def add(self, state: Any, info: Info) -> None:
        self._energies.append(widened(info.energy).cpu())
        self._total = info if self._total is None else merge_infos(self._total, info)

    def save(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {"energies": torch.stack(self._energies), "total": self._total._asdict()}

    def restore(self, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
        self._energies, self._total = list(saved["energies"].cpu()), restored_info(saved["total"])

    def finish(self, checkpoint: Checkpoint) -> None:
        checkpoint.put(batch_name(self._numbers), self.batch().as_data())
        self._run.record_progress(self._numbers)

    def batch(self) -> Batch:
        """The texts of the last states."""
        target, tokens, log_target = self._run.target, self._chains.state.tokens, -self._total.energy
        log_prob = target.text.log_prob(tokens) if isinstance(target, ControlledTarget) else log_target
        indices = [number - self._run.first_chain for number in self._numbers]
        texts = make_texts(target, indices, tokens, log_prob, log_target, self._run.prompt_number)
        energies = torch.stack(self._energies, dim=1).numpy()
        return Batch(texts, energies, self._first, tokens.cpu().numpy(), self._total)


@dataclass(frozen=True)
class TextChains:
    """The chains of one prompt. Chain i of prompt j has the number j n + i, on which its random stream depends."""

    target: TextTarget | ControlledTarget
    plan: Plan
    seed: int
    start: Start = None
    checkpoint: Checkpoint = NO_CHECKPOINT
    observer: Observer | None = None
    prompt_number: int = 0
    first_chain: int = 0
    """Number of the first chain."""
    all_texts: int = 0
    """Number of texts of the whole run, with all prompts."""

    def draw(self, n: int, progress: bool = False, label: str = "") -> Iterator[Batch]:
        """Draw ``n`` texts in batches; batches that the checkpoint holds are not drawn again."""
        for numbers in chain_batches(self.plan, self.first_chain, n, self.checkpoint):
            shown = f"{label}texts to {numbers.stop - self.first_chain} of {n}"
            with progress_bar(self.plan.steps, progress, shown, stage="texts") as tick:
                batch = self.draw_batch(numbers, tick)
            self.record_progress(numbers)
            if self.checkpoint.is_due:
                self.checkpoint.save()
            yield batch

    def record_progress(self, numbers: range) -> None:
        """Record in the checkpoint that the texts of these chains are drawn, and those of all chains before."""
        self.checkpoint.record_progress(numbers.stop, self.all_texts, "texts")

    def draw_batch(self, numbers: range, tick: Tick) -> Batch:
        """One text from each of these chains."""
        saved = self.checkpoint.get(batch_name(numbers))
        if saved is not None:
            return Batch.from_data(saved)
        problem, steps = bind(self.target), self.plan.steps
        chains = Chains(self.plan.sampler, problem, Rng(self.seed, numbers, device=problem.device), self.start)
        record = _TextRecord(self, numbers, chains.state.tokens, chains)
        for state, info in advance_chains(chains, record, steps, self.checkpoint, position_name(numbers)):
            if self.observer is not None:
                self.observer.moved(self.target, numbers, state.tokens, info)
            tick(f"log p {-float(info.energy.mean()):.2f}")
        return record.batch()


def batch_name(numbers: range) -> str:
    """The name of a batch of chains in a checkpoint."""
    return f"batch-{numbers[0]:09}"


def position_name(numbers: range) -> str:
    """The name of the position of chains in a checkpoint."""
    return f"chains-{numbers[0]:09}"


def chain_batches(plan: Plan, first: int, count: int, checkpoint: Checkpoint) -> Iterator[range]:
    """The numbers of ``count`` chains in batches. A run that was extended has the same batches as before."""
    for stage in checkpoint.stages(count):
        yield from _batches(plan, first + stage.start, len(stage), checkpoint.split)


def _batches(plan: Plan, first: int, count: int, split: int) -> Iterator[range]:
    """Batches that are small at first, so that the first texts come soon; with workers, batches of equal size."""
    largest = 16
    size = BLOCK if plan.steps < MIN_STEPS_FOR_MIXING else largest
    if split > 1:
        size = largest = min(largest, -(-count // split))
    begin, stop = first, first + count
    while begin < stop:
        size = min(size, largest)
        yield range(begin, min(stop, begin + size))
        begin, size = begin + size, 2 * size


def chain_status(batches: list[Batch], plan: Plan, target: TextTarget | ControlledTarget) -> str:
    """One line: number of texts, R-hat, effective sample size, acceptance and evaluations."""
    first, last = (np.concatenate(part) for part in zip(*((one.first, one.last) for one in batches), strict=True))
    text = target.text if isinstance(target, ControlledTarget) else target
    is_token = np.ones_like(last, dtype=bool) if text.padding is None else (last != text.padding) | (first != last)
    evaluations = float(torch.cat([batch.info.evaluations.cpu() for batch in batches]).float().mean())
    parts = [f"{len(last)} text{'s' if len(last) > 1 else ''}"]
    if plan.steps >= MIN_STEPS_FOR_MIXING:
        later = later_energies(batches)
        mixing = mixing_of(later)
        if mixing.rhat is not None:
            parts.append(f"R-hat of log p {mixing.rhat:.2f}")
        if mixing.ess_bulk is not None:
            parts.append(f"effective sample size {mixing.ess_bulk / len(later):.1f} per chain")
    if not is_independent(plan.sampler) and is_token.any():
        parts.append(f"{float((last != first)[is_token].mean()):.0%} of tokens differ from the start")
    redraws, accepted = (_total(batches, name) for name in ("redraws", "refreshed"))
    if redraws:
        parts.append(f"{accepted / redraws:.0%} of redraws accepted")
    parts.append(f"{evaluations:.3g} evaluation{'' if evaluations == 1 else 's'} per text")
    impossible, proposals = (_total(batches, name) for name in ("nonfinite", "evaluations"))
    if impossible:
        parts.append(f"{impossible:,} of {proposals:,} proposals had probability 0")
    if not plan.is_exact:
        parts.append("approximate sampler")
    return "; ".join(parts)


def _total(batches: list[Batch], name: str) -> int:
    """Sum of a field of Info over all chains; 0 if the sampler does not report it."""
    counts = [getattr(batch.info, name, None) for batch in batches]
    return sum(int(count.sum()) for count in counts if count is not None)


def later_energies(batches: list[Batch]) -> np.ndarray:
    """(chain, step): -log p in the second half of the steps."""
    energies = np.concatenate([batch.energies for batch in batches])
    return energies[:, energies.shape[1] // 2 :]


def record_of_texts(batches: list[Batch], plan: Plan) -> Record:
    """The data of chains that gave one text each, for diagnostics."""
    infos = [batch.info._asdict() for batch in batches]
    counts = {
        name: np.concatenate([info[name].cpu().numpy() for info in infos])[:, None]
        for name, part in infos[0].items()
        if part is not None and name != "energy"
    }
    return Record(
        sampler=plan.name,
        log_prob=-later_energies(batches),
        one_text=True,
        chains=[text.index for batch in batches for text in batch.texts],
        counts=counts,
        steps=plan.steps,
        independent=is_independent(plan.sampler),
        scale=find_scale(describe_settings(plan.sampler)),
    )


def chain_warnings(batches: list[Batch], plan: Plan) -> list[DiagnosticWarning]:
    """Warnings about the chains; none after a few steps, unless the texts have weights."""
    if plan.steps < MIN_STEPS_FOR_MIXING and batches[0].info.log_weights is None:
        return []
    return diagnose_record(record_of_texts(batches, plan)).warnings
