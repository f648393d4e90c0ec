"""The room of texts: what `svs sample` does, told while it happens."""

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
from structured_voronoi.web.playground import Say

SECONDS = 0.2
"""Chains that move are shown so often; the work must not wait for the telling."""
MODELS_IN_MEMORY = 2


def draw_texts(form: TextForm, say: Say) -> None:
    """Draw texts, and report progress, the moves of chains, and the texts as they are accepted."""
    say({"kind": "phase", "stage": "loading"})
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
    observer = _PageObserver(form.n, say)
    say({"kind": "phase", "stage": "texts"})
    run = GenerationRun(request, observer)
    with report_progress_to(observer.show_progress):
        for texts in run.batches():
            if run.reason:
                say({"kind": "said", "words": run.reason})
                run.reason = ""
            say({"kind": "texts", "texts": [text.line() for text in texts]})
    say({"kind": "said", "words": run.status})
    for warning in run.warnings:
        say({"kind": "said", "words": f"warning: {warning}"})
    if request.controls and run.probability:
        (found,) = run.probability
        share = found.effective_share
        say({"kind": "probability", "words": str(found), "effective_share": share, "verdict": found.verdict})


def check_control(form: ControlForm, say: Say) -> None:
    """Raise an error if a control cannot be used."""
    parse_control(form.written)
    say({"kind": "checked"})


@lru_cache(maxsize=MODELS_IN_MEMORY)
def _load(name: str) -> LanguageModel:
    return load(name)


class _PageObserver:
    """Reports to the page, a few times per second."""

    def __init__(self, count: int, say: Say) -> None:
        self.count, self.say = count, say
        self.steps, self.is_chain = 1, False
        self.began = self.told = -math.inf
        self.batch, self.step = range(0), 0

    def show_progress(self, progress: Progress) -> None:
        """Send progress of texts; `moved` sends the steps of chains."""
        if progress.note:
            if monotonic() - self.told > SECONDS:
                self.told = monotonic()
                self.say({"kind": "note", "words": progress.note})
            return
        if self.is_chain:
            return
        if progress.done == 0:
            self.began = monotonic()
        if progress.done in (0, progress.total) or monotonic() - self.told > SECONDS:
            self.told = monotonic()
            self._tell_progress(progress.stage, min(1.0, progress.done / max(1, progress.total)))

    def planned(self, target: TextTarget | ControlledTarget, sampler: str, steps: int) -> None:
        self.steps, self.is_chain, self.began = steps, not find_sampler(sampler).independent, monotonic()
        names = [control.name for control in target.controls] if isinstance(target, ControlledTarget) else []
        is_exact = find_sampler(sampler).exact
        known = {"sampler": sampler, "is_exact": is_exact, "steps": steps, "controls": names}
        self.say({"kind": "planned", **known})

    def moved(self, target: TextTarget | ControlledTarget, chains: range, tokens: Tensor, info: Info) -> None:
        if chains != self.batch:
            self.batch, self.step = chains, 0
        self.step += 1
        steps = self.steps
        if self.step > 1 and monotonic() - self.told < SECONDS:
            return
        self.told = monotonic()
        self._tell_progress("texts", (chains.start * steps + self.step * len(chains)) / (self.count * steps))
        scores = target.control_log_probs(tokens) if isinstance(target, ControlledTarget) else {}
        self.say(
            {
                "kind": "moving",
                "step": self.step,
                "steps": steps,
                "first": chains.start,
                "log_probs": _numbers(-info.energy),
                "controls": {name: _numbers(widened(score).exp()) for name, score in scores.items()},
                "pieces": [_pieces(target, row) for row in tokens],
            }
        )

    def _tell_progress(self, stage: str, share: float) -> None:
        """``left`` are seconds, once there is something to go by."""
        spent = monotonic() - self.began
        left = spent * (1 - share) / share if share > 0 and spent > SECONDS else None
        self.say({"kind": "progress", "stage": stage, "share": share, "left": left})


def _numbers(values: Tensor) -> list[float | None]:
    """As JSON has them: infinities are null."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _pieces(target: TextTarget | ControlledTarget, tokens: Tensor) -> list[str]:
    """The text of every token, up to the end."""
    text = target.text if isinstance(target, ControlledTarget) else target
    length = int(text.content_lengths(tokens[None])[0])
    return [_piece(target.tokenizer, token) for token in tokens[:length].tolist()]


@lru_cache(maxsize=100_000)
def _piece(tokenizer: Any, token: int) -> str:
    """What a token adds to a text: some tokenizers drop the space at the beginning of all that they decode."""
    return str(tokenizer.decode([token, token]))[len(str(tokenizer.decode([token]))) :]
