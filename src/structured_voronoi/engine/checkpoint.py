"""Checkpoints: what a run needs to go on as if it had never stopped, in a folder, written every now and then."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from itertools import count, pairwise
from pathlib import Path
from time import monotonic
from typing import Any, Self

import torch

from structured_voronoi.core.contracts import Chains, Sampler, Start, tune
from structured_voronoi.core.stopping import Stopping
from structured_voronoi.engine.plan import Plan
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import few_texts, identify
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.registry import Scale, text_sampler
from structured_voronoi.storage.packing import changed, changes, check_storable, describe, pack, unpack
from structured_voronoi.storage.store import Store

SECONDS, FIRST = 30.0, 1.0
"""Between two writes; the first come sooner, each after twice the time of the one before."""
SHARE = 0.02
"""Of the time may be spent on writing: on a slow disk writes come less often."""
LIBRARIES = ("structured-voronoi", "torch", "numpy", "transformers")
SUFFIX, STAGE = ".safetensors", "stage-"


class Checkpoint:
    """A run that is kept in a folder. What is put into it takes effect with the next `save`, all at once."""

    is_spread, split = False, 1
    """Is the run spread over workers, and for how many was it split when it began?"""

    def __init__(self, folder: str | Path | Store, resume: bool = True) -> None:
        self.store = folder if isinstance(folder, Store) else Store(folder, resume)
        self._new: dict[str, bytes] = {}
        self._outdated: list[str] = []
        self._wait, self._saved = min(FIRST, SECONDS), monotonic()
        self._progress: dict[str, Any] | None = None
        self.stopping = Stopping()
        """Entered around steps that can be kept."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self.store.__exit__(kind, error, trace)

    def begin(self, kind: str, problem: Problem, settings: dict[str, Any], growing: str | None = None) -> None:
        """Begin the run, or go on with it; another run, or one of another target, is refused.

        The count of the name ``growing`` may be larger than it was: what there is stays, and more comes after it.
        """
        versions = {name: version(name) for name in LIBRARIES}
        asked = {**describe(settings), "target": fingerprint(problem)}
        before = None if growing is None or self.store.manifest is None else self.store.manifest.settings.get(growing)
        if growing is None or before is None or asked[growing] <= before:
            self.store.begin(kind, asked, versions)
            return
        self.store.begin(kind, {**asked, growing: before}, versions)
        progress = {**self.store.run.progress, "of": asked[growing]} if self.store.run.progress else None
        self.store.commit({f"{STAGE}{before:09}{SUFFIX}": pack(None)}, progress=progress, settings=asked)

    @property
    def other_versions(self) -> str:
        """The libraries that are not those with which the run was begun; draws of theirs may end in other bits."""
        begun = self.store.run.versions
        now = {name: version(name) for name in begun if name in LIBRARIES}
        return ", ".join(f"{name} {begun[name]}, now {now[name]}" for name in now if now[name] != begun[name])

    def stages(self, count: int) -> list[range]:
        """The numbers below ``count``: first those that the run was begun with, then those by which it has grown."""
        ends = [int(name.removeprefix(STAGE)) for name in self.names(STAGE)]
        return [range(begin, end) for begin, end in pairwise([0, *ends, count])]

    @property
    def is_finished(self) -> bool:
        return self.store.run.finished

    @property
    def is_due(self) -> bool:
        """Is it time to write, or has somebody asked to stop?"""
        return self.stopping.asked or monotonic() - self._saved >= self._wait

    def names(self, prefix: str) -> list[str]:
        """What was put under names that begin so, in order."""
        held = {*self.store.names(prefix), *self._new} - {*self._outdated}
        return sorted(file.removesuffix(SUFFIX) for file in held if file.startswith(prefix))

    def get(self, name: str, template: Any = None, device: torch.device | str = "cpu") -> Any:
        """What was put under a name and saved; None where nothing was."""
        file = name + SUFFIX
        return unpack(self.store.read(file), template, device) if file in self.store.run.parts else None

    def put(self, name: str, value: Any, template: Any = None) -> None:
        """Tensors, arrays, numbers and words in tuples, lists and dicts; a name stands for one value for ever."""
        self._new[name + SUFFIX] = pack(value, template, name)

    def drop(self, name: str) -> None:
        """Leave out what is under a name."""
        if self._new.pop(name + SUFFIX, None) is None:
            self._outdated.append(name + SUFFIX)

    def reach(self, done: int, of: int, unit: str) -> None:
        """Say how far the run is; it is written with the next save."""
        self._progress = {"done": done, "of": of, "unit": unit}

    def save(self) -> None:
        """Write what was put, and how far the run is; one that is all done is finished. Stop then, if asked to."""
        began, told = monotonic(), self._progress
        finished = told is not None and told["done"] == told["of"]
        self.store.commit(self._new, self._outdated, told, finished)
        self._new, self._outdated, self._saved = {}, [], monotonic()
        self._wait = max(min(2 * self._wait, SECONDS), (self._saved - began) / SHARE)
        if self.stopping.asked:
            self.stopping.let_through()

    def bookmark(self, name: str, chains: Chains) -> Bookmark:
        return Bookmark(self, name, chains)

    def tuned(self, sampler: Sampler, problem: Problem, seed: int, start: Start) -> Sampler:
        """The sampler with the settings that its pilot found, now or in the run that is resumed."""
        if not hasattr(sampler, "tuned"):
            return sampler
        if self.names("sampler"):
            return self._get_sampler("sampler", sampler, problem)
        made = tune(sampler, problem, seed, start)
        self._put_sampler("sampler", sampler, made)
        self.save()
        return made

    def plan(self, name: str, problem: Problem, scale: Scale, make: Callable[[], Plan]) -> Plan:
        """How texts are drawn, as it was decided once."""

        def base(of: str) -> Sampler:
            return text_sampler(of, scale, problem.embeddings.shape[1])

        stored = self.get(name)
        if stored is not None:
            return Plan(**stored, sampler=self._get_sampler(f"{name}-sampler", base(stored["name"]), problem))
        plan = make()
        self.put(name, {key: value for key, value in vars(plan).items() if key != "sampler"})
        self._put_sampler(f"{name}-sampler", base(plan.name), plan.sampler)
        self.save()
        return plan

    def lookahead(self, name: str, problem: Problem, make: Callable[[], Lookahead]) -> Lookahead:
        """A lookahead that was fitted once."""
        if self.store.names(f"{name}/"):
            return Lookahead.load(self.store.folder / name, problem)
        made = make()
        self._put_lookahead(name, made)
        self.save()
        return made

    def _put_sampler(self, name: str, base: Sampler, made: Sampler) -> None:
        """How a sampler differs from the one it was made of; its lookaheads have folders of their own."""
        folders = (f"{name}-lookahead-{number}" for number in count())

        def put(value: Any) -> str | None:
            if not isinstance(value, Lookahead):
                return None
            folder = next(folders)
            self._put_lookahead(folder, value)
            return folder

        self.put(name, changes(base, made, type(base).__name__, put))

    def _get_sampler(self, name: str, base: Sampler, problem: Problem) -> Sampler:
        made: Sampler = changed(
            base, self.get(name), lambda folder: Lookahead.load(self.store.folder / folder, problem)
        )
        return made

    def _put_lookahead(self, name: str, lookahead: Lookahead) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lookahead.save(folder)
            self._new |= {f"{name}/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}


def open_checkpoint(folder: str | Path | None, resume: bool, workers: int | str, kind: str) -> Checkpoint:
    """The checkpoint of a run of some kind, in a folder; shared by workers, if the run has or had any.

    A run goes on as it was begun: one without workers has none later, and the other way round.
    """
    from structured_voronoi.engine.worker_checkpoint import SPLIT, SpreadCheckpoint, TemporaryStore, hire

    store = TemporaryStore() if folder is None else Store(folder, resume)
    parts = {} if store.manifest is None else store.manifest.parts
    try:
        store.check_kind(kind)
        if SPLIT in parts or (workers != 1 and not parts):
            return SpreadCheckpoint(store, hire(workers, store.folder))
    except BaseException:
        store.close()
        raise
    return Checkpoint(store)


class Bookmark:
    """Where some chains are: their state, how much of their random streams is used, and what was counted so far."""

    def __init__(self, checkpoint: Checkpoint, name: str, chains: Chains) -> None:
        """Refuses a sampler whose state cannot be stored, before its first step."""
        self.checkpoint, self.name, self.chains = checkpoint, name, chains
        self._first = chains.state
        check_storable(self._first, f"{type(chains.sampler).__name__}'s state")

    def resume(self) -> dict[str, Any]:
        """Put the chains where they were; returns what was counted, nothing where they have not set out."""
        *_, last = [None, *self.checkpoint.names(f"{self.name}.")]
        if last is None:
            return {}
        template, rng = (self._first, None, None), self.chains.rng
        self.chains.state, counter, counted = self.checkpoint.get(last, template, rng.device)
        rng.counter = counter.to(rng.counter.device)
        return dict(counted)

    def put(self, counted: dict[str, Any]) -> None:
        """Mark the present place instead of the last one."""
        names = self.checkpoint.names(f"{self.name}.")
        self.remove()
        number = 1 + int(names[-1].split(".")[-1]) if names else 0
        value = (self.chains.state, self.chains.rng.counter, counted)
        self.checkpoint.put(f"{self.name}.{number:09}", value, (self._first, None, None))

    def remove(self) -> None:
        for name in self.checkpoint.names(f"{self.name}."):
            self.checkpoint.drop(name)


def fingerprint(problem: Problem) -> dict[str, Any]:
    """By what a target is known again: its sizes and names, and what it says of a few texts."""
    energy = problem.evaluate(few_texts(problem), "none").energy
    return {"class": problem.name, **identify(problem), "energy": [f"{value:.4g}" for value in energy.tolist()]}
