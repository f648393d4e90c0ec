"""A language model as a target: p(m | prompt) over N tokens, with text on the right if there is any.

Texts may also end by themselves, with the tokenizer's end-of-text token or after a stop string. A row of N tokens then
holds the text up to its end, and the end-of-text token as padding at every position that is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Choose, Pattern, Redrawn, SoftReading
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import BLOCK, MEMORY, block_rows, in_blocks, widened
from structured_voronoi.core.validation import check_count, check_memory
from structured_voronoi.models.loading import head, hidden_states, load_model
from structured_voronoi.models.prompts import drops_space, encode_chat, encode_prompt, encode_suffix, end_of_turn
from structured_voronoi.targets.ending import (
    ENDING,
    Ending,
    Ends,
    checked_ends,
    checked_stops,
    end_tokens,
    log_of,
    make_ending,
)
from structured_voronoi.targets.growing import Growing

HALF_PRECISION = (torch.float16, torch.bfloat16)


class LanguageModel:
    """p(m | prompt), times p(suffix | prompt, m), times p(end | …) if ``ends`` is "at length".

    Tokens that are not allowed have logits of -inf at every sampled position, so that without suffix and end this is a
    normalised autoregressive model, and ancestral sampling is its truth. The suffix and the end are scored by the
    unmasked model. The geometry is the output table; with tied embeddings that is the input table too. Logits of the
    whole vocabulary are held for as many positions at a time as fit into ``memory`` bytes.

    If ``ends`` is "anywhere", the target is p(text | it ends within ``length`` tokens, its end included). Up to the
    probability of that condition, log_prob is Σ log p of the tokens up to the end; it is -inf for rows that do not end,
    or that go on after it. After the end padding is certain. A text also ends with the token that completes one of the
    ``stop`` strings, given as text or as the number of a token; that token is kept whole.

    In a ``chat`` the prompt is what a user says, after the ``system`` message if there is one, and the text is the
    model's answer: both by the tokenizer's template, and the answer ends with the end of the turn.
    """

    masks_itself = True
    reorders = True
    origin: tuple[str, str, str] | None = None
    """The name, device and dtype by which the network was loaded, if it was."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: str = "",
        length: int = 20,
        suffix: str = "",
        ends: Ends | bool = "never",
        allowed: list[int] | None = None,
        memory: int = MEMORY,
        stop: str | int | Sequence[str | int] = (),
        chat: bool = False,
        system: str = "",
    ) -> None:
        check_count(length=length)
        check_count(most=2**63, memory=memory)
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self.length, self.suffix = length, suffix
        self.is_chat, self.system, self.asked = chat or bool(system), system, allowed
        self.ends, self.stop = checked_ends(ends), checked_stops(stop)
        self.device = model.device
        table = model.get_output_embeddings().weight
        # one object for all targets of a network, so that its geometry is built once
        self.embeddings: Float[Tensor, "token d"] = table.detach() if table.requires_grad else table
        self.allowed, self.excluded = self._make_mask(allowed)
        self._fitted: Tensor | None = None
        self._read_prompt(prompt)
        after = encode_suffix(tokenizer, suffix) if suffix else []
        if self.ends == "at length":
            after = [*after, self._end_token()]
        self.after = torch.tensor(after, dtype=torch.int64, device=self.device)
        self._check_length()
        self.ending: Ending | None = None
        if self.ends == "anywhere":
            if suffix:
                raise SamplingError(
                    f"the suffix {suffix!r} follows texts of {length} tokens, which do not end before it",
                    remedy="leave it out, or say ends='never'",
                )
            tokens, stops = end_tokens(model, tokenizer, self._end_token(), self.stop)
            self._allow(tokens)
            self.ending = make_ending(tokenizer, self.allowed, tokens, stops, length)
        self.padding = None if self.ending is None else self.ending.padding
        if self.stop and self.ending is None:
            raise SamplingError(
                f"stop = {self.stop!r} ends texts anywhere, and ends = {self.ends!r}",
                remedy="say 'anywhere'",
            )

    @classmethod
    def load(
        cls,
        name: str = "bundled",
        *,
        prompt: str = "",
        length: int = 20,
        suffix: str = "",
        ends: Ends | bool = "never",
        stop: str | int | Sequence[str | int] = (),
        allowed: list[int] | None = None,
        chat: bool = False,
        system: str = "",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> Self:
        """``bundled``, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file."""
        ends = checked_ends(ends)
        check_count(length=length)
        loaded = load_model(name, device, dtype)
        made = cls(loaded.model, loaded.tokenizer, prompt, length, suffix, ends, allowed, MEMORY, stop, chat, system)
        made.origin = (str(Path(name).resolve()) if Path(name).exists() and name != "bundled" else name, device, dtype)
        return made

    def recipe(self) -> Any:
        """How another process makes the same: by loading the network from where it is from, if that is known."""
        if self.origin is None or type(self) is not LanguageModel:
            return NotImplemented
        settings = {"prompt": self.prompt, "length": self.length, "suffix": self.suffix, "ends": self.ends}
        settings |= {"stop": self.stop, "allowed": self.asked, "chat": self.is_chat, "system": self.system}
        return _load_again, (self.origin, self.memory, settings)

    def with_prompt(self, prompt: str) -> Self:
        """The same after another prompt; the network and all that does not depend on the prompt are shared."""
        other = copy.copy(self)
        other._read_prompt(prompt)
        other._check_length()
        return other

    def with_prompts_of(self, rows: Sequence[LanguageModel]) -> Self:
        """A target whose rows have prompts of their own, all as long, by which texts can be drawn but not scored.

        Rows are drawn in whole blocks, of which the last one is filled with its last row.
        """
        other = copy.copy(self)
        other.before = torch.cat([row.before for row in [*rows, *[rows[-1]] * (-len(rows) % BLOCK)]])
        return other

    def _read_prompt(self, prompt: str) -> None:
        tokenizer, self.prompt = self.tokenizer, prompt
        ids = encode_chat(tokenizer, prompt, self.system) if self.is_chat else encode_prompt(tokenizer, prompt)
        known = len(self.model.get_input_embeddings().weight)
        if ids and max(ids) >= known:
            raise SamplingError(
                f"the prompt {prompt[:80]!r} has token {max(ids)}, and the model knows {known}",
                remedy="the tokenizer belongs to another model: copy both again",
            )
        self.before: Int[Tensor, "row position"] = torch.tensor([ids], dtype=torch.int64, device=self.device)
        """The prompt's tokens: one row for all, or one for each."""
        self._prompt_text = tokenizer.decode(ids) if prompt and drops_space(tokenizer) else None

    def decode(self, tokens: Int[Tensor, " n"]) -> str:
        """The text without its end and padding, as it goes on from the prompt: some tokenizers drop its first space."""
        ids = tokens[: int(self.content_lengths(tokens[None])[0])].tolist()
        if self._prompt_text is not None:
            text = str(self.tokenizer.decode([*self.before[0].tolist(), *ids]))
            if text.startswith(self._prompt_text):
                return text[len(self._prompt_text) :]
        return str(self.tokenizer.decode(ids))

    def content_lengths(self, tokens: Int[Tensor, "chain n"]) -> Int[Tensor, " chain"]:
        """How many tokens stand before the end token and padding: those that `decode` and classifiers read."""
        if self.ending is None:
            return tokens.new_full((len(tokens),), tokens.shape[1])
        is_end = torch.isin(tokens, torch.tensor(self.ending.tokens, device=tokens.device))
        return is_end.cumsum(-1).eq(0).sum(-1)

    def text_lengths(self, tokens: Int[Tensor, "chain n"]) -> Int[Tensor, " chain"]:
        """How many tokens have a probability: up to and including the end, without padding."""
        if self.ending is None:
            return tokens.new_full((len(tokens),), tokens.shape[1])
        return (~self.ending.over(tokens)[:, :-1]).sum(-1)

    def ended(self, tokens: Int[Tensor, "chain n"]) -> Bool[Tensor, " chain"]:
        """Which texts are complete?"""
        if self.ending is None:
            return torch.full_like(tokens[:, 0], self.ends == "at length", dtype=torch.bool)
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
            hidden = hidden_states(self.model, self._ids(tokens))
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
        """log p of every row and its steering field; rows that are no text are impossible, and are not evaluated."""
        possible = None if self.ending is None else self.ending.is_text(tokens)
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

    def _grad_of_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        table = self.model.get_input_embeddings()
        with torch.enable_grad():
            embeds = table(self._ids(tokens)).detach().requires_grad_()
            hidden = hidden_states(self.model, embeds=embeds)
            with torch.no_grad():
                scored, after = self._scores(tokens, hidden)
                slope = self._slope(tokens, hidden)
            (gradient,) = torch.autograd.grad(hidden, embeds, slope)
        start = self.before.shape[1]
        as_input = gradient[:, start : start + self.length]
        if self.input_map is not None:
            as_input = as_input @ self.input_map.T
        gradient = self._predicting(hidden).detach() + as_input
        return scored.sum(-1) + after, self._without_padding(gradient, tokens)

    def _without_padding(self, field: Float[Tensor, "chain n d"], tokens: Tensor) -> Float[Tensor, "chain n d"]:
        """The field where tokens may move."""
        return field if self.padding is None else field.masked_fill((tokens == self.padding)[..., None], 0)

    @torch.no_grad()
    def token_log_probs(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
        """log p of each token given those before it."""
        return self._scores(tokens)[0]

    @property
    def normalised(self) -> bool:
        """Does nothing stand on the right of the tokens? Of texts that end this is said of those that do."""
        return not len(self.after)

    def log_factors(self, tokens: Int[Tensor, "chain n"]) -> dict[str, Float[Tensor, " chain"]]:
        """log p of what stands on the right of the tokens; 0 or -inf for texts that must have ended."""
        if self.ending is not None:
            return {ENDING: log_of(self.ended(tokens))}
        if len(self.after):
            return {"what follows": widened(self._scores(tokens)[1])}
        return {}

    @property
    def patterns(self) -> dict[str, Pattern | Ending]:
        """That a text must end is a pattern, too."""
        return {} if self.ending is None else {ENDING: self.ending}

    def why_impossible(self, tokens: Int[Tensor, "chain n"]) -> str:
        """How many of these texts have not ended."""
        if self.ending is None or self.ended(tokens).all():
            return ""
        share = float((~self.ended(tokens)).float().mean())
        return f"{share:.0%} of the last ones had not ended after {self.length} tokens"

    @torch.no_grad()
    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]:
        """log p(· | prompt, tokens before) at every position from ``start``; -inf for tokens that are not allowed."""
        hidden = self._predicting(hidden_states(self.model, self._ids(tokens)))[:, start:]
        log_probs = self.log_probs(hidden)
        if self.ending is not None:
            log_probs[self.ending.over(tokens)[:, start:-1]] = self.certain_padding
        return log_probs

    @torch.no_grad()
    def redraw(self, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose) -> Redrawn:
        """Redraw positions ``start`` to ``stop`` from the model given the tokens before them, and score the rest.

        Keys and values are kept, so every position goes through the model once, as in one evaluation; those of the
        prompt are computed for one row and shared by all. In half precision that rounds otherwise than one pass over
        the whole text does, and the text is scored once more by such a pass, so that a chain compares energies of one
        kind only (what is drawn is exact up to that rounding).
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
        if self.embeddings.dtype in HALF_PRECISION:
            scored, after = self._scores(tokens)
            return Redrawn(tokens, scored[:, start:], after)
        following, after = growing.score(tokens[:, stop:])
        scored = torch.cat([*log_probs, following], dim=-1)
        if self.ending is not None:
            scored[:, stop - start :] = self._padded(following, tokens, stop)
            after = log_of(self.ended(tokens)).to(scored)
        return Redrawn(tokens, scored, after)

    def soft_reading(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> SoftReading:
        """The conditionals of texts whose tokens are mixtures, read as mixtures of embeddings.

        What stands on the right is the rest, and only its slope needs a backward pass.
        """
        parts = [
            self._soft_reading_of_rows(weights[rows], candidates[rows])
            for rows in self._row_slices(len(weights), self._graph_bytes)
        ]
        return SoftReading(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _soft_reading_of_rows(self, weights: Tensor, candidates: Tensor) -> SoftReading:
        rows, table = len(weights), self.model.get_input_embeddings()
        after = self.after.expand(rows, -1)
        with torch.set_grad_enabled(bool(len(self.after))):
            weights = weights.detach().requires_grad_(bool(len(self.after)))
            parts = [table(self.before.expand(rows, -1)), self.soft_embeds(weights, candidates), table(after)]
            hidden = hidden_states(self.model, embeds=torch.cat(parts, dim=1))
            if len(self.after):
                log_rest = self.gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)
                (slope,) = torch.autograd.grad(log_rest.sum(), weights)
            else:
                log_rest, slope = hidden.new_zeros(rows), torch.zeros_like(weights)
        return SoftReading(self.log_probs(self._predicting(hidden.detach())), log_rest.detach(), slope)

    def soft_embeds(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> Float[Tensor, "chain n d"]:
        """The input embeddings of mixtures of tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(candidates)
        return torch.einsum("cnk,cnkd->cnd", weights.to(embeds), embeds)

    def prompt_cache(self, rows: int) -> Any:
        """Keys and values of the prompt without its last token, for so many rows; None if there is no other token."""
        if self.before.shape[1] == 1:
            return None
        cache = self.model.base_model(input_ids=self.before[:, :-1], use_cache=True).past_key_values
        if len(self.before) < rows:
            cache.batch_repeat_interleave(rows)
        return cache

    def _ids(self, tokens: Tensor) -> Tensor:
        rows = len(tokens)
        return torch.cat([self.before.expand(rows, -1), tokens, self.after.expand(rows, -1)], dim=-1)

    def _predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the tokens are predicted: each one position before its token."""
        start = self.before.shape[1] - 1
        return hidden[:, start : start + self.length]

    def _predicting_after(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the suffix and the end are predicted."""
        start = self.before.shape[1] + self.length - 1
        return hidden[:, start : start + len(self.after)]

    def _scores(self, tokens: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p of each token, and of all that stands on the right."""
        if hidden is None:
            hidden = hidden_states(self.model, self._ids(tokens))
        scored = self.gather_log_probs(self._predicting(hidden), tokens)
        if self.ending is not None:
            return self._padded(scored, tokens, 0), log_of(self.ended(tokens)).to(scored)
        if not len(self.after):
            return scored, torch.zeros_like(scored[:, 0])
        after = self.after.expand(len(tokens), -1)
        return scored, self.gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)

    def _padded(self, scored: Float[Tensor, "chain rest"], tokens: Tensor, start: int) -> Float[Tensor, "chain rest"]:
        """log p of the tokens from ``start`` on, where what follows the end is certain to be padding."""
        assert self.ending is not None
        is_padding = tokens[:, start:] == self.ending.padding
        return torch.where(self.ending.over(tokens)[:, start:-1], log_of(is_padding).to(scored), scored)

    @property
    def certain_padding(self) -> Float[Tensor, " token"]:
        """log p of every token after the end."""
        is_padding = torch.zeros(len(self.embeddings), dtype=torch.bool, device=self.device)
        if self.padding is not None:
            is_padding[self.padding] = True
        return log_of(is_padding).to(torch.promote_types(self.embeddings.dtype, torch.float32))

    def gather_log_probs(self, hidden: Tensor, ids: Tensor, masked: bool = True) -> Float[Tensor, "chain position"]:
        """log p of these tokens, from the hidden states that predict them, some rows of logits at a time."""
        rows, chosen = hidden.flatten(0, 1), ids.flatten()[:, None]
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        parts = [
            self.log_probs(rows[i : i + size], masked).gather(-1, chosen[i : i + size])
            for i in range(0, max(1, len(rows)), size)
        ]
        return torch.cat(parts).view(ids.shape)

    def _slope(self, tokens: Tensor, hidden: Tensor) -> Float[Tensor, "chain position d"]:
        """The gradient of log p(m) at the last hidden states: v_w - Σ_j p_j v_j where each token w is predicted."""
        slope, table = torch.zeros_like(hidden), self.embeddings
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        predicted = [(self._predicting, tokens, True)]
        if len(self.after):
            predicted.append((self._predicting_after, self.after.expand(len(tokens), -1), False))
        for select, ids, masked in predicted:
            rows, chosen = select(hidden).flatten(0, 1), ids.flatten()
            parts = [
                table[chosen[i : i + size]] - self.log_probs(rows[i : i + size], masked).exp_().to(table) @ table
                for i in range(0, len(rows), size)
            ]
            pulls = torch.cat(parts).view(*ids.shape, -1)
            if self.ending is not None:
                pulls = pulls.masked_fill(self.ending.over(tokens)[:, :-1, None], 0)
            select(slope)[:] += pulls.to(slope)
        return slope

    def log_probs(self, hidden: Float[Tensor, "*position d"], masked: bool = True) -> Float[Tensor, "*position token"]:
        """log p of every token where these hidden states are the last."""
        logits = head(self.model, hidden)
        if masked:
            logits.masked_fill_(~self.allowed, -torch.inf)
        return logits.log_softmax(-1)

    def _row_slices(self, rows: int, bytes_each: int) -> list[slice]:
        """Blocks of rows that stay within the memory bound, in whole multiples of 8."""
        size = max(BLOCK, block_rows(bytes_each, self.memory))
        return [slice(i, i + size) for i in range(0, rows, size)]

    @property
    def _graph_bytes(self) -> int:
        """A rough size of one row's graph for the backward pass, which keeps every layer."""
        return self.row_bytes * int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def row_bytes(self) -> int:
        """A rough size of one row on its way through the model: twenty numbers a position and dimension."""
        positions = self.before.shape[1] + self.length + len(self.after)
        return int(20 * self.model.config.get_text_config().hidden_size * positions * self.embeddings.element_size())

    @property
    def input_map(self) -> Float[Tensor, "d d"] | None:
        """A with input table ≈ output table · A, or None where they are one."""
        table_in, table_out = self.model.get_input_embeddings().weight, self.embeddings
        if table_in.data_ptr() == table_out.data_ptr():
            return None
        if self._fitted is None:
            self._fitted = torch.linalg.lstsq(table_out.float(), table_in.float()).solution.to(table_in)
        return self._fitted

    def _make_mask(self, allowed: list[int] | None) -> tuple[Bool[Tensor, " token"], dict[str, int]]:
        """Which tokens may be sampled, and how many are left out for which reason."""
        size = len(self.embeddings)
        mask = torch.ones(size, dtype=torch.bool, device=self.device)
        if allowed is not None:
            wrong = [token for token in allowed if not hasattr(token, "__index__") or not 0 <= int(token) < size]
            if wrong:
                raise SamplingError(
                    f"allowed holds token {wrong[0]!r}, and there are those from 0 to {size - 1}",
                    remedy="give some of these",
                )
            mask[:] = False
            mask[torch.tensor(allowed, dtype=torch.int64)] = True
            return mask, {"not asked for": size - int(mask.sum())}
        added = {token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special}
        mask[[token for token in added | set(self.tokenizer.all_special_ids) if token < size]] = False
        special = size - int(mask.sum())
        used = torch.zeros_like(mask)
        used[[token for token in self.tokenizer.get_vocab().values() if token < size]] = True
        mask &= used
        unused = size - int(mask.sum()) - special
        damaged = mask & ~self.embeddings.isfinite().all(-1)
        mask &= ~damaged
        repeated = _repeated_rows(self.embeddings, mask)
        mask &= ~repeated
        counts = {"special": special, "unused": unused, "with the embedding of another": int(repeated.sum())}
        return mask, counts | {"without finite embeddings": int(damaged.sum())}

    def _end_token(self) -> int:
        end = end_of_turn(self.tokenizer) if self.is_chat else self.tokenizer.eos_token_id
        if end is None or end >= len(self.embeddings):
            raise SamplingError(
                f"ends = {self.ends!r} needs an end-of-text token and this tokenizer has none",
                remedy="say ends='never'",
            )
        return int(end)

    def _allow(self, tokens: Sequence[int]) -> None:
        """Some tokens more may be sampled."""
        for token in tokens:
            if not self.allowed[token]:
                self.allowed[token] = True
                self.excluded = {why: count - (i == 0) for i, (why, count) in enumerate(self.excluded.items())}

    def _check_length(self) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        needed = self.before.shape[1] + self.length + len(self.after)
        if limit is not None and needed > limit:
            raise SamplingError(
                f"prompt ({self.before.shape[1]} tokens), length ({self.length}) and what follows "
                f"({len(self.after)}) exceed the model's context of {limit}",
                remedy="shorten the prompt or the length",
            )
        check_memory(BLOCK * self.row_bytes, f"{BLOCK} texts of {self.length} tokens")


def _repeated_rows(table: Float[Tensor, "token d"], mask: Bool[Tensor, " token"]) -> Bool[Tensor, " token"]:
    """Which rows of the mask equal an earlier one of it: found by hashing, and compared only where hashes agree."""
    repeated: list[int] = []
    seen: set[bytes] = set()
    for tokens in torch.split(mask.nonzero().squeeze(-1), 1024):
        rows = (table.detach()[tokens] + 0.0).cpu()  # adding zero makes 0.0 of -0.0, which it equals
        for token, row in zip(tokens.tolist(), rows.view(torch.uint8).numpy(), strict=True):
            count = len(seen)
            seen.add(row.tobytes())
            if len(seen) == count:
                repeated.append(token)
    found = torch.zeros_like(mask)
    found[repeated] = True
    return found


def _load_again(origin: tuple[str, str, str], memory: int, settings: dict[str, Any]) -> LanguageModel:
    name, device, dtype = origin
    model = LanguageModel.load(name, device=device, dtype=dtype, **settings)
    model.memory = memory
    return model
