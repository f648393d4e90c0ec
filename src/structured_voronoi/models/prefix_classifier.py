"""The predictor of FUDGE (Yang & Klein 2021): the label of a text, predicted from its first tokens.

As in that paper's appendix it is a BiLSTM of three layers with dropout ½ and its own token embeddings. In training each
text is cut at a random length every time it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.models.batches import Schedule, optimiser_step, pad_rows
from structured_voronoi.models.classifiers import pooled_lstm
from structured_voronoi.models.labels import most_probable_labels, number_labels

WEIGHTS_FILE, CONFIG_FILE = "prefix_classifier.safetensors", "config.json"


@dataclass(frozen=True)
class PrefixSettings(Schedule):
    """Settings of a prefix classifier and of its training, with the fields of `Schedule`.

    Parameters
    ----------
    embedding
        Dimensions of the token embeddings.
    hidden
        Units of the LSTM in each direction.
    layers
        Layers of the LSTM.
    dropout
        Dropout probability.
    """

    embedding: int = 300
    hidden: int = 300
    layers: int = 3
    dropout: float = 0.5
    batch_size: int = 64
    epochs: float = 3.0
    learning_rate: float = 1e-3
    seed: int = 0


class PrefixClassifier(nn.Module):
    """p(label | prefix) from a BiLSTM with max-pooling over the prefix, made by `train_prefix_classifier`.

    Parameters
    ----------
    vocabulary
        Tokens of the language model.
    labels
        The labels, sorted.
    settings
        Sizes of the network.
    """

    def __init__(self, vocabulary: int, labels: list[str], settings: PrefixSettings) -> None:
        super().__init__()
        self.vocabulary, self.labels, self.settings = vocabulary, labels, settings
        self.embedding = nn.Embedding(vocabulary, settings.embedding)
        self.lstm = nn.LSTM(
            settings.embedding,
            settings.hidden,
            settings.layers,
            batch_first=True,
            dropout=settings.dropout if settings.layers > 1 else 0.0,
            bidirectional=True,
        )
        self.dropout = nn.Dropout(settings.dropout)
        self.out = nn.Linear(2 * settings.hidden, len(labels))

    def forward(
        self, tokens: Int[Tensor, "row n"], lengths: Int[Tensor, " row"] | None = None
    ) -> Float[Tensor, "row label"]:
        """The logits; rows of different lengths are padded on the right with any token."""
        logits: Tensor = self.out(self.dropout(pooled_lstm(self.lstm, self.embedding(tokens), lengths)))
        return logits

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "row n"], label: str) -> Float[Tensor, " row"]:
        """log p(label | prefix) of prefixes of equal lengths."""
        if label not in self.labels:
            raise SamplingError(
                f"the prefix classifier has no label {label!r}", remedy=did_you_mean(label, self.labels)
            )
        log_probs: Tensor = self(tokens).log_softmax(-1)
        return log_probs[:, self.labels.index(label)]

    def predict(self, texts: list[list[int]]) -> list[str]:
        """The most probable label of each text, a list of tokens."""

        def logits(rows: list[list[int]]) -> Tensor:
            return self(*pad_rows(rows, self.embedding.weight.device))  # type: ignore[no-any-return]

        return most_probable_labels(logits, self.labels, texts, batch_size=256)

    def save(self, folder: Path) -> None:
        """Save the classifier to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS_FILE)
        config = {"vocabulary": self.vocabulary, "labels": self.labels, "settings": asdict(self.settings)}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a classifier from the folder it was saved to."""
        if not (folder / CONFIG_FILE).exists() or not (folder / WEIGHTS_FILE).exists():
            raise SamplingError(
                f"{folder} holds no {CONFIG_FILE} with {WEIGHTS_FILE}",
                remedy="give a folder that a prefix classifier was saved to",
            )
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        classifier = cls(config["vocabulary"], config["labels"], PrefixSettings(**config["settings"]))
        classifier.load_state_dict(load_file(folder / WEIGHTS_FILE))
        return classifier.eval()


@torch.random.fork_rng()
def train_prefix_classifier(
    texts: list[list[int]],
    labels: list[str],
    vocabulary: int,
    settings: PrefixSettings,
    tick: Callable[[str, int], None],
) -> PrefixClassifier:
    """Train a prefix classifier.

    Parameters
    ----------
    texts
        The language model's tokens of each text, without special tokens; empty texts are left out.
    labels
        The label of each text.
    vocabulary
        Tokens of the language model.
    settings
        Settings of the classifier and of its training.
    tick
        Called as ``tick(note, steps)`` after each step.

    Returns
    -------
    PrefixClassifier
        The classifier, in evaluation mode.

    Raises
    ------
    SamplingError
        If there is not one label for each text, or fewer than two labels.
    """
    names, indices = number_labels(texts, labels)
    label_indices = torch.from_numpy(indices)
    non_empty = [row for row, text in enumerate(texts) if text]
    torch.manual_seed(settings.seed)
    classifier = PrefixClassifier(vocabulary, names, settings).train()
    optimiser = torch.optim.Adam(classifier.parameters(), lr=settings.learning_rate)
    rng = np.random.default_rng(settings.seed)
    rows: list[int] = []
    for _ in range(settings.steps(len(non_empty))):
        while len(rows) < settings.batch_size:
            rows += rng.permutation(non_empty).tolist()
        chosen, rows = rows[: settings.batch_size], rows[settings.batch_size :]
        prefixes = [texts[row][: rng.integers(1, len(texts[row]) + 1)] for row in chosen]
        loss = nn.functional.cross_entropy(classifier(*pad_rows(prefixes)), label_indices[chosen])
        tick(optimiser_step(loss, classifier, optimiser), 1)
    return classifier.eval()
