"""Texts for the page: the same runs as `svs sample`, with progress and chains reported while they run."""

from __future__ import annotations

import math
from functools import lru_cache
from time import monotonic
from typing import Any

from torch import Tensor

from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.core.info import Info
from structured_voronoi.core.progress import Progress, report_progress_to
from structured_voronoi.core.streams import widened
from structured_voronoi.engine.generation_run import GenerationRun
from structured_voronoi.engine.request import Request
from structured_voronoi.samplers.registry import find_sampler
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.language_model import LanguageModel, load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.web.forms import ControlForm, TextForm
from structured_voronoi.web.playground import Report

REPORT_SECONDS = 0.2
"""Minimum time between two reports of progress."""
MAX_MODELS_IN_MEMORY = 2


def draw_texts(form: TextForm, report: Report) -> None:
    """Draw texts and report progress, the steps of chains, and the texts as they are accepted."""
    report({"kind": "stage", "stage": "loading"})
    request = Request(
        _load(form.model),
        [form.prompt],
        [parse_control(control.written) for control in form.controls],
        n=form.n,
        max_tokens=form.max_tokens,
        finish=form.finish,
        stop=form.stop,
        chat=form.chat,
        system=form.system,
        sampler=form.sampler,
        warmup=form.warmup,
        seed=form.seed,
    )
    observer = _PageObserver(form.n, report)
    report({"kind": "stage", "stage": "texts"})
    run = GenerationRun(request, observer)
    reason = ""
    with report_progress_to(observer.report_progress):
        for texts in run.batches():
            if run.reason and not reason:
                reason = run.reason
                report({"kind": "reason", "message": reason})
            report({"kind": "texts", "texts": [text.line() for text in texts]})
    report({"kind": "status", "message": run.status})
    for warning in run.warnings:
        report({"kind": "warning", "code": warning.code, "message": warning.message, "remedy": warning.remedy})
    if request.controls and run.probability:
        (estimate,) = run.probability
        report(
            {
                "kind": "probability",
                "estimate": str(estimate),
                "effective_share": estimate.effective_share,
                "verdict": estimate.verdict,
            }
        )


def check_control(form: ControlForm, report: Report) -> None:
    """Raise an error if a control cannot be used."""
    parse_control(form.written)
    report({"kind": "checked"})


@lru_cache(maxsize=MAX_MODELS_IN_MEMORY)
def _load(name: str) -> LanguageModel:
    return load(name)


class _PageObserver:
    """Reports the progress and the chains of a run, a few times per second."""

    def __init__(self, count: int, report: Report) -> None:
        self.count, self.report = count, report
        self.steps, self.is_chain = 1, False
        self.started = self.last_report = -math.inf
        self.batch, self.step = range(0), 0

    def report_progress(self, progress: Progress) -> None:
        """Report notes and, unless chains run, the share of the work that is done."""
        if progress.note:
            if monotonic() - self.last_report > REPORT_SECONDS:
                self.last_report = monotonic()
                self.report({"kind": "note", "message": progress.note})
            return
        if self.is_chain:
            return
        if progress.done == 0:
            self.started = monotonic()
        if progress.done in (0, progress.total) or monotonic() - self.last_report > REPORT_SECONDS:
            self.last_report = monotonic()
            self._report_share(progress.stage, min(1.0, progress.done / max(1, progress.total)))

    def planned(self, target: TextTarget | ControlledTarget, sampler: str, steps: int) -> None:
        entry = find_sampler(sampler)
        self.steps, self.is_chain, self.started = steps, not entry.independent, monotonic()
        names = [control.name for control in target.controls] if isinstance(target, ControlledTarget) else []
        plan = {"sampler": sampler, "is_exact": entry.exact, "steps": steps, "controls": names}
        self.report({"kind": "planned", **plan})

    def moved(self, target: TextTarget | ControlledTarget, chains: range, tokens: Tensor, info: Info) -> None:
        if chains != self.batch:
            self.batch, self.step = chains, 0
        self.step += 1
        steps = self.steps
        if self.step > 1 and monotonic() - self.last_report < REPORT_SECONDS:
            return
        self.last_report = monotonic()
        self._report_share("texts", (chains.start * steps + self.step * len(chains)) / (self.count * steps))
        scores = target.control_log_probs(tokens) if isinstance(target, ControlledTarget) else {}
        self.report(
            {
                "kind": "chains",
                "step": self.step,
                "steps": steps,
                "first": chains.start,
                "log_target": _numbers(-info.energy),
                "controls": {name: _numbers(widened(score).exp()) for name, score in scores.items()},
                "pieces": [_pieces(target, row) for row in tokens],
            }
        )

    def _report_share(self, stage: str, share: float) -> None:
        """Report the share of the work that is done and, after the first moments, the seconds left."""
        elapsed = monotonic() - self.started
        left = elapsed * (1 - share) / share if share > 0 and elapsed > REPORT_SECONDS else None
        self.report({"kind": "progress", "stage": stage, "share": share, "seconds_left": left})


def _numbers(values: Tensor) -> list[float | None]:
    """The values as JSON numbers; None where they are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _pieces(target: TextTarget | ControlledTarget, tokens: Tensor) -> list[str]:
    """The text of each token, up to the end of the text."""
    text = target.text if isinstance(target, ControlledTarget) else target
    length = int(text.content_lengths(tokens[None])[0])
    return [_piece(target.tokenizer, token) for token in tokens[:length].tolist()]


@lru_cache(maxsize=100_000)
def _piece(tokenizer: Any, token: int) -> str:
    """The text of a token inside a text: some tokenizers drop the leading space of what they decode."""
    return str(tokenizer.decode([token, token]))[len(str(tokenizer.decode([token]))) :]
