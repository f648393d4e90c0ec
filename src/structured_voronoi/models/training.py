"""Train a small GPT-2 with a byte-level BPE of its own; save it as an ordinary Hugging Face folder.

Training can be stopped at any time and goes on where it was: the order of the batches is a function of the seed and the
step, and weights and optimiser are written every few hundred steps as safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from structured_voronoi.errors import SamplingError
from structured_voronoi.models.batches import descend, padded
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.loading import quiet_libraries

END_OF_TEXT = "<|endoftext|>"
UNFINISHED, REPORT = "unfinished", "training.json"
CHECKPOINT_STEPS = 200
IGNORED = -100


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


def digest(corpus: Corpus, recipe: Recipe) -> str:
    """Twelve characters that change with the texts and with the recipe."""
    serialised = json.dumps([asdict(recipe), corpus.train, corpus.held_out])
    return hashlib.sha256(serialised.encode()).hexdigest()[:12]


@torch.random.fork_rng()
def train_language_model(
    corpus: Corpus, out: Path, recipe: Recipe, tick: Callable[[str, int], None], half: bool = False
) -> dict[str, Any]:
    """Train, or resume training, into the folder ``out``; ``tick(note, steps)`` is called after each step."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    quiet_libraries()
    tokenizer = _train_tokenizer(corpus.train, recipe)
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=recipe.context
    )
    ids, held_out = _encode(wrapped, corpus.train, recipe), _encode(wrapped, corpus.held_out, recipe)
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
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    steps = recipe.steps(len(ids))
    first = _resume(out / UNFINISHED, digest(corpus, recipe), model, optimiser)
    tick("", first)
    for step in range(first, steps):
        warm = min(1.0, (step + 1) / 100)
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * warm * (0.05 + 0.95 * (1 - step / steps))
        loss = _loss(model, _select_batch(ids, step, recipe))
        tick(descend(loss, model, optimiser), 1)
        if (step + 1) % CHECKPOINT_STEPS == 0 and step + 1 < steps:
            _save_checkpoint(out / UNFINISHED, digest(corpus, recipe), step + 1, model, optimiser)

    model.eval()
    with torch.no_grad():
        losses = [(float(_loss(model, part)), sum(len(row) for row in part)) for part in _split_batches(held_out, 100)]
    nats = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    report = {"held_out_loss": nats, "held_out_perplexity": math.exp(nats), "texts": len(ids), **asdict(recipe)}
    if half:
        model = model.half()
    model.save_pretrained(out)
    wrapped.save_pretrained(out)
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for file in (out / UNFINISHED).glob("*"):
        file.unlink()
    if (out / UNFINISHED).exists():
        (out / UNFINISHED).rmdir()
    return report


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


def _encode(tokenizer: Any, texts: list[str], recipe: Recipe) -> list[list[int]]:
    """Each text between two end-of-text tokens, cut to the context."""
    end = tokenizer.eos_token_id
    return [[end, *ids, end][: recipe.context] for ids in tokenizer(texts, truncation=False)["input_ids"]]


def _select_batch(ids: list[list[int]], step: int, recipe: Recipe) -> list[list[int]]:
    """The texts of one step, a function of the step alone: every text once an epoch, in an order of that epoch."""
    positions = np.arange(step * recipe.batch, (step + 1) * recipe.batch)
    chosen: list[list[int]] = []
    for epoch in np.unique(positions // len(ids)):
        order = np.random.default_rng([recipe.seed, int(epoch)]).permutation(len(ids))
        chosen += [ids[order[position % len(ids)]] for position in positions if position // len(ids) == epoch]
    return chosen


def _split_batches(ids: list[list[int]], size: int) -> list[list[list[int]]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _loss(model: Any, rows: list[list[int]]) -> Tensor:
    """Mean negative log-likelihood per token, padding left out."""
    logits = model(input_ids=padded(rows)[0]).logits
    labels, _ = padded(rows, filler=IGNORED)
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _save_checkpoint(folder: Path, training_digest: str, step: int, model: Any, optimiser: Any) -> None:
    """Write weights and optimiser under another name and rename them, so that an interruption leaves the last ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.named_parameters()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
    metadata = {"step": str(step), "of": training_digest}
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "new", metadata)
    os.replace(folder / "new", folder / "state.safetensors")


def _resume(folder: Path, training_digest: str, model: Any, optimiser: Any) -> int:
    """Load the checkpoint into the model and the optimiser; returns its step, 0 without a checkpoint."""
    path = folder / "state.safetensors"
    if not path.exists():
        return 0
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
    except SafetensorError as error:
        raise SamplingError(f"the checkpoint {path} is damaged ({error}); delete it to begin anew") from error
    if metadata.get("of") != training_digest:
        raise SamplingError(
            f"{folder} holds a training with other settings or other texts; use the same ones or another --out"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, number, field = name.split(".", 2)
            state.setdefault(int(number), {})[field] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return int(metadata["step"])
