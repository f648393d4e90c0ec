"""What checkpoints cost: seconds of a write, for chains of several kinds, against the seconds between two.

`python benchmarks/checkpoints.py` prints a table; `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import structured_voronoi as sv
from structured_voronoi.core.contracts import Chains
from structured_voronoi.engine.checkpoint import SECONDS, SHARE, Checkpoint
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.registry import text_sampler

WRITES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = sv.load("bundled").target(max_tokens=60, finish="stop")
    cases: dict[str, tuple[Any, Any, int]] = {
        "svs+refresh, 16 chains, 60 tokens": (model, text_sampler("svs+refresh"), 16),
        "svs+refresh, 64 chains, 60 tokens": (model, text_sampler("svs+refresh"), 64),
        "refresh, 64 chains, 60 tokens": (model, text_sampler("refresh"), 64),
        "svs on a Potts model, 100 chains": (sv.PottsTarget(side=8, states=4, coupling=0.5), sv.SVS(0.5), 100),
    }
    found = {name: measure(*case) for name, case in cases.items()}
    for name, figures in found.items():
        print(
            f"{name}: {figures['seconds']:.3f} s a write ({figures['megabytes']:.1f} MB), "
            f"{figures['share']:.2%} of the time, one every {figures['every']:.0f} s"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(target: Any, sampler: Any, chains: int) -> dict[str, float]:
    """The median of some writes of a run in which every chain has taken a step."""
    problem = bind(target)
    running = Chains(sampler, problem, sv.Rng(0, chains))
    next(islice(running, 0, 1))
    seconds = []
    with tempfile.TemporaryDirectory(dir=".") as folder, Checkpoint(folder) as kept:
        kept.begin("measurement", problem, {})
        bookmark = kept.bookmark("chains", running)
        for done in range(WRITES):
            began = perf_counter()
            bookmark.put({"steps": done})
            kept.reach(done, WRITES, "writes")
            kept.save()
            seconds.append(perf_counter() - began)
        size = sum(part.size for part in kept.store.run.parts.values())
    middle = statistics.median(seconds)
    every = max(SECONDS, middle / SHARE)
    return {
        "seconds": middle,
        "slowest": max(seconds),
        "megabytes": size / 1e6,
        "every": every,
        "share": middle / (every + middle),
    }


if __name__ == "__main__":
    main()
