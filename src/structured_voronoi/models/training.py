"""Train a small GPT-2 with a byte-level BPE of its own; save it as an ordinary Hugging Face folder.

Training can be stopped at any time and goes on where it was: the order of the batches is a function of the seed and the
step, and weights and optimiser are kept every few hundred steps, or minutes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.batches import descend, padded
from structured_voronoi.models.corpora import Corpus, Labelled
from structured_voronoi.models.loading import head, hidden_states, quiet_libraries
from structured_voronoi.models.unfinished import Unfinished

END_OF_TEXT = "<|endoftext|>"
UNFINISHED, REPORT = "unfinished", "training.json"
IGNORED = -100
MOST_NATS = 100.0
"""Of a token; a model that guesses blindly has the logarithm of its vocabulary, 10 or so."""


class Schedule(Protocol):
    """What `descend_on_texts` wants to know of a recipe."""

    @property
    def batch(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def seed(self) -> int: ...
    def steps(self, texts: int) -> int: ...


@dataclass(frozen=True)
class Recipe:
    """Everything the result depends on, besides the texts."""

    vocabulary: int = 1000
    width: int = 128
    layers: int = 5
    heads: int = 4
    context: int = 128
    batch: int = 64
    epochs: float = 1.0
    learning_rate: float = 2e-3
    seed: int = 0

    def steps(self, texts: int) -> int:
        return math.ceil(self.epochs * texts / self.batch)


class Progress(NamedTuple):
    """How far a training has come."""

    step: int
    share: float
    """Of the steps or of the seconds, whichever will end it."""
    seconds: float
    note: str


def digest(texts: Corpus | Labelled, recipe: Any) -> str:
    """Twelve characters that change with the texts and with the recipe, a dataclass."""
    serialised = json.dumps([asdict(recipe), *texts])
    return hashlib.sha256(serialised.encode()).hexdigest()[:12]


@torch.random.fork_rng()
def train_language_model(
    corpus: Corpus,
    out: Path,
    recipe: Recipe,
    tick: Callable[[str, int], None],
    half: bool = False,
    checkpoint: Path | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Train, or resume training, into the folder ``out``; ``tick(note, steps)`` is called after each step.

    What is unfinished is kept in ``checkpoint``, or in a folder of ``out``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    quiet_libraries()
    tokenizer = _train_tokenizer(corpus.train, recipe)
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=recipe.context
    )
    ids, held_out = (encode_whole_texts(wrapped, texts, recipe.context) for texts in corpus)
    torch.manual_seed(recipe.seed)
    config = GPT2Config(
        vocab_size=len(wrapped),
        n_positions=recipe.context,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        bos_token_id=wrapped.bos_token_id,
        eos_token_id=wrapped.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = GPT2LMHeadModel(config)
    folder, shown = checkpoint or out / UNFINISHED, 0
    with unfinished_training(model, ids, recipe, folder, describe_training(corpus, recipe), resume) as unfinished:
        for progress in descend_on_texts(model, ids, recipe, unfinished):
            tick(progress.note, progress.step - shown)
            shown = progress.step
        model.eval()
        nats = mean_loss(model, held_out)
        found = {"held_out_loss": nats, "held_out_perplexity": perplexity(nats, out), "texts": len(ids)}
        report = {**found, **asdict(recipe)}
        if half:
            model = model.half()
        model.save_pretrained(out)
        wrapped.save_pretrained(out)
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.remove()
    return report


def describe_training(texts: Corpus | Labelled, recipe: Any) -> dict[str, Any]:
    """What a training that is resumed must have in common with the one that was stopped."""
    return {**asdict(recipe), "texts": digest(texts, recipe)}


def unfinished_training(
    model: Any, ids: list[list[int]], recipe: Schedule, folder: Path, settings: dict[str, Any], resume: bool
) -> Unfinished:
    """The training of the parameters that ask for gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    return Unfinished(folder, settings, model, optimiser, recipe.steps(len(ids)), resume)


def descend_on_texts(
    model: Any,
    ids: list[list[int]],
    recipe: Schedule,
    unfinished: Unfinished,
    seconds: float = math.inf,
    warmup: int = 100,
) -> Iterator[Progress]:
    """Train until the steps or the seconds are spent, yielding after each step.

    Goes on where the training was left, whose steps and seconds count. The learning rate rises in the first ``warmup``
    steps.
    """
    begun, steps, note = time.monotonic() - unfinished.seconds, unfinished.steps, ""
    while True:
        step, spent = unfinished.step, unfinished.seconds
        share = max(step / steps, spent / seconds)
        yield Progress(step, share, spent, note)
        if share >= 1:
            return
        warm = min(1.0, (step + 1) / warmup)
        unfinished.optimiser.param_groups[0]["lr"] = recipe.learning_rate * warm * (0.05 + 0.95 * (1 - share))
        note = descend(_loss(model, _select_batch(ids, step, recipe)), model, unfinished.optimiser)
        unfinished.advance(time.monotonic() - begun)


@torch.no_grad()
def mean_loss(model: Any, rows: list[list[int]], at_a_time: int = 100) -> float:
    """The negative log-likelihood of the rows, in nats a token."""
    parts = [rows[i : i + at_a_time] for i in range(0, len(rows), at_a_time)]
    losses = [(float(_loss(model, part)), sum(len(row) - 1 for row in part)) for part in parts]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def perplexity(nats: float, out: Path) -> float:
    """Of this loss a token; an error where the training has come to nothing."""
    if not nats < MOST_NATS:
        raise SamplingError(
            f"the training has come to a loss of {nats:.3g} nats a token",
            remedy=f"delete {out} to begin anew",
        )
    return math.exp(nats)


def _train_tokenizer(texts: list[str], recipe: Recipe) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_whole_texts(tokenizer: Any, texts: list[str], context: int) -> list[list[int]]:
    """Each text between the tokens that texts begin and end with, cut to the context."""
    end = tokenizer.eos_token_id
    first = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = tokenizer(texts, truncation=False, add_special_tokens=False, verbose=False)["input_ids"]
    return [[first, *ids, end][:context] for ids in encoded]


def _select_batch(ids: list[list[int]], step: int, recipe: Schedule) -> list[list[int]]:
    """The texts of one step, a function of the step alone: every text once an epoch, in an order of that epoch."""
    positions = np.arange(step * recipe.batch, (step + 1) * recipe.batch)
    chosen: list[list[int]] = []
    for epoch in np.unique(positions // len(ids)):
        order = np.random.default_rng([recipe.seed, int(epoch)]).permutation(len(ids))
        chosen += [ids[order[position % len(ids)]] for position in positions if position // len(ids) == epoch]
    return chosen


def _loss(model: Any, rows: list[list[int]]) -> Tensor:
    """Mean negative log-likelihood per token; padding is left out before the logits, which cost most."""
    hidden = hidden_states(model, padded(rows)[0])[:, :-1]
    labels = padded(rows, filler=IGNORED)[0][:, 1:]
    counted = labels != IGNORED
    return torch.nn.functional.cross_entropy(head(model, hidden[counted]), labels[counted])
