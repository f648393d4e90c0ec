"""`sample`: run a sampler on a target."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from structured_voronoi.core.contracts import Chains, Sampler, Start, Target, describe_settings, is_independent
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count, check_memory
from structured_voronoi.engine.chains import advance_chains
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint, CheckpointSettings
from structured_voronoi.engine.recorder import COUNTS, Recorder
from structured_voronoi.problem.problem import Problem, bind

if TYPE_CHECKING:
    from xarray import Dataset, DataTree

    from structured_voronoi.workers.selection import WorkerChoice

KIND = "sv.sample"
"""The kind of these runs in checkpoints."""


def sample(
    target: Target | Problem,
    sampler: Sampler,
    chains: int = 4,
    draws: int = 500,
    warmup: int = 100,
    thin: int = 1,
    seed: int = 0,
    start: Start = None,
    checkpoint: str | Path | CheckpointSettings | None = None,
    workers: WorkerChoice = 1,
    progress: bool = True,
    keep_warmup: bool = False,
) -> DataTree:
    """Draw from a target with Markov chains.

    All chains advance together as one batch. Ctrl-C returns the draws so far.

    Parameters
    ----------
    target
        What to draw from: any object with ``embeddings``, ``length`` and ``log_prob``.
    sampler
        How to draw, for example `SVS`.
    chains
        Number of chains.
    draws
        Number of draws per chain.
    warmup
        Number of steps before the first draw. Samplers of independent draws skip them.
    thin
        Number of steps per draw.
    seed
        Seed of all random numbers. The draws of a chain do not depend on the number of chains or workers.
    start
        First states, int64 (chains, length); or "random" or "ancestral". By default the target decides.
    checkpoint
        Folder in which the run is saved at intervals. The same call resumes it and gives the same draws as an
        uninterrupted run; another call with this folder is refused. `CheckpointSettings` set the intervals.
    workers
        Number of processes among which the chains are split; or "ray" or "ray://HOST:PORT" for a Ray cluster. The
        target and the sampler must be picklable.
    progress
        Whether to show a progress bar and warnings on a terminal.
    keep_warmup
        Whether to return the steps of the warm-up too, in ``warmup_posterior`` and ``warmup_sample_stats``.

    Returns
    -------
    xarray.DataTree
        In the ArviZ convention. ``["posterior"]["tokens"]`` has the dimensions (chain, draw, position).
        ``["sample_stats"]`` holds ``lp`` (log p, unnormalised), ``evaluations``, ``swaps``, ``diverging`` and the other
        fields of `Info`. ``attrs`` holds the settings, versions of libraries, the cost of the warm-up, and the summary
        of the ``diagnosis``.

    Raises
    ------
    SamplingError
        If an argument or the target is invalid, or if the run was interrupted before the first draw.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.SVS(scale=0.5), chains=2, draws=10, seed=1, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (2, 10, 4)
    >>> draws["sample_stats"]["lp"].dims
    ('chain', 'draw')
    """
    statistics_per_draw = 12
    check_count(chains=chains, draws=draws, thin=thin)
    check_count(0, warmup=warmup)
    problem = bind(target)
    check_memory(chains * draws * 8 * (problem.length + statistics_per_draw), f"{draws} draws of {chains} chains")
    rng = Rng(seed, chains, device=problem.device)
    settings = {"chains": chains, "draws": draws, "warmup": warmup, "thin": thin, "seed": seed}
    with _open_checkpoint(checkpoint, workers) as saved:
        if saved is not NO_CHECKPOINT:
            from structured_voronoi.storage.packing import describe, describe_sampler

            described = {"start": describe(start), "sampler": describe_sampler(sampler)}
            saved.begin(KIND, problem, {**settings, "keep_warmup": keep_warmup, **described})
        sampler = saved.tuned_sampler(sampler, problem, seed, start)
        settings["warmup"] = 0 if is_independent(sampler) else warmup
        recorder = Recorder(draws, settings["warmup"], thin, keep_warmup)
        interrupted = _record(saved, sampler, problem, rng, start, recorder, progress)
    if recorder.count <= recorder.warmup_rows:
        raise SamplingError("interrupted before the first draw", remedy="use a smaller `warmup`, or wait longer")
    from structured_voronoi.engine.summary import add_summary

    tree = _make_tree(recorder, sampler, problem, settings, interrupted)
    add_summary(tree, problem, progress)
    return tree


def _open_checkpoint(location: str | Path | CheckpointSettings | None, workers: WorkerChoice) -> Checkpoint:
    if location is None and workers == 1:
        return NO_CHECKPOINT
    from structured_voronoi.engine.run_checkpoint import open_checkpoint

    return open_checkpoint(location, True, workers, KIND)


def _record(
    saved: Checkpoint,
    sampler: Sampler,
    problem: Problem,
    rng: Rng,
    start: Start,
    recorder: Recorder,
    progress: bool,
) -> bool:
    """Record the draws of all chains, saved or new. Returns True if interrupted."""
    if saved.has_workers:
        from structured_voronoi.engine.worker_chains import distribute_chains
        from structured_voronoi.engine.worker_checkpoint import WorkerCheckpoint

        assert isinstance(saved, WorkerCheckpoint)
        return distribute_chains(saved, sampler, problem, rng, start, recorder, progress)
    if saved.is_finished:
        recorder.restore(saved, saved.get(COUNTS))
        return False
    with contextlib.suppress(KeyboardInterrupt), progress_bar(recorder.all_steps, progress) as tick:
        chains = Chains(sampler, problem, rng, start)
        for _, info in advance_chains(chains, recorder, recorder.all_steps, saved):
            tick(f"log p {-float(info.energy.mean()):.2f}")
        return False
    return True


def _make_tree(
    recorder: Recorder, sampler: Sampler, problem: Problem, settings: dict[str, int], interrupted: bool
) -> DataTree:
    from structured_voronoi.diagnostics.notebook import Draws

    libraries = ("structured-voronoi", "torch", "numpy", "xarray")
    groups = _make_groups(recorder, recorder.warmup_rows, recorder.count)
    if recorder.warmup_rows:
        groups |= {f"warmup_{name}": group for name, group in _make_groups(recorder, 0, recorder.warmup_rows).items()}
    tree = Draws.from_dict(groups)
    tree.attrs = {
        "sampler": type(sampler).__name__,
        "sampler_settings": json.dumps(describe_settings(sampler), default=repr),
        "target": problem.name,
        **settings,
        "independent": int(is_independent(sampler)),
        "warmup_evaluations": recorder.warmup_cost,
        "interrupted": int(interrupted),
        **{f"version_{name}": version(name) for name in libraries},
    }
    return tree


def _make_groups(recorder: Recorder, begin: int, end: int) -> dict[str, Dataset]:
    """Some rows of the record, by group of the result."""
    import xarray

    further_dimensions = {
        "redraws_by_length": ("redraw_length",),
        "refreshed_by_length": ("redraw_length",),
        "log_weights": ("choice", "fresh"),
    }
    values = {name: recorder.values(name)[:, begin:end] for name in recorder.columns}
    chains, draws, positions = values["tokens"].shape
    coordinates = {"chain": range(chains), "draw": range(draws)}
    posterior = xarray.Dataset(
        {"tokens": (("chain", "draw", "position"), values.pop("tokens"))},
        coords={**coordinates, "position": range(positions)},
    )
    stats = {name: (("chain", "draw", *further_dimensions.get(name, ())), part) for name, part in values.items()}
    return {"posterior": posterior, "sample_stats": xarray.Dataset(stats, coords=coordinates)}


def start_chains(
    target: Target | Problem, sampler: Sampler, chains: int, seed: int, start: Start = None, stream: str = "run"
) -> Chains:
    """Chains in their first states, which the caller advances."""
    problem = bind(target)
    return Chains(sampler, problem, Rng(seed, chains, stream, problem.device), start)
