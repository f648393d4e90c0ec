"""A classifier of texts that shares no tokens, embeddings or language model with the classifiers that steer sampling.

It is a logistic regression on the words of a text and on pairs of neighbouring words, each hashed to one of 65,536
weights per label (Weinberger et al. 2009). In training all labels have the same total weight.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.labels import most_probable_labels, number_labels

HASH_SIZE = 2**16
WEIGHTS_FILE, CONFIG_FILE = "judge.safetensors", "judge.json"


class Judge:
    """A text classifier on the words of a text, made by `Judge.train`.

    Parameters
    ----------
    labels
        The labels, sorted.
    """

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.weights = nn.EmbeddingBag(HASH_SIZE, len(labels), mode="sum")
        self.bias = nn.Parameter(torch.zeros(len(labels)))
        nn.init.zeros_(self.weights.weight)
        self.parameters = self.weights.weight.numel() + self.bias.numel()

    @classmethod
    def train(cls, texts: list[str], labels: list[str], seed: int = 0) -> Self:
        """Train a judge on labelled texts with Adam, in five epochs."""
        names, label_indices = number_labels(texts, labels)
        judge, indices, counts = cls(names), torch.from_numpy(label_indices), Counter(labels)
        features = [_features(text) for text in texts]
        class_weights = torch.tensor([len(labels) / len(counts) / counts[label] for label in names])
        optimiser = torch.optim.Adam([judge.weights.weight, judge.bias], lr=0.01)
        rng, batch_size = np.random.default_rng(seed), 256
        for _ in range(5):
            order = rng.permutation(len(texts))
            for begin in range(0, len(texts), batch_size):
                rows = order[begin : begin + batch_size]
                logits = judge._logits([features[row] for row in rows])
                loss = nn.functional.cross_entropy(logits, indices[rows], weight=class_weights)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        return judge

    def predict(self, texts: list[str]) -> list[str]:
        """The most probable label of each text."""
        return most_probable_labels(self._logits, self.labels, [_features(text) for text in texts])

    def save(self, folder: Path) -> None:
        """Save the judge to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weights": self.weights.weight.detach(), "bias": self.bias.detach()}, folder / WEIGHTS_FILE)
        config = json.dumps({"labels": self.labels}, ensure_ascii=False)
        (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a judge from the folder it was saved to."""
        if not (folder / CONFIG_FILE).exists():
            raise SamplingError(f"{folder} holds no {CONFIG_FILE}", remedy="give a folder that a judge was saved to")
        judge = cls(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["labels"])
        tensors = load_file(folder / WEIGHTS_FILE)
        with torch.no_grad():
            judge.weights.weight.copy_(tensors["weights"])
            judge.bias.copy_(tensors["bias"])
        return judge

    def _logits(self, rows: list[list[int]]) -> Tensor:
        offsets = np.cumsum([0, *(len(row) for row in rows[:-1])])
        flat = torch.tensor([feature for row in rows for feature in row], dtype=torch.int64)
        logits: Tensor = self.weights(flat, torch.from_numpy(offsets)) + self.bias
        return logits


def _features(text: str) -> list[int]:
    """The hashes of the distinct words and pairs of neighbouring words of a text, in lower case."""
    words = re.findall(r"\w+|£", text.lower())
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    return sorted({zlib.crc32(gram.encode()) % HASH_SIZE for gram in [*words, *pairs]})
