"""The predictor of FUDGE (Yang & Klein 2021): the label of a text, predicted from its first tokens.

As in the paper's appendix on food classifiers: a BiLSTM of three layers with dropout ½ and token embeddings of its
own. It learns from labelled texts that are cut at random lengths, anew each time they are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.models.batches import descend, padded

WEIGHTS, CONFIG = "prefix_classifier.safetensors", "config.json"


@dataclass(frozen=True)
class PrefixRecipe:
    """Everything the result depends on, besides the texts."""

    embedding: int = 300
    hidden: int = 300
    layers: int = 3
    dropout: float = 0.5
    batch: int = 64
    epochs: float = 3.0
    learning_rate: float = 1e-3
    seed: int = 0

    def steps(self, texts: int) -> int:
        return math.ceil(self.epochs * texts / self.batch)


class PrefixClassifier(nn.Module):
    """p(label | prefix), read off the strongest answer of each unit of the LSTM, wherever in the prefix it is."""

    def __init__(self, vocabulary: int, labels: list[str], recipe: PrefixRecipe) -> None:
        super().__init__()
        self.vocabulary, self.labels, self.recipe = vocabulary, labels, recipe
        self.embedding = nn.Embedding(vocabulary, recipe.embedding)
        self.lstm = nn.LSTM(
            recipe.embedding,
            recipe.hidden,
            recipe.layers,
            batch_first=True,
            dropout=recipe.dropout if recipe.layers > 1 else 0.0,
            bidirectional=True,
        )
        self.dropout = nn.Dropout(recipe.dropout)
        self.out = nn.Linear(2 * recipe.hidden, len(labels))

    def forward(
        self, tokens: Int[Tensor, "row n"], lengths: Int[Tensor, " row"] | None = None
    ) -> Float[Tensor, "row label"]:
        """Logits; rows of different lengths are padded on the right with any token."""
        embedded = self.embedding(tokens)
        if lengths is not None:
            embedded = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        answers = self.lstm(embedded)[0]
        if lengths is not None:  # answers lie between -1 and 1
            answers, _ = pad_packed_sequence(answers, batch_first=True, padding_value=-1.0)
        logits: Tensor = self.out(self.dropout(answers.amax(1)))
        return logits

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "row n"], label: str) -> Float[Tensor, " row"]:
        """log p(label | prefix) of prefixes of one length."""
        index = self._index_of(label)
        log_probs: Tensor = self(tokens).log_softmax(-1)
        return log_probs[:, index]

    def predict(self, texts: list[list[int]], batch: int = 256) -> list[str]:
        """The most probable label of each text."""
        predicted: list[str] = []
        with torch.no_grad():
            for begin in range(0, len(texts), batch):
                logits = self(*padded(texts[begin : begin + batch], self.embedding.weight.device))
                predicted += [self.labels[index] for index in logits.argmax(-1).tolist()]
        return predicted

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)
        config = {"vocabulary": self.vocabulary, "labels": self.labels, "recipe": asdict(self.recipe)}
        (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        if not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
            raise SamplingError(
                f"{folder} holds no {CONFIG} with {WEIGHTS}",
                remedy="give a folder that one was saved to",
            )
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        model = cls(config["vocabulary"], config["labels"], PrefixRecipe(**config["recipe"]))
        model.load_state_dict(load_file(folder / WEIGHTS))
        return model.eval()

    def _index_of(self, label: str) -> int:
        if label not in self.labels:
            raise SamplingError(
                f"the prefix classifier has no label {label!r}",
                remedy=did_you_mean(label, self.labels),
            )
        return self.labels.index(label)


@torch.random.fork_rng()
def train_prefix_classifier(
    texts: list[list[int]],
    labels: list[str],
    vocabulary: int,
    recipe: PrefixRecipe,
    tick: Callable[[str, int], None],
) -> PrefixClassifier:
    """A classifier of prefixes.

    Texts are lists of the language model's tokens, without special ones; ``tick(note, steps)`` is called every step.
    """
    kept = [row for row, text in enumerate(texts) if text]
    names = sorted(set(labels))
    if len(texts) != len(labels) or len(names) < 2:
        raise SamplingError(
            f"{len(texts)} texts with {len(labels)} labels, {len(names)} of them different",
            remedy="give one label for each text, two different ones at least",
        )
    label_indices = torch.tensor([names.index(label) for label in labels])
    torch.manual_seed(recipe.seed)
    model = PrefixClassifier(vocabulary, names, recipe).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
    source = np.random.default_rng(recipe.seed)
    rows: list[int] = []
    for _ in range(recipe.steps(len(kept))):
        while len(rows) < recipe.batch:
            rows += source.permutation(kept).tolist()
        chosen, rows = rows[: recipe.batch], rows[recipe.batch :]
        cut = [texts[row][: source.integers(1, len(texts[row]) + 1)] for row in chosen]
        loss = nn.functional.cross_entropy(model(*padded(cut)), label_indices[chosen])
        tick(descend(loss, model, optimiser), 1)
    return model.eval()
