"""Bad input is refused with a message that names the value and the remedy."""

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


class Endless:
    """A target without positions."""

    embeddings, length = EMBEDDINGS, 0

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens))


def sampled(**settings: Any) -> Any:
    target = sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (1, 2), -torch.inf))
    return sv.sample(target, sv.PNCG(step_size=1.0), **{"chains": 2, "draws": 2, "progress": False} | settings)


BAD_INPUT: dict[str, tuple[Callable[[], Any], str]] = {
    "NaN embedding": (
        lambda: sv.TabularTarget(with_entry(EMBEDDINGS, (1, 0), torch.nan), TABLE),
        "embedding of token 1 holds a NaN or infinite value; give finite numbers",
    ),
    "infinite embedding": (
        lambda: cells_of(with_entry(EMBEDDINGS, (2, 1), torch.inf)),
        "embedding of token 2 holds a NaN or infinite value; mend it or leave the token out.*`allowed`",
    ),
    "table with NaN": (
        lambda: sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (0, 2), torch.nan)),
        r"holds nan at \(0, 2\); entries must be numbers below \+inf",
    ),
    "table with +inf": (
        lambda: sv.TabularTarget(EMBEDDINGS, with_entry(TABLE, (2, 1), torch.inf)),
        r"holds inf at \(2, 1\); entries must be numbers below \+inf",
    ),
    "table without a finite entry": (
        lambda: sv.TabularTarget(EMBEDDINGS, torch.full((3, 3), -torch.inf)),
        "no finite entry.*give at least one",
    ),
    "table of the wrong size": (
        lambda: sv.TabularTarget(EMBEDDINGS, torch.zeros(3, 2)),
        r"shape \(3, 2\) but there are 3 embeddings; every axis must have size 3",
    ),
    "M = 1": (lambda: sv.TabularTarget(EMBEDDINGS[:1], TABLE[:1, :1]), "M = 1: .* two or more tokens"),
    "M = 1 after the mask": (
        lambda: cells_of(EMBEDDINGS, torch.tensor([True, False, False])),
        "M = 1: .* two or more tokens",
    ),
    "N = 0 in a table": (lambda: sv.TabularTarget(EMBEDDINGS, torch.zeros(())), "N = 0: .* one axis of size M"),
    "N = 0": (
        lambda: sv.sample(Endless(), sv.SVS(scale=0.5), progress=False),
        "N = 0: .* its length must be 1 or more",
    ),
    "negative scale": (lambda: sv.SVS(scale=-0.5), "scale = -0.5 is not a positive number; choose one"),
    "guidance weight that is no number": (lambda: sv.SVS(guidance_weight="a"), "guidance_weight = 'a' is not a finite"),
    "half a dimension": (lambda: sv.SVS(dimensions=1.5), "dimensions = 1.5 is not a whole number"),
    "masses that are no tuple": (lambda: sv.SVS(masses=1.0), "masses = 1.0 is unknown"),
    "scale of NaN": (lambda: sv.SVS(scale=float("nan")), "scale = nan is not a positive number; choose one"),
    "start of the wrong shape": (
        lambda: sampled(start=torch.zeros(2, 3, dtype=torch.int64)),
        r"start has shape \(2, 3\) .* must be int64 of shape \(2, 2\)",
    ),
    "start of the wrong type": (
        lambda: sampled(start=torch.zeros(2, 2)),
        r"start has .* type torch.float32; it must be int64",
    ),
    "start outside the vocabulary": (
        lambda: sampled(start=torch.tensor([[0, 0], [0, 7]])),
        "token 7 at chain 1, position 1, which is not allowed or outside the vocabulary of 3; start from allowed",
    ),
    "start of zero probability": (
        lambda: sampled(start=torch.tensor([[0, 0], [1, 2]])),
        r"start of chain 1, tokens \[1, 2\], has no finite energy.*start from a state with positive probability",
    ),
    "unknown start": (lambda: sampled(start="randon"), "start = 'randon' is not possible.*did you mean 'random'"),
    "start from a language model without one": (
        lambda: sampled(start="ancestral"),
        "an ancestral start needs a target with `conditionals.*use another sampler or start",
    ),
    "box that leaves out an embedding": (
        lambda: sv.CategoricalTarget(EMBEDDINGS, TABLE[0], box=1.5),
        "box = 1.5 leaves out the embedding of token 2; the largest coordinate is 2, choose a larger box",
    ),
    "endless box": (
        lambda: sv.CategoricalTarget(EMBEDDINGS, TABLE[0], box=torch.inf),
        "box = inf is no size",
    ),
    "uniform base with open walls": (
        lambda: sv.SVS(base="uniform", walls="open"),
        "walls='open'.* do not go with the uniform base.*set walls='closed'",
    ),
    "uniform base with estimated masses": (
        lambda: sv.SVS(base="uniform", walls="closed", masses="estimated"),
        "masses='estimated' do not go with the uniform base.*set walls='closed' and masses='equal'",
    ),
    "unknown guidance": (
        lambda: sv.SVS(guidance="foward"),
        "guidance = 'foward' is unknown; did you mean 'forward'.*known: forward, full, none",
    ),
    "unknown guidance of p-NCG": (
        lambda: sv.PNCG(step_size=1.0, guidance="gradient"),
        "guidance = 'gradient' is unknown; known: forward, full, none",
    ),
    "unknown walls": (
        lambda: sv.SVS(walls="opened"),
        "walls = 'opened' is unknown; did you mean 'open'.*known: closed, open",
    ),
    "unknown masses": (
        lambda: sv.SVS(masses="estimate"),
        "masses = 'estimate' is unknown; did you mean 'estimated'",
    ),
    "unknown base": (lambda: sv.HMC(step_size=1.0, base="normal"), "base = 'normal' is unknown; .*known: gaussian"),
    "gradient of the wrong shape": (
        lambda: sv.TabularTarget(EMBEDDINGS, TABLE, torch.zeros(3, 3, 2, 5)),
        r"gradient has shape \(3, 3, 2, 5\); it must be \(3, 3, 2, 2\)",
    ),
    "masses of the wrong number": (
        lambda: sv.sample(
            sv.TabularTarget(EMBEDDINGS, TABLE), sv.SVS(scale=0.5, walls="closed", masses=(1.0, 2.0)), progress=False
        ),
        "masses holds 2 numbers for 3 tokens; give one for each",
    ),
    "too many dimensions": (
        lambda: cells_of(EMBEDDINGS, dimensions=3),
        "dimensions = 3: the embeddings have 2; choose",
    ),
    "mask of the wrong type": (
        lambda: cells_of(EMBEDDINGS, torch.ones(3)),
        r"`allowed` has shape \(3,\) and type torch.float32; it must be a bool tensor",
    ),
    "negative seed": (lambda: sampled(seed=-1), r"seed -1 is not a whole number ≥ 0 below 2\*\*63; give one"),
    "no chains": (lambda: sampled(chains=0), "chains = 0 is not a whole number of at least 1"),
    "no draws": (lambda: sampled(draws=0), "draws = 0 is not a whole number of at least 1"),
}


@pytest.mark.parametrize(("attempt", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_refused_by_name(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(sv.SamplingError, match=message):
        attempt()


UNIFORM = {name: sampler for name, sampler in ALL_SAMPLERS.items() if "uniform" in name}


@pytest.mark.parametrize("sampler", UNIFORM.values(), ids=UNIFORM.keys())
def test_the_uniform_base_needs_a_box(sampler: Any) -> None:
    target = boxed_target(1)
    target.box = None
    with pytest.raises(sv.SamplingError, match="this target has no `box`; give it one or use base='gaussian'"):
        sampler.init(target, Rng(0, 2), None)


@pytest.mark.parametrize("sampler", ALL_SAMPLERS.values(), ids=ALL_SAMPLERS.keys())
def test_a_disallowed_start_is_refused_by_every_sampler(sampler: Any) -> None:
    target = boxed_target(1)
    target.allowed = torch.arange(6) != 4
    if hasattr(sampler, "tuned"):
        sampler = sampler if sampler.scale != "auto" else sv.SVS(scale=0.5)
    with pytest.raises(sv.SamplingError, match="token 4 at chain 0, position 1, which is not allowed"):
        sampler.init(target, Rng(0, 1), torch.tensor([[0, 4]]))
