"""Fine-tune the last layers of a pretrained language model on texts.

The layers below and both embedding tables stay frozen: they need no gradients, which halves the time, and a light
classifier of the base model, which reads its embeddings, also works for the fine-tuned one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import Schedule, bfloat16_products
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.loading import load_model
from structured_voronoi.models.training import (
    encode_whole_texts,
    mean_loss,
    perplexity,
    save_trained,
    train_on_texts,
    training_run,
)
from structured_voronoi.models.training_run import TrainingCheckpoint

FINE_TUNING_TICKS = 1000
"""Number of progress steps of `fine_tune`."""


@dataclass(frozen=True)
class FineTuningSettings(Schedule):
    """Settings of fine-tuning, with the fields of `Schedule`.

    Parameters
    ----------
    base
        The pretrained model, as in `load_model`.
    minutes
        Largest time; training ends earlier if all epochs are done.
    layers
        Number of layers, from the last one, that are trained.
    context
        Largest number of tokens of a text.
    max_held_out_texts
        Largest number of texts for the held-out loss.
    """

    base: str
    minutes: float = 40.0
    epochs: float = 1.0
    layers: int = 8
    context: int = 128
    batch_size: int = 16
    learning_rate: float = 2e-4
    max_held_out_texts: int = 400
    seed: int = 0


@torch.random.fork_rng()
def fine_tune(
    corpus: Corpus,
    out: Path,
    settings: FineTuningSettings,
    tick: Callable[[str, int], None],
    half: bool = False,
    checkpoint: TrainingCheckpoint | None = None,
) -> dict[str, Any]:
    """Fine-tune a language model, or resume its fine-tuning, and save it.

    Parameters
    ----------
    corpus
        Texts for training and held-out texts.
    out
        Folder for the model.
    settings
        Settings of fine-tuning.
    tick
        Called as ``tick(note, steps)`` after each step, with `FINE_TUNING_TICKS` steps in total.
    half
        Whether the weights are saved in float16.
    checkpoint
        Where and how often the training is saved.

    Returns
    -------
    dict
        The held-out loss before and after, the number of steps and texts, and the settings; also saved as
        training.json.

    Raises
    ------
    SamplingError
        If ``out`` is the base model's folder, the base model is not suitable, the loss diverges, or the checkpoint
        belongs to another training.
    """
    if Path(settings.base).exists() and out.resolve() == Path(settings.base).resolve():
        raise SamplingError(
            f"{out} is the base model's folder and would be overwritten",
            argument="out",
            remedy="choose another folder",
        )
    loaded = load_model(settings.base)
    network, tokenizer = loaded
    if tokenizer.eos_token_id is None:
        raise SamplingError(
            f"the base model {settings.base} has no end-of-text token", remedy="choose another base model"
        )
    context = min(settings.context, getattr(network.config, "max_position_embeddings", None) or settings.context)
    held_out_texts = corpus.held_out[:: -(-len(corpus.held_out) // settings.max_held_out_texts)]
    ids, held_out = (encode_whole_texts(tokenizer, texts, context) for texts in (corpus.train, held_out_texts))
    evaluation_batch_size = 16  # the logits of a large vocabulary take much memory
    with bfloat16_products():
        tick("held-out loss", 0)
        loss_before = mean_loss(network, held_out, evaluation_batch_size)
    for layer in _layers(network)[-settings.layers :]:
        layer.requires_grad_(True)
    with training_run(network, ids, settings, corpus, out, checkpoint) as run:
        with bfloat16_products():
            train_on_texts(ids, settings, run, tick, FINE_TUNING_TICKS, 60 * settings.minutes, warmup_steps=20)
            loss = mean_loss(network, held_out, evaluation_batch_size)
        report = {
            "held_out_loss_before": loss_before,
            "held_out_loss": loss,
            "held_out_perplexity": perplexity(loss, out),
            "held_out_texts": len(held_out),
            "texts": min(len(ids), run.step * settings.batch_size),
            "steps": run.step,
            "minutes_taken": run.seconds / 60,
            **asdict(settings),
        }
        tokenizer.chat_template = None  # the fine-tuned model was trained on plain texts, not on conversations
        save_trained(loaded, report, out, half)
        run.remove()
    return report


def _layers(network: Any) -> nn.ModuleList:
    """The list of the network's layers, whose name depends on the kind of the model."""
    count = network.config.get_text_config().num_hidden_layers
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise SamplingError(
        f"the layers of a {type(network).__name__} could not be found", remedy="choose another base model"
    )
