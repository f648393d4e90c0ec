"""Checkpoints in folders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from structured_voronoi.core.contracts import Sampler, Start, tune
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.stored_checkpoint import SUFFIX, StoredCheckpoint
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import few_texts, identify
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.registry import Scale, text_sampler
from structured_voronoi.storage.packing import apply_changes, describe, describe_changes, pack
from structured_voronoi.storage.store import Store

LIBRARIES = ("structured-voronoi", "torch", "numpy", "transformers")
STAGE = "stage-"
"""Files whose names give the size of a run before it was extended."""


class FolderCheckpoint(StoredCheckpoint):
    """A checkpoint in a folder that this process has locked."""

    def __init__(self, store: Store, settings: CheckpointSettings | None = None) -> None:
        super().__init__(store, settings)
        self.store = store

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self.store.__exit__(kind, error, trace)

    @property
    def folder(self) -> Path:
        return self.store.folder

    @property
    def settings(self) -> Mapping[str, Any]:
        return {} if self.store.manifest is None else self.store.manifest.settings

    def begin(self, kind: str, problem: Problem, settings: Mapping[str, Any], growing: str | None = None) -> None:
        versions = {name: version(name) for name in LIBRARIES}
        requested = {**describe(settings), "target": fingerprint(problem)}
        before = None if growing is None else self.settings.get(growing)
        if growing is None or before is None or requested[growing] <= before:
            self.store.begin(kind, requested, versions)
            return
        self.store.begin(kind, {**requested, growing: before}, versions)
        progress = {**self.store.run.progress, "of": requested[growing]} if self.store.run.progress else None
        self.store.commit({f"{STAGE}{before:09}{SUFFIX}": pack(None)}, progress=progress, settings=requested)

    @property
    def changed_versions(self) -> str:
        begun = self.store.run.versions
        now = {name: version(name) for name in begun if name in LIBRARIES}
        return ", ".join(f"{name} {begun[name]}, now {now[name]}" for name in now if now[name] != begun[name])

    def stages(self, count: int) -> list[range]:
        ends = [int(name.removeprefix(STAGE)) for name in self.names(STAGE)]
        return [range(begin, end) for begin, end in pairwise([0, *ends, count])]

    def tuned_sampler(self, sampler: Sampler, problem: Problem, seed: int, start: Start) -> Sampler:
        if not hasattr(sampler, "tuned"):
            return sampler
        if self.names("sampler"):
            return self._get_sampler("sampler", sampler, problem)
        tuned = tune(sampler, problem, seed, start)
        self._put_sampler("sampler", sampler, tuned)
        self.save()
        return tuned

    def plan(self, name: str, problem: Problem, scale: Scale, make: Callable[[], Plan]) -> Plan:
        def untuned(sampler: str) -> Sampler:
            return text_sampler(sampler, scale, problem.embeddings.shape[1])

        saved = self.get(name)
        if saved is not None:
            return Plan(**saved, sampler=self._get_sampler(f"{name}-sampler", untuned(saved["name"]), problem))
        plan = make()
        self.put(name, {key: value for key, value in vars(plan).items() if key != "sampler"})
        self._put_sampler(f"{name}-sampler", untuned(plan.name), plan.sampler)
        self.save()
        return plan

    def lookahead(self, name: str, problem: Problem, make: Callable[[], Lookahead]) -> Lookahead:
        if self.store.names(f"{name}/"):
            return Lookahead.load(self.folder / name, problem)
        fitted = make()
        self._put_lookahead(name, fitted)
        self.save()
        return fitted

    def _put_sampler(self, name: str, untuned: Sampler, tuned: Sampler) -> None:
        """Put what tuning changed; lookaheads go into folders of their own."""
        folders = (f"{name}-lookahead-{number}" for number in count())

        def put(value: Any) -> str | None:
            if not isinstance(value, Lookahead):
                return None
            folder = next(folders)
            self._put_lookahead(folder, value)
            return folder

        self.put(name, describe_changes(untuned, tuned, type(untuned).__name__, put))

    def _get_sampler(self, name: str, untuned: Sampler, problem: Problem) -> Sampler:
        tuned: Sampler = apply_changes(
            untuned, self.get(name), lambda folder: Lookahead.load(self.folder / folder, problem)
        )
        return tuned

    def _put_lookahead(self, name: str, lookahead: Lookahead) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lookahead.save(folder)
            self._new |= {f"{name}/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}


def fingerprint(problem: Problem) -> dict[str, Any]:
    """What identifies a target: its sizes, its names, and the energies of a few texts."""
    energy = problem.evaluate(few_texts(problem), "none").energy
    return {"class": problem.name, **identify(problem), "energy": [f"{value:.4g}" for value in energy.tolist()]}
