"""The room of texts: what `svs sample` does, told while it happens."""

from __future__ import annotations

import math
from functools import lru_cache
from time import monotonic
from typing import Any

from torch import Tensor

from structured_voronoi.contracts import Info, is_independent
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.errors import SamplingError
from structured_voronoi.progress import heard_by
from structured_voronoi.run.generation import Request, fulfil, read_controls
from structured_voronoi.run.presets import Plan, written_ending
from structured_voronoi.run.probability import probability
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.streams import widened
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel
from structured_voronoi.web.forms import ControlForm, TextForm
from structured_voronoi.web.playground import Say

SECONDS = 0.2
"""Chains that move are shown so often; the work must not wait for the telling."""
MODELS_IN_MEMORY = 2
WEIGHTED_TEXTS = (256, 1024)
"""By which the probability of the controls is estimated, after guided texts: more, where few cannot be trusted."""


def draw_texts(form: TextForm, say: Say) -> None:
    """Texts, and on the way: what is being done, how far it has come, and the chains as they move."""
    say({"kind": "phase", "words": "reading the controls and loading the model"})
    request = Request(
        _load(form.model),
        [form.prompt],
        read_controls([control.written for control in form.controls], "cpu"),
        form.n,
        form.length,
        **written_ending(form.ends, list(form.stop)),
        chat=form.chat,
        system=form.system,
        sampler=form.sampler,
        warmup=form.warmup,
        seed=form.seed,
    )
    watcher = _Watcher(form.n, say)
    say({"kind": "phase", "words": "choosing a sampler on a pilot" if form.sampler == "auto" else "setting out"})

    def tell(words: str) -> None:
        say({"kind": "said", "words": words})

    with heard_by(watcher.hear):
        for batch in fulfil(request, tell, tell, watcher):
            say({"kind": "texts", "texts": [text.line() for text in batch.texts]})
        watcher.tell_probability(form.seed)


def check_control(form: ControlForm, say: Say) -> None:
    """Whether a control can be used: an error says why not."""
    parse_control(form.written)
    say({"kind": "checked"})


@lru_cache(maxsize=MODELS_IN_MEMORY)
def _load(name: str) -> LanguageModel:
    return LanguageModel.load(name)


class _Watcher:
    """Looks on while texts are drawn, and tells the browser, though not of every step."""

    def __init__(self, count: int, say: Say) -> None:
        self.count, self.say = count, say
        self.target: LanguageModel | Controlled | None = None
        self.plan: Plan | None = None
        self.is_drawing = False
        self.began = self.told = -math.inf
        self.batch, self.step = range(0), 0

    def hear(self, label: str, done: int, total: int, note: str) -> None:
        """Of the pilot, of the probability, and of what takes long within a step; the steps of texts are told by
        `moved`."""
        if note:
            if monotonic() - self.told > SECONDS:
                self.told = monotonic()
                self.say({"kind": "note", "words": note})
            return
        if self.is_drawing:
            return
        if done == 0:
            self.began = monotonic()
        if done in (0, total) or monotonic() - self.told > SECONDS:
            self.told = monotonic()
            self._tell_progress(label, min(1.0, done / max(1, total)))

    def planned(self, target: LanguageModel | Controlled, plan: Plan) -> None:
        self.target, self.plan, self.is_drawing, self.began = target, plan, True, monotonic()
        names = [control.name for control in target.controls] if isinstance(target, Controlled) else []
        known = {"sampler": plan.name, "is_exact": plan.is_exact, "steps": plan.steps, "controls": names}
        self.say({"kind": "planned", **known})

    def moved(self, target: LanguageModel | Controlled, chains: range, tokens: Tensor, info: Info) -> None:
        assert self.plan is not None
        if chains != self.batch:
            self.batch, self.step = chains, 0
        self.step += 1
        steps = self.plan.steps
        if is_independent(self.plan.sampler) or (self.step > 1 and monotonic() - self.told < SECONDS):
            return
        self.told = monotonic()
        self._tell_progress("drawing texts", (chains.start * steps + self.step * len(chains)) / (self.count * steps))
        scores = target.control_log_probs(tokens) if isinstance(target, Controlled) else {}
        self.say(
            {
                "kind": "moving",
                "step": self.step,
                "steps": steps,
                "first": chains.start,
                "energies": _numbers(info.energy),
                "controls": {control.name: _numbers(widened(score).exp()) for control, score in scores.items()},
                "pieces": [_pieces(target, row) for row in tokens],
            }
        )

    def tell_probability(self, seed: int) -> None:
        """How probable what was asked for is, where guided sampling has learnt it."""
        self.is_drawing = False
        if self.plan is None or self.target is None or not isinstance(self.plan.sampler, Guided):
            return
        for texts in WEIGHTED_TEXTS:
            try:
                found = probability(self.target, texts, seed, self.plan.sampler.lookahead)
            except SamplingError as error:
                self.say({"kind": "said", "words": f"no probability of the controls: {error}"})
                return
            told = {"words": str(found), "effective_share": found.effective_share, "verdict": found.verdict}
            self.say({"kind": "probability", **told})
            if found.trusted:
                return

    def _tell_progress(self, label: str, share: float) -> None:
        """``left`` are seconds, once there is something to go by."""
        spent = monotonic() - self.began
        left = spent * (1 - share) / share if share > 0 and spent > SECONDS else None
        self.say({"kind": "progress", "label": label, "share": share, "left": left})


def _numbers(values: Tensor) -> list[float | None]:
    """As JSON has them: infinities are null."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _pieces(target: LanguageModel | Controlled, tokens: Tensor) -> list[str]:
    """The text of every token, up to the end."""
    model = target.model if isinstance(target, Controlled) else target
    length = int(model.content_lengths(tokens[None])[0])
    return [_piece(target.tokenizer, token) for token in tokens[:length].tolist()]


@lru_cache(maxsize=100_000)
def _piece(tokenizer: Any, token: int) -> str:
    """What a token adds to a text: some tokenizers drop the space at the beginning of all that they decode."""
    return str(tokenizer.decode([token, token]))[len(str(tokenizer.decode([token]))) :]
