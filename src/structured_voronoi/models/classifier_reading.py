"""Read texts with a classifier: their tokens, the logits, the most probable labels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import pad_rows
from structured_voronoi.models.classifiers import ClassifierSettings, classifier_inputs, first_token, load_classifier
from structured_voronoi.models.labels import most_probable_labels
from structured_voronoi.models.loading import Loaded


def predicted_labels(folder: Path, loaded: Loaded, texts: list[str], max_tokens: int | None = None) -> list[str]:
    """The most probable label of each text, or of its first ``max_tokens`` tokens."""
    network, config = load_classifier(folder)
    ids = encode_texts(texts, loaded, ClassifierSettings(**config["settings"]))
    logits = partial(network_logits, network, config["classifier"], loaded)
    return most_probable_labels(logits, config["labels"], [row[:max_tokens] for row in ids])


def text_limit(loaded: Loaded, settings: ClassifierSettings) -> int:
    """The number of tokens that are read of a text, such that they fit the context after the first token."""
    context: int = getattr(loaded.network.config, "max_position_embeddings", None) or settings.max_tokens + 1
    return min(settings.max_tokens, context - 1)


def encode_texts(texts: list[str], loaded: Loaded, settings: ClassifierSettings) -> list[list[int]]:
    """The tokens of each text, at most `text_limit` of them."""
    rows: list[list[int]] = loaded.tokenizer(texts, add_special_tokens=False)["input_ids"]
    empty = [text for text, row in zip(texts, rows, strict=True) if not row]
    if empty:
        raise SamplingError(f"the text {empty[0]!r} has no tokens", remedy="leave out empty texts")
    return [row[: text_limit(loaded, settings)] for row in rows]


@torch.no_grad()
def frozen_inputs(
    kind: str, loaded: Loaded, rows: list[list[int]]
) -> tuple[Float[Tensor, "row position d"], Float[Tensor, " row"]]:
    """The inputs of a classifier for rows of tokens, without gradients, and their lengths."""
    tokens, lengths = pad_rows(rows, loaded.network.device)
    embeds = loaded.network.get_input_embeddings()(tokens)
    inputs = classifier_inputs(kind, loaded.network, first_token(kind, loaded.tokenizer), embeds)
    return inputs.float(), lengths + inputs.shape[1] - tokens.shape[1]  # a probe also reads the first token


def network_logits(network: nn.Module, kind: str, loaded: Loaded, rows: list[list[int]]) -> Float[Tensor, "row label"]:
    """The logits of rows of tokens of different lengths."""
    logits: Tensor = network(*frozen_inputs(kind, loaded, rows))
    return logits
