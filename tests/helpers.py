"""Shared builders and checks: targets with a box, one sampler of every kind, trajectories through walls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.geometry.cells import Cells, spacing
from structured_voronoi.geometry.flows import Particle, Rotation
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.problem.problem import bind
from structured_voronoi.verify.checks import MIN_MOVED, MIN_P_VALUE

torch.set_num_threads(1)  # most tensors are too small for a second thread

PROPERTY = settings(derandomize=True, max_examples=20, deadline=None, database=None)

SVS = str(Path(sys.executable).with_name("svs"))

ALL_SAMPLERS: dict[str, Any] = {
    "svs open": sv.SVS(scale=0.6),
    "svs closed": sv.SVS(scale=0.6, walls="closed"),
    "svs estimated": sv.SVS(scale=0.6, walls="closed", masses="estimated", mass_draws=256),
    "svs uniform": sv.SVS(base="uniform", walls="closed", length=1.5),
    "svs auto": sv.SVS(),
    "svs projected": sv.SVS(scale=0.6, dimensions=2),
    "svs paper": sv.SVS.paper(step_size=0.5, discontinuity_step=0.2),
    "svs paper uniform": sv.SVS.paper(step_size=0.5, discontinuity_step=0.2, base="uniform"),
    "hmc": sv.baselines.HMC(step_size=0.5, leapfrog_steps=3),
    "hmc uniform": sv.baselines.HMC(step_size=0.5, base="uniform"),
    "langevin": sv.baselines.Langevin(step_size=0.5),
    "mucola": sv.baselines.MuCoLa(step_size=1.5),
    "mucola metropolis": sv.baselines.MuCoLa(step_size=1.0, metropolis=True),
    "pncg": sv.PNCG(step_size=2.0),
    "pncg norm 1": sv.PNCG(step_size=2.0, norm=1.0),
    "gibbs with gradients": sv.GibbsWithGradients(),
}


def svs(*words: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    done = subprocess.run([SVS, *words], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def boxed_target(seed: int, *shape: Any, mean: float = 0.0, **settings: Any) -> sv.TabularTarget:
    """A random target whose embeddings lie around ``mean``, with a box around them for the uniform base."""
    target = sv.verify.random_target(seed, *shape, **settings)
    target.embeddings = target.embeddings + mean
    target.box = float(target.embeddings.abs().max()) + 0.5
    return target


def with_embeddings(embeddings: Tensor, length: int = 1, seed: int = 0) -> sv.TabularTarget:
    """A random target over the given embeddings."""
    target = sv.verify.random_target(seed, len(embeddings), length, embeddings.shape[1], dtype=embeddings.dtype)
    target.embeddings = embeddings
    target.box = float(embeddings.abs().max()) + 0.5
    return target


def svs_of(kind: str, scale: float = 0.6, turn: float = 1.0, of: type[sv.SVS] = sv.SVS) -> sv.SVS:
    """SVS or a twin of it, by its walls: "open", "closed" or "uniform" (closed walls, uniform base).

    Points settle on a single trajectory: any point of the cell will do for these tests.
    """
    if kind == "uniform":
        return of(base="uniform", walls="closed", length=turn * torch.pi / 2, settling_trajectories=1)
    return of(scale, walls=kind, turn=turn, settling_trajectories=1)


def trajectory(sampler: sv.SVS, target: sv.TabularTarget, seed: int, chains: int = 200) -> Trajectory:
    """Trajectories of a sampler from random tokens."""
    problem, rng = bind(target), sv.Rng(seed, chains)
    return sampler.trajectory(problem, rng, sampler.init(problem, rng, "random"))


def energy_error(there: Trajectory) -> float:
    """The largest relative change of the energy over all chains."""
    end, *_ = simulate(there)
    before, after = there.energy(there.start), there.energy(end)
    return float(((after - before).abs() / (1 + before.abs())).max())


def round_trip_failures(there: Trajectory, tolerance: float) -> float:
    """The share of swapping trajectories that do not return when reversed.

    A trajectory returns if its tokens do, and x and r to within ``tolerance`` (x in units of σ, or of the spacing of
    the cells for the uniform base). Unlike sv.verify.round_trip this takes any start and leaves abandoned trajectories
    out.
    """
    out, tally, _ = simulate(there)
    back, again, _ = simulate(there._replace(start=out._replace(r=-out.r)))
    unit = there.flow.sigma if isinstance(there.flow, Rotation) else spacing(there.cells)
    x_gap = (back.x - there.start.x).abs().amax((-2, -1)) / unit
    r_gap = (back.r + there.start.r).abs().amax((-2, -1))
    returned = (back.cell == there.start.cell).all(-1) & (x_gap <= tolerance) & (r_gap <= tolerance)
    swapping = (tally.crossings > 0) & ~tally.abandoned & ~again.abandoned
    assert swapping.sum() >= 20, "too few trajectories swap for this check"
    return float((swapping & ~returned).sum() / swapping.sum())


def check_stationarity(
    target: Any, sampler: Any, *twins: Any, chains: int, steps: int, seed: int, min_moved: float = MIN_MOVED
) -> None:
    """Chains of the sampler move and stay at the truth; those of each twin, at the same settings, leave it."""
    found = sv.verify.stationarity(sampler, target, chains, steps, seed)
    assert found.moved >= min_moved
    assert found.p_value >= MIN_P_VALUE
    assert twins, "this check needs a twin that fails"
    for twin in twins:
        assert sv.verify.stationarity(twin, target, chains, steps, seed).p_value < MIN_P_VALUE, twin


def outside(cells: Cells, p: Particle) -> float:
    """The largest distance by which a point is farther from its own embedding than from the nearest one."""
    gaps = torch.cdist(p.x.double().flatten(0, 1), cells.table.double(), compute_mode="donot_use_mm_for_euclid_dist")
    own = gaps.gather(-1, p.cell.flatten()[:, None]).squeeze(-1)
    return float((own - gaps.amin(-1)).max())
