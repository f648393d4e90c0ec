"""Rejection that learns: rounds of tries, from proposals that improve between rounds.

Try t of prompt j has the random stream (seed, j, t). The first rounds propose from the model, restricted to tokens
after which the controls can still be satisfied, and accept a text with probability W. At the end of a round, and only
there, the run decides from counts and weights whether to stop, to go on, or to learn a better proposal from the tries
so far. A learnt proposal accepts with probability min(1, w / c), with the cap c from the weights of its other tries, so
that the error is at most the tolerance. Given the past, every accepted text follows the target up to that error,
whatever proposal the past has led to. No decision depends on time, on the batch size or on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.streams import BLOCK
from structured_voronoi.engine.proposals import Proposal
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.tries import Tries
from structured_voronoi.lookahead.learning import learn, learnable, refine
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.observing import Observed
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.metrics.weights import effective_share, is_accepted
from structured_voronoi.problem.problem import Problem


class Work(NamedTuple):
    """A batch of tries to draw."""

    label: str
    """The name of the proposal."""
    rows: list[tuple[int, int]]
    """(prompt, number) of each try."""
    is_observed: bool

    @property
    def name(self) -> str:
        prompt, number = self.rows[0]
        return f"{self.label}-{prompt:06}-{number:09}-{len(self.rows)}"


class Source(Protocol):
    """Where batches of tries are drawn: in this process, by workers, or from a checkpoint."""

    split: int
    """Number of batches that should be drawn side by side."""

    def announce(self, works: Sequence[Work], lookahead: Lookahead) -> None:
        """Batches that will be asked for, in this order."""

    def draw(self, work: Work, lookahead: Lookahead) -> Tries: ...

    def learnt(self, name: str, make: Callable[[], Lookahead]) -> Lookahead:
        """A lookahead, made now or found in a checkpoint."""


class Accepted(NamedTuple):
    """An accepted text."""

    prompt: int
    proposal: int
    tries: Tries
    """The tries of its batch."""
    row: int
    """Its row there."""


@dataclass
class Rounds:
    """A run of the engine for several prompts."""

    problems: Sequence[Problem]
    """One per prompt, with the same controls."""
    source: Source
    wanted: int
    """Texts per prompt; effective texts if ``weighted``; tries of the last proposal if ``measures``."""
    seed: int
    tolerance: float
    settings: EngineSettings
    weighted: bool = False
    measures: bool = False
    """True where the probability of the controls is wanted, not texts."""
    lookahead: Lookahead | None = None
    """A proposal to begin with instead of the model restricted to possible tokens."""
    proposals: list[Proposal] = field(default_factory=list)
    current: int = 0
    progress: Callable[[Rounds], None] = lambda rounds: None
    """Called after every batch."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every batch: a limit on time that the user has set."""
    stopped_early: bool = False
    _next: list[int] = field(default_factory=list)
    _released: list[set[tuple[int, int]]] = field(default_factory=list)
    _observed: list[tuple[int, Observed, np.ndarray]] = field(default_factory=list)
    _learnings: int = 0
    _learnt_from: dict[int, int] = field(default_factory=dict)
    """Of each proposal, the number of tries when it was last learnt from."""

    def __post_init__(self) -> None:
        self._next = [0] * len(self.problems)
        self._released = [set() for _ in self.problems]
        first = self.lookahead
        if first is None:
            first = untrained(self.problems[0], settings=self.settings.lookahead)
        self._add_proposal(first, "first")

    def run(self) -> Iterator[list[Accepted]]:
        """Accepted texts as soon as it is certain that they stay accepted."""
        try:
            while not self.is_done() and not self.stopped_early:
                yield from self._draw_round()
                for proposal in self.proposals:
                    proposal.find_caps(self.tolerance)
                if not self.is_done() and not self.stopped_early:
                    yield self._release(self.settings.release_margin)
                    self._refuse_fruitless()
                    self._choose_proposal()
            yield self._release(1.0)
        except KeyboardInterrupt:
            for proposal in self.proposals:
                proposal.find_caps(self.tolerance)
            yield self._release(1.0)
            raise

    # rounds

    def _draw_round(self) -> Iterator[list[Accepted]]:
        """One round of tries of the current proposal; texts of the model are released as they come."""
        number, proposal = self.current, self.proposals[self.current]
        works = self._plan_round()
        self.source.announce(works, proposal.lookahead)
        for work in works:
            drawn = self.source.draw(work, proposal.lookahead)
            self._record(number, work, drawn)
            self.progress(self)
            if self.should_stop():
                self.stopped_early = True
                return
            if proposal.is_plain:
                yield self._release_plain(number, work)

    def _plan_round(self) -> list[Work]:
        """The batches of the next round: numbers of tries for every prompt that needs more texts."""
        proposal, settings = self.proposals[self.current], self.settings
        open_prompts = [prompt for prompt in range(len(self.problems)) if self.missing(prompt) > 0]
        size = self._round_size(proposal, open_prompts)
        is_observed = settings.learns and self._recorded() < settings.max_learning_tries and self.tolerance > 0
        rows = min(settings.batch_rows, math.ceil(size * len(open_prompts) / self.source.split / BLOCK) * BLOCK)
        works: list[Work] = []
        for group in self._groups(open_prompts):
            tries = [(prompt, self._next[prompt] + number) for number in range(size) for prompt in group]
            for begin in range(0, len(tries), rows):
                works.append(Work(proposal.label, tries[begin : begin + rows], is_observed))
        for prompt in open_prompts:
            self._next[prompt] += size
        return works

    def _groups(self, prompts: list[int]) -> list[list[int]]:
        """Prompts whose tries can be drawn in one batch: those with as many tokens, where there are no controls."""
        if not self.problems[0].normalised:
            return [[prompt] for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for prompt in prompts:
            by_length.setdefault(self.problems[prompt].before.shape[1], []).append(prompt)
        return list(by_length.values())

    def _round_size(self, proposal: Proposal, open_prompts: list[int]) -> int:
        """Tries per prompt: as many as before, but not more than are expected to be needed."""
        settings, prompts = self.settings, len(open_prompts)
        missing = max(self.missing(prompt) for prompt in open_prompts)
        before = proposal.count() // max(1, len(proposal.batches))
        size: float
        if not before and not proposal.is_plain:
            size = 2 * settings.first_round // prompts
        elif not before:
            size = min(max(settings.first_round // prompts, BLOCK), 2 * missing)
            size = missing if self.problems[0].normalised else size
        else:
            rate = self._rate(proposal)
            needed = 1.2 * missing / rate if rate else math.inf
            size = min(before, needed, settings.max_round // prompts)
            until_learning = self._learning_tries() // prompts - before
            if proposal.is_plain and settings.learns and until_learning > 0:
                size = min(size, until_learning) if size < 2 * until_learning else size
        if self.problems[0].normalised:
            return max(1, math.ceil(size))
        return max(BLOCK, math.ceil(size / BLOCK) * BLOCK)

    def _record(self, number: int, work: Work, drawn: Tries) -> None:
        if drawn.observed is not None:
            self._observed.append((number, drawn.observed, drawn.log_weight.numpy()))
        for prompt, rows in _rows_by_prompt(work).items():
            self.proposals[number].add(prompt, drawn.at(rows))

    # decisions

    def missing(self, prompt: int) -> float:
        """Texts that a prompt still needs."""
        if self.measures:
            return self._missing_weights(prompt)
        if self.weighted:
            weight = np.concatenate([proposal.weight(prompt) for proposal in self.proposals])
            return self.wanted - (effective_share(weight) * len(weight) if len(weight) else 0.0)
        return self.wanted - self.accepted_count(prompt)

    def _missing_weights(self, prompt: int) -> float:
        """Tries that an estimate still needs: first those to learn from, unless the model itself does well."""
        proposal = self.proposals[self.current]
        count = proposal.count(prompt)
        if self._is_precise(proposal, prompt):
            return 0
        if proposal.is_plain and self._may_learn() and effective_share(proposal.weight()) < 0.2:
            return max(1, self._learning_tries() - count)
        return self.wanted - count

    def _is_precise(self, proposal: Proposal, prompt: int) -> bool:
        """Is the estimate from these tries reliable, with a small error?"""
        min_tries, target = 256, self.settings.target_relative_error
        if not target or proposal.count(prompt) < min_tries:
            return False
        log_weight = proposal.tries(prompt).log_weight.numpy()
        found = estimate_probability(log_weight, len(log_weight), proposal.is_plain)
        return found.reliable and found.relative_error <= target

    def _may_learn(self) -> bool:
        settings = self.settings
        return settings.learns and self.tolerance > 0 and self._learnings < settings.max_learnings

    def accepted_count(self, prompt: int) -> int:
        known = [one for one in self.proposals if one.is_plain or len(one.caps.get(prompt, ())) == one.count(prompt)]
        return sum(int(proposal.accepted(prompt).sum()) for proposal in known)

    def best_proposal(self, prompt: int) -> Proposal:
        """The learnt proposal with the most effective tries of a prompt; the first one if nothing was learnt."""
        there = [proposal for proposal in self.proposals if prompt in proposal.batches]
        learnt = [proposal for proposal in there if not proposal.is_plain] or there
        return max(learnt, key=lambda proposal: effective_share(proposal.weight(prompt)) * proposal.count(prompt))

    def is_done(self) -> bool:
        return all(self.missing(prompt) <= 0 for prompt in range(len(self.problems)))

    def _rate(self, proposal: Proposal) -> float:
        """Texts per try: the acceptance rate, or the effective share where weights are wanted."""
        if self.measures:
            return 1.0
        return effective_share(proposal.weight()) if self.weighted else proposal.acceptance_rate()

    def _choose_proposal(self) -> None:
        """Learn a new proposal where that is expected to pay, else go on with the best one so far."""
        if not self.measures:
            numbers = range(len(self.proposals))
            self.current = max(numbers, key=lambda number: (self._rate(self.proposals[number]), number))
        if self._should_learn():
            self._learn()

    def _should_learn(self) -> bool:
        """Would learning and the tries after it cost less than the tries at the present rate?

        It waits for a quarter of the tries that are still expected: more of them teach more.
        """
        settings, proposal = self.settings, self.proposals[self.current]
        if not self._may_learn():
            return False
        recorded = self._recorded()
        missing = sum(max(0.0, self.missing(prompt)) for prompt in range(len(self.problems)))
        rate = max(self._rate(proposal), 0.5 / proposal.count())
        least, most = settings.min_learning_tries, self._learning_tries()
        if recorded < (most if self.measures else min(most, max(least, missing / rate / 4))):
            return False
        if recorded < 2 * self._learnt_from.get(self.current, 0):  # what it taught before was no better than itself
            return False
        if proposal.is_plain and not learnable(self._joined(), proposal.lookahead):
            self._learnings += self.measures and recorded >= settings.max_learning_tries and settings.max_learnings
            return False
        if self.measures:
            return effective_share(proposal.weight()) < (0.2 if proposal.is_plain else 0.1) and missing > 0
        afterwards = 4 * rate ** (-1 / 3) if proposal.is_plain else 0.5 / rate
        return missing / rate > self._learning_cost() + missing * afterwards

    def _recorded(self) -> int:
        """Tries of the current proposal that can be learnt from."""
        return sum(len(seen.tokens) for number, seen, _ in self._observed if number == self.current)

    def _learning_tries(self) -> int:
        """Tries to learn from: with N of them, a text costs about 10,000 / N proposals, so that √(10,000 n) is best."""
        settings, texts = self.settings, self.wanted * len(self.problems)
        best = math.ceil(math.sqrt(10_000 * (texts if not self.measures else 32)) / BLOCK) * BLOCK
        return min(max(settings.min_learning_tries, best), settings.max_learning_tries)

    def _learning_cost(self) -> float:
        """The operations of learning in units of those of a try."""
        problem, settings = self.problems[0], self.settings.lookahead
        network: Any = getattr(getattr(problem, "model", None), "network", None)
        parameters = sum(part.numel() for part in network.parameters()) if hasattr(network, "parameters") else 10**5
        outputs = sum(max(1, head.reader.outputs) for head in self.proposals[0].lookahead.heads.values())
        head_parameters = outputs * problem.embeddings.shape[1] * min(64, problem.embeddings.shape[1])
        return 1.5 * settings.steps * settings.batch * head_parameters / (parameters * problem.length)

    def _learn(self) -> None:
        """A new proposal from all tries that were recorded."""
        self._learnings += 1
        proposal = self.proposals[self.current]
        self._learnt_from[self.current] = self._recorded()

        def make() -> Lookahead:
            if proposal.is_plain:
                return learn(self.problems[0], self._joined(), self.settings.lookahead, self.seed)
            mine = [
                (seen, weight) for number, seen, weight in self._observed if self.proposals[number].lookahead.learned
            ]
            observed = Observed.joined([seen for seen, _ in mine])
            log_weight = torch.from_numpy(np.concatenate([weight for _, weight in mine]))
            return refine(proposal.lookahead, observed, log_weight, self.settings.lookahead, self.seed)

        label = f"{len(self.proposals):02}-{sum(one.count() for one in self.proposals)}"
        self._add_proposal(self.source.learnt(f"lookahead-{label}", make), label)
        self.current = len(self.proposals) - 1

    def _joined(self) -> Observed:
        """Everything that was recorded with proposals from the model."""
        return Observed.joined([seen for number, seen, _ in self._observed if self.proposals[number].is_plain])

    def _add_proposal(self, lookahead: Lookahead, label: str) -> None:
        """The label tells proposals apart that were learnt from other numbers of tries."""
        most = 1 / self.settings.plain_share if lookahead.learned else 1.0
        self.proposals.append(Proposal(lookahead, most, label))

    def _refuse_fruitless(self) -> None:
        """Give up where no try has satisfied the controls."""
        tries = sum(proposal.count() for proposal in self.proposals)
        if tries < self.settings.max_fruitless_tries or any((one.weight() > 0).any() for one in self.proposals):
            return
        problem, plain = self.problems[0], sum(one.count() for one in self.proposals if one.is_plain)
        last = self.proposals[self.current].tries(next(iter(self.proposals[self.current].batches)))
        reason = problem.why_impossible(last.tokens[-256:].to(problem.device)) if problem.why_impossible else ""
        raise NoStartError(
            f"none of {tries:,} tries satisfied the controls{f' ({reason})' if reason else ''}: their probability is "
            f"below {min(1.0, 3 / max(1, plain)):.2g} (95 % limit)",
            remedy="loosen a control, or give a prompt that leads there",
        )

    # release

    def _release_plain(self, number: int, work: Work) -> list[Accepted]:
        """The accepted tries of one batch of the model: nothing can change that."""
        if self.weighted or self.measures:
            return []
        found: list[Accepted] = []
        for prompt in _rows_by_prompt(work):
            batch = self.proposals[number].batches[prompt][-1]
            accepted = np.nonzero(is_accepted(batch.weight, batch.level.numpy(), np.ones(len(batch.number))))[0]
            found += [Accepted(prompt, number, batch, int(row)) for row in accepted]
        return self._give(found)

    def _release(self, margin: float) -> list[Accepted]:
        """Texts of learnt proposals; all accepted ones if the margin is 1. Weighted texts come at the end only."""
        if self.measures or (self.weighted and margin != 1.0):
            return []
        found: list[Accepted] = []
        for prompt in range(len(self.problems)):
            for number, proposal in enumerate(self.proposals):
                if prompt not in proposal.batches:
                    continue
                tries = proposal.tries(prompt)
                kept = tries.weight > 0 if self.weighted else proposal.accepted(prompt, margin)
                if margin > 1 and kept.any() and not proposal.is_plain:
                    cap = margin * float(proposal.caps[prompt].min())
                    proposal.released_cap[prompt] = min(cap, proposal.released_cap.get(prompt, math.inf))
                found += [Accepted(prompt, number, tries, int(row)) for row in np.nonzero(kept)[0]]
        return self._give(found)

    def _give(self, found: list[Accepted]) -> list[Accepted]:
        """Those that were not given before, up to the number wanted."""
        given: list[Accepted] = []
        for one in found:
            key, released = (one.proposal, int(one.tries.number[one.row])), self._released[one.prompt]
            if key not in released and (self.weighted or len(released) < self.wanted):
                released.add(key)
                given.append(one)
        return given


def _rows_by_prompt(work: Work) -> dict[int, list[int]]:
    """The rows of each prompt in a batch."""
    found: dict[int, list[int]] = {}
    for row, (prompt, _) in enumerate(work.rows):
        found.setdefault(prompt, []).append(row)
    return found
