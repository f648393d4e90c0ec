"""`sample`: run a sampler on a target and return a DataTree that ArviZ reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structured_voronoi.contracts import (
    Chains,
    Info,
    Sampler,
    Start,
    Target,
    is_independent,
    merge_infos,
    restored_info,
    tune,
)
from structured_voronoi.errors import SamplingError
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.progress import progress_bar
from structured_voronoi.streams import Rng

if TYPE_CHECKING:
    from xarray import DataTree

    from structured_voronoi.run.checkpoints import Checkpoint

LIBRARIES = ("structured-voronoi", "torch", "numpy", "xarray")


class Recorder:
    """The draws and statistics so far, in tensors that are filled as the chains go along."""

    def __init__(self, draws: int, warmup: int = 0, thin: int = 1) -> None:
        self.total, self.warmup, self.thin = draws, warmup, thin
        self.steps = self.count = self.warmup_cost = 0
        self.pending: Any = None
        """What was reported since the last draw."""
        self.columns: dict[str, Tensor] = {}

    @property
    def all_steps(self) -> int:
        return self.warmup + self.total * self.thin

    def add(self, tokens: Tensor, info: Info) -> None:
        """Count one step of all chains; the last of ``thin`` steps makes a draw."""
        self.steps += 1
        if self.steps <= self.warmup:
            self.warmup_cost += int(info.evaluations.sum())
            return
        self.pending = info if self.pending is None else merge_infos(self.pending, info)
        if (self.steps - self.warmup) % self.thin == 0:
            reported = {name: part for name, part in self.pending._asdict().items() if part is not None}
            self.append({name: part[None] for name, part in ({"tokens": tokens} | reported).items()})
            self.pending = None

    def append(self, columns: dict[str, Tensor]) -> None:
        """Further draws, (draw, chain, …) each column."""
        for name, part in columns.items():
            if name not in self.columns:
                self.columns[name] = torch.empty((self.total, *part.shape[1:]), dtype=part.dtype)
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
    counts of each draw, and the attributes hold every setting, the versions, and the cost of the warm-up.
    """
    for name, value, least in (
        ("chains", chains, 1),
        ("draws", draws, 1),
        ("warmup", warmup, 0),
        ("thin", thin, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise SamplingError(f"{name} = {value!r}; it must be a whole number of at least {least}")
    problem = bind(target)
    rng = Rng(seed, chains, device=problem.device)
    settings = {"chains": chains, "draws": draws, "warmup": warmup, "thin": thin, "seed": seed}
    with contextlib.ExitStack() as stack:
        kept = None
        if checkpoint is None and workers == 1:
            sampler = tune(sampler, problem, seed, start)
        else:
            from structured_voronoi.run.checkpoints import open_checkpoint
            from structured_voronoi.run.stored import describe, describe_sampler

            kept = stack.enter_context(open_checkpoint(checkpoint, True, workers))
            kept.begin(
                "sv.sample", problem, {**settings, "start": describe(start), "sampler": describe_sampler(sampler)}
            )
            sampler = kept.tuned(sampler, problem, seed, start)
        settings["warmup"] = 0 if is_independent(sampler) else warmup
        recorder, interrupted = Recorder(draws, settings["warmup"], thin), True
        if kept is not None and kept.is_spread:
            from structured_voronoi.run.spread import SpreadCheckpoint
            from structured_voronoi.run.spread_chains import spread_chains

            assert isinstance(kept, SpreadCheckpoint)
            interrupted = spread_chains(kept, sampler, problem, rng, start, recorder, progress)
        else:
            with contextlib.suppress(KeyboardInterrupt), progress_bar(recorder.all_steps, progress) as tick:
                for info in advance(sampler, problem, rng, start, recorder, kept):
                    tick(f"energy {float(info.energy.mean()):.2f}")
                interrupted = False
    if recorder.count == 0:
        raise SamplingError("interrupted before the first draw: nothing to return; run again with a shorter warm-up")
    return _make_tree(recorder, sampler, problem, settings, recorder.warmup_cost, interrupted)


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
            kept.save(recorder.steps, recorder.all_steps, "steps")
        yield info


def _make_tree(
    recorder: Recorder,
    sampler: Sampler,
    problem: Problem,
    settings: dict[str, int],
    warmup_cost: int,
    interrupted: bool,
) -> DataTree:
    import xarray

    stats = {name: (("chain", "draw"), recorder.values(name)) for name in recorder.columns if name != "tokens"}
    chains, draws, positions = recorder.values("tokens").shape
    coordinates = {"chain": range(chains), "draw": range(draws)}
    posterior = xarray.Dataset(
        {"tokens": (("chain", "draw", "position"), recorder.values("tokens"))},
        coords={**coordinates, "position": range(positions)},
    )
    tree = xarray.DataTree.from_dict(
        {"posterior": posterior, "sample_stats": xarray.Dataset(stats, coords=coordinates)}
    )
    tree.attrs = {
        "sampler": type(sampler).__name__,
        "sampler_settings": json.dumps(_describe_settings(sampler), default=repr),
        "target": problem.name,
        **settings,
        "warmup_evaluations": warmup_cost,
        "interrupted": int(interrupted),
        **{f"version_{name}": version(name) for name in LIBRARIES},
    }
    return tree


def _describe_settings(sampler: Sampler) -> dict[str, Any]:
    """The settings of a sampler, and of those it is made of, by name."""
    if not dataclasses.is_dataclass(sampler):
        return {"repr": repr(sampler)}
    settings = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    parts = settings.get("samplers")
    if isinstance(parts, tuple):
        settings["samplers"] = [{"sampler": type(part).__name__, **_describe_settings(part)} for part in parts]
    return settings


def start_chains(
    target: Target | Problem, sampler: Sampler, chains: int, seed: int, start: Start = None, stream: str = "run"
) -> Chains:
    """The chains of a run, to be advanced step by step by the caller."""
    problem = bind(target)
    return Chains(sampler, problem, Rng(seed, chains, stream, problem.device), start)
