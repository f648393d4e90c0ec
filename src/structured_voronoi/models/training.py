"""Train a small GPT-2 with its own byte-level BPE tokenizer, and save it as a Hugging Face folder.

The batch of a step depends on the seed and the step alone, so an interrupted training can be resumed exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import Schedule, learning_rate, pad_rows
from structured_voronoi.models.corpora import Corpus, digest
from structured_voronoi.models.loading import Loaded, head, hidden_states, quiet_libraries, save_model
from structured_voronoi.models.training_run import TrainingCheckpoint, TrainingRun

REPORT_FILE = "training.json"


@dataclass(frozen=True)
class TrainingSettings(Schedule):
    """Settings of a language model and of its training, with the fields of `Schedule`.

    Parameters
    ----------
    vocabulary
        Tokens of the tokenizer.
    width, layers, heads
        Size of the network.
    context
        Largest number of tokens of a text.
    """

    vocabulary: int = 1000
    width: int = 128
    layers: int = 5
    heads: int = 4
    context: int = 128
    batch_size: int = 64
    epochs: float = 1.0
    learning_rate: float = 2e-3
    seed: int = 0


@torch.random.fork_rng()
def train_language_model(
    corpus: Corpus,
    out: Path,
    settings: TrainingSettings,
    tick: Callable[[str, int], None],
    half: bool = False,
    checkpoint: TrainingCheckpoint | None = None,
) -> dict[str, Any]:
    """Train a language model from random weights, or resume its training, and save it.

    Parameters
    ----------
    corpus
        Texts for training and held-out texts.
    out
        Folder for the model.
    settings
        Settings of the model and of its training.
    tick
        Called as ``tick(note, steps)`` after each step.
    half
        Whether the weights are saved in float16.
    checkpoint
        Where and how often the training is saved.

    Returns
    -------
    dict
        The held-out loss and perplexity per token, the number of texts and the settings; also saved as training.json.

    Raises
    ------
    SamplingError
        If the loss diverges, or the checkpoint belongs to another training.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    quiet_libraries()
    end = "<|endoftext|>"
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(corpus.train, settings.vocabulary, end),
        bos_token=end,
        eos_token=end,
        model_max_length=settings.context,
    )
    ids, held_out = (encode_whole_texts(tokenizer, texts, settings.context) for texts in corpus)
    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    network: Any = GPT2LMHeadModel(config)
    with training_run(network, ids, settings, corpus, out, checkpoint) as run:
        train_on_texts(ids, settings, run, tick, run.steps)
        loss = mean_loss(network.eval(), held_out)
        report = {"held_out_loss": loss, "held_out_perplexity": perplexity(loss, out), "texts": len(ids)}
        report |= asdict(settings)
        save_trained(Loaded(network, tokenizer), report, out, half)
        run.remove()
    return report


def training_run(
    network: Any,
    ids: list[list[int]],
    settings: Any,
    corpus: Corpus,
    out: Path,
    checkpoint: TrainingCheckpoint | None,
) -> TrainingRun:
    """The training of the parameters that require gradients."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    described = {**asdict(settings), "texts": digest(corpus, settings)}
    steps = settings.steps(len(ids))
    return TrainingRun(checkpoint or TrainingCheckpoint(), out, described, network, optimiser, steps)


def train_on_texts(
    ids: list[list[int]],
    settings: Schedule,
    run: TrainingRun,
    tick: Callable[[str, int], None],
    total_ticks: int,
    max_seconds: float = math.inf,
    warmup_steps: int = 100,
) -> None:
    """Train, or resume, until all steps are done or the time is over.

    The steps and seconds before an interruption count. ``tick`` is called before the first step and after each one,
    with ``total_ticks`` in total.
    """
    ticks, note = 0, ""
    while True:
        share = max(run.step / run.steps, run.seconds / max_seconds)
        done = round(total_ticks * min(share, 1.0))
        tick(note, done - ticks)
        if share >= 1:
            return
        ticks = done
        loss = _loss(run.network, _select_batch(ids, run.step, settings))
        rate = learning_rate(settings.learning_rate, run.step, share, warmup_steps, final=0.05)
        note = run.advance(loss, rate)


@torch.no_grad()
def mean_loss(network: Any, rows: list[list[int]], batch_size: int = 100) -> float:
    """The mean negative log-likelihood of the rows, in nats per token."""
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    losses = [(float(_loss(network, batch)), sum(len(row) - 1 for row in batch)) for batch in batches]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def perplexity(loss: float, out: Path) -> float:
    """The perplexity of a loss in nats per token; an error if the training has diverged."""
    if not loss < 100:  # a uniform guess has the logarithm of the vocabulary, about 10
        raise SamplingError(
            f"the training has diverged to a loss of {loss:.3g} nats per token", remedy=f"delete {out} and train again"
        )
    return math.exp(loss)


def save_trained(loaded: Loaded, report: dict[str, Any], out: Path, half: bool) -> None:
    """Save a trained language model, in float16 if ``half``, and the report."""
    save_model(Loaded(loaded.network.half(), loaded.tokenizer) if half else loaded, out)
    (out / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def encode_whole_texts(tokenizer: Any, texts: list[str], context: int) -> list[list[int]]:
    """The tokens of each text with a beginning-of-text and an end-of-text token, cut to the context."""
    end = tokenizer.eos_token_id
    first = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = tokenizer(texts, truncation=False, add_special_tokens=False, verbose=False)["input_ids"]
    return [[first, *ids, end][:context] for ids in encoded]


def _train_tokenizer(texts: list[str], vocabulary: int, end: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _select_batch(ids: list[list[int]], step: int, settings: Schedule) -> list[list[int]]:
    """The texts of one step; each epoch contains each text once, in random order."""
    positions = np.arange(step * settings.batch_size, (step + 1) * settings.batch_size)
    chosen: list[list[int]] = []
    for epoch in np.unique(positions // len(ids)):
        order = np.random.default_rng([settings.seed, int(epoch)]).permutation(len(ids))
        chosen += [ids[order[position % len(ids)]] for position in positions if position // len(ids) == epoch]
    return chosen


def _loss(network: Any, rows: list[list[int]]) -> Tensor:
    """The mean negative log-likelihood per token; logits, the most expensive part, are not computed for padding."""
    ignored = -100
    hidden = hidden_states(network, pad_rows(rows)[0])[:, :-1]
    labels = pad_rows(rows, padding=ignored)[0][:, 1:]
    counted = labels != ignored
    return torch.nn.functional.cross_entropy(head(network, hidden[counted]), labels[counted])
