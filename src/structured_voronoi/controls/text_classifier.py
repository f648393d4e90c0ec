"""Any Hugging Face sequence classifier as a control, on the decoded text: any tokenizer will do; it does not steer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError, did_you_mean, one_line
from structured_voronoi.core.streams import in_blocks
from structured_voronoi.core.validation import is_folder, usable_device
from structured_voronoi.models.loading import check_complete, check_layer_count, hub_options, quiet_libraries
from structured_voronoi.models.wheels import WHEELS

AT_A_TIME = 64


class TextClassifier:
    """log p(label | text) of a sequence classifier. It has no gradient at the language model's embeddings."""

    weight: float = 1.0
    """Exponent of the control."""

    def __init__(self, model: Any, tokenizer: Any, label: str | int, title: str) -> None:
        labels: dict[int, str] = {int(index): name for index, name in model.config.id2label.items()}
        index_of = {name: index for index, name in labels.items()} | {str(index): index for index in labels}
        if str(label) not in index_of:
            raise SamplingError(
                f"the classifier {title} has no label {label!r}",
                remedy=did_you_mean(str(label), index_of),
            )
        if len(labels) < 2:
            raise SamplingError(
                f"{title} gives one number and no classes",
                remedy="choose a model with two labels or more",
            )
        if model.config.pad_token_id is None:
            model.config.pad_token_id = -1  # some models ask for one, though nothing is ever padded
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self._label_index = index_of[str(label)]
        self.label = labels[self._label_index]
        self.name = f"{title}={self.label}"

    def __invert__(self) -> Self:
        raise SamplingError(
            f"the control {self.name} is a label, which has no opposite", remedy="use another label of the classifier"
        )

    @classmethod
    def load(cls, name: str | Path, label: str | int, device: str = "cpu") -> Self:
        """A folder or a hub name; the label by its name or number. Only safetensors, never remote code."""
        source = str(name)
        if source in WHEELS:
            raise SamplingError(
                f"{source}, the {WHEELS[source].kind}, has no classes of its own",
                remedy=(
                    "fine-tune it on labelled texts with `svs train classifier --kind encoder --out FOLDER`, and "
                    "give that folder"
                ),
            )
        options = {} if is_folder(source) else hub_options(source)

        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        quiet_libraries()
        subject = f"the text classifier {source!r}"
        try:
            check_layer_count(subject, AutoConfig.from_pretrained(source, trust_remote_code=False, **options))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
            model: Any
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                source, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
            )
        except SamplingError:
            raise
        except Exception as error:  # the libraries below raise many kinds; each means that this model cannot be had
            raise SamplingError(
                f"{subject} cannot be loaded ({type(error).__name__}: {one_line(error)})",
                remedy="check the folder, or the hub name and the connection",
            ) from error
        check_complete(subject, loading_info)
        return cls(model.to(usable_device(device)), tokenizer, label, Path(name).name)

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]:
        """Texts of the same length go together, so that nothing is padded and no text's score depends on the others.

        Of an empty text some tokenizers make no token at all; the classifier reads the one that begins or ends a text.
        """
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        blank = next((token for token in known if token is not None), 0)
        rows: list[list[int]] = [row or [blank] for row in self.tokenizer(texts, truncation=True)["input_ids"]]
        log_prob = torch.empty(len(texts), dtype=torch.float64)
        for length in sorted({len(row) for row in rows}):
            positions = [position for position, row in enumerate(rows) if len(row) == length]
            for i in range(0, len(positions), AT_A_TIME):
                batch = positions[i : i + AT_A_TIME]
                log_prob[batch] = in_blocks(self._score, torch.tensor([rows[position] for position in batch])).cpu()
        return log_prob.to(tokens.device)

    def _score(self, ids: Int[Tensor, "text position"]) -> Float[Tensor, " text"]:
        ids = ids.to(self.model.device)
        logits: Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()
        multi_label = self.model.config.problem_type == "multi_label_classification"
        return (torch.nn.functional.logsigmoid(logits) if multi_label else logits.log_softmax(-1))[:, self._label_index]
