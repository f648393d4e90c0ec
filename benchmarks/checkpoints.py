"""The cost of checkpoints: seconds per save for several kinds of chains, and the share of the time spent on saving.

`python benchmarks/checkpoints.py` prints a table; `--json FILE` writes the figures to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import structured_voronoi as sv
from structured_voronoi.core.contracts import Chains
from structured_voronoi.engine.chains import ChainPosition
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.folder_checkpoint import FolderCheckpoint
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.storage.store import Store


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
            f"{name}: {figures['seconds']:.3f} s per save ({figures['megabytes']:.1f} MB), "
            f"{figures['share']:.2%} of the time, one every {figures['every']:.0f} s"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(target: Any, sampler: Any, chains: int, saves: int = 7) -> dict[str, float]:
    """The median over several saves of chains that have taken no step."""
    problem = bind(target)
    running = Chains(sampler, problem, sv.Rng(0, chains))
    seconds = []
    with tempfile.TemporaryDirectory(dir=".") as folder, FolderCheckpoint(Store(folder)) as checkpoint:
        checkpoint.begin("measurement", problem, {})
        position = ChainPosition(checkpoint, "chains", running)
        for done in range(saves):
            began = perf_counter()
            position.put({"steps": done})
            checkpoint.record_progress(done, saves, "saves")
            checkpoint.save()
            seconds.append(perf_counter() - began)
        size = sum(part.size for part in checkpoint.store.run.parts.values())
    settings, median = CheckpointSettings(), statistics.median(seconds)
    every = max(settings.interval, median / settings.max_time_share)
    return {
        "seconds": median,
        "slowest": max(seconds),
        "megabytes": size / 1e6,
        "every": every,
        "share": median / (every + median),
    }


if __name__ == "__main__":
    main()
