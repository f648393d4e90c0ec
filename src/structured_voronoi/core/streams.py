"""Randomness and evaluation that do not depend on what else runs: a stream per chain, rows in whole blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import MAX_SEED

BLOCK = 8
"""Rows are evaluated in multiples of this many."""
MEMORY = 256 * 2**20
"""Default bound, in bytes, on what one pass over the vocabulary may hold at a time."""


class Rng:
    """One random stream per chain, derived from (seed, chain index).

    The generator is Philox4x32-10 (Salmon et al. 2011). It is counter-based, so that a chain's numbers depend neither
    on the batch it runs in nor on the device; the whole state is ``counter``, one number a chain.
    """

    def __init__(
        self,
        seed: int,
        chains: int | Sequence[int],
        stream: str = "run",
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MAX_SEED:
            raise SamplingError(
                f"seed {seed!r} is not a whole number ≥ 0 below 2**63",
                remedy="give one, for example seed=0",
            )
        seed = int(seed)
        self.seed, self.stream, self.device = seed, stream, torch.device(device)
        self._dtype = widest_dtype(self.device)
        home = self.device if self._dtype == torch.float64 else torch.device("cpu")
        indices = range(chains) if isinstance(chains, int) else chains
        self.chains = torch.tensor(list(indices), dtype=torch.int64, device=home)
        self.counter = torch.zeros_like(self.chains)
        words = np.random.SeedSequence([seed, *stream.encode()]).generate_state(2, np.uint32)
        self._key = (int(words[0]), int(words[1]))

    def __len__(self) -> int:
        return len(self.chains)

    def fork(self, stream: str, chains: int | None = None) -> Self:
        """An independent source with the same seed: for pilots and for what all chains share."""
        indices = self.chains.tolist() if chains is None else chains
        return type(self)(self.seed, indices, f"{self.stream}/{stream}", self.device)

    def select(self, rows: Int[Tensor, " row"]) -> Self:
        """The streams of the selected chains, at the same counters."""
        rows = rows.to(self.chains.device)
        selection = type(self)(self.seed, self.chains[rows].tolist(), self.stream, self.device)
        selection.counter = self.counter[rows]
        return selection

    def catch_up(self, rows: Int[Tensor, " row"], selection: Rng) -> None:
        """Set the counters of the selected chains to those of their selection."""
        self.counter[rows.to(self.counter.device)] = selection.counter

    def uniform(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Uniform on (0, 1), with 52 random bits."""
        count = math.prod(shape)
        blocks = (count + 1) // 2  # a block of four words makes two numbers
        steps = self.counter[:, None] + torch.arange(blocks, device=self.counter.device)
        self.counter = self.counter + blocks
        words = philox(
            (steps & _MASK, steps >> 32, (self.chains & _MASK)[:, None], (self.chains >> 32)[:, None]),
            self._key,
        )
        pairs = torch.stack([_unit(words[0], words[1]), _unit(words[2], words[3])], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape).to(self.device, self._dtype)

    def normal(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Standard normal (Box–Muller)."""
        count = math.prod(shape)
        u, v = self.uniform((count + 1) // 2, 2).unbind(-1)
        radius = (-2 * u.log()).sqrt()
        pairs = torch.stack([radius * (2 * math.pi * v).cos(), radius * (2 * math.pi * v).sin()], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape)

    def categorical(self, log_weights: Float[Tensor, "chain *shape token"]) -> Int[Tensor, chain * shape]:
        """One index per row with probability ∝ exp(log_weights), by inversion."""
        return inverse_cdf(log_weights, self.uniform(*log_weights.shape[1:-1]))


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: float64, except on Apple's, which have float32 only."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the widest type of its device: what energies and cumulative sums are kept in."""
    return tensor.to(widest_dtype(tensor.device))


def inverse_cdf(
    log_weights: Float[Tensor, "*shape token"], level: Float[Tensor, "*shape"], memory: int = MEMORY
) -> Int[Tensor, "*shape"]:
    """The index at which the cumulative distribution ∝ exp(log_weights) passes ``level``, row block by row block."""
    rows, levels = log_weights.flatten(0, -2) if log_weights.ndim > 1 else log_weights[None], level.reshape(-1)
    size = block_rows(3 * 8 * rows.shape[-1], memory)
    parts = []
    for begin in range(0, len(rows), size):
        weights = widened(rows[begin : begin + size]).softmax(-1)
        parts.append(index_at_level(weights, levels[begin : begin + size]))
    return torch.cat(parts).view(level.shape)


def index_at_level(weights: Float[Tensor, "row token"], level: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """The index at which the cumulative distribution ∝ weights passes ``level``."""
    cumulative = widened(weights).cumsum(-1)
    index: Tensor = torch.searchsorted(cumulative, (level[:, None] * cumulative[:, -1:]).to(cumulative)).squeeze(-1)
    return index.clamp(max=weights.shape[-1] - 1)  # NaN weights are searched past the end


_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; products wrap modulo 2^64, which keeps their bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _unit(high: Tensor, low: Tensor) -> Tensor:
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


def block_rows(bytes_each: int, memory: int = MEMORY) -> int:
    """How many rows of ``bytes_each`` fit into the bound: at least one, whole blocks of 8 where possible."""
    fit = max(1, memory // max(1, bytes_each))
    return fit if fit < BLOCK else fit // BLOCK * BLOCK


def in_blocks(function: Callable[..., Any], *inputs: Tensor, rows_at_a_time: int | None = None) -> Any:
    """``function(*inputs)``, called with at most so many rows at a time, each time padded to a multiple of 8.

    Matrix products of few rows differ from those of many in the last bits; padded, a chain's numbers no longer depend
    on how many chains run beside it. The result is a tensor or a tuple of tensors, a row for each row of the inputs.
    """
    count = len(inputs[0])
    size = max(1, count) if rows_at_a_time is None else max(BLOCK, rows_at_a_time // BLOCK * BLOCK)
    parts = [_call_padded(function, [part[i : i + size] for part in inputs]) for i in range(0, max(1, count), size)]
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _call_padded(function: Callable[..., Any], inputs: list[Tensor]) -> Any:
    """The function of inputs padded with copies of their last row; results of the padding are left out."""
    count = len(inputs[0])
    extra = -count % BLOCK
    if extra and count:
        inputs = [torch.cat([part, part[-1:].expand(extra, *part.shape[1:])]) for part in inputs]
    result = function(*inputs)
    return result[:count] if isinstance(result, Tensor) else tuple(part[:count] for part in result)
