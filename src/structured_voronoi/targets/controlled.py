"""A language model under control: p(m) ∝ p_LM(m | prompt) · Π_k p(t_k | m)^weight_k."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Control, Redrawn, SamplingError
from structured_voronoi.targets.language_model import LanguageModel

PENALTY = -4.0
"""What an impossible text costs while a start is looked for."""


class Controlled:
    """Any number of controls, each with its weight γ.

    Guidance comes from the language model and from the controls that have a gradient; the others are sampled exactly
    all the same, they just do not steer.
    """

    _least = -math.inf
    normalised = False
    """Controls look at the whole text: ancestral draws are not the truth."""

    def __init__(self, model: LanguageModel, controls: Mapping[Control, float]) -> None:
        if not controls:
            raise SamplingError("no control was given; sample the language model itself, or add a control")
        for control, weight in controls.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
                raise SamplingError(f"the weight of {control.name} is {weight!r}; give a number ≥ 0, for example 1.0")
        self.model = model
        self.controls: dict[Control, float] = {
            control.bind(model) if hasattr(control, "bind") else control: float(weight)
            for control, weight in controls.items()
        }
        names = [control.name for control in self.controls]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise SamplingError(f"two controls are called {twice.pop()!r}; leave one out, or give it another name")
        self.embeddings, self.length, self.allowed = model.embeddings, model.length, model.allowed
        self.tokenizer, self.decode = model.tokenizer, model.decode
        self.conditionals, self.token_log_probs = model.conditionals, model.token_log_probs

    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        return self.model.log_prob(tokens) + self._weighed(tokens)

    def redraw(
        self, tokens: Int[Tensor, "chain n"], start: int, stop: int, levels: Float[Tensor, "chain count"]
    ) -> Redrawn:
        """As the language model does; the controls stand on the right."""
        found = self.model.redraw(tokens, start, stop, levels)
        return found._replace(right=found.right + self._weighed(found.tokens))

    def log_prob_and_guide(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        return self._steered(tokens, self.model.log_prob_and_guide, "log_prob_and_guide")

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        return self._steered(tokens, self.model.log_prob_and_grad, "log_prob_and_grad")

    def softened(self) -> Self:
        """The same with scores that are never lower than a penalty: a way to texts that satisfy hard constraints."""
        soft = copy.copy(self)
        soft._least = PENALTY
        return soft

    def control_log_probs(self, tokens: Int[Tensor, "chain n"]) -> dict[Control, Float[Tensor, " chain"]]:
        """log p(t_k | m) of every control, without its weight."""
        texts = self.texts(tokens)
        return {control: control.log_prob(tokens, texts) for control in self.controls}

    def texts(self, tokens: Int[Tensor, "chain n"]) -> list[str]:
        """What the controls read: the drawn tokens alone, decoded."""
        return [self.decode(row) for row in tokens]

    def _weighed(self, tokens: Tensor) -> Float[Tensor, " chain"]:
        """Σ_k weight_k log p(t_k | m)."""
        texts = self.texts(tokens)
        total = self.embeddings.new_zeros(len(tokens), dtype=torch.float64)
        for control, weight in self.controls.items():
            if weight:  # 0 · (-inf) is no number
                scores = _checked(control, control.log_prob(tokens, texts), total)
                total = total + weight * scores.clamp(min=self._least)
        return total

    def _steered(
        self, tokens: Tensor, of_model: Callable[[Tensor], tuple[Tensor, Tensor]], name: str
    ) -> tuple[Tensor, Tensor]:
        total, field = of_model(tokens)
        total, texts = total.double(), self.texts(tokens)
        for control, weight in self.controls.items():
            if not weight:
                continue
            steering: Any = getattr(control, name, None)
            if steering is None:
                found = control.log_prob(tokens, texts)
            else:
                found, own = steering(tokens, texts)
                field = field + weight * own.to(field)
            total = total + weight * _checked(control, found, total)
        return total, field


def _checked(control: Control, scores: object, like: Float[Tensor, " chain"]) -> Float[Tensor, " chain"]:
    """One number for each text, or an error that names the control."""
    if not isinstance(scores, Tensor) or scores.shape != like.shape:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise SamplingError(
            f"the control {control.name} scores {len(like)} texts with {found}; "
            f"it must return a tensor of shape {tuple(like.shape)}"
        )
    return scores.to(like)
