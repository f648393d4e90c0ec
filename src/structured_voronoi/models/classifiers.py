"""Classifiers that read a language model's tokens: two networks and their files.

A `light` classifier reads the token embeddings, so its gradient needs no backward pass through the language model. A
`probe` is the classifier of the paper: a BiLSTM on the hidden states. The language model stays frozen and is not saved
with them.

The bundled classifiers were trained with `svs train classifier --data builtin --label NAME --out FOLDER`, one for each
NAME in `restaurants.LABELS`.
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

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.models.loading import Loaded, convert_errors, hidden_states

Kind = Literal["light", "probe"]
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


class Light(nn.Module):
    """A convolution over three neighbouring embeddings, max-pooling over the text, and a linear layer.

    Parameters
    ----------
    width
        Dimensions of the embeddings.
    hidden
        Number of filters.
    classes
        Number of labels.
    scale
        Factor of the embeddings.
    """

    scale: Tensor

    def __init__(self, width: int, hidden: int, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.filters = nn.Conv1d(width, hidden, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(hidden, classes)

    def forward(self, states: Float[Tensor, "row n d"], lengths: Int[Tensor, " row"]) -> Float[Tensor, "row label"]:
        """The logits of texts that are padded on the right."""
        inside = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
        outputs = self.filters((states * self.scale * inside[..., None]).transpose(1, 2)).relu()
        pooled = (outputs * inside[:, None]).amax(-1)  # outputs are ≥ 0, so masked positions do not count
        logits: Tensor = self.out(self.dropout(pooled))
        return logits


class Probe(nn.Module):
    """Three layers of a BiLSTM on embeddings and hidden states, max-pooling over the text, and a linear layer.

    Parameters
    ----------
    width
        Dimensions of the embeddings, and of the hidden states.
    hidden
        Units of the LSTM in each direction.
    classes
        Number of labels.
    scale
        Factor of the embeddings.
    """

    scale: Tensor

    def __init__(self, width: int, hidden: int, classes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.lstm = nn.LSTM(2 * width, hidden, num_layers=3, bidirectional=True, batch_first=True, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, states: Float[Tensor, "row n d"], lengths: Int[Tensor, " row"]) -> Float[Tensor, "row label"]:
        """The logits of texts that are padded on the right."""
        embeds, hidden = states.chunk(2, dim=-1)
        pooled = pooled_lstm(self.lstm, torch.cat([embeds * self.scale, hidden], dim=-1), lengths)
        logits: Tensor = self.out(self.dropout(pooled))
        return logits


NETWORKS: dict[str, type[Light] | type[Probe]] = {"light": Light, "probe": Probe}


def pooled_lstm(
    lstm: nn.LSTM, inputs: Float[Tensor, "row n d"], lengths: Int[Tensor, " row"] | None = None
) -> Float[Tensor, "row unit"]:
    """The largest output of each unit of an LSTM within each row; without ``lengths`` no row is padded."""
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward pass in evaluation mode
        if lengths is None:
            outputs: Tensor = lstm(inputs)[0]
        else:
            packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
            # outputs lie between -1 and 1, so padding does not count
            outputs, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True, padding_value=-1.0)
    return outputs.amax(1)


def first_token(kind: str, tokenizer: Any) -> int:
    """The token before a text that a probe reads; 0, which is unused, for a light classifier."""
    if kind == "light":
        return 0
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SamplingError("the tokenizer has no beginning-of-text token for a probe", remedy="use kind light")
    return int(first)


def classifier_inputs(
    kind: str, network: Any, first: int, embeds: Float[Tensor, "row n d"]
) -> Float[Tensor, "row position d"]:
    """The inputs of a classifier: the embeddings of the text; for a probe also the first token's and the hidden states.

    A probe needs both, because the last hidden state of a token says more about the next token than about itself.
    """
    if kind == "light":
        return embeds
    beginning = network.get_input_embeddings()(torch.full((len(embeds), 1), first, device=embeds.device))
    embedded = torch.cat([beginning, embeds], dim=1)
    return torch.cat([embedded, hidden_states(network, embeds=embedded)], dim=-1)


def model_identity(loaded: Loaded) -> dict[str, Any]:
    """What identifies a language model: its vocabulary and a sample of its embeddings."""
    table = loaded.network.get_input_embeddings().weight.detach()
    vocabulary = json.dumps(sorted(loaded.tokenizer.get_vocab().items())).encode()
    rows = torch.linspace(0, len(loaded.tokenizer) - 1, 5, device=table.device).long()
    return {
        "tokens": len(loaded.tokenizer),
        "width": table.shape[1],
        "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
        "sample": [[round(value, 5) for value in row] for row in table[rows, :4].tolist()],
        "spread": float(table.float().std()),
    }


def identity_difference(trained: dict[str, Any], present: dict[str, Any]) -> str | None:
    """How a language model differs from the one that a classifier was trained with; None if it does not."""
    for key, quantity in (("tokens", "tokens in the vocabulary"), ("width", "dimensions of the embeddings")):
        if trained[key] != present[key]:
            return f"{trained[key]} {quantity} against {present[key]}"
    if trained["vocabulary"] != present["vocabulary"]:
        return "different tokens, equally many"
    largest = (torch.tensor(trained["sample"]) - torch.tensor(present["sample"])).abs().max()
    return "the same tokens, but different embeddings" if largest > 0.2 * trained["spread"] else None


@dataclass(frozen=True)
class ClassifierSettings:
    """Settings of a classifier and of its training.

    Parameters
    ----------
    kind
        ``light`` or ``probe``.
    hidden
        Filters or units of the network.
    epochs
        Passes over the texts. None means four, or more if there are few texts.
    batch_size
        Texts per step.
    learning_rate
        Largest learning rate.
    max_tokens
        Tokens that are read of each text.
    held_out_share
        Share of the texts that are held out for the report.
    seed
        Seed of all random numbers.
    """

    kind: Kind = "light"
    hidden: int = 64
    epochs: float | None = None
    batch_size: int = 32
    learning_rate: float = 2e-3
    max_tokens: int = 100
    held_out_share: float = 0.1
    seed: int = 0

    def steps(self, texts: int) -> int:
        """Number of training steps for so many texts."""
        batches = texts * (1 - self.held_out_share) / self.batch_size
        return max(1500, math.ceil(4 * batches)) if self.epochs is None else math.ceil(self.epochs * batches)


def load_classifier(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load a classifier's network, in evaluation mode, and its config."""
    with convert_errors(f"classifier {folder}", "give a folder written by `svs train classifier`"):
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        with torch.device("meta"):  # allocates no memory for the sizes in a damaged config
            network = NETWORKS[config["classifier"]](config["model"]["width"], config["hidden"], len(config["labels"]))
        network.load_state_dict(tensors, assign=True)
    return network.eval().requires_grad_(False), config


def save_classifier(network: nn.Module, config: dict[str, Any], out: Path) -> None:
    """Save a classifier in float16; each file is written under a temporary name and then renamed."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors |= {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.named_parameters()}
    try:
        save_file(tensors, out / "new")
        os.replace(out / "new", out / WEIGHTS_FILE)
        (out / "new").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(out / "new", out / CONFIG_FILE)
    finally:
        (out / "new").unlink(missing_ok=True)
