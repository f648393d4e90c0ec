"""Builders that several test layers share: random targets, one sampler of every kind, journeys through walls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.base import Rng
from structured_voronoi.experiments import checks
from structured_voronoi.geometry.cells import Cells, spacing
from structured_voronoi.geometry.motion import (
    CLOSED,
    OPEN,
    Evaluate,
    Particle,
    Proposal,
    Rotation,
    Straight,
    Tally,
    Walls,
    travel,
)
from structured_voronoi.samplers import gwg, pncg, proposals
from structured_voronoi.samplers.evaluation import cells_of_target

torch.set_num_threads(1)  # the tensors of most tests are so small that a second thread only costs

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
    "hmc": sv.HMC(step_size=0.5, leapfrog_steps=3),
    "hmc uniform": sv.HMC(step_size=0.5, base="uniform"),
    "langevin": sv.Langevin(step_size=0.5),
    "mucola": sv.MuCoLa(step_size=1.5),
    "mucola metropolis": sv.MuCoLa(step_size=1.0, metropolis=True),
    "pncg": sv.PNCG(step_size=2.0),
    "pncg norm 1": sv.PNCG(step_size=2.0, norm=1.0),
    "gibbs with gradients": sv.GibbsWithGradients(),
}


def svs(*words: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, as a user types it."""
    done = subprocess.run([SVS, *words], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def forget_the_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of Metropolis: p-NCG and Gibbs with gradients accept as if proposals were symmetric."""
    right = proposals.metropolis_hastings

    def forgetful(target, guidance, state, proposed, log_forward, log_reverse, level):  # type: ignore[no-untyped-def]
        return right(target, guidance, state, proposed, 0 * log_forward, lambda *_: 0 * log_forward, level)

    for module in (pncg, gwg):
        monkeypatch.setattr(module, "metropolis_hastings", forgetful)


def random_target(
    seed: int,
    tokens: int = 6,
    length: int = 2,
    dimensions: int = 3,
    field_sd: float = 0.2,
    dtype: torch.dtype = torch.float64,
    mean: float = 0.0,
) -> sv.TabularTarget:
    """A random table over random embeddings, steered by a random field, with a box around the embeddings."""
    target = checks.random_target(seed, tokens, length, dimensions, field_sd, dtype)
    target.embeddings = target.embeddings + mean
    target.box = float(target.embeddings.abs().max()) + 0.5
    return target


def with_embeddings(embeddings: Tensor, length: int = 1, seed: int = 0) -> sv.TabularTarget:
    """A random target over embeddings of one's own."""
    target = random_target(seed, len(embeddings), length, embeddings.shape[1], dtype=embeddings.dtype)
    target.embeddings = embeddings
    target.box = float(embeddings.abs().max()) + 0.5
    return target


class Journey(NamedTuple):
    """Everything one call of `travel` needs."""

    cells: Cells
    flow: Rotation | Straight
    walls: Walls
    evaluate: Evaluate
    start: Particle
    duration: Tensor
    unit: float
    """σ, or the spacing of the cells for the uniform base: what distances are measured in."""

    def go(self, start: Particle | None = None, max_events: int = 1000) -> tuple[Particle, Tally]:
        end, tally, _ = travel(
            self.cells, start or self.start, self.duration, self.flow, self.walls, self.evaluate, max_events
        )
        return end, tally

    def energy(self, p: Particle) -> Tensor:
        """U + ‖x-c‖²/2σ² + ½‖r‖²."""
        return p.potential + self.flow.potential(p.x, p.centre) + (p.r**2).sum((-2, -1)) / 2


def journey(
    kind: str, target: sv.TabularTarget, seed: int, chains: int = 200, scale: float = 0.6, turn: float = 1.0
) -> Journey:
    """Chains about to set out in a target: ``kind`` is "open", "closed" or "uniform"."""
    cells, rng = cells_of_target(target), Rng(seed, chains)
    cell = (rng.uniform(target.length) * len(cells.table)).long()
    sigma = scale * spacing(cells)
    flow: Rotation | Straight = Rotation(sigma)
    if kind == "uniform":
        flow = Straight(-target.box - cells.origin, target.box - cells.origin)
    evaluate = evaluator(target, cells, sigma)
    first = evaluate(cell)
    x, r = cells.points(cell), rng.normal(target.length, cells.table.shape[1]).to(cells.table)
    duration = (turn * torch.pi / 2 * (0.5 + rng.uniform())).to(cells.table)
    start = Particle(cell, x, r, first.potential, first.centre)
    if kind == "open":
        start = start._replace(x=first.centre + sigma * rng.normal(*x.shape[1:]).to(x))
    else:  # a trajectory between reflecting walls brings x from the embedding to some place in its cell
        settled, *_ = travel(cells, start, duration, flow, CLOSED, None)
        start = start._replace(x=settled.x, r=rng.normal(*x.shape[1:]).to(x))
    unit = spacing(cells) if kind == "uniform" else sigma
    return Journey(cells, flow, OPEN if kind == "open" else CLOSED, evaluate, start, duration, unit)


def evaluator(target: sv.TabularTarget, cells: Cells, sigma: float) -> Evaluate:
    """What the target says about proposed cells: U(m) and c_m = v_m + σ² g_m."""

    def evaluate(cell: Tensor) -> Proposal:
        log_prob, field = target.log_prob_and_grad(cells.tokens[cell])
        return Proposal(-log_prob, cells.points(cell) + sigma**2 * field, log_prob.isfinite())

    return evaluate


def energy_error(there: Journey) -> float:
    """The largest change of the energy over all chains of a journey, relative to its size."""
    end, _ = there.go()
    before, after = there.energy(there.start), there.energy(end)
    return float(((after - before).abs() / (1 + before.abs())).max())


def round_trip_failures(there: Journey, tolerance: float) -> float:
    """The share of swapping trajectories that do not come back: forward, flip r, forward again, flip r.

    A trajectory comes back if its tokens do, and x and r to within ``tolerance`` (x in units of σ).
    """
    out, tally = there.go()
    back, again = there.go(out._replace(r=-out.r))
    x_gap = (back.x - there.start.x).abs().amax((-2, -1)) / there.unit
    r_gap = (back.r + there.start.r).abs().amax((-2, -1))
    returned = (back.cell == there.start.cell).all(-1) & (x_gap <= tolerance) & (r_gap <= tolerance)
    swapping = (tally.swaps > 0) & ~tally.abandoned & ~again.abandoned
    assert swapping.sum() >= 20, "too few trajectories swap for this check to mean anything"
    return float((swapping & ~returned).sum() / swapping.sum())


def outside(cells: Cells, p: Particle) -> float:
    """How much farther than its nearest embedding any point is from the embedding of its own token, at most."""
    gaps = torch.cdist(p.x.double().flatten(0, 1), cells.table.double(), compute_mode="donot_use_mm_for_euclid_dist")
    own = gaps.gather(-1, p.cell.flatten()[:, None]).squeeze(-1)
    return float((own - gaps.amin(-1)).max())
