"""Classifiers that read a language model's own tokens: two networks, their training, their files.

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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.base import SamplingError
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.loading import Loaded, hidden_states

Kind = Literal["light", "probe"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
LEAST_STEPS = 1500
SHORT = 20
"""Texts are judged whole and cut to this many tokens, the default length of a sampled text."""


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
        found = self.filters((states * self.scale * inside[..., None]).transpose(1, 2)).relu()
        strongest = (found * inside[:, None]).amax(-1)  # answers are ≥ 0, so that 0 is no answer
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
            found = self.lstm(packed)[0]
        answers, _ = nn.utils.rnn.pad_packed_sequence(found, batch_first=True, padding_value=-1.0)
        logits: Tensor = self.out(self.dropout(answers.amax(1)))  # answers lie between -1 and 1
        return logits


NETWORKS: dict[str, type[Light] | type[Probe]] = {"light": Light, "probe": Probe}


def first_token(tokenizer: Any) -> int:
    """What a text begins with, for the probe."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SamplingError("this tokenizer has no token to begin a text with, and a probe needs one; use kind light")
    return int(first)


def states_of(
    kind: str, model: Any, first: int, tokens: Int[Tensor, "row n"], embeds: Float[Tensor, "row n d"] | None = None
) -> Float[Tensor, "row place d"]:
    """What the network reads: the tokens' embeddings; for a probe also their hidden states, from the beginning on.

    The last hidden state of a token says more about the next token than about itself, so both are needed.
    """
    table = model.get_input_embeddings()
    inputs: Tensor = table(tokens) if embeds is None else embeds
    if kind == "light":
        return inputs
    beginning = table(torch.full_like(tokens[:, :1], first))
    whole = torch.cat([beginning, inputs], dim=1)
    return torch.cat([whole, hidden_states(model, embeds=whole)], dim=-1)


def identity_of(loaded: Loaded) -> dict[str, Any]:
    """What tells one language model from another: its vocabulary, and a few numbers of its embeddings."""
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


def difference(trained: dict[str, Any], found: dict[str, Any]) -> str | None:
    """In what a language model differs from the one a classifier was trained with; None if in nothing."""
    for key, what in (("tokens", "tokens in the vocabulary"), ("width", "dimensions of the embeddings")):
        if trained[key] != found[key]:
            return f"{trained[key]} {what} against {found[key]}"
    if trained["vocabulary"] != found["vocabulary"]:
        return "the same number of tokens, but other ones"
    apart = (torch.tensor(trained["sample"]) - torch.tensor(found["sample"])).abs().max()
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
        once = texts * (1 - self.held_out) / self.batch
        return max(LEAST_STEPS, math.ceil(4 * once)) if self.epochs is None else math.ceil(self.epochs * once)


def train_classifier(
    texts: list[str],
    labels: list[str],
    loaded: Loaded,
    out: Path,
    recipe: ClassifierRecipe,
    tick: Callable[[str, int], None],
) -> dict[str, Any]:
    """Train into the folder ``out``; ``tick(note, steps)`` is told how it goes. Returns the report, which is also
    kept in the folder's config.json."""
    if recipe.kind not in get_args(Kind):
        raise SamplingError(f"kind {recipe.kind!r} is unknown; choose {' or '.join(get_args(Kind))}")
    names = sorted(set(labels))
    ids, longest = _encoded(texts, loaded, recipe), _longest(loaded, recipe)
    known = np.array([names.index(label) for label in labels])
    learn, judge = _split(known, recipe)
    table = loaded.model.get_input_embeddings().weight
    first = first_token(loaded.tokenizer) if recipe.kind == "probe" else 0
    torch.manual_seed(recipe.seed)
    scale = 1 / float(table.float().std())
    network = NETWORKS[recipe.kind](table.shape[1], recipe.hidden, len(names), scale).to(table.device).train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    weights = _weights(known[learn], len(names)).to(table.device)
    source, steps = np.random.default_rng(recipe.seed), recipe.steps(len(ids))
    for step, rows in zip(range(steps), _batches(learn, recipe.batch, source), strict=False):
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, (step + 1) / 50) * (1 - step / steps)
        varied = _varied([ids[row] for row in rows], len(loaded.tokenizer), source)
        logits = _logits(network, recipe.kind, loaded.model, first, [row[:longest] for row in varied])
        wanted = torch.tensor(known[rows], device=table.device)
        loss = nn.functional.cross_entropy(logits, wanted, weight=weights)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        tick(f"loss {float(loss.detach()):.3f}", 1)
    network.eval()
    for parameter in network.parameters():
        parameter.data = parameter.data.half().float()  # what is judged is what is saved

    def judged(cut: int | None) -> dict[str, Any]:
        parts = [judge[i : i + 64] for i in range(0, len(judge), 64)]
        guesses = [
            _logits(network, recipe.kind, loaded.model, first, [ids[row][:cut] for row in part]).argmax(-1).cpu()
            for part in parts
        ]
        guessed = [names[place] for place in torch.cat(guesses).tolist()]
        return classification_report([names[place] for place in known[judge]], guessed, names)

    with torch.no_grad():
        whole, short = judged(None), judged(SHORT)
    report = {
        **whole,
        f"macro_f1_of_{SHORT}_tokens": short["macro_f1"],
        "texts": len(learn),
        "held_out_texts": len(judge),
        "parameters": sum(part.numel() for part in network.parameters()),
    }
    config = {
        "classifier": recipe.kind,
        "labels": names,
        "hidden": recipe.hidden,
        "model": identity_of(loaded),
        "recipe": asdict(recipe),
        "report": report,
    }
    _save(network, config, out)
    return report


