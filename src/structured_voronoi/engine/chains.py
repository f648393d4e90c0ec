"""The loop that advances Markov chains, saves them at intervals and resumes them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from structured_voronoi.core.contracts import Chains
from structured_voronoi.core.info import Info
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint


class ChainRecord(Protocol):
    """What a run records about its chains."""

    @property
    def steps(self) -> int:
        """Number of recorded steps."""

    def add(self, state: Any, info: Info) -> None:
        """Record one step of all chains."""

    def save(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put what is new into the checkpoint, and return what `restore` needs besides."""

    def restore(self, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
        """Continue after the steps that were saved."""

    def finish(self, checkpoint: Checkpoint) -> None:
        """Put the results of the last step into the checkpoint."""


def advance_chains(
    chains: Chains, record: ChainRecord, steps: int, checkpoint: Checkpoint = NO_CHECKPOINT, name: str = "chains"
) -> Iterator[tuple[Any, Info]]:
    """Advance chains until their record has a number of steps.

    Parameters
    ----------
    chains
        The chains in their first state.
    record
        Records every step. It is restored from the checkpoint first.
    steps
        Number of steps of each chain.
    checkpoint
        Saves the chains and the record when it is due.
    name
        Name of these chains in the checkpoint.

    Yields
    ------
    tuple
        The state of the chains and the statistics of the step, after each step.
    """
    position = ChainPosition(checkpoint, name, chains)
    saved = position.restore()
    if saved is not None:
        record.restore(checkpoint, saved)
    with checkpoint.finish_step():
        for state, info in islice(chains, steps - record.steps):
            record.add(state, info)
            if record.steps == steps:
                position.drop()
                record.finish(checkpoint)
            if checkpoint.is_due:
                if record.steps < steps:
                    position.put(record.save(checkpoint))
                checkpoint.save()
            yield state, info


class ChainPosition:
    """The position of chains in a checkpoint: their state, the counters of their random streams, and the record."""

    def __init__(self, checkpoint: Checkpoint, name: str, chains: Chains) -> None:
        self.checkpoint, self.name, self.chains = checkpoint, name, chains
        self._template = (chains.state, None, None)
        checkpoint.check_storable(chains.state, f"{type(chains.sampler).__name__}'s state")

    def restore(self) -> dict[str, Any] | None:
        """Put the chains into their saved state and return what the record saved; None if nothing was saved."""
        names = self.checkpoint.names(f"{self.name}.")
        if not names:
            return None
        rng = self.chains.rng
        self.chains.state, counter, record = self.checkpoint.get(names[-1], self._template, rng.device)
        rng.counter = counter.to(rng.counter.device)
        return dict(record)

    def put(self, record: dict[str, Any]) -> None:
        """Replace the saved position by the present one."""
        names = self.checkpoint.names(f"{self.name}.")
        self.drop()
        number = 1 + int(names[-1].split(".")[-1]) if names else 0
        value = (self.chains.state, self.chains.rng.counter, record)
        self.checkpoint.put(f"{self.name}.{number:09}", value, self._template)

    def drop(self) -> None:
        """Remove the saved position."""
        for name in self.checkpoint.names(f"{self.name}."):
            self.checkpoint.drop(name)
