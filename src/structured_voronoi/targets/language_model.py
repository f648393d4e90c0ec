"""A language model as a target: p(m | prompt) over N tokens, with text on the right if there is any."""

from __future__ import annotations

from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.contracts import Choose, Redrawn, SoftReading
from structured_voronoi.errors import SamplingError
from structured_voronoi.models.loading import head, hidden_states, load_model
from structured_voronoi.streams import BLOCK, MEMORY, block_rows

HALF_PRECISION = (torch.float16, torch.bfloat16)


class LanguageModel:
    """p(m | prompt), times p(suffix | prompt, m), times p(EOS | …) if ``ends``.

    Tokens that are not allowed have logits of -inf at every sampled position, so that without suffix and ``ends`` this
    is a normalised autoregressive model, and ancestral sampling is its truth. The suffix and the end are scored by the
    unmasked model. The geometry is the output table; with tied embeddings that is the input table too. Logits of the
    whole vocabulary are held for as many positions at a time as fit into ``memory`` bytes.
    """

    masks_itself = True
    reorders = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: str = "",
        length: int = 20,
        suffix: str = "",
        ends: bool = False,
        allowed: list[int] | None = None,
        memory: int = MEMORY,
    ) -> None:
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self.length, self.ends, self.prompt, self.suffix = length, ends, prompt, suffix
        self.device = model.device
        table = model.get_output_embeddings().weight
        # one object for all targets of a network, so that its geometry is built once
        self.embeddings: Float[Tensor, "token d"] = table.detach() if table.requires_grad else table
        self.allowed, self.excluded = self._make_mask(allowed)
        self._fitted: Tensor | None = None
        self._before = self._encode_prompt(prompt)
        self._prompt_text = self.tokenizer.decode(self._before.tolist()) if prompt and self._drops_space() else None
        after = self._encode_suffix(suffix) if suffix else []
        if ends:
            if tokenizer.eos_token_id is None:
                raise SamplingError("ends=True needs an end-of-text token and this tokenizer has none; leave it out")
            after = [*after, tokenizer.eos_token_id]
        self._after = torch.tensor(after, dtype=torch.int64, device=self.device)
        self._check_length()

    @classmethod
    def load(
        cls,
        name: str = "bundled",
        *,
        prompt: str = "",
        length: int = 20,
        suffix: str = "",
        ends: bool = False,
        allowed: list[int] | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> Self:
        """``bundled``, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file."""
        loaded = load_model(name, device, dtype)
        return cls(loaded.model, loaded.tokenizer, prompt, length, suffix, ends, allowed)

    def decode(self, tokens: Int[Tensor, " n"]) -> str:
        """The text of the tokens, as it goes on from the prompt: some tokenizers leave out the space it begins with."""
        if self._prompt_text is not None:
            text = str(self.tokenizer.decode([*self._before.tolist(), *tokens.tolist()]))
            if text.startswith(self._prompt_text):
                return text[len(self._prompt_text) :]
        return str(self.tokenizer.decode(tokens.tolist()))

    @torch.no_grad()
    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        scored, after = self._scores(tokens)
        return scored.sum(-1) + after

    @torch.no_grad()
    def log_prob_and_guide(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """Also the hidden state that predicts each token: the part of the gradient that needs no backward pass."""
        hidden = hidden_states(self.model, self._ids(tokens))
        scored, after = self._scores(tokens, hidden)
        return scored.sum(-1) + after, self._predicting(hidden)

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """The whole gradient: each token as an output (the hidden state) and as an input (by backpropagation).

        Where input and output tables differ, the input part is brought into the output table's space by least squares.
        """
        parts = [self._grad_of_rows(tokens[rows]) for rows in self._row_slices(len(tokens), self._graph_bytes)]
        log_prob, gradient = (torch.cat(column) for column in zip(*parts, strict=True))
        return log_prob, gradient

    def _grad_of_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        table = self.model.get_input_embeddings()
        with torch.enable_grad():
            embeds = table(self._ids(tokens)).detach().requires_grad_()
            hidden = hidden_states(self.model, embeds=embeds)
            with torch.no_grad():
                scored, after = self._scores(tokens, hidden)
                slope = self._slope(tokens, hidden)
            (gradient,) = torch.autograd.grad(hidden, embeds, slope)
        start = len(self._before)
        as_input = gradient[:, start : start + self.length]
        if self.input_map is not None:
            as_input = as_input @ self.input_map.T
        return scored.sum(-1) + after, self._predicting(hidden).detach() + as_input

    @torch.no_grad()
    def token_log_probs(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
        """log p of each token given those before it."""
        return self._scores(tokens)[0]

    @property
    def normalised(self) -> bool:
        """Does nothing stand on the right of the tokens?"""
        return not len(self._after)

    @torch.no_grad()
    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]:
        """log p(· | prompt, tokens before) at every position from ``start``; -inf for tokens that are not allowed."""
        hidden = self._predicting(hidden_states(self.model, self._ids(tokens)))[:, start:]
        return self._log_probs(hidden)

    @torch.no_grad()
    def redraw(self, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose) -> Redrawn:
        """Redraw positions ``start`` to ``stop`` from the model given the tokens before them, and score the rest.

        Keys and values are kept, so every position goes through the model once, as in one evaluation; those of the
        prompt are computed for one row and shared by all. In half precision that rounds otherwise than one pass over
        the whole text does, and the text is scored once more by such a pass, so that a chain compares energies of one
        kind only (what is drawn is exact up to that rounding).
        """
        tokens, cache = tokens.clone(), self._prompt_cache(len(tokens))
        log_probs: list[Tensor] = []
        ids = torch.cat([self._before[-1:].expand(len(tokens), -1), tokens[:, :start]], dim=-1)
        for n in range(start, stop):
            out = self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            hidden = out.last_hidden_state[:, -1]
            scores = self._log_probs(hidden)
            choice = choose(n, scores, hidden)
            if isinstance(choice, tuple):  # rows go on from others
                choice, parents = choice
                tokens[:, :n], scores = tokens[parents, :n], scores[parents]
                log_probs = [part[parents] for part in log_probs]
                cache.reorder_cache(parents)
            tokens[:, n] = choice
            ids = tokens[:, n : n + 1]
            log_probs.append(scores.gather(-1, ids))
        if self.embeddings.dtype in HALF_PRECISION:
            scored, after_text = self._scores(tokens)
            return Redrawn(tokens, scored[:, start:], after_text)
        after = self._after.expand(len(tokens), -1)
        following = torch.cat([tokens[:, stop:], after], dim=-1)
        if not following.shape[1]:
            return Redrawn(tokens, torch.cat(log_probs, dim=-1), torch.zeros_like(log_probs[0][:, 0]))
        ids = torch.cat([ids, following[:, :-1]], dim=-1)
        hidden = self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        count = self.length - stop
        log_probs.append(self._gather_log_probs(hidden[:, :count], tokens[:, stop:]))
        rest = self._gather_log_probs(hidden[:, count:], after, masked=False).sum(-1)
        return Redrawn(tokens, torch.cat(log_probs, dim=-1), rest)

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
        after = self._after.expand(rows, -1)
        with torch.set_grad_enabled(bool(len(self._after))):
            weights = weights.detach().requires_grad_(bool(len(self._after)))
            parts = [table(self._before.expand(rows, -1)), self.soft_embeds(weights, candidates), table(after)]
            hidden = hidden_states(self.model, embeds=torch.cat(parts, dim=1))
            if len(self._after):
                log_rest = self._gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)
                (slope,) = torch.autograd.grad(log_rest.sum(), weights)
            else:
                log_rest, slope = hidden.new_zeros(rows), torch.zeros_like(weights)
        return SoftReading(self._log_probs(self._predicting(hidden.detach())), log_rest.detach(), slope)

    def soft_embeds(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> Float[Tensor, "chain n d"]:
        """The input embeddings of mixtures of tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(candidates)
        return torch.einsum("cnk,cnkd->cnd", weights.to(embeds), embeds)

    def _prompt_cache(self, rows: int) -> Any:
        """Keys and values of the prompt without its last token, for so many rows; None if there is no other token."""
        if len(self._before) == 1:
            return None
        cache = self.model.base_model(input_ids=self._before[None, :-1], use_cache=True).past_key_values
        cache.batch_repeat_interleave(rows)
        return cache

    def _ids(self, tokens: Tensor) -> Tensor:
        rows = len(tokens)
        return torch.cat([self._before.expand(rows, -1), tokens, self._after.expand(rows, -1)], dim=-1)

    def _predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the tokens are predicted: each one position before its token."""
        start = len(self._before) - 1
        return hidden[:, start : start + self.length]

    def _predicting_after(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the suffix and the end are predicted."""
        start = len(self._before) + self.length - 1
        return hidden[:, start : start + len(self._after)]

    def _scores(self, tokens: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p of each token, and of all that stands on the right."""
        if hidden is None:
            hidden = hidden_states(self.model, self._ids(tokens))
        scored = self._gather_log_probs(self._predicting(hidden), tokens)
        if not len(self._after):
            return scored, torch.zeros_like(scored[:, 0])
        after = self._after.expand(len(tokens), -1)
        return scored, self._gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)

    def _gather_log_probs(self, hidden: Tensor, ids: Tensor, masked: bool = True) -> Float[Tensor, "chain position"]:
        """log p of these tokens, from the hidden states that predict them, some rows of logits at a time."""
        rows, chosen = hidden.flatten(0, 1), ids.flatten()[:, None]
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        parts = [
            self._log_probs(rows[i : i + size], masked).gather(-1, chosen[i : i + size])
            for i in range(0, max(1, len(rows)), size)
        ]
        return torch.cat(parts).view(ids.shape)

    def _slope(self, tokens: Tensor, hidden: Tensor) -> Float[Tensor, "chain position d"]:
        """The gradient of log p(m) at the last hidden states: v_w - Σ_j p_j v_j where each token w is predicted."""
        slope, table = torch.zeros_like(hidden), self.embeddings
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        predicted = [(self._predicting, tokens, True)]
        if len(self._after):
            predicted.append((self._predicting_after, self._after.expand(len(tokens), -1), False))
        for select, ids, masked in predicted:
            rows, chosen = select(hidden).flatten(0, 1), ids.flatten()
            parts = [
                table[chosen[i : i + size]] - self._log_probs(rows[i : i + size], masked).exp_().to(table) @ table
                for i in range(0, len(rows), size)
            ]
            select(slope)[:] += torch.cat(parts).view(*ids.shape, -1).to(slope)
        return slope

    def _log_probs(self, hidden: Float[Tensor, "*position d"], masked: bool = True) -> Float[Tensor, "*position token"]:
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
        positions = len(self._before) + self.length + len(self._after)
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
            wrong = [token for token in allowed if not 0 <= token < size]
            if wrong:
                raise SamplingError(f"allowed holds token {wrong[0]}; the vocabulary has {size} tokens, from 0")
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

    def _encode_prompt(self, prompt: str) -> Int[Tensor, " position"]:
        ids = self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
        first = self.tokenizer.bos_token_id
        if first is None and not ids:
            first = self.tokenizer.eos_token_id
        if first is not None:
            ids = [first, *ids]
        if not ids:
            raise SamplingError("this tokenizer has no token to begin a text with; give a prompt")
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _drops_space(self) -> bool:
        """Does the tokenizer, as Llama 2's does, leave out the space before the first word of what it decodes?"""
        ids = self.tokenizer("a b", add_special_tokens=False)["input_ids"]
        return bool(self.tokenizer.decode(ids) != self.tokenizer.decode(ids[:1]) + self.tokenizer.decode(ids[1:]))

    def _encode_suffix(self, suffix: str) -> list[int]:
        """The tokens of a text that follows another: some tokenizers put a space before the first word of a text."""
        before, both = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (".", "." + suffix))
        if both[: len(before)] == before:
            following: list[int] = both[len(before) :]
            return following
        alone: list[int] = self.tokenizer(suffix, add_special_tokens=False)["input_ids"]
        return alone

    def _check_length(self) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        needed = len(self._before) + self.length + len(self._after)
        if self.length < 1:
            raise SamplingError(f"length = {self.length}: there is nothing to sample; ask for 1 token or more")
        if limit is not None and needed > limit:
            raise SamplingError(
                f"prompt ({len(self._before)} tokens), length ({self.length}) and what follows ({len(self._after)}) "
                f"exceed the model's context of {limit}; shorten the prompt or the length"
            )


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
