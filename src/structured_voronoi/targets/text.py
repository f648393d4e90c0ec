"""Texts after a prompt as a target: p(m | prompt) over rows of N tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Choose, Pattern, Redrawn
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import BLOCK, MEMORY, in_blocks, widened
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.core.validation import check_choice, check_count, check_memory
from structured_voronoi.models.loading import hidden_states
from structured_voronoi.models.prompts import drops_space, encode_chat, encode_prompt, encode_suffix, end_of_turn
from structured_voronoi.targets.ending import ENDING, Ending, Finish, checked_stops, end_tokens, make_ending
from structured_voronoi.targets.growing import Growing
from structured_voronoi.targets.scoring import ScoredText

if TYPE_CHECKING:
    from structured_voronoi.targets.controlled import ControlledTarget
    from structured_voronoi.targets.language_model import Controls, LanguageModel


class TextTarget(ScoredText):
    """p(m | prompt), times p(suffix | prompt, m) if there is a suffix; made by `LanguageModel.target`.

    Tokens that are not allowed have logits of -inf at every sampled position, so that without a suffix this is a
    normalised autoregressive model. The suffix is scored by the unmasked model. Samplers move among the output
    embeddings.

    Texts that end (``finish`` is "stop" or "any") fill a row up to their end, and padding follows, which is certain
    there. With "stop" log_prob is -inf for rows that do not end: the target is p(text | it ends within N tokens) up to
    the probability of that condition. A stop string ends a text with the token that completes it; that token is kept
    whole.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.load("bundled").target("Near the", max_tokens=4)
    >>> draws = sv.sample(target, sv.Ancestral(), chains=2, draws=1, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (2, 1, 4)
    """

    masks_itself = True
    reorders = True

    def __init__(
        self,
        model: LanguageModel,
        prompt: str = "",
        max_tokens: int = 20,
        *,
        suffix: str = "",
        finish: Finish = "length",
        stop: str | int | Sequence[str | int] = (),
        chat: bool = False,
        system: str = "",
        allowed: Sequence[int] | None = None,
        memory: int = MEMORY,
    ) -> None:
        check_count(max_tokens=max_tokens)
        check_count(most=2**63, memory=memory)
        check_choice(Finish, finish=finish)
        self.model, self.network, self.tokenizer = model, model.network, model.tokenizer
        self.memory, self.device, self.embeddings = memory, model.device, model.embeddings
        self.length, self.suffix, self.finish, self.stop = max_tokens, suffix, finish, checked_stops(stop)
        self.is_chat, self.system = chat or bool(system), system
        self._asked_tokens = None if allowed is None else list(allowed)
        self.allowed, self.excluded = self._make_mask()
        self._read_prompt(prompt)
        after = encode_suffix(self.tokenizer, suffix) if suffix else []
        self.after = torch.tensor(after, dtype=torch.int64, device=self.device)
        self._check_context()
        self.ending = self._make_ending()
        self.padding = None if self.ending is None else self.ending.padding
        self.ended = self.is_complete if finish == "stop" else None

    def under(self, controls: Controls, timeout: float | None = CONTROL_SECONDS) -> ControlledTarget:
        """The same texts under controls."""
        from structured_voronoi.targets.controlled import ControlledTarget

        return ControlledTarget(self, controls, timeout)

    @property
    def input_map(self) -> Float[Tensor, "d d"] | None:  # type: ignore[override]
        return self.model.input_map

    def recipe(self) -> Any:
        """How another process makes the same target."""
        if type(self) is not TextTarget:
            return NotImplemented
        settings = {"suffix": self.suffix, "finish": self.finish, "stop": self.stop, "chat": self.is_chat}
        settings |= {"system": self.system, "allowed": self._asked_tokens, "memory": self.memory}
        return _make_again, (self.model, self.prompt, self.length, settings)

    def with_prompt(self, prompt: str) -> Self:
        """The same after another prompt; everything that does not depend on the prompt is shared."""
        other = copy.copy(self)
        other._read_prompt(prompt)
        other._check_context()
        if self.ended is not None:
            other.ended = other.is_complete
        return other

    def with_prompts_of(self, rows: Sequence[TextTarget]) -> Self:
        """A target whose rows have prompts of their own, all as long, by which texts can be drawn but not scored.

        Rows are drawn in whole blocks, of which the last one is filled with its last row.
        """
        other = copy.copy(self)
        other.before = torch.cat([row.before for row in [*rows, *[rows[-1]] * (-len(rows) % BLOCK)]])
        if self.ended is not None:
            other.ended = other.is_complete
        return other

    def _read_prompt(self, prompt: str) -> None:
        tokenizer, self.prompt = self.tokenizer, prompt
        ids = encode_chat(tokenizer, prompt, self.system) if self.is_chat else encode_prompt(tokenizer, prompt)
        known = len(self.network.get_input_embeddings().weight)
        if ids and max(ids) >= known:
            raise SamplingError(
                f"the prompt {prompt[:80]!r} has token {max(ids)}, and the model knows {known}",
                remedy="the tokenizer belongs to another model: copy both again",
            )
        self.before: Int[Tensor, "row position"] = torch.tensor([ids], dtype=torch.int64, device=self.device)
        self._prompt_text = tokenizer.decode(ids) if prompt and drops_space(tokenizer) else None

    def decode(self, tokens: Int[Tensor, " n"]) -> str:
        """The text without its end and padding.

        It is decoded together with the prompt by tokenizers that drop a first space.
        """
        tokens = torch.as_tensor(tokens)  # also arrays, such as draws of `sample`
        ids = tokens[: int(self.content_lengths(tokens[None])[0])].tolist()
        if self._prompt_text is not None:
            text = str(self.tokenizer.decode([*self.before[0].tolist(), *ids]))
            if text.startswith(self._prompt_text):
                return text[len(self._prompt_text) :]
        return str(self.tokenizer.decode(ids))

    def content_lengths(self, tokens: Int[Tensor, "chain n"]) -> Int[Tensor, " chain"]:
        """Number of tokens before the end token and padding: those that `decode` and classifiers read."""
        if self.ending is None:
            return tokens.new_full((len(tokens),), tokens.shape[1])
        is_end = torch.isin(tokens, torch.tensor(self.ending.tokens, device=tokens.device))
        return is_end.cumsum(-1).eq(0).sum(-1)

    def text_lengths(self, tokens: Int[Tensor, "chain n"]) -> Int[Tensor, " chain"]:
        """Number of tokens up to and including the end, without padding."""
        if self.ending is None:
            return tokens.new_full((len(tokens),), tokens.shape[1])
        return (~self.ending.over(tokens)[:, :-1]).sum(-1)

    def is_complete(self, tokens: Int[Tensor, "chain n"]) -> Bool[Tensor, " chain"]:
        """Which texts have ended by themselves."""
        if self.ending is None:
            return torch.zeros_like(tokens[:, 0], dtype=torch.bool)
        return self.ending.over(tokens)[:, -1]

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        def score(tokens: Tensor) -> tuple[Tensor]:
            scored, after = self._scores(tokens)
            return (scored.sum(-1) + after,)

        return self._of_texts(score, tokens)[0]

    @torch.no_grad()
    def log_prob_and_guide(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """Also the hidden state that predicts each token: the part of the gradient that needs no backward pass."""

        def score(tokens: Tensor) -> tuple[Tensor, Tensor]:
            hidden = hidden_states(self.network, self._ids(tokens))
            scored, after = self._scores(tokens, hidden)
            return scored.sum(-1) + after, self._without_padding(self._predicting(hidden), tokens)

        log_prob, guide = self._of_texts(score, tokens)
        return log_prob, guide

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """The whole gradient: each token as an output (the hidden state) and as an input (by backpropagation).

        Where input and output tables differ, the input part is brought into the output table's space by least squares.
        """

        def score(tokens: Tensor) -> tuple[Tensor, ...]:
            parts = [self._grad_of_rows(tokens[rows]) for rows in self._row_slices(len(tokens), self._graph_bytes)]
            return tuple(torch.cat(column) for column in zip(*parts, strict=True))

        log_prob, gradient = self._of_texts(score, tokens)
        return log_prob, gradient

    def _of_texts(self, score: Callable[[Tensor], tuple[Tensor, ...]], tokens: Tensor) -> tuple[Tensor, ...]:
        """log p of every row and its steering field; rows that are no text are impossible and not evaluated."""
        possible = None if self.ending is None else self.ending.is_text(tokens, must_end=self.finish == "stop")
        if possible is None or possible.all():
            return score(tokens)
        dtype = torch.promote_types(self.embeddings.dtype, torch.float32)
        log_prob = torch.full_like(tokens[:, 0], -torch.inf, dtype=dtype)
        fields = [self.embeddings.new_zeros(*tokens.shape, self.embeddings.shape[1])]
        if possible.any():
            log_prob[possible], *found = in_blocks(score, tokens[possible])
            for field, part in zip(fields, found, strict=False):
                field[possible] = part
        return log_prob, *fields

    @torch.no_grad()
    def token_log_probs(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
        """log p of each token given those before it."""
        return self._scores(tokens)[0]

    @property
    def normalised(self) -> bool:
        """True without a suffix: log_prob is the sum of the tokens' log-probabilities, for texts that are possible."""
        return not len(self.after)

    def log_factors(self, tokens: Int[Tensor, "chain n"]) -> dict[str, Float[Tensor, " chain"]]:
        """log p of the suffix, or 0 and -inf for texts that must end."""
        if self.ended is not None:
            return {ENDING: self._log_ended(tokens)}
        if len(self.after):
            return {"suffix": widened(self._scores(tokens)[1])}
        return {}

    @property
    def patterns(self) -> Mapping[str, Pattern | Ending]:
        """That a text must end is a pattern, too."""
        return {} if self.ended is None or self.ending is None else {ENDING: self.ending}

    def why_impossible(self, tokens: Int[Tensor, "chain n"]) -> str:
        """The share of these texts that have not ended, if they must."""
        if self.ended is None or self.ended(tokens).all():
            return ""
        share = float((~self.ended(tokens)).float().mean())
        return f"{share:.0%} of the last ones had not ended after {self.length} tokens"

    @torch.no_grad()
    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]:
        """log p(· | prompt, tokens before) at every position from ``start``; -inf for tokens that are not allowed."""
        hidden = self._predicting(hidden_states(self.network, self._ids(tokens)))[:, start:]
        log_probs = self.log_probs(hidden)
        if self.ending is not None:
            log_probs[self.ending.over(tokens)[:, start:-1]] = self.certain_padding
        return log_probs

    @torch.no_grad()
    def redraw(self, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose) -> Redrawn:
        """Redraw positions ``start`` to ``stop`` from the model given the tokens before them, and score the rest.

        Keys and values are cached, so that every position goes through the network once; those of the prompt are
        computed for one row and shared by all. In half precision the text is scored once more by one pass over all of
        it, because that pass rounds differently and chains compare its log-probabilities.
        """
        tokens, growing = tokens.clone(), Growing(self, tokens[:, :start])
        log_probs: list[Tensor] = []
        for n in range(start, stop):
            scores, hidden = growing.predict()
            choice, parents = choose(n, scores, hidden), None
            if isinstance(choice, tuple):  # rows go on from others
                choice, parents = choice
                tokens[:, :n], scores = tokens[parents, :n], scores[parents]
                log_probs = [part[parents] for part in log_probs]
            tokens[:, n] = choice
            growing.append(choice, parents)
            log_probs.append(scores.gather(-1, choice[:, None]))
        if self.embeddings.dtype in (torch.float16, torch.bfloat16):
            scored, after = self._scores(tokens)
            return Redrawn(tokens, scored[:, start:], after)
        following, after = growing.score(tokens[:, stop:])
        scored = torch.cat([*log_probs, following], dim=-1)
        if self.ending is not None:
            scored[:, stop - start :] = self._padded(following, tokens, stop)
            after = self._log_ended(tokens).to(scored)
        return Redrawn(tokens, scored, after)

    def prompt_cache(self, rows: int) -> Any:
        """Keys and values of the prompt without its last token; None if it has only one."""
        if self.before.shape[1] == 1:
            return None
        cache = self.network.base_model(input_ids=self.before[:, :-1], use_cache=True).past_key_values
        if len(self.before) < rows:
            cache.batch_repeat_interleave(rows)
        return cache

    def _make_mask(self) -> tuple[Bool[Tensor, " token"], dict[str, int]]:
        """The tokens that may be sampled, and how many are left out for each reason."""
        allowed, size = self._asked_tokens, len(self.embeddings)
        if allowed is None:
            mask, excluded = self.model.sampled_tokens
            return mask.clone(), dict(excluded)
        wrong = [token for token in allowed if not hasattr(token, "__index__") or not 0 <= int(token) < size]
        if wrong:
            raise SamplingError(
                f"allowed holds token {wrong[0]!r}, and the model has tokens from 0 to {size - 1}",
                remedy="give numbers in this range",
            )
        mask = torch.zeros(size, dtype=torch.bool, device=self.device)
        mask[torch.tensor(allowed, dtype=torch.int64)] = True
        return mask, {"not in `allowed`": size - int(mask.sum())}

    def _make_ending(self) -> Ending | None:
        """How texts end; their end tokens become allowed."""
        if self.finish == "length":
            if self.stop:
                raise SamplingError(
                    f"stop = {self.stop!r} ends texts, and with finish='length' they have no end",
                    remedy="use finish='stop' or finish='any'",
                )
            return None
        if self.suffix:
            raise SamplingError(
                f"the suffix {self.suffix!r} follows texts of exactly {self.length} tokens, which do not end before it",
                remedy="leave out the suffix, or use finish='length'",
            )
        end = end_of_turn(self.tokenizer) if self.is_chat else self.tokenizer.eos_token_id
        if end is None or end >= len(self.embeddings):
            raise SamplingError(
                f"finish = {self.finish!r} needs an end-of-text token and this tokenizer has none",
                remedy="use finish='length'",
            )
        tokens, stops = end_tokens(self.network, self.tokenizer, int(end), self.stop)
        for token in tokens:
            if not self.allowed[token]:
                self.allowed[token] = True
                self.excluded = {why: count - (i == 0) for i, (why, count) in enumerate(self.excluded.items())}
        return make_ending(self.tokenizer, self.allowed, tokens, stops, self.length)

    def _check_context(self) -> None:
        """Raise an error for texts that are longer than the model's context, or than memory."""
        limit = getattr(self.network.config, "max_position_embeddings", None)
        needed = self.before.shape[1] + self.length + len(self.after)
        if limit is not None and needed > limit:
            raise SamplingError(
                f"prompt ({self.before.shape[1]} tokens), max_tokens ({self.length}) and suffix ({len(self.after)}) "
                f"exceed the model's context of {limit}",
                remedy="shorten the prompt or reduce max_tokens",
            )
        check_memory(BLOCK * self.row_bytes, f"{BLOCK} texts of {self.length} tokens")


def _make_again(model: LanguageModel, prompt: str, length: int, settings: dict[str, Any]) -> TextTarget:
    return TextTarget(model, prompt, length, **settings)
