"""A judge of texts that shares no tokens, embeddings or language model with the classifiers that guide them.

It is a logistic regression on the words of the decoded text and on pairs of neighbouring words, each hashed to one of
65,536 weights a label (Weinberger et al. 2009). Rare labels weigh as much as common ones in its training.
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

SIZE = 2**16
EPOCHS, BATCH, RATE = 5, 256, 0.01
WEIGHTS, CONFIG = "judge.safetensors", "judge.json"


class Judge:
    """A text classifier; `Judge.train(texts, labels)` makes one."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.weights = nn.EmbeddingBag(SIZE, len(labels), mode="sum")
        self.bias = nn.Parameter(torch.zeros(len(labels)))
        nn.init.zeros_(self.weights.weight)
        self.parameters = self.weights.weight.numel() + self.bias.numel()

    @classmethod
    def train(cls, texts: list[str], labels: list[str], seed: int = 0) -> Self:
        """A judge of the labels that occur, trained with Adam."""
        counts = Counter(labels)
        if len(texts) != len(labels) or len(counts) < 2:
            raise SamplingError(
                f"{len(texts)} texts with {len(labels)} labels, {len(counts)} of them different",
                remedy="give one label for each text, two different ones at least",
            )
        judge = cls(sorted(counts))
        features = [_features(text) for text in texts]
        indices = torch.tensor([judge.labels.index(label) for label in labels])
        balance = torch.tensor([len(labels) / len(counts) / counts[label] for label in judge.labels])
        optimiser = torch.optim.Adam([judge.weights.weight, judge.bias], lr=RATE)
        source = np.random.default_rng(seed)
        for _ in range(EPOCHS):
            order = source.permutation(len(texts))
            for begin in range(0, len(texts), BATCH):
                rows = order[begin : begin + BATCH]
                logits = judge._logits([features[row] for row in rows])
                loss = nn.functional.cross_entropy(logits, indices[rows], weight=balance)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        return judge

    @torch.no_grad()
    def predict(self, texts: list[str]) -> list[str]:
        """The most probable label of each text."""
        if not texts:
            return []
        return [self.labels[index] for index in self._logits([_features(text) for text in texts]).argmax(-1).tolist()]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weights": self.weights.weight.detach(), "bias": self.bias.detach()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps({"labels": self.labels}, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        if not (folder / CONFIG).exists():
            raise SamplingError(f"{folder} holds no {CONFIG}", remedy="give a folder that a judge was saved to")
        judge = cls(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["labels"])
        tensors = load_file(folder / WEIGHTS)
        with torch.no_grad():
            judge.weights.weight.copy_(tensors["weights"])
            judge.bias.copy_(tensors["bias"])
        return judge

    def _logits(self, rows: list[list[int]]) -> Tensor:
        begins = np.cumsum([0, *(len(row) for row in rows[:-1])])
        flat = torch.tensor([feature for row in rows for feature in row], dtype=torch.int64)
        logits: Tensor = self.weights(flat, torch.from_numpy(begins)) + self.bias
        return logits


def _features(text: str) -> list[int]:
    """The hashes of a text's words and pairs of neighbouring words, in lower case, each once."""
    words = re.findall(r"\w+|£", text.lower())
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    return sorted({zlib.crc32(gram.encode()) % SIZE for gram in [*words, *pairs]})
