"""Batches of tries drawn in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from structured_voronoi.core.contracts import Target
from structured_voronoi.engine.rounds import Work
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.tries import Tries, draw_tries
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.problem.problem import Problem, bind


@dataclass
class LocalSource:
    """Draws batches of tries for some targets, one per prompt."""

    targets: Sequence[Target]
    seed: int
    settings: EngineSettings
    stream: str = "tries"
    """The name of the random stream."""

    def __post_init__(self) -> None:
        self.problems = [bind(target) for target in self.targets]
        self.split = 1

    def announce(self, works: Sequence[Work], lookahead: Lookahead) -> None:
        """Nothing is drawn in advance."""

    def draw(self, work: Work, lookahead: Lookahead) -> Tries:
        """The tries of one batch."""
        return self.compute(work, lookahead)

    def compute(self, work: Work, lookahead: Lookahead) -> Tries:
        """Draw the tries of one batch; rows of several prompts need a target that takes them together."""
        prompts = [prompt for prompt, _ in work.rows]
        problem = self.problems[prompts[0]]
        if len(set(prompts)) > 1:
            rows: list[Any] = [self.targets[prompt] for prompt in prompts]
            problem = bind(rows[0].with_prompts_of(rows))
        share = self.settings.plain_share
        return draw_tries(problem, lookahead, self.seed, work.rows, share, work.is_observed, self.stream)

    def part_name(self, work: Work) -> str:
        """The name of a batch in a checkpoint."""
        return f"{self.stream}-{work.name}"

    def learnt(self, name: str, make: Callable[[], Lookahead]) -> Lookahead:
        """A new lookahead."""
        return make()


def plain_proposal(problem: Problem, settings: EngineSettings, has_heads: bool = True) -> Lookahead:
    """The model, restricted to tokens after which patterns can still match if it has heads."""
    if has_heads:
        return untrained(problem, settings=settings.lookahead)
    return Lookahead({}, settings.lookahead, {}, learned=False)
