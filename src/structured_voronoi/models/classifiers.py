"""Classifiers that read a language model's own tokens: two networks and their files.

`light` reads the model's token embeddings, so that its gradient needs no language model at all. `probe` is the paper's:
a BiLSTM on the model's representations. The language model is frozen and never stored with them.

The bundled ones were made by `svs train classifier --data builtin --label NAME --out FOLDER`, for every NAME of
restaurants.LABELS.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.models.loading import Loaded, hidden_states

Kind = Literal["light", "probe"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
LEAST_STEPS = 1500


class Light(nn.Module):
    """Filters of a few tokens' width over the embeddings, the strongest answer of each, one linear layer."""

    scale: Tensor

    def __init__(self, width: int, hidden: int, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.filters = nn.Conv1d(width, hidden, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(hidden, classes)

    def forward(self, states: Float[Tensor, "row n d"], lengths: Int[Tensor, " row"]) -> Float[Tensor, "row label"]:
        inside = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
        answers = self.filters((states * self.scale * inside[..., None]).transpose(1, 2)).relu()
        strongest = (answers * inside[:, None]).amax(-1)  # answers are ≥ 0, so that 0 is no answer
        logits: Tensor = self.out(self.dropout(strongest))
        return logits


class Probe(nn.Module):
    """Three layers of BiLSTM; the label is read off the strongest answer of each unit, wherever in the text it is."""

    scale: Tensor

    def __init__(self, width: int, hidden: int, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.lstm = nn.LSTM(2 * width, hidden, num_layers=3, bidirectional=True, batch_first=True, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, states: Float[Tensor, "row n d"], lengths: Int[Tensor, " row"]) -> Float[Tensor, "row label"]:
        embeds, hidden = states.chunk(2, dim=-1)
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.cat([embeds * self.scale, hidden], dim=-1), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward pass outside training
            packed_answers = self.lstm(packed)[0]
        answers, _ = nn.utils.rnn.pad_packed_sequence(packed_answers, batch_first=True, padding_value=-1.0)
        logits: Tensor = self.out(self.dropout(answers.amax(1)))  # answers lie between -1 and 1
        return logits


NETWORKS: dict[str, type[Light] | type[Probe]] = {"light": Light, "probe": Probe}


def first_token(kind: str, tokenizer: Any) -> int:
    """The token that a text begins with for a probe; 0, which is not used, for a light classifier."""
    if kind == "light":
        return 0
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SamplingError(
            "this tokenizer has no token to begin a text with, and a probe needs one",
            remedy="use kind light",
        )
    return int(first)


def states_of(kind: str, model: Any, first: int, embeds: Float[Tensor, "row n d"]) -> Float[Tensor, "row position d"]:
    """The network's inputs: the text's embeddings; for a probe those of the first token too, and all hidden states.

    The last hidden state of a token says more about the next token than about itself, so both are needed.
    """
    if kind == "light":
        return embeds
    beginning = model.get_input_embeddings()(torch.full((len(embeds), 1), first, device=embeds.device))
    embedded = torch.cat([beginning, embeds], dim=1)
    return torch.cat([embedded, hidden_states(model, embeds=embedded)], dim=-1)


def identity_of(loaded: Loaded) -> dict[str, Any]:
    """The identity of a language model: its vocabulary, and a few numbers of its embeddings."""
    table = loaded.model.get_input_embeddings().weight.detach()
    vocabulary = json.dumps(sorted(loaded.tokenizer.get_vocab().items())).encode()
    rows = torch.linspace(0, len(loaded.tokenizer) - 1, 5, device=table.device).long()
    return {
        "tokens": len(loaded.tokenizer),
        "width": table.shape[1],
        "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
        "sample": [[round(value, 5) for value in row] for row in table[rows, :4].tolist()],
        "spread": float(table.float().std()),
    }


def mismatch(trained: dict[str, Any], present: dict[str, Any]) -> str | None:
    """How a language model differs from the one a classifier was trained with; None if it does not."""
    for key, quantity in (("tokens", "tokens in the vocabulary"), ("width", "dimensions of the embeddings")):
        if trained[key] != present[key]:
            return f"{trained[key]} {quantity} against {present[key]}"
    if trained["vocabulary"] != present["vocabulary"]:
        return "the same number of tokens, but other ones"
    apart = (torch.tensor(trained["sample"]) - torch.tensor(present["sample"])).abs().max()
    return "the same tokens, but other embeddings" if apart > 0.2 * trained["spread"] else None


@dataclass(frozen=True)
class ClassifierRecipe:
    """Everything the result depends on, besides the texts and the language model."""

    kind: Kind = "light"
    hidden: int = 64
    epochs: float | None = None
    """Passes over the texts; four if left out, and more where they are few."""
    batch: int = 32
    learning_rate: float = 2e-3
    longest: int = 100
    held_out: float = 0.1
    seed: int = 0

    def steps(self, texts: int) -> int:
        batches = texts * (1 - self.held_out) / self.batch
        return max(LEAST_STEPS, math.ceil(4 * batches)) if self.epochs is None else math.ceil(self.epochs * batches)


def load_classifier(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The network, ready to evaluate, and the config it was saved with."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
        with torch.device("meta"):  # sizes that a damaged config makes up take no memory
            network = NETWORKS[config["classifier"]](config["model"]["width"], config["hidden"], len(config["labels"]))
        network.load_state_dict(tensors, assign=True)
    except Exception as error:  # the libraries below raise many kinds; each means that the folder is of no use
        raise SamplingError(
            f"classifier {folder} cannot be loaded ({type(error).__name__}: {one_line(error)})",
            remedy="give a folder written by `svs train classifier`",
        ) from error
    return network.eval().requires_grad_(False), config


def save_classifier(network: nn.Module, config: dict[str, Any], out: Path) -> None:
    """Write both files under another name and rename them, so that an interruption leaves no partial file."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors |= {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.named_parameters()}
    try:
        save_file(tensors, out / "new")
        os.replace(out / "new", out / WEIGHTS)
        (out / "new").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(out / "new", out / CONFIG)
    finally:
        (out / "new").unlink(missing_ok=True)
