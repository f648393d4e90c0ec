"""Fine-tune the last layers of a pretrained language model on texts, within a budget of minutes.

The layers below them and both embedding tables stay as they are: they run without gradients, which halves the time, and
light classifiers of the base model, which read its embeddings, fit the fine-tuned one too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import fast_arithmetic
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.loading import load_model, save_model
from structured_voronoi.models.training import (
    REPORT,
    UNFINISHED,
    descend_on_texts,
    describe_training,
    encode_whole_texts,
    mean_loss,
    perplexity,
    unfinished_training,
)

TICKS = 1000
"""How often, in sum, `fine_tune` calls its tick."""
AT_A_TIME = 16
"""Texts at a time of the held-out loss: logits of a large vocabulary take memory."""


@dataclass(frozen=True)
class FineTuning:
    """Everything the result depends on, besides the texts and how fast the machine is."""

    base: str
    minutes: float = 40.0
    """Of the clock; training ends after them or after the epochs, whichever comes first."""
    epochs: float = 1.0
    layers: int = 8
    """The last so many are trained."""
    context: int = 128
    batch: int = 16
    learning_rate: float = 2e-4
    held_out: int = 400
    """Texts that the loss before and after is measured on, at most."""
    seed: int = 0

    def steps(self, texts: int) -> int:
        return math.ceil(self.epochs * texts / self.batch)


@torch.random.fork_rng()
def fine_tune(
    corpus: Corpus,
    out: Path,
    recipe: FineTuning,
    tick: Callable[[str, int], None],
    half: bool = False,
    checkpoint: Path | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Train, or resume training, into the folder ``out``; ``tick(note, steps)`` is called with TICKS steps in sum.

    What is unfinished is kept in ``checkpoint``, or in a folder of ``out``.
    """
    if Path(recipe.base).exists() and out.resolve() == Path(recipe.base).resolve():
        raise SamplingError(
            f"--out {out} is the base model's own folder, which would be overwritten",
            remedy="choose another",
        )
    loaded = load_model(recipe.base)
    model, tokenizer = loaded
    if tokenizer.eos_token_id is None:
        raise SamplingError(
            f"{recipe.base} has no end-of-text token, so that no text could end",
            remedy="choose another base",
        )
    context = min(recipe.context, getattr(model.config, "max_position_embeddings", None) or recipe.context)
    held_out_texts = corpus.held_out[:: -(-len(corpus.held_out) // recipe.held_out)]
    ids, held_out = (encode_whole_texts(tokenizer, texts, context) for texts in (corpus.train, held_out_texts))
    with fast_arithmetic():
        tick("held-out loss", 0)
        before = mean_loss(model, held_out, AT_A_TIME)
    for layer in _layers(model)[-recipe.layers :]:
        layer.requires_grad_(True)
    folder, shown = checkpoint or out / UNFINISHED, 0
    with unfinished_training(model, ids, recipe, folder, describe_training(corpus, recipe), resume) as unfinished:
        with fast_arithmetic():
            for progress in descend_on_texts(model, ids, recipe, unfinished, 60 * recipe.minutes, warmup=20):
                ticks = round(TICKS * min(progress.share, 1.0))
                tick(progress.note, ticks - shown)
                shown = ticks
            after = mean_loss(model, held_out, AT_A_TIME)
        report = {
            "held_out_loss_before": before,
            "held_out_loss": after,
            "held_out_perplexity": perplexity(after, out),
            "held_out_texts": len(held_out),
            "texts": min(len(ids), progress.step * recipe.batch),
            "steps": progress.step,
            "minutes_taken": progress.seconds / 60,
            **asdict(recipe),
        }
        tokenizer.chat_template = None  # it has learnt texts, each after the first token, and no conversation
        save_model(loaded._replace(model=model.half()) if half else loaded, out)
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.remove()
    return report


def _layers(model: Any) -> nn.ModuleList:
    """The list of the model's layers, whatever its kind calls it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise SamplingError(
        f"a {type(model).__name__} keeps its layers in no list of {count}",
        remedy="choose another base",
    )
