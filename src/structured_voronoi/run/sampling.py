"""`sample`: run a sampler on a target and return a DataTree that ArviZ reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from functools import reduce
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structured_voronoi.contracts import Chains, Info, Sampler, Start, Target, is_independent, merge_infos, tune
from structured_voronoi.errors import SamplingError, check_count, check_memory
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.progress import progress_bar
from structured_voronoi.streams import Rng

if TYPE_CHECKING:
    from xarray import DataTree

STATISTICS = 12
"""Numbers that are kept of a draw besides its tokens."""
LIBRARIES = ("structured-voronoi", "torch", "numpy", "xarray")


class Recorder:
    """The draws and statistics so far, in tensors that are filled as the chains go along."""

    def __init__(self, draws: int) -> None:
        self.total, self.count = draws, 0
        self.columns: dict[str, Tensor] = {}

    def add(self, tokens: Tensor, info: Info) -> None:
        fields = {"tokens": tokens} | {name: part for name, part in info._asdict().items() if part is not None}
        for name, part in fields.items():
            if name not in self.columns:
                self.columns[name] = torch.empty((self.total, *part.shape), dtype=part.dtype)
            self.columns[name][self.count] = part.cpu()
        self.count += 1

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
    checkpoint: None = None,
    progress: bool = True,
) -> DataTree:
    """Draw from a target.

    Each chain takes ``warmup`` steps (none if draws are independent), then ``draws`` times ``thin`` steps; all chains
    advance as one batch. Ctrl-C returns the draws so far. The result follows the ArviZ convention:
    ``["posterior"]["tokens"]`` has dimensions (chain, draw, position), ``["sample_stats"]`` holds the energy and the
    counts of each draw, and the attributes hold every setting, the versions, and the cost of the warm-up.
    """
    check_count(chains=chains, draws=draws, thin=thin)
    check_count(0, warmup=warmup)
    if checkpoint is not None:
        raise SamplingError(f"checkpoint = {checkpoint!r}: checkpoints are not part of this version; leave it out")
    problem = bind(target)
    check_memory(chains * draws * 8 * (problem.length + STATISTICS), f"{draws} draws of {chains} chains")
    rng = Rng(seed, chains, device=problem.device)
    sampler = tune(sampler, problem, seed, start)
    if is_independent(sampler):
        warmup = 0

    recorder, warmup_cost, interrupted = Recorder(draws), 0, True
    with contextlib.suppress(KeyboardInterrupt), progress_bar(warmup + draws, progress) as tick:
        running = Chains(sampler, problem, rng, start)
        for _, info in islice(running, warmup):
            warmup_cost += int(info.evaluations.sum())
            tick(f"energy {float(info.energy.mean()):.2f}")
        for _ in range(draws):
            info = reduce(merge_infos, (info for _, info in islice(running, thin)))
            recorder.add(running.state.tokens, info)
            tick(f"energy {float(info.energy.mean()):.2f}")
        interrupted = False
    if recorder.count == 0:
        raise SamplingError("interrupted before the first draw: nothing to return; run again with a shorter warm-up")
    settings = {"chains": chains, "draws": draws, "warmup": warmup, "thin": thin, "seed": seed}
    return _make_tree(recorder, sampler, problem, settings, warmup_cost, interrupted)


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
