"""Nested data as bytes and back, and data that is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.storage.packing import (
    apply_changes,
    check_storable,
    describe,
    describe_changes,
    describe_sampler,
    pack,
    unpack,
)


@dataclass(frozen=True)
class Constants:
    table: Any = None


class Inner(NamedTuple):
    x: Tensor
    count: int


class State(NamedTuple):
    tokens: Tensor
    inner: Inner
    parts: tuple[Any, ...]
    more: Any
    constants: Any = Constants()


def same(one: Any, other: Any) -> bool:
    """True if equal, also in type; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return one == other or (one != one and other != other)


VALUES: list[Any] = [
    *(None, True, 0, 2**80, -0.0, math.inf, math.nan, "naïve \udc80", [], {}, [1, [2.5, None]], {"a": [1]}),
    *(torch.tensor(3), torch.zeros(0, 4), torch.arange(6).view(2, 3).t(), torch.tensor([math.nan, 1.0])),
    *(torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.uint8)),
    *(np.arange(4.0), np.float64(0.1), np.int32(7), np.zeros((2, 0), dtype=bool)),
    *(b"", b"\x00\xff", {"a/b.safetensors": b"1"}, {"a.b": b"1", "a": {"b": b"2"}}),
    *([torch.ones(1), 2], {"a": torch.ones(1), "b": [np.ones(1)]}, (torch.ones(2), None), ((), 1)),
]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_unpacked_data_equals_packed_data(number: int) -> None:
    tokens = torch.arange(4)
    state = State(tokens, Inner(tokens, 3), (Inner(tokens.double() / 3, 1), tokens), VALUES[number])
    template = State(tokens[:1], Inner(tokens[:1], 0), (Inner(tokens, 0), None), None, state.constants)
    back = unpack(pack(state, template), template)
    assert same(back, state)
    assert back.constants is template.constants


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (object(), "walk's state.more is of type object"),
        ({1: 2.0}, "walk's state.more is of type dict"),
        ([torch.ones(1), {3}], "walk's state.more.1 is of type set"),
        (lambda: 0, "walk's state.more is of type function"),
        (torch.Generator(), "walk's state.more is of type Generator"),
        (torch.ones(1, dtype=torch.complex64), "walk's state.more is of type Tensor"),
        (torch.eye(2).to_sparse(), "walk's state.more is of type Tensor"),
        (np.array(["a"]), "walk's state.more is of type ndarray"),
        ((1, object()), "walk's state.more.1 is of type object"),
    ],
)
def test_other_types_are_refused_with_their_path(more: Any, what: str) -> None:
    state = State(torch.ones(1), Inner(torch.ones(1), 0), (), more)
    with pytest.raises(sv.SamplingError) as caught:
        check_storable(state, "walk's state")
    assert caught.value.message == f"{what}, which cannot be saved"


def test_field_that_becomes_a_named_tuple_is_refused() -> None:
    first = State(torch.ones(1), Inner(torch.ones(1), 0), (), None)
    with pytest.raises(sv.SamplingError, match=r"state\.more is a Inner and was a NoneType in the first state"):
        pack(first._replace(more=first.inner), first, "state")


def test_descriptions_are_equal_if_and_only_if_settings_are() -> None:
    assert describe(sv.SVS(0.5))["scale"] == 0.5
    assert describe(torch.ones(3)) == describe(torch.ones(3)) != describe(torch.ones(3).double())
    assert describe([0] * 1000) == describe([0] * 1000) != describe([0] * 999 + [1])
    network = torch.nn.Linear(2, 2)
    assert describe({"a": (network, abs)}) == {"a": [describe(network), "abs"]}

    class Walk:
        def __init__(self, width: float) -> None:
            self.width, self.proposal = width, lambda x: x

    assert describe_sampler(Walk(0.5)) == describe_sampler(Walk(0.5)) != describe_sampler(Walk(0.6))
    assert "0x" not in str(describe_sampler(Walk(0.5)))


def test_tuned_sampler_is_restored_from_its_changes() -> None:
    given = sv.Cycle(sv.SVS(), sv.PNCG(2.0))
    tuned = sv.Cycle(sv.SVS(0.3), given.samplers[1])
    described = describe_changes(given, tuned, "Cycle", lambda _: None)
    assert apply_changes(given, described, lambda _: None) == tuned
    assert apply_changes(given, describe_changes(given, given, "Cycle", lambda _: None), lambda _: None) is given
    with pytest.raises(sv.SamplingError, match="Cycle was tuned to a object, which cannot be saved"):
        describe_changes(given, object(), "Cycle", lambda _: None)
