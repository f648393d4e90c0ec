"""Texts under control: p(m) ∝ p_LM(m | prompt) · Π_k p(t_k | m)^weight_k."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.controls.texts import as_control
from structured_voronoi.core.contracts import (
    BOUND_TOLERANCE,
    CONTROL_ABILITIES,
    Choose,
    Control,
    Pattern,
    Redrawn,
    SoftReading,
)
from structured_voronoi.core.errors import NoBoundError, SamplingError
from structured_voronoi.core.streams import widened
from structured_voronoi.core.user_code import CONTROL_SECONDS, user_code
from structured_voronoi.core.validation import check_positive, refuse_misspelt
from structured_voronoi.targets.ending import Ending
from structured_voronoi.targets.text import TextTarget

if TYPE_CHECKING:
    from structured_voronoi.targets.language_model import Controls

PENALTY = -4.0
"""Lowest score of a control while starts are searched."""

Steering = Callable[[Tensor, list[str]], tuple[Tensor, Tensor]]
SoftSteering = Callable[[Tensor], tuple[Tensor, Tensor]]


class _Weighted(NamedTuple):
    """A control as the target uses it: every optional ability looked up once."""

    control: Control
    weight: float
    bound: float
    guide: Steering | None
    gradient: Steering | None
    soft_gradient: SoftSteering | None
    pattern: Pattern | None


class ControlledTarget:
    """Texts of a language model under controls, each with its weight; made by `LanguageModel.target`.

    The language model and the controls that have a gradient guide samplers; the others are sampled exactly all the
    same.

    Parameters
    ----------
    text
        The texts without controls.
    controls
        Controls such as ``sv.keyword("river")``, functions of the text, or any object with a ``name`` and
        ``log_prob(tokens, texts)``.
    timeout
        Maximum number of seconds for one call of a control, where calls can be interrupted; None for no limit.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.load("bundled").target("Near the", [sv.keyword("river")], max_tokens=8)
    >>> [control.name for control in target.controls]
    ['keyword=river']
    """

    masks_itself = True
    reorders = True
    normalised = False
    """Controls read the whole text, so that ancestral sampling is not exact."""
    _lowest_score = -math.inf

    def __init__(self, text: TextTarget, controls: Controls, timeout: float | None = CONTROL_SECONDS) -> None:
        check_positive(timeout=timeout)
        self.text, self.timeout, self._asked = text, timeout, check_controls(controls)
        if not self._asked:
            raise SamplingError("no control was given", remedy="sample the texts themselves, or add a control")
        self._weighted = []
        for control in self._asked:
            with user_code(f"the control {type(control).__name__}", "correct it, or leave it out", timeout):
                self._weighted.append(_bind_control(control, text))
        self.controls: list[Control] = [weighted.control for weighted in self._weighted]
        """The controls, bound to the language model."""
        names = [control.name for control in self.controls]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise SamplingError(
                f"two controls have the name {repeated.pop()!r}", remedy="leave one out, or give it another name"
            )
        self.model, self.tokenizer, self.prompt = text.model, text.tokenizer, text.prompt
        self.embeddings, self.length, self.allowed = text.embeddings, text.length, text.allowed
        self.decode, self.stop, self.system = text.decode, text.stop, text.system
        self.conditionals, self.token_log_probs = text.conditionals, text.token_log_probs
        self.padding, self.ended = text.padding, text.ended

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each control, by name."""
        return {weighted.control.name: weighted.weight for weighted in self._weighted}

    def recipe(self) -> Any:
        """How another process makes the same target."""
        if type(self) is not ControlledTarget:
            return NotImplemented
        return ControlledTarget, (self.text, self._asked, self.timeout)

    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        return self.text.log_prob(tokens) + self._weighted_scores(tokens)

    def redraw(self, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose) -> Redrawn:
        """The language model's redraw; the controls count as part of ``log_rest``."""
        redrawn = self.text.redraw(tokens, start, stop, choose)
        return redrawn._replace(log_rest=redrawn.log_rest + self._weighted_scores(redrawn.tokens))

    def log_prob_and_guide(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        return self._steer(tokens, self.text.log_prob_and_guide, [weighted.guide for weighted in self._weighted])

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        return self._steer(tokens, self.text.log_prob_and_grad, [weighted.gradient for weighted in self._weighted])

    def soft_reading(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> SoftReading:
        """The language model's reading; the controls that can read mixtures of tokens count as part of the rest."""
        log_probs, log_rest, slope = self.text.soft_reading(weights, candidates)
        with torch.enable_grad():
            weights = weights.detach().requires_grad_()
            embeds = self.text.soft_embeds(weights, candidates)
        total, at_embeds = widened(log_rest), torch.zeros_like(embeds)
        for weighted in self._weighted:
            if weighted.weight and weighted.soft_gradient is not None:
                with self._asking(weighted.control):
                    scores, gradient = weighted.soft_gradient(embeds.detach())
                _check_gradient(weighted.control, gradient, embeds)
                total = total + weighted.weight * _check_scores(weighted.control, scores, total)
                at_embeds = at_embeds + weighted.weight * gradient.detach().to(at_embeds)
        (at_weights,) = torch.autograd.grad(embeds, weights, at_embeds)
        return SoftReading(log_probs, total, slope + at_weights.to(slope))

    @property
    def not_softly_read(self) -> list[str]:
        """The names of the controls that cannot read mixtures of tokens, so that they do not steer COLD."""
        return [
            weighted.control.name for weighted in self._weighted if weighted.weight and weighted.soft_gradient is None
        ]

    def relaxed_target(self) -> Self:
        """The same target with scores of at least PENALTY, along which texts that meet hard constraints are found."""
        relaxed = copy.copy(self)
        relaxed._lowest_score = PENALTY
        return relaxed

    @property
    def log_bound(self) -> float:
        """An upper bound of log p(m) minus the language model's; an error names a control that has no bound."""
        total = 0.0
        for control, weight, bound, *_ in self._weighted:
            if weight and not math.isfinite(bound):
                raise NoBoundError(
                    f"control {control.name!r} has the bound {bound}, so that rejection is impossible",
                    remedy="declare a `bound` that its scores never exceed or use svs+refresh",
                )
            total += weight * bound if weight else 0.0
        return total

    def log_factors(self, tokens: Int[Tensor, "chain n"]) -> dict[str, Float[Tensor, " chain"]]:
        """weight_k (score_k - bound_k) of every control, and the factors of the model."""
        texts, like = self.decode_all(tokens), widened(self.embeddings.new_zeros(len(tokens)))
        factors = {
            control.name: weight * (self._scores(control, tokens, texts, like) - bound)
            for control, weight, bound, *_ in self._weighted
            if weight
        }
        return factors | self.text.log_factors(tokens)

    @property
    def patterns(self) -> dict[str, Pattern | Ending]:
        """The patterns of the controls that are nothing else, and the model's."""
        return dict(self.text.patterns) | {
            weighted.control.name: weighted.pattern
            for weighted in self._weighted
            if weighted.weight and weighted.pattern is not None
        }

    def why_above_bound(self, tokens: Int[Tensor, "chain n"]) -> str:
        """Which control gives one of these texts a score above its bound."""
        scores = self.control_log_probs(tokens)
        for control, _, bound, *_ in self._weighted:
            highest = float(scores[control.name].max())
            if highest > bound + BOUND_TOLERANCE:
                return f"control {control.name!r} scored {highest:.6g}, above its bound of {bound:.6g}"
        return ""

    def why_impossible(self, tokens: Int[Tensor, "chain n"]) -> str:
        """Which controls find these texts impossible, and how many of them."""
        scores = self.control_log_probs(tokens)
        shares = {name: float((~score.isfinite()).float().mean()) for name, score in scores.items()}
        reasons = [f"{name} is violated by {share:.0%} of the last ones" for name, share in shares.items() if share]
        return ", ".join(filter(None, [self.text.why_impossible(tokens), *reasons]))

    def control_log_probs(self, tokens: Int[Tensor, "chain n"]) -> dict[str, Float[Tensor, " chain"]]:
        """log p(t_k | m) of every control by name, without its weight."""
        texts, like = self.decode_all(tokens), widened(self.embeddings.new_zeros(len(tokens)))
        return {control.name: self._scores(control, tokens, texts, like) for control in self.controls}

    def decode_all(self, tokens: Int[Tensor, "chain n"]) -> list[str]:
        """The texts that the controls read: the drawn tokens alone, without prompt and suffix."""
        return [self.decode(row) for row in tokens]

    def _weighted_scores(self, tokens: Tensor) -> Float[Tensor, " chain"]:
        """Σ_k weight_k log p(t_k | m)."""
        texts = self.decode_all(tokens)
        total = widened(self.embeddings.new_zeros(len(tokens)))
        for control, weight, *_ in self._weighted:
            if weight:  # 0 · (-inf) is no number
                scores = self._scores(control, tokens, texts, total)
                total = total + weight * scores.clamp(min=self._lowest_score)
        return total

    def _scores(
        self, control: Control, tokens: Tensor, texts: list[str], like: Float[Tensor, " chain"]
    ) -> Float[Tensor, " chain"]:
        """What a control says of these texts."""
        with self._asking(control):
            scores = control.log_prob(tokens, texts)
        return _check_scores(control, scores, like)

    def _asking(self, control: Control) -> AbstractContextManager[None]:
        return user_code(f"the control {control.name}", "make it answer for every text", self.timeout)

    def _steer(
        self, tokens: Tensor, steer_model: Callable[[Tensor], tuple[Tensor, Tensor]], steering: list[Steering | None]
    ) -> tuple[Tensor, Tensor]:
        total, field = steer_model(tokens)
        total, texts = widened(total), self.decode_all(tokens)
        for (control, weight, *_), steer in zip(self._weighted, steering, strict=True):
            if not weight:
                continue
            if steer is None:
                total = total + weight * self._scores(control, tokens, texts, total)
                continue
            with self._asking(control):
                scores, slope = steer(tokens, texts)
            _check_gradient(control, slope, field)
            field = field + weight * slope.detach().to(field)
            total = total + weight * _check_scores(control, scores, total)
        return total, field


def check_controls(controls: Controls) -> list[Control]:
    """The controls as a list, with functions of the text as predicates; an error for anything else."""
    if isinstance(controls, str | bytes | Mapping) or not isinstance(controls, Collection):
        raise SamplingError(
            f"controls = {controls!r:.200} is not a list of controls",
            remedy="write controls=[sv.keyword('river')]; weights belong to the controls: "
            "sv.label('food', 'Italian', weight=1.5)",
        )
    found: list[Control] = []
    for given in controls:
        with user_code(f"the control {type(given).__name__}", "correct it, or leave it out"):
            control = as_control(given)
            is_control = isinstance(control, Control)
        if not is_control:
            raise SamplingError(
                f"{given!r:.200} is not a control",
                remedy="give one such as sv.keyword('river'), a function of the text, or an object with a `name` and "
                "`log_prob(tokens, texts)`",
            )
        if control is not given:  # a function; several lambdas have the same name
            control = _unused_name(control, {other.name for other in found})
        found.append(control)
    return found


def _unused_name(control: Any, used: set[str]) -> Any:
    """A predicate made of a function, with a number if another one has its name."""
    if control.name not in used:
        return control
    return replace(control, name=next(name for k in itertools.count(2) if (name := f"{control.name} {k}") not in used))


def _bind_control(control: Control, model: TextTarget) -> _Weighted:
    if not isinstance(control.name, str) or not control.name:
        raise SamplingError(
            f"the name of a control, a {type(control).__name__}, is {control.name!r}",
            remedy="give it a text that tells it from others",
        )
    weight = getattr(control, "weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise SamplingError(
            f"the weight of {control.name} is {weight!r}", remedy="give a number of at least 0, for example 1.0"
        )
    refuse_misspelt(control, CONTROL_ABILITIES, "control")
    bind: Any = getattr(control, "bind", None)
    bound_control: Any = control if bind is None else bind(model)
    if not isinstance(bound_control, Control):
        raise SamplingError(f"`bind` of the control {control.name} gave {bound_control!r}, which is not a control")
    return _Weighted(
        bound_control,
        float(weight),
        float(getattr(bound_control, "bound", None) or 0.0),
        getattr(bound_control, "log_prob_and_guide", None),
        getattr(bound_control, "log_prob_and_grad", None),
        getattr(bound_control, "soft_log_prob_and_grad", None),
        getattr(bound_control, "pattern", None),
    )


def _check_scores(control: Control, scores: object, like: Float[Tensor, " chain"]) -> Float[Tensor, " chain"]:
    """The scores, one for each text, in the type of ``like``; an error names a control that gives anything else."""
    if not isinstance(scores, Tensor) or scores.shape != like.shape or scores.is_complex() or scores.is_meta:
        received = f"{tuple(scores.shape)} {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
        raise SamplingError(
            f"the control {control.name} scores {len(like)} texts with {received}",
            remedy=f"it must return a tensor of real numbers of shape {tuple(like.shape)}",
        )
    return scores.detach().to(like)


def _check_gradient(control: Control, gradient: object, like: Float[Tensor, "chain n d"]) -> None:
    """Refuse a control whose gradient is none, or would be broadcast."""
    if not isinstance(gradient, Tensor) or gradient.shape != like.shape:
        received = f"shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else type(gradient).__name__
        raise SamplingError(
            f"the gradient of the control {control.name} has {received}",
            remedy=f"it must be {tuple(like.shape)}",
        )
