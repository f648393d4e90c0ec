"""The memory bound holds for a large vocabulary."""

import subprocess
import sys

import torch

from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.masses import estimated_masses

PROGRAM = """
import sys
import torch
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.geometry.flows import CLOSED_WALLS, Particle, Rotation

torch.set_num_threads(1)

def peak():  # getrusage would include the parent process
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


generator = torch.Generator().manual_seed(0)
cells = cells_of(torch.randn(200_000, 8, generator=generator), memory=int(sys.argv[1]))
cell = torch.randint(200_000, (16, 8), generator=generator)
x, r = cells.points(cell), torch.randn(16, 8, 8, generator=generator)
before = peak()
start = Particle(cell, x, r, torch.zeros(16), x)
simulate(Trajectory(cells, start, torch.full((16,), 0.5), Rotation(0.1), CLOSED_WALLS, None, max_events=3))
print(peak() - before)
"""

ONE_TABLE = 16 * 8 * 200_000 * 4
"""Bytes of one number per chain, position and token; a single pass needs at least four of them."""


def growth(memory: int) -> int:
    """Bytes by which the peak memory of a new process grows during a trajectory among 200,000 tokens."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(memory)], capture_output=True, text=True, check=True, timeout=100
    )
    return int(run.stdout)


def test_peak_memory_stays_below_a_small_bound() -> None:
    assert growth(32 * 2**20) < 1.5 * ONE_TABLE


def test_peak_memory_is_larger_without_the_bound() -> None:
    assert growth(2**40) > 2 * ONE_TABLE


def test_masses_do_not_depend_on_the_memory_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings, noise = (torch.randn(count, 4, generator=generator, dtype=torch.float64) for count in (60, 512))
    here = torch.randint(60, (5, 3), generator=generator)
    found = []
    for memory in (2**30, 2**16):
        cells = cells_of(embeddings, memory=memory)
        masses = estimated_masses(cells, 0.3, noise)
        assert (masses.shifts is None) == (memory == 2**16)
        found.append(masses(here, cells.points(here)).value)
    assert torch.equal(*found)
