"""Compare the draws of two commits at literal seeds.

Save the digests of one commit and compare those of another with them, on the same machine::

    OMP_NUM_THREADS=1 python tests/golden/draws.py --save digests.json
    OMP_NUM_THREADS=1 python tests/golden/draws.py --compare digests.json

A change that keeps the random streams keeps every digest. The last bits of matrix products differ between processors,
so digests of different machines cannot be compared, and none are stored in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import structured_voronoi as sv
from structured_voronoi.baselines.hmc import HMC
from structured_voronoi.baselines.langevin import Langevin
from structured_voronoi.baselines.mucola import MuCoLa
from structured_voronoi.baselines.smc import SMC
from structured_voronoi.targets.tabular import AutoregressiveTable

LENGTH = {"finish": "length", "max_tokens": 8}
STOP = {"finish": "stop", "max_tokens": 24}
PROMPTS = ["Near the bridge", "The Old Mill is", "In the city", "Near the river"]


def table(kind: str) -> Any:
    """Return a random target of three positions and six tokens: "box", "left to right" or "scored"."""
    generator = torch.Generator().manual_seed(17)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    embeddings, log_prob, field = normal(6, 4), normal(6, 6, 6), 0.2 * normal(6, 6, 6, 3, 4)
    if kind == "box":
        target: Any = sv.TabularTarget(embeddings, log_prob, field)
        target.box = float(embeddings.abs().max()) + 0.5
        return target
    scores = -normal(6, 6, 6).abs() if kind == "scored" else None
    return AutoregressiveTable(embeddings, log_prob - log_prob.logsumexp((0, 1, 2)), field, scores)


def brief(text: str) -> bool:
    return len(text) < 60


def text_target(controls: Sequence[Any] = (), prompt: str = "Near the", **settings: Any) -> Any:
    return sv.load("bundled").target(prompt, controls, **settings)


def hash_tokens(tokens: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]


def hash_values(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def run_sampler(make_target: Callable[[], Any], sampler: Any, chains: int = 5, draws: int = 12) -> str:
    tree = sv.sample(make_target(), sampler, chains=chains, draws=draws, warmup=2, seed=5, progress=False)
    return hash_tokens(tree["posterior"]["tokens"].values)


def run_generate(prompt: str | list[str] | None, controls: Sequence[Any] = (), seed: int = 5, **settings: Any) -> str:
    found = sv.generate("bundled", prompt, controls, seed=seed, progress=False, **settings)
    return hash_values([[draw.prompt, draw.text] for draw in found.draws])


def run_probability(controls: Sequence[Any], texts: int, **settings: Any) -> str:
    found = sv.probability("bundled", "Near the", controls, texts=texts, seed=5, progress=False, **settings)
    return hash_values([f"{found.value:.6g}", f"{found.low:.6g}", f"{found.high:.6g}", found.evaluations])


def run_command(options: Sequence[str]) -> str:
    """Return the digest of the tokens in the file that `svs sample` writes."""
    from structured_voronoi import cli

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out, arguments = Path(folder, "texts.jsonl"), sys.argv
        sys.argv = ["svs", "sample", "-n", "5", "--max-tokens", "8", "--finish", "length", "--seed", "3"]
        sys.argv += ["--out", str(out), *options]
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"svs {' '.join(options)} exited with {stop.code}") from stop
        finally:
            sys.argv = arguments
        return hash_tokens([json.loads(line)["tokens"] for line in out.read_text(encoding="utf-8").splitlines()])


def table_cases() -> dict[str, Callable[[], str]]:
    """Return samplers on small tables."""
    samplers: dict[str, Any] = {
        "svs": sv.SVS(0.8),
        "svs, tuned": sv.SVS(),
        "svs, two dimensions": sv.SVS(0.8, dimensions=2),
        "svs, no guidance": sv.SVS(0.8, guidance="none"),
        "svs, closed": sv.SVS(0.5, walls="closed"),
        "svs, estimated masses": sv.SVS(0.5, walls="closed", masses="estimated", mass_draws=256),
        "svs, uniform": sv.SVS(base="uniform", walls="closed", length=1.5),
        "svs, the paper's": sv.SVS.paper(0.5, 0.2),
        "hmc": HMC(0.5, leapfrog_steps=3),
        "langevin": Langevin(0.5),
        "mucola": MuCoLa(1.5),
        "pncg": sv.PNCG(2.0),
        "pncg, norm 1": sv.PNCG(2.0, norm=1.0),
        "gwg": sv.GibbsWithGradients(),
    }
    scored: dict[str, Any] = {
        "refresh": sv.Refresh(block=2),
        "rejection": sv.Rejection(),
        "svs + refresh": sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2, moves=2)),
        "guided": sv.Guided(None, 3, 64),
        "smc": SMC(None, 4, texts=64),
    }
    cases = {f"table: {name}": partial(run_sampler, partial(table, "box"), it, 12, 20) for name, it in samplers.items()}
    cases |= {
        f"sentences: {name}": partial(run_sampler, partial(table, "scored"), it, 12, 20) for name, it in scored.items()
    }
    cases["sentences: ancestral"] = partial(run_sampler, partial(table, "left to right"), sv.Ancestral(), 12, 20)
    return cases


def text_cases() -> dict[str, Callable[[], str]]:
    """Return samplers on the bundled language model, without and with controls."""
    svs, svs_and_refresh = sv.SVS(0.45, dimensions=32), sv.Cycle(sv.SVS(0.45, dimensions=32), sv.Refresh(moves=3))
    samplers: dict[str, Any] = {
        "svs": svs,
        "svs, full guidance": sv.SVS(0.45, dimensions=32, guidance="full"),
        "pncg": sv.PNCG(0.02, guidance="forward"),
        "pncg, full guidance": sv.PNCG(0.02),
        "gwg": sv.GibbsWithGradients(),
        "refresh": sv.Refresh(),
        "ancestral": sv.Ancestral(),
        "svs + refresh": svs_and_refresh,
    }
    controlled: dict[str, Any] = {
        "rejection": sv.Rejection(),
        "svs": svs,
        "svs + refresh": svs_and_refresh,
        "guided": sv.Guided(None, 3, 128),
        "smc": SMC(None, 4, texts=128),
    }

    def food_and_brief() -> Any:
        return text_target([sv.label("food", "Italian", weight=0.5), brief], **LENGTH)

    def family() -> Any:
        return text_target([sv.keyword("family")], **STOP)

    cases: dict[str, Callable[[], str]] = {}
    for name, sampler in samplers.items():
        cases[f"texts: {name}"] = partial(run_sampler, partial(text_target, **LENGTH), sampler)
    for name in ("ancestral", "svs", "refresh"):
        cases[f"texts that end: {name}"] = partial(run_sampler, partial(text_target, **STOP), samplers[name])
    for name, sampler in controlled.items():
        cases[f"control: {name}"] = partial(run_sampler, food_and_brief, sampler)
    cases["control that ends: guided"] = partial(run_sampler, family, controlled["guided"])
    return cases


def command_cases() -> dict[str, Callable[[], str]]:
    """Return `svs sample` with some options."""
    options = {
        "svs sample": "--sampler svs+refresh --warmup 3",
        "svs sample --control": "--sampler svs+refresh --control food=Italian --control not~keyword=pub --warmup 3",
        "svs sample --sampler rejection": "--sampler rejection --control food=Italian@0.5",
        "svs sample --sampler refresh --suffix": "--sampler refresh --suffix ~by~the~river. --warmup 3",
        "svs sample --start random": "--sampler svs --start random --warmup 3",
    }
    return {
        name: partial(run_command, [word.replace("~", " ") for word in words.split()])
        for name, words in options.items()
    }


def engine_cases() -> dict[str, Callable[[], str]]:
    """Return `sv.generate` and `sv.probability` with one prompt and with several."""

    def texts(prompt: Any, names: str = "", **settings: Any) -> Callable[[], str]:
        return lambda: run_generate(prompt, make_controls(names), **settings)

    def estimate(names: str, texts: int, **settings: Any) -> Callable[[], str]:
        return lambda: run_probability(make_controls(names), texts, **settings)

    def make_controls(names: str) -> list[Any]:
        known = {"brief": lambda: brief, "food": lambda: sv.label("food", "Italian")}
        return [known[name]() if name in known else sv.keyword(name) for name in names.split()]

    chains = {"sampler": "svs+refresh", "warmup": 3}
    suffix = {"sampler": "refresh", "warmup": 3, "suffix": " by the river."}
    return {
        "generate": texts(None, n=6, seed=3, **STOP),
        "generate: length": texts("Near the", n=6, seed=3, **LENGTH),
        "generate: prompts": texts(PROMPTS, n=3, **STOP),
        "generate: prompts, length": texts(PROMPTS, n=3, **LENGTH),
        "generate: stop string": texts(PROMPTS[:2], n=3, stop=".", **STOP),
        "generate: keyword, prompts": texts(PROMPTS, "family", n=4, **STOP),
        "generate: keyword, prompts, length": texts(PROMPTS, "river", n=4, **LENGTH),
        "generate: label and function": texts("Near the", "food brief", n=8, **LENGTH),
        "generate: two keywords": texts("Near the", "Italian river", n=16, **STOP),
        "generate: rejection": texts(PROMPTS[:2], "the", n=4, sampler="rejection", **STOP),
        "generate: weighted": texts("Near the", "Italian", n=16, weighted=True, **STOP),
        "generate: svs+refresh, prompts": texts(PROMPTS[:2], "food", n=3, **chains, **LENGTH),
        "generate: suffix": texts(PROMPTS[:2], n=3, **suffix, **LENGTH),
        "probability: keyword": estimate("Italian", 256, **LENGTH),
        "probability: keyword, texts that end": estimate("Italian", 256, **STOP),
        "probability: label and keyword": estimate("food river", 512, **LENGTH),
    }


def compute_digests(only: str) -> dict[str, str]:
    """Return the digest of every case whose name contains ``only``; a case that fails has the digest "failed"."""
    digests = {}
    for name, run in {**table_cases(), **text_cases(), **command_cases(), **engine_cases()}.items():
        if only in name:
            try:
                digests[name] = run()
            except Exception as error:
                digests[name] = "failed"
                print(f"{name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    return digests


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--save", type=Path, metavar="FILE", help="write the digests to this file")
    action.add_argument("--compare", type=Path, metavar="FILE", help="compare with the digests in this file")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the cases whose names contain this text")
    settings = parser.parse_args()
    digests = compute_digests(settings.only)
    if settings.save is not None:
        settings.save.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
        return int("failed" in digests.values())
    saved = json.loads(settings.compare.read_text(encoding="utf-8"))
    saved = {name: digest for name, digest in saved.items() if settings.only in name}
    differing = [name for name in {**saved, **digests} if digests.get(name) != saved.get(name)]
    for name in differing:
        print(f"{name}: {saved.get(name, 'missing')} saved, {digests.get(name, 'missing')} now")
    print(f"{len(digests) - len(differing)} of {len(saved)} digests agree.")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
