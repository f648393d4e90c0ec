"""Runs that are stopped in the middle of a step, as if the process had been killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from structured_voronoi.core.contracts import Chains
from structured_voronoi.engine import source as source_module
from structured_voronoi.targets.tabular import AutoregressiveTable


class Killed(Exception):
    """Raised where a process would have been killed; unlike that, the lock is released."""


@contextlib.contextmanager
def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, error: type[BaseException] = Killed) -> Iterator[None]:
    """Raise an error in the middle of a step of chains, or of a batch of tries, after a number of them."""
    step, draw, taken = Chains.__next__, source_module.draw_tries, 0

    def stepped(self: Chains) -> Any:
        nonlocal taken
        if taken == steps:
            self.rng.uniform(3)  # an unfinished step may have used its random stream
            raise error
        taken += 1
        return step(self)

    def drawn(*arguments: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise error
        taken += 1
        return draw(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed) if error is Killed else contextlib.nullcontext():
        patch.setattr(Chains, "__next__", stepped)
        patch.setattr(source_module, "draw_tries", drawn)
        yield


def autoregressive_table() -> AutoregressiveTable:
    """Three tokens, drawn from left to right, with scores."""
    generator = torch.Generator().manual_seed(3)
    embeddings, log_prob = torch.randn(5, 3, generator=generator), torch.randn(5, 5, 5, generator=generator)
    scores = -torch.randn(5, 5, 5, generator=generator).abs()
    return AutoregressiveTable(embeddings, log_prob - log_prob.logsumexp((0, 1, 2)), None, scores)
