"""Texts of the engine for the prompts of a request, and what the run found out about the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.engine.checkpoint import Checkpoint
from structured_voronoi.engine.rounds import Accepted, Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.texts import Text, make_texts
from structured_voronoi.engine.try_source import TrySource, plain_proposal
from structured_voronoi.metrics.probability import Probability, estimate_probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

MIN_ENDED_SHARE, MIN_TRIES_TO_END = 0.01, 1000
"""Give up if a smaller share of at least so many tries ends in time."""


@dataclass(frozen=True)
class Outcome:
    """What a run of the engine found out besides the texts, per prompt."""

    probability: list[Probability]
    error_bound: list[float]
    evaluations: int
    stopped_early: bool


@dataclass
class EngineTexts:
    """Texts of some targets, one per prompt."""

    targets: Sequence[LanguageModel | Controlled]
    n: int
    seed: int
    tolerance: float
    weighted: bool
    settings: EngineSettings
    time_limit: float | None = None
    checkpoint: Checkpoint | None = None
    make_targets: Callable[[], Sequence[LanguageModel | Controlled]] | None = None
    progress: bool = False
    _counts: dict[int, int] = field(default_factory=dict)

    def draw(self) -> Iterator[list[Text]]:
        """Texts as they are accepted."""
        source = TrySource(
            self.targets, self.seed, self.settings, checkpoint=self.checkpoint, make_targets=self.make_targets
        )
        problems, began = [bind(target) for target in self.targets], monotonic()
        is_plain = problems[0].normalised
        self.rounds = rounds = Rounds(
            problems,
            source,
            self.n,
            self.seed,
            self.tolerance,
            self.settings,
            self.weighted,
            lookahead=plain_proposal(problems[0], self.settings, has_heads=False) if is_plain else None,
        )
        all_texts = self.n * len(self.targets)
        with progress_bar(all_texts, self.progress, stage="texts") as tick:
            shown = 0

            def show(rounds: Rounds) -> None:
                tries = sum(one.count() for one in rounds.proposals)
                self._refuse_endless(rounds, tries)
                tick(f"{tries:,} tries with proposal {rounds.current}, {self._rate()}", 0)

            rounds.progress = show
            if self.time_limit is not None:
                limit = self.time_limit
                rounds.should_stop = lambda: monotonic() - began > limit
            for found in rounds.run():
                texts = self._texts(found)
                done = sum(self._counts.values())
                tick("", min(all_texts, done) - shown)
                shown = min(all_texts, done)
                if texts:
                    self._keep(texts, done)
                    self._reach(done, all_texts)
                    yield texts
        self._reach(all_texts, all_texts)

    def _keep(self, texts: list[Text], done: int) -> None:
        """Put the texts into the checkpoint, where `svs runs` and `svs diagnose` read them."""
        kept, name = self.checkpoint, f"texts-{done:09}"
        if kept is not None and not kept.is_finished and name not in kept.names("texts-"):
            kept.put(name, {"texts": [text._asdict() for text in texts]})

    def _reach(self, done: int, all_texts: int) -> None:
        kept = self.checkpoint
        if kept is not None and not kept.is_finished:
            kept.reach(min(done, all_texts), all_texts, "texts")
            if done >= all_texts or kept.is_due:
                kept.save()

    def _rate(self) -> str:
        """The acceptance rate in words."""
        proposal = self.rounds.proposals[self.rounds.current]
        weight = proposal.weight()
        return f"{(weight > 0).mean():.0%} satisfy the controls" if len(weight) else ""

    def _refuse_endless(self, rounds: Rounds, tries: int) -> None:
        """Give up on texts that must end, but hardly ever do."""
        problem = rounds.problems[0]
        if problem.ended is None or tries < MIN_TRIES_TO_END or not rounds.proposals[0].is_plain:
            return
        ended = sum(int(batch.ended.sum()) for parts in rounds.proposals[0].batches.values() for batch in parts)
        if ended < MIN_ENDED_SHARE * rounds.proposals[0].count() and problem.normalised:
            raise NoStartError(
                f"{ended} of {tries} texts ended within {problem.length} tokens",
                remedy="raise the length, give a stop string, or take texts that need not end",
            )

    def _texts(self, found: list[Accepted]) -> list[Text]:
        """The accepted tries as texts, in their order."""
        texts: list[Text] = []
        for one in found:
            index = self._counts.get(one.prompt, 0)
            self._counts[one.prompt] = index + 1
            row, target = slice(one.row, one.row + 1), self.targets[one.prompt]
            (text,) = make_texts(
                target,
                [one.prompt * self.n + index if not self.weighted else index],
                one.tries.tokens[row].to(target.embeddings.device),
                one.tries.log_prob[row],
                one.tries.log_target[row],
            )
            if self.weighted:
                text = text._replace(log_weight=float(one.tries.log_weight[one.row]))
            texts.append(text)
        return texts

    def outcome(self) -> Outcome:
        """What the tries say about the controls."""
        rounds = self.rounds
        evaluations = sum(proposal.count() for proposal in rounds.proposals)
        found, bounds = [], []
        for prompt in range(len(self.targets)):
            there = [one for one in rounds.proposals if prompt in one.batches]
            best = rounds.best_proposal(prompt)
            log_weight = best.tries(prompt).log_weight.numpy()
            evaluations_here = sum(one.count(prompt) for one in there)
            found.append(estimate_probability(log_weight, evaluations_here, best.is_plain))
            bounds.append(self._bound(prompt))
        return Outcome(found, bounds, evaluations, rounds.stopped_early)

    def _bound(self, prompt: int) -> float:
        """The error bound of a prompt's texts: the mean over the proposals that they come from."""
        rounds = self.rounds
        if self.weighted:
            return 0.0
        released = [number for number, _ in rounds._released[prompt]]
        total = 0.0
        for number in set(released):
            proposal = rounds.proposals[number]
            if not proposal.is_plain:
                total += released.count(number) * proposal.error_bound.get(prompt, 0.0)
        return total / max(1, len(released))
