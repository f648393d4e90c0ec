"""Errors about arguments: class, argument, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import structured_voronoi as sv
from helpers import ALL_SAMPLERS, boxed_target
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.cells import cells_of

EMBEDDINGS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
TABLE = torch.zeros(3, 3)


def with_entry(tensor: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


class NoPositions:
    """A target without positions."""

    embeddings, length = EMBEDDINGS, 0

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens))


def sampled(**settings: Any) -> Any:
    target = sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (1, 2), -torch.inf))
    return sv.sample(target, sv.PNCG(step_size=1.0), **{"chains": 2, "draws": 2, "progress": False} | settings)


BAD_INPUT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "NaN embedding": (lambda: sv.TabularTarget(with_entry(EMBEDDINGS, (1, 0), torch.nan), TABLE), "", "token 1"),
    "infinite embedding": (lambda: cells_of(with_entry(EMBEDDINGS, (2, 1), torch.inf)), "", "token 2"),
    "NaN in the table": (
        lambda: sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (0, 2), torch.nan)),
        "",
        "nan at (0, 2)",
    ),
    "+inf in the table": (
        lambda: sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (2, 1), torch.inf)),
        "",
        "inf at (2, 1)",
    ),
    "table without a finite entry": (
        lambda: sv.TabularTarget(EMBEDDINGS, torch.full((3, 3), -torch.inf)),
        "",
        "no finite entry",
    ),
    "table of the wrong size": (lambda: sv.TabularTarget(EMBEDDINGS, torch.zeros(3, 2)), "", "(3, 2)"),
    "one token": (lambda: sv.TabularTarget(EMBEDDINGS[:1], TABLE[:1, :1]), "", "M = 1"),
    "one allowed token": (lambda: cells_of(EMBEDDINGS, torch.tensor([True, False, False])), "", "1"),
    "table without positions": (lambda: sv.TabularTarget(EMBEDDINGS, torch.zeros(())), "", "N = 0"),
    "target without positions": (lambda: sv.sample(NoPositions(), sv.SVS(scale=0.5), progress=False), "", "0"),
    "negative scale": (lambda: sv.SVS(scale=-0.5), "scale", "-0.5"),
    "scale NaN": (lambda: sv.SVS(scale=float("nan")), "scale", "nan"),
    "guidance weight that is a string": (lambda: sv.SVS(guidance_weight="a"), "guidance_weight", "'a'"),
    "fraction of a dimension": (lambda: sv.SVS(dimensions=1.5), "dimensions", "1.5"),
    "too many dimensions": (lambda: cells_of(EMBEDDINGS, dimensions=3), "dimensions", "3"),
    "masses that are a number": (lambda: sv.SVS(masses=1.0), "masses", "1.0"),
    "start of the wrong shape": (lambda: sampled(start=torch.zeros(2, 3, dtype=torch.int64)), "", "(2, 3)"),
    "start of the wrong type": (lambda: sampled(start=torch.zeros(2, 2)), "", "torch.float32"),
    "start outside the vocabulary": (
        lambda: sampled(start=torch.tensor([[0, 0], [0, 7]])),
        "",
        "token 7 at chain 1, position 1",
    ),
    "start of probability 0": (lambda: sampled(start=torch.tensor([[0, 0], [1, 2]])), "", "[1, 2]"),
    "unknown start": (lambda: sampled(start="randon"), "start", "did you mean 'random'"),
    "ancestral start without a language model": (lambda: sampled(start="ancestral"), "", "TabularTarget"),
    "box that excludes an embedding": (
        lambda: sv.CategoricalTarget(EMBEDDINGS, TABLE[0], box=1.5),
        "box",
        "1.5 excludes the embedding of token 2",
    ),
    "infinite box": (lambda: sv.CategoricalTarget(EMBEDDINGS, TABLE[0], box=torch.inf), "box", "inf"),
    "uniform base with open walls": (lambda: sv.SVS(base="uniform", walls="open"), "", "walls='open'"),
    "uniform base with estimated masses": (
        lambda: sv.SVS(base="uniform", walls="closed", masses="estimated"),
        "",
        "masses='estimated'",
    ),
    "unknown guidance": (lambda: sv.SVS(guidance="foward"), "guidance", "did you mean 'forward'"),
    "unknown guidance of p-NCG": (lambda: sv.PNCG(step_size=1.0, guidance="gradient"), "guidance", "'gradient'"),
    "unknown walls": (lambda: sv.SVS(walls="opened"), "walls", "did you mean 'open'"),
    "unknown masses": (lambda: sv.SVS(masses="estimate"), "masses", "did you mean 'estimated'"),
    "unknown base": (lambda: sv.baselines.HMC(step_size=1.0, base="normal"), "base", "'normal'"),
    "gradient of the wrong shape": (
        lambda: sv.TabularTarget(EMBEDDINGS, TABLE, torch.zeros(3, 3, 2, 5)),
        "",
        "(3, 3, 2, 5)",
    ),
    "wrong number of masses": (
        lambda: sv.sample(
            sv.TabularTarget(EMBEDDINGS, TABLE), sv.SVS(scale=0.5, walls="closed", masses=(1.0, 2.0)), progress=False
        ),
        "",
        "2 numbers for 3 tokens",
    ),
    "mask of the wrong type": (lambda: cells_of(EMBEDDINGS, torch.ones(3)), "", "torch.float32"),
    "negative seed": (lambda: sampled(seed=-1), "seed", "-1"),
    "no chains": (lambda: sampled(chains=0), "chains", "0"),
    "no draws": (lambda: sampled(draws=0), "draws", "0"),
}
"""Attempt, argument at fault, and what the error names."""


@pytest.mark.parametrize(("attempt", "argument", "named"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_errors_name_the_value_and_the_remedy(attempt: Callable[[], Any], argument: str, named: str) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        attempt()
    assert caught.value.argument == argument
    assert named in str(caught.value)
    assert caught.value.remedy


UNIFORM = {name: sampler for name, sampler in ALL_SAMPLERS.items() if "uniform" in name}


@pytest.mark.parametrize("sampler", UNIFORM.values(), ids=UNIFORM.keys())
def test_the_uniform_base_requires_a_box(sampler: Any) -> None:
    target = boxed_target(1)
    target.box = None
    with pytest.raises(sv.SamplingError, match="`box`"):
        sampler.init(target, Rng(0, 2), None)


@pytest.mark.parametrize("sampler", ALL_SAMPLERS.values(), ids=ALL_SAMPLERS.keys())
def test_every_sampler_refuses_a_start_with_tokens_that_are_not_allowed(sampler: Any) -> None:
    target = boxed_target(1)
    target.allowed = torch.arange(6) != 4
    if hasattr(sampler, "tuned"):
        sampler = sampler if sampler.scale != "auto" else sv.SVS(scale=0.5)
    with pytest.raises(sv.SamplingError, match="token 4 at chain 0, position 1"):
        sampler.init(target, Rng(0, 1), torch.tensor([[0, 4]]))
