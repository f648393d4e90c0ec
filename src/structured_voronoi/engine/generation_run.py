"""A run that draws texts, by rejection that learns or by Markov chains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.diagnostics.checks import DiagnosticWarning
from structured_voronoi.diagnostics.diagnosis import Diagnosis
from structured_voronoi.engine.accepted_texts import AcceptedTexts
from structured_voronoi.engine.checkpoint import Checkpoint
from structured_voronoi.engine.plan import choose_sampler
from structured_voronoi.engine.request import Request
from structured_voronoi.engine.run_checkpoint import open_checkpoint
from structured_voronoi.engine.texts import Text
from structured_voronoi.metrics.probability import Probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.registry import find_sampler
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.text import TextTarget

if TYPE_CHECKING:
    from structured_voronoi.engine.text_chains import Observer

KIND = "texts"
"""Kind of these runs in checkpoints."""


class GenerationRun:
    """A run that draws the texts of a request. Iterate over `batches`, then read the other attributes."""

    def __init__(self, request: Request, observer: Observer | None = None) -> None:
        self.request, self.observer = request, observer
        self.probability: list[Probability] = []
        self.error_bound: list[float] = []
        self.evaluations = 0
        self.sampler = ""
        self.reason = ""
        """Why this sampler was chosen, if that is not obvious."""
        self.status = ""
        """What was drawn and at what cost, in one line."""
        self.warnings: list[DiagnosticWarning] = []
        self._finished: dict[str, int] = {"stop": 0, "length": 0}

    def batches(self) -> Generator[list[Text]]:
        """The texts as they are accepted; all prompts are checked before the first text is drawn."""
        request = self.request
        with contextlib.ExitStack() as stack:
            checkpoint = stack.enter_context(open_checkpoint(request.checkpoint, request.resume, request.workers, KIND))
            targets = request.targets()
            self.sampler, reason = choose_sampler(targets[0], request.sampler)
            self.reason = reason or ""
            independent = find_sampler(self.sampler).independent
            if not independent:
                _refuse_growth(request, checkpoint)
            checkpoint.begin(KIND, bind(targets[0]), request.description(), growing="n")
            if checkpoint.changed_versions:
                self.warnings.append(
                    DiagnosticWarning(
                        "changed-versions",
                        f"the run was begun with {checkpoint.changed_versions}",
                        "further texts may differ in the last bits",
                    )
                )
            if request.weighted and self.sampler not in ("adaptive", "rejection"):
                raise SamplingError(
                    "weighted texts need controls with a bound", remedy="leave out weighted, or add a control"
                )
            draw = self._draw_by_engine if independent else self._draw_by_chains
            for texts in draw(targets, checkpoint):
                for text in texts:
                    self._finished[text.finish_reason] += 1
                yield texts
        self._warn_of_cut_texts()

    def diagnosis(self) -> Diagnosis:
        """The status and the warnings of the run."""
        return Diagnosis(run=self.status, warnings=list(self.warnings))

    def _draw_by_engine(
        self, targets: Sequence[TextTarget | ControlledTarget], checkpoint: Checkpoint
    ) -> Iterator[list[Text]]:
        """Independent texts, by rejection that learns where it may."""
        request = self.request
        if self.observer is not None:
            self.observer.planned(targets[0], self.sampler, 1)
        learns = request.settings.learns and self.sampler == "adaptive"
        run = AcceptedTexts(
            targets,
            request.n,
            request.seed,
            request.tolerance,
            request.weighted,
            replace(request.settings, learns=learns),
            request.time_limit,
            checkpoint,
            partial(Request.targets, replace(request, checkpoint=None, workers=1, progress=False)),
            request.progress,
        )
        yield from run.draw()
        outcome = run.outcome()
        self.probability, self.error_bound = outcome.probability, outcome.error_bound
        self.evaluations = outcome.evaluations
        self.status = self._engine_status(outcome.stopped_early)
        self._warn_of_error_bounds()

    def _engine_status(self, stopped_early: bool) -> str:
        """What was drawn, at what cost, and how probable the controls are."""
        request, count = self.request, sum(self._finished.values())
        kind = "weighted text" if request.weighted else "text"
        parts = [f"{count} {kind}{'' if count == 1 else 's'}", f"{self.evaluations:,} proposals"]
        if request.controls and self.probability:
            if len(self.probability) == 1:
                parts.append(f"P(controls) = {self.probability[0]}")
            if request.tolerance and not request.weighted:
                parts.append(f"error bound {max(self.error_bound):.2g}")
        if stopped_early:
            parts.append(f"stopped after {request.time_limit:g} s")
        return "; ".join(parts)

    def _warn_of_error_bounds(self) -> None:
        request = self.request
        for prompt, bound in enumerate(self.error_bound):
            if bound > max(2 * request.tolerance, 0.5 / math.sqrt(request.n)):  # half the standard error of a share
                where = f"prompt {prompt + 1}: " if len(self.error_bound) > 1 else ""
                self.warnings.append(
                    DiagnosticWarning(
                        "error-bound",
                        f"{where}the error bound is {bound:.2g}",
                        "draw more texts, or use sampler='rejection'",
                        arguments={"sampler": "rejection"},
                    )
                )

    def _warn_of_cut_texts(self) -> None:
        request, cut = self.request, self._finished["length"]
        texts = sum(self._finished.values())
        if request.finish == "any" and not request.suffix and cut > texts / 2:
            self.warnings.append(
                DiagnosticWarning(
                    "cut-texts",
                    f"{cut} of {texts} texts were cut at {request.max_tokens} tokens",
                    f"use max_tokens={2 * request.max_tokens}, or finish='stop' for texts that end by themselves",
                    arguments={"max_tokens": 2 * request.max_tokens},
                )
            )

    def _draw_by_chains(
        self, targets: Sequence[TextTarget | ControlledTarget], checkpoint: Checkpoint
    ) -> Iterator[list[Text]]:
        """Texts from Markov chains, prompt by prompt."""
        from structured_voronoi.engine.text_chains import TextChains, chain_status, chain_warnings
        from structured_voronoi.engine.worker_texts import distribute_texts

        request, status = self.request, list[str]()
        plans = [request.plan(targets[0], checkpoint, 0)]
        with distribute_texts(checkpoint, request, targets, plans[0]):
            for number, target in enumerate(targets):
                plan = plans[0] if not number else request.plan(target, checkpoint, number)
                if self.observer is not None:
                    self.observer.planned(target, plan.name, plan.steps)
                label = f"prompt {number + 1} of {len(targets)}: " if len(targets) > 1 else ""
                chains = TextChains(
                    target,
                    plan,
                    request.seed,
                    request.start,
                    checkpoint,
                    self.observer,
                    prompt_number=number,
                    first_chain=number * request.n,
                    all_texts=len(targets) * request.n,
                )
                batches = []
                for batch in chains.draw(request.n, request.progress and not checkpoint.has_workers, label):
                    batches.append(batch)
                    yield batch.texts
                self.evaluations += sum(int(batch.info.evaluations.sum()) for batch in batches)
                status.append(f"{label}{chain_status(batches, plan, target)}")
                self.status = "; ".join(status)
                self.warnings += [
                    replace(warning, message=f"{label}{warning.message}") for warning in chain_warnings(batches, plan)
                ]


def _refuse_growth(request: Request, checkpoint: Checkpoint) -> None:
    """Chains of several prompts cannot be extended: the number of a chain depends on ``n``."""
    before = checkpoint.settings.get("n", request.n)
    if len(request.prompts) > 1 and request.n > before:
        raise SamplingError(
            f"{checkpoint.folder} holds a run of {before} texts for each of {len(request.prompts)} prompts, which "
            "cannot be extended",
            argument="n",
            remedy=f"use n={before}, or another folder",
        )
