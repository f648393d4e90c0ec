"""Any Hugging Face sequence classifier as a control, on the decoded text: it need not share a tokenizer, nor steers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import SamplingError, did_you_mean

AT_A_TIME = 64


class TextClassifier:
    """log p(label | text) of a sequence classifier. It has no gradient at the language model's embeddings."""

    def __init__(self, model: Any, tokenizer: Any, label: str | int, what: str) -> None:
        labels: dict[int, str] = {int(place): name for place, name in model.config.id2label.items()}
        places = {name: place for place, name in labels.items()} | {str(place): place for place in labels}
        if str(label) not in places:
            raise SamplingError(f"the classifier {what} has no label {label!r}; {did_you_mean(str(label), places)}")
        if len(labels) < 2:
            raise SamplingError(f"{what} gives one number and no classes; choose a model with two labels or more")
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self._place = places[str(label)]
        self.label = labels[self._place]
        self.name = f"{what}={self.label}"

    @classmethod
    def load(cls, name: str | Path, label: str | int, device: str = "cpu") -> Self:
        """A folder or a hub name; the label by its name or number. Only safetensors, never remote code."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                str(name), trust_remote_code=False, use_safetensors=True
            )
        except Exception as error:  # the libraries below raise many kinds; each means that this model cannot be had
            said = " ".join(str(error).split())[:200]
            raise SamplingError(
                f"the text classifier {str(name)!r} cannot be loaded ({type(error).__name__}: {said}); "
                "check the folder, or the hub name and the connection"
            ) from error
        return cls(model.to(device), tokenizer, label, Path(name).name)

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]:
        parts = [self._of(texts[i : i + AT_A_TIME]) for i in range(0, len(texts), AT_A_TIME)]
        return torch.cat(parts).to(tokens.device)

    def _of(self, texts: list[str]) -> Float[Tensor, " text"]:
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.model.device)
        logits: Tensor = self.model(**inputs).logits
        return logits.double().log_softmax(-1)[:, self._place]
