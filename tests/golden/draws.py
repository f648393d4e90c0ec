"""Digests of the draws of every exact sampler at literal seeds: `python tests/golden/draws.py` prints them as JSON.

They were recorded before the code was rearranged around bound problems, and are compared with by
tests/system/test_golden.py: a change that is meant to change nothing changes none of them. Only the public interface is
used, so that the script runs on older versions too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import structured_voronoi as sv
from structured_voronoi.targets.tabular import AutoregressiveTable

DIGESTS = Path(__file__).with_name("digests.json")


def table(autoregressive: bool = False) -> Any:
    """Three positions over six tokens with a random field; read from left to right and scored, if asked for."""
    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embeddings, log_prob, field = normal(6, 4), normal(6, 6, 6), 0.2 * normal(6, 6, 6, 3, 4)
    if autoregressive:
        scores = -normal(6, 6, 6).abs()
        return AutoregressiveTable(embeddings, log_prob - log_prob.logsumexp((0, 1, 2)), field, scores)
    target: Any = sv.TabularTarget(embeddings, log_prob, field)
    target.box = float(embeddings.abs().max()) + 0.5
    return target


ON_TABLES: dict[str, Any] = {
    "svs": sv.SVS(0.8),
    "svs, tuned": sv.SVS(),
    "svs, two dimensions": sv.SVS(0.8, dimensions=2),
    "svs, no guidance": sv.SVS(0.8, guidance="none"),
    "svs, closed": sv.SVS(0.5, walls="closed"),
    "svs, estimated masses": sv.SVS(0.5, walls="closed", masses="estimated", mass_draws=256),
    "svs, uniform": sv.SVS(base="uniform", walls="closed", length=1.5),
    "svs, the paper's": sv.SVS.paper(0.5, 0.2),
    "hmc": sv.HMC(0.5, leapfrog_steps=3),
    "langevin": sv.Langevin(0.5),
    "mucola": sv.MuCoLa(1.5),
    "pncg": sv.PNCG(2.0),
    "pncg, norm 1": sv.PNCG(2.0, norm=1.0),
    "gwg": sv.GibbsWithGradients(),
}
ON_SENTENCES: dict[str, Any] = {
    "refresh": sv.Refresh(block=2),
    "rejection": sv.Rejection(),
    "svs + refresh": sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2, moves=2)),
}
ON_TEXTS: dict[str, Any] = {
    "svs": sv.SVS(0.45, dimensions=32),
    "svs, full guidance": sv.SVS(0.45, dimensions=32, guidance="full"),
    "pncg": sv.PNCG(0.02, guidance="forward"),
    "pncg, full guidance": sv.PNCG(0.02),
    "gwg": sv.GibbsWithGradients(),
    "refresh": sv.Refresh(),
    "svs + refresh": sv.Cycle(sv.SVS(0.45, dimensions=32), sv.Refresh(moves=3)),
}
UNDER_CONTROL: dict[str, Any] = {"rejection": sv.Rejection(), **{k: ON_TEXTS[k] for k in ("svs", "svs + refresh")}}
COMMANDS = {
    "svs sample": ["--sampler", "svs+refresh", "--warmup", "3"],
    "svs sample --control": [
        *("--sampler", "svs+refresh", "--control", "food=Italian", "--control", "not keyword=pub", "--warmup", "3")
    ],
    "svs sample --sampler rejection": ["--sampler", "rejection", "--control", "food=Italian@0.5"],
    "svs sample --sampler refresh --suffix": ["--sampler", "refresh", "--suffix", " by the river.", "--warmup", "3"],
    "svs sample --start random": ["--sampler", "svs", "--start", "random", "--warmup", "3"],
}


def digest(tokens: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]


def drawn(target: Any, sampler: Any, chains: int, draws: int) -> str:
    tree = sv.sample(target, sampler, chains=chains, draws=draws, warmup=2, seed=5, progress=False)
    return digest(tree["posterior"]["tokens"].values)


def written(words: list[str]) -> str:
    """The tokens in the file that a command writes."""
    from structured_voronoi import cli

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out = Path(folder, "texts.jsonl")
        arguments, sys.argv = sys.argv, ["svs", "sample", "-n", "5", "--length", "8", "--seed", "3"]
        sys.argv += ["--ends", "never", "--out", str(out), *words]
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"svs {' '.join(words)} ended with {stop.code}") from stop
        finally:
            sys.argv = arguments
        return digest([json.loads(line)["tokens"] for line in out.read_text(encoding="utf-8").splitlines()])


def digests() -> dict[str, str]:
    """Every case and the digest of its draws."""
    model = sv.LanguageModel.load("bundled", length=8, prompt="Near the")
    food, brief = sv.controls.Classifier.load("food", "Italian"), sv.controls.Predicate(lambda text: len(text) < 60)
    controlled = sv.Controlled(model, {food: 0.5, brief: 1.0})
    found = {f"table: {name}": drawn(table(), sampler, 12, 20) for name, sampler in ON_TABLES.items()}
    found |= {f"sentences: {name}": drawn(table(True), sampler, 12, 20) for name, sampler in ON_SENTENCES.items()}
    found |= {f"texts: {name}": drawn(model, sampler, 5, 12) for name, sampler in ON_TEXTS.items()}
    found |= {f"control: {name}": drawn(controlled, sampler, 5, 12) for name, sampler in UNDER_CONTROL.items()}
    return found | {name: written(words) for name, words in COMMANDS.items()}


if __name__ == "__main__":
    json.dump(digests(), sys.stdout, indent=1)
    print()
