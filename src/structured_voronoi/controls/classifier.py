"""A classifier that shares the language model's tokens: log p(label | text), with a gradient at the embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from structured_voronoi.controls import BUNDLED_CONTROLS, bundled_controls
from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.validation import is_folder, usable_device
from structured_voronoi.models.classifiers import (
    classifier_inputs,
    first_token,
    identity_difference,
    load_classifier,
    model_identity,
)
from structured_voronoi.models.loading import Loaded

if TYPE_CHECKING:
    from structured_voronoi.targets.text import TextTarget


class Classifier:
    """One label of a classifier. A target binds it to its language model, whose tokens it must share.

    A ``light`` classifier steers in forward guidance too, as its gradient needs no backward pass through the language
    model; a ``probe`` steers in full guidance only.
    """

    weight: float = 1.0
    """Exponent of the control."""

    def __init__(self, network: nn.Module, config: dict[str, Any], name: str, label: str) -> None:
        labels: list[str] = config["labels"]
        if label not in labels:
            raise SamplingError(
                f"the classifier {name} has no label {label!r}",
                remedy=did_you_mean(label, labels),
            )
        self.network, self.config, self.label = network, config, label
        self.name = f"{name}={label}"
        self.kind: str = config["classifier"]
        self._label_index = labels.index(label)
        self._lm: TextTarget | None = None

    def __invert__(self) -> Self:
        raise SamplingError(
            f"the control {self.name} is a label, which has no opposite", remedy="use another label of the classifier"
        )

    @classmethod
    def load(cls, name: str | Path, label: str, device: str = "cpu") -> Self:
        """A bundled classifier by name, or a folder written by `svs train classifier`."""
        if str(name) in bundled_controls():
            folder = BUNDLED_CONTROLS / name
        elif is_folder(name):
            folder = Path(name)
        else:
            raise SamplingError(
                f"there is no classifier and no folder {str(name)!r}",
                remedy=did_you_mean(str(name), bundled_controls()),
            )
        network, config = load_classifier(folder)
        return cls(network.to(usable_device(device)), config, folder.resolve().name, label)

    def bind(self, text: TextTarget) -> Self:
        """A copy that reads this language model's embeddings; an error if it was trained with another one's."""
        reason = identity_difference(self.config["model"], model_identity(Loaded(text.network, text.tokenizer)))
        if reason:
            raise SamplingError(
                f"the classifier {self.name} was trained with another language model",
                cause=reason,
                remedy="train one for this model with `svs train classifier --model …`",
            )
        bound = copy.copy(self)
        bound._lm = text
        dtype = torch.float64 if text.embeddings.dtype == torch.float64 else torch.float32
        bound.network = copy.deepcopy(self.network).to(device=text.device, dtype=dtype)
        if self.kind == "light":
            bound.log_prob_and_guide = bound.log_prob_and_grad  # type: ignore[attr-defined]
        return bound

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]:
        lm = self._model()
        return self._score(lm, lm.network.get_input_embeddings()(tokens), lm.content_lengths(tokens))

    def log_prob_and_grad(
        self, tokens: Int[Tensor, "chain n"], texts: list[str]
    ) -> tuple[Float[Tensor, " chain"], Float[Tensor, "chain n d"]]:
        """The gradient at the input embeddings, brought into the output table's space where the two differ."""
        lm = self._model()
        embeds = lm.network.get_input_embeddings()(tokens)
        log_prob, gradient = self.soft_log_prob_and_grad(embeds, lm.content_lengths(tokens))
        return log_prob, gradient if lm.input_map is None else gradient @ lm.input_map.T

    def soft_log_prob_and_grad(
        self, embeds: Float[Tensor, "chain n d"], lengths: Int[Tensor, " chain"] | None = None
    ) -> tuple[Float[Tensor, " chain"], Float[Tensor, "chain n d"]]:
        """The score of input embeddings, which may be mixtures of tokens', and its gradient there."""
        with torch.enable_grad():
            embeds = embeds.detach().requires_grad_()
            log_prob = self._score(self._model(), embeds, lengths)
            (gradient,) = torch.autograd.grad(log_prob.sum(), embeds)
        return log_prob.detach(), gradient

    def _score(
        self, lm: TextTarget, embeds: Float[Tensor, "chain n d"], lengths: Int[Tensor, " chain"] | None = None
    ) -> Float[Tensor, " chain"]:
        """The score of the first tokens of each row, or of all of them."""
        states = classifier_inputs(self.kind, lm.network, first_token(self.kind, lm.tokenizer), embeds)
        if lengths is None:
            lengths = torch.full((len(embeds),), embeds.shape[1], device=embeds.device)
        lengths = lengths + states.shape[1] - embeds.shape[1]  # a probe also reads the first token
        logits = self.network(states.to(self.network.out.weight.dtype), lengths)  # type: ignore[union-attr,arg-type]
        log_prob: Tensor = logits.log_softmax(-1)[:, self._label_index]
        return log_prob

    def _model(self) -> TextTarget:
        if self._lm is None:
            raise SamplingError(
                f"the classifier {self.name} is not bound to a language model",
                remedy="give it to model.target(..., controls=[...])",
            )
        return self._lm
