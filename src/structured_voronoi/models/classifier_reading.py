"""Texts read by a trained classifier: their tokens, its logits, the most probable labels."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import padded
from structured_voronoi.models.classifiers import ClassifierRecipe, first_token, load_classifier, states_of
from structured_voronoi.models.loading import Loaded


def predicted_labels(folder: Path, loaded: Loaded, texts: list[str], cut: int | None = None) -> list[str]:
    """The most probable label of each text, or of its first ``cut`` tokens."""
    network, config = load_classifier(folder)
    ids = encode_texts(texts, loaded, ClassifierRecipe(**config["recipe"]))
    return most_probable_labels(network, config["classifier"], config["labels"], loaded, [row[:cut] for row in ids])


@torch.no_grad()
def most_probable_labels(
    network: nn.Module, kind: str, labels: list[str], loaded: Loaded, rows: list[list[int]]
) -> list[str]:
    """The most probable label of each row of tokens."""
    predicted: list[str] = []
    for begin in range(0, len(rows), 64):
        indices = network_logits(network, kind, loaded, rows[begin : begin + 64]).argmax(-1)
        predicted += [labels[index] for index in indices.tolist()]
    return predicted


def text_limit(loaded: Loaded, recipe: ClassifierRecipe) -> int:
    """The most tokens of a text that are read, so that they fit the model's context after its first token."""
    context: int = getattr(loaded.model.config, "max_position_embeddings", None) or recipe.longest + 1
    return min(recipe.longest, context - 1)


def encode_texts(texts: list[str], loaded: Loaded, recipe: ClassifierRecipe) -> list[list[int]]:
    """The tokens of every text, cut to `text_limit`."""
    rows: list[list[int]] = loaded.tokenizer(texts, add_special_tokens=False)["input_ids"]
    empty = [text for text, row in zip(texts, rows, strict=True) if not row]
    if empty:
        raise SamplingError(f"the text {empty[0]!r} has no tokens", remedy="leave out empty texts")
    return [row[: text_limit(loaded, recipe)] for row in rows]


def network_logits(network: nn.Module, kind: str, loaded: Loaded, rows: list[list[int]]) -> Float[Tensor, "row label"]:
    """The network's logits of texts of different lengths."""
    tokens, lengths = padded(rows, loaded.model.device)
    with torch.no_grad():
        embeds = loaded.model.get_input_embeddings()(tokens)
        states = states_of(kind, loaded.model, first_token(kind, loaded.tokenizer), embeds)
    logits: Tensor = network(states.float(), lengths + (kind == "probe"))  # a probe also reads the first token
    return logits
