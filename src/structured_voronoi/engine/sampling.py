"""`sample`: run a sampler on a target and return a DataTree that ArviZ reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structured_voronoi.core.contracts import (
    Chains,
    Info,
    Sampler,
    Start,
    Target,
    describe_settings,
    is_independent,
    merge_infos,
    restored_info,
    tune,
)
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count, check_memory
from structured_voronoi.problem.problem import Problem, bind

if TYPE_CHECKING:
    from xarray import Dataset, DataTree

    from structured_voronoi.engine.checkpoint import Checkpoint

KIND = "sv.sample"
"""What runs of this are called in checkpoints."""
STATISTICS = 12
"""Numbers that are kept of a draw besides its tokens."""
LIBRARIES = ("structured-voronoi", "torch", "numpy", "xarray")
FURTHER_DIMENSIONS = {
    "redraws_by_length": ("redraw_length",),
    "refreshed_by_length": ("redraw_length",),
    "log_weights": ("choice", "fresh"),
}
"""Of fields of Info that have more than a number a chain."""


class Recorder:
    """The draws and statistics so far, after the warm-up if that is kept, in tensors that are filled step by step."""

    def __init__(self, draws: int, warmup: int = 0, thin: int = 1, keep_warmup: bool = False) -> None:
        self.draws, self.warmup, self.thin = draws, warmup, thin
        self.warm = warmup if keep_warmup else 0
        """Rows that belong to the warm-up."""
        self.steps = self.count = self.warmup_cost = 0
        self.pending: Any = None
        """What was reported since the last draw."""
        self.columns: dict[str, Tensor] = {}

    @property
    def all_steps(self) -> int:
        return self.warmup + self.draws * self.thin

    def add(self, tokens: Tensor, info: Info) -> None:
        """Count one step of all chains; the last of ``thin`` steps makes a draw."""
        self.steps += 1
        if self.steps <= self.warmup:
            self.warmup_cost += int(info.evaluations.sum())
            if self.warm:
                self._append_row(tokens, info)
            return
        self.pending = info if self.pending is None else merge_infos(self.pending, info)
        if (self.steps - self.warmup) % self.thin == 0:
            self._append_row(tokens, self.pending)
            self.pending = None

    def _append_row(self, tokens: Tensor, info: Info) -> None:
        reported = {name: part for name, part in info._asdict().items() if part is not None}
        self.append({name: part[None] for name, part in ({"tokens": tokens} | reported).items()})

    def append(self, columns: dict[str, Tensor]) -> None:
        """Further draws, (draw, chain, …) each column."""
        for name, part in columns.items():
            if name not in self.columns:
                self.columns[name] = torch.empty((self.warm + self.draws, *part.shape[1:]), dtype=part.dtype)
            self.columns[name][self.count : self.count + len(part)] = part.cpu()
        self.count += len(columns["tokens"])

    def since(self, count: int) -> dict[str, Tensor]:
        """The draws after the first so many."""
        return {name: column[count : self.count] for name, column in self.columns.items()}

    def counted(self) -> dict[str, Any]:
        """What has to be known besides the draws in order to go on."""
        pending = None if self.pending is None else self.pending._asdict()
        return {"steps": self.steps, "warmup_cost": self.warmup_cost, "pending": pending}

    def resume(
        self,
        draws: list[dict[str, Tensor]],
        steps: int = 0,
        warmup_cost: int = 0,
        pending: dict[str, Tensor | None] | None = None,
    ) -> None:
        """Go on after these draws, with what was counted."""
        for columns in draws:
            self.append(columns)
        self.steps, self.warmup_cost = steps, warmup_cost
        self.pending = None if pending is None else restored_info(pending)

    def values(self, name: str) -> Any:
        """(chain, draw, …) as numpy."""
        return self.columns[name][: self.count].transpose(0, 1).contiguous().numpy()


def sample(
    target: Target | Problem,
    sampler: Sampler,
    chains: int = 4,
    draws: int = 500,
    warmup: int = 100,
    thin: int = 1,
    seed: int = 0,
    start: Start = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    keep_warmup: bool = False,
    workers: int | str = 1,
) -> DataTree:
    """Draw from a target.

    Each chain takes ``warmup`` steps (none if draws are independent), then ``draws`` times ``thin`` steps; all chains
    advance as one batch. Ctrl-C returns the draws so far. With ``checkpoint``, a folder, the run is kept there as it
    goes along; the same call goes on with it, whatever has stopped it, and another one is refused. With ``workers`` the
    chains are split over so many processes, or over a Ray cluster ("ray", "ray://HOST:PORT"), and are the same for
    every split; the target and the sampler must be such that `pickle` can send them. The result follows the ArviZ
    convention:
    ``["posterior"]["tokens"]`` has dimensions (chain, draw, position), ``["sample_stats"]`` holds the energy and the
    counts of each draw, and the attributes hold every setting, the versions, the cost of the warm-up and, in words,
    the ``diagnosis``: whether to trust the run. With ``keep_warmup`` the steps of the warm-up are in
    ``["warmup_posterior"]`` and ``["warmup_sample_stats"]``.
    """
    check_count(chains=chains, draws=draws, thin=thin)
    check_count(0, warmup=warmup)
    problem = bind(target)
    check_memory(chains * draws * 8 * (problem.length + STATISTICS), f"{draws} draws of {chains} chains")
    rng = Rng(seed, chains, device=problem.device)
    settings = {"chains": chains, "draws": draws, "warmup": warmup, "thin": thin, "seed": seed}
    with contextlib.ExitStack() as stack:
        kept = None
        if checkpoint is None and workers == 1:
            sampler = tune(sampler, problem, seed, start)
        else:
            from structured_voronoi.engine.checkpoint import open_checkpoint
            from structured_voronoi.storage.packing import describe, describe_sampler

            kept = stack.enter_context(open_checkpoint(checkpoint, True, workers, KIND))
            more = {"keep_warmup": keep_warmup, "start": describe(start), "sampler": describe_sampler(sampler)}
            kept.begin(KIND, problem, {**settings, **more})
            sampler = kept.tuned(sampler, problem, seed, start)
        settings["warmup"] = 0 if is_independent(sampler) else warmup
        recorder, interrupted = Recorder(draws, settings["warmup"], thin, keep_warmup), True
        if kept is not None and kept.is_spread:
            from structured_voronoi.engine.worker_chains import spread_chains
            from structured_voronoi.engine.worker_checkpoint import SpreadCheckpoint

            assert isinstance(kept, SpreadCheckpoint)
            interrupted = spread_chains(kept, sampler, problem, rng, start, recorder, progress)
        else:
            with contextlib.suppress(KeyboardInterrupt), progress_bar(recorder.all_steps, progress) as tick:
                for info in advance(sampler, problem, rng, start, recorder, kept):
                    tick(f"energy {float(info.energy.mean()):.2f}")
                interrupted = False
    if recorder.count <= recorder.warm:
        raise SamplingError(
            "interrupted before the first draw: nothing to return",
            remedy="run again with a shorter warm-up",
        )
    from structured_voronoi.engine.conclusion import conclude

    tree = _make_tree(recorder, sampler, problem, settings, interrupted)
    conclude(tree, problem, progress)
    return tree


def advance(
    sampler: Sampler, problem: Problem, rng: Rng, start: Start, recorder: Recorder, kept: Checkpoint | None
) -> Iterator[Info]:
    """The reports of steps, each after it was recorded; the first is that after the last one that was kept."""
    if kept is not None and kept.is_finished:
        recorder.resume([kept.get(name) for name in kept.names("draws-")], **kept.get("counted"))
        return
    chains = Chains(sampler, problem, rng, start)
    bookmark = None if kept is None else kept.bookmark("chains", chains)
    if kept is not None and bookmark is not None:
        recorder.resume([kept.get(name) for name in kept.names("draws-")], **bookmark.resume())
    stored = recorder.count
    with contextlib.nullcontext() if kept is None else kept.stopping:
        for _, info in islice(chains, recorder.all_steps - recorder.steps):
            recorder.add(chains.state.tokens, info)
            is_last = recorder.steps == recorder.all_steps
            if kept is not None and bookmark is not None and (is_last or kept.is_due):
                if recorder.count > stored:
                    kept.put(f"draws-{len(kept.names('draws-')):06}", recorder.since(stored))
                    stored = recorder.count
                if is_last:
                    bookmark.remove()
                    kept.put("counted", recorder.counted())
                else:
                    bookmark.put(recorder.counted())
                kept.reach(recorder.steps, recorder.all_steps, "steps")
                kept.save()
            yield info


def _make_tree(
    recorder: Recorder, sampler: Sampler, problem: Problem, settings: dict[str, int], interrupted: bool
) -> DataTree:
    from structured_voronoi.diagnostics.notebook import Draws

    groups = _make_groups(recorder, recorder.warm, recorder.count)
    if recorder.warm:
        groups |= {f"warmup_{name}": group for name, group in _make_groups(recorder, 0, recorder.warm).items()}
    tree = Draws.from_dict(groups)
    tree.attrs = {
        "sampler": type(sampler).__name__,
        "sampler_settings": json.dumps(describe_settings(sampler), default=repr),
        "target": problem.name,
        **settings,
        "independent": int(is_independent(sampler)),
        "warmup_evaluations": recorder.warmup_cost,
        "interrupted": int(interrupted),
        **{f"version_{name}": version(name) for name in LIBRARIES},
    }
    return tree


def _make_groups(recorder: Recorder, begin: int, end: int) -> dict[str, Dataset]:
    """Some of what was recorded, as ArviZ names it."""
    import xarray

    values = {name: recorder.values(name)[:, begin:end] for name in recorder.columns}
    chains, draws, positions = values["tokens"].shape
    coordinates = {"chain": range(chains), "draw": range(draws)}
    posterior = xarray.Dataset(
        {"tokens": (("chain", "draw", "position"), values.pop("tokens"))},
        coords={**coordinates, "position": range(positions)},
    )
    stats = {name: (("chain", "draw", *FURTHER_DIMENSIONS.get(name, ())), part) for name, part in values.items()}
    return {"posterior": posterior, "sample_stats": xarray.Dataset(stats, coords=coordinates)}


def start_chains(
    target: Target | Problem, sampler: Sampler, chains: int, seed: int, start: Start = None, stream: str = "run"
) -> Chains:
    """The chains of a run, to be advanced step by step by the caller."""
    problem = bind(target)
    return Chains(sampler, problem, Rng(seed, chains, stream, problem.device), start)
