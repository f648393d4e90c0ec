"""A language model over six tokens and the end, whose texts of at most four tokens can be listed."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

import structured_voronoi as sv

WORDS = ("<end>", "a", "b", "c", "Ġd", ".", "Ġ!")
END, LENGTH = 0, 4
SPELT = ("", "a", "b", "c", " d", ".", " !")
STOPS: tuple[tuple[str | int, ...], ...] = ((), ("ab", "!"), (". d", 3))
"""No stop string; one of two tokens and one that is the end of a token; one that begins in a token, and a token."""


def words() -> transformers.PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="c"))
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", bos_token="<end>")


@cache
def network() -> Any:
    """Weights so large that a token depends much on those before it."""
    torch.manual_seed(18)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=12, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)


@cache
def model() -> sv.LanguageModel:
    """One model for all targets, so that its geometry is built once."""
    return sv.LanguageModel(network(), words())


class ListedTexts(sv.TextTarget):
    """A target that lists its texts and their probabilities, by strings and one pass of the network each."""

    def __init__(
        self, stop: tuple[str | int, ...] = (), length: int = LENGTH, finish: str = "stop", **settings: Any
    ) -> None:
        super().__init__(model(), "", length, finish=finish, stop=stop, **settings)

    @cached_property
    def listed(self) -> tuple[Tensor, Tensor]:
        waiting: list[list[int]] = [[]]
        texts: list[list[int]] = []
        for tokens in waiting:  # grows as it goes
            for token in range(len(WORDS)):
                longer = [*tokens, token]
                spelt = "".join(SPELT[one] for one in longer)
                if token == END or token in self.stop or any(isinstance(s, str) and s in spelt for s in self.stop):
                    texts.append(longer)
                elif len(longer) < self.length:
                    waiting.append(longer)
                elif self.finish == "any":
                    texts.append(longer)
        rows = torch.tensor([text + [END] * (self.length - len(text)) for text in texts])
        log_prob = torch.stack([_log_prob(text) for text in texts])
        return rows, log_prob

    def support(self) -> Tensor:
        return self.listed[0]

    def probabilities(self) -> Tensor:
        return self.listed[1].softmax(-1)


def _log_prob(text: list[int]) -> Tensor:
    logits = network()(input_ids=torch.tensor([[END, *text[:-1]]])).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(text)[:, None]).sum()


class PaddingCounted(ListedTexts):
    """Broken: what the network says of padding counts."""

    def _padded(self, scored: Tensor, tokens: Tensor, start: int) -> Tensor:
        return scored


class EndlessAccepted(ListedTexts):
    """Broken: redraws do not report that a text has not ended."""

    def redraw(self, *arguments: Any) -> Any:
        redrawn = super().redraw(*arguments)
        return redrawn._replace(log_rest=torch.zeros_like(redrawn.log_rest))


class CutTextsHalved(ListedTexts):
    """Broken: texts that are cut have half of their probability."""

    def log_prob(self, tokens: Tensor) -> Tensor:
        return super().log_prob(tokens) + self._halved(tokens)

    def redraw(self, *arguments: Any) -> Any:
        redrawn = super().redraw(*arguments)
        return redrawn._replace(log_rest=redrawn.log_rest + self._halved(redrawn.tokens))

    def _halved(self, tokens: Tensor) -> Tensor:
        return (~self.is_complete(tokens)).double() * torch.tensor(0.5).log()


class EndForFree(ListedTexts):
    """Broken: the probability of the end itself is left out."""

    def _padded(self, scored: Tensor, tokens: Tensor, start: int) -> Tensor:
        return super()._padded(scored, tokens, start).masked_fill(tokens[:, start:] == END, 0.0)


@cache
def listed(
    stop: tuple[str | int, ...] = (), kind: type[ListedTexts] = ListedTexts, finish: str = "stop"
) -> ListedTexts:
    return kind(stop, finish=finish)


class ControlledTexts(sv.ControlledTarget):
    """Listed texts under one control."""

    def __init__(self, model: ListedTexts, control: Any) -> None:
        super().__init__(model, [control])
        self.listed_model = model

    def support(self) -> Tensor:
        return self.listed_model.support()

    def probabilities(self) -> Tensor:
        rows, log_prob = self.listed_model.listed
        spelt = ["".join(SPELT[token] for token in row) for row in rows.tolist()]
        (control,) = self.controls
        return (log_prob + control.log_prob(rows, spelt)).softmax(-1)