def load_classifier(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The network, ready to evaluate, and the config it was saved with."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
        network = NETWORKS[config["classifier"]](config["model"]["width"], config["hidden"], len(config["labels"]))
        network.load_state_dict(tensors)
    except Exception as error:  # the libraries below raise many kinds; each means that the folder is of no use
        said = " ".join(str(error).split())[:200]
        raise SamplingError(
            f"classifier {folder} cannot be loaded ({type(error).__name__}: {said}); "
            "give a folder written by `svs train classifier`"
        ) from error
    return network.eval().requires_grad_(False), config


def predicted(folder: Path, loaded: Loaded, texts: list[str], cut: int | None = None) -> list[str]:
    """The most probable label of each text, or of its first ``cut`` tokens."""
    network, config = load_classifier(folder)
    kind, first = config["classifier"], first_token(loaded.tokenizer) if config["classifier"] == "probe" else 0
    ids = _encoded(texts, loaded, ClassifierRecipe(**config["recipe"]))
    found: list[str] = []
    with torch.no_grad():
        for begin in range(0, len(ids), 64):
            rows = [row[:cut] for row in ids[begin : begin + 64]]
            found += [config["labels"][place] for place in _logits(network, kind, loaded.model, first, rows).argmax(-1)]
    return found


def _save(network: nn.Module, config: dict[str, Any], out: Path) -> None:
    """Both files are written beside the last ones and renamed, so that a kill leaves no half of one."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors |= {name: tensor.detach().half().cpu().contiguous() for name, tensor in network.named_parameters()}
    save_file(tensors, out / "new")
    os.replace(out / "new", out / WEIGHTS)
    (out / "new").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(out / "new", out / CONFIG)


def _longest(loaded: Loaded, recipe: ClassifierRecipe) -> int:
    """How many tokens the language model takes in, after the one that a text begins with."""
    context: int = getattr(loaded.model.config, "max_position_embeddings", None) or recipe.longest + 1
    return min(recipe.longest, context - 1)


def _encoded(texts: list[str], loaded: Loaded, recipe: ClassifierRecipe) -> list[list[int]]:
    """The tokens of every text, cut to what the language model takes in."""
    rows: list[list[int]] = loaded.tokenizer(texts, add_special_tokens=False)["input_ids"]
    empty = [text for text, row in zip(texts, rows, strict=True) if not row]
    if empty:
        raise SamplingError(f"the text {empty[0]!r} has no tokens; leave out empty texts")
    return [row[: _longest(loaded, recipe)] for row in rows]


def _split(known: np.ndarray, recipe: ClassifierRecipe) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn from and rows to judge by: the same share of every class, and one of each at the least."""
    source = np.random.default_rng([recipe.seed, 1])
    learn, judge = [], []
    for label in np.unique(known):
        rows = source.permutation(np.flatnonzero(known == label))
        count = max(1, round(recipe.held_out * len(rows)))
        judge.append(rows[:count])
        learn.append(rows[count:])
    return np.concatenate(learn), np.concatenate(judge)


def _weights(known: np.ndarray, classes: int) -> Float[Tensor, " label"]:
    """Rare classes weigh more, at most ten times as much as under equal weights; the mean over texts is 1."""
    counts = np.bincount(known, minlength=classes)
    weights = np.minimum(len(known) / (classes * np.maximum(counts, 1)), 10.0)
    return torch.tensor(weights / (weights[known].mean()), dtype=torch.float32)


def _batches(rows: np.ndarray, size: int, source: np.random.Generator) -> Iterator[np.ndarray]:
    """Every row once an epoch, without end."""
    while True:
        order = source.permutation(rows)
        yield from (order[i : i + size] for i in range(0, len(order), size))


def _varied(rows: list[list[int]], tokens: int, source: np.random.Generator) -> list[list[int]]:
    """Texts as samplers meet them: half of the time their beginnings alone, and half of the time with a few random
    tokens before and after, which mean nothing."""
    if source.random() < 0.5:
        cut = int(source.integers(8, max(9, max(map(len, rows)) + 1)))
        rows = [row[:cut] for row in rows]
    if source.random() < 0.5:
        rows = [_rubbish(tokens, source) + row + _rubbish(tokens, source) for row in rows]
    return rows


def _rubbish(tokens: int, source: np.random.Generator) -> list[int]:
    found: list[int] = source.integers(tokens, size=source.integers(9)).tolist()
    return found


def _logits(network: nn.Module, kind: str, model: Any, first: int, rows: list[list[int]]) -> Tensor:
    """The network's answers to texts of different lengths."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    lengths = torch.tensor([len(row) + (kind == "probe") for row in rows], device=model.device)
    with torch.no_grad():
        states = states_of(kind, model, first, tokens)
    logits: Tensor = network(states.float(), lengths)
    return logits


def counted(labels: list[str]) -> Counter[str]:
    """How many texts each label has; an error if no classifier can be learnt from them."""
    counts = Counter(labels)
    if len(counts) < 2:
        raise SamplingError(
            f"all {len(labels)} texts have the label {labels[0]!r}; a classifier needs two classes or more"
        )
    rare = [label for label, count in counts.items() if count < 2]
    if rare:
        raise SamplingError(
            f"the label {rare[0]!r} has a single text; give it two or more (one is to judge by), or leave it out"
        )
    return counts
