"""Texts of the engine for the prompts of a request, and what the run found out about the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint
from structured_voronoi.engine.rounds import Accepted, Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import plain_proposal
from structured_voronoi.engine.texts import Text, make_texts
from structured_voronoi.engine.try_source import TrySource
from structured_voronoi.metrics.probability import Probability, estimate_probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.text import TextTarget


@dataclass(frozen=True)
class Outcome:
    """What a run of the engine found out besides the texts, per prompt."""

    probability: list[Probability]
    error_bound: list[float]
    evaluations: int
    stopped_early: bool


@dataclass
class AcceptedTexts:
    """Texts of some targets, one per prompt."""

    targets: Sequence[TextTarget | ControlledTarget]
    n: int
    seed: int
    tolerance: float
    weighted: bool
    settings: EngineSettings
    time_limit: float | None = None
    checkpoint: Checkpoint = NO_CHECKPOINT
    make_targets: Callable[[], Sequence[TextTarget | ControlledTarget]] | None = None
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
        total = self.n * len(self.targets)
        with progress_bar(total, self.progress, "texts") as tick:
            shown = 0

            def show(rounds: Rounds) -> None:
                tries = sum(one.count() for one in rounds.proposals)
                self._refuse_endless(rounds, tries)
                tick(f"{tries:,} proposals, {self._satisfied_share()}", 0)

            rounds.progress = show
            if self.time_limit is not None:
                limit = self.time_limit
                rounds.should_stop = lambda: monotonic() - began > limit
            for found in rounds.run():
                texts = self._texts(found)
                done = min(total, sum(self._counts.values()))
                tick("", done - shown)
                shown = done
                if texts:
                    self._save(texts, done, total)
                    yield texts
        if not rounds.stopped_early:
            self._save([], total, total)

    def _save(self, texts: list[Text], done: int, total: int) -> None:
        """Put texts into the checkpoint, where `svs runs` and `svs diagnose` read them."""
        checkpoint, name = self.checkpoint, f"texts-{done:09}"
        if checkpoint.is_finished:
            return
        if texts and name not in checkpoint.names("texts-"):
            checkpoint.put(name, {"texts": [vars(text) for text in texts]})
        checkpoint.record_progress(done, total, "texts")
        if checkpoint.is_due:
            checkpoint.save()

    def _satisfied_share(self) -> str:
        proposal = self.rounds.proposals[self.rounds.current]
        weight = proposal.weight()
        return f"{(weight > 0).mean():.0%} satisfy the controls" if len(weight) else ""

    def _refuse_endless(self, rounds: Rounds, tries: int) -> None:
        """Give up on texts that must end, but hardly ever do."""
        min_tries, min_ended_share = 1000, 0.01
        problem = rounds.problems[0]
        if problem.ended is None or tries < min_tries or not rounds.proposals[0].is_plain:
            return
        ended = sum(int(batch.ended.sum()) for parts in rounds.proposals[0].batches.values() for batch in parts)
        if ended < min_ended_share * rounds.proposals[0].count() and problem.normalised:
            raise NoStartError(
                f"{ended} of {tries} texts ended within {problem.length} tokens",
                remedy="raise max_tokens, give a stop string, or use finish='any'",
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
                [index],
                one.tries.tokens[row].to(target.embeddings.device),
                one.tries.log_prob[row],
                one.tries.log_target[row],
                one.prompt,
            )
            if self.weighted:
                text = replace(text, log_weight=float(one.tries.log_weight[one.row]))
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
