"""Random streams, one per chain, and evaluation in blocks of rows; neither depends on the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.validation import check_seed

_MASK = 0xFFFFFFFF
"""Mask of a 32-bit word."""
BLOCK = 8
"""Number of rows of which every batch is a multiple."""
MEMORY = 256 * 2**20
"""Default limit, in bytes, of the memory that one pass over the vocabulary uses."""


class Rng:
    """One random stream per chain, derived from the seed and the chain's number.

    The generator is Philox4x32-10 (Salmon et al. 2011). It is counter-based: the numbers of a chain depend neither on
    the other chains of its batch nor on the device, and ``counter``, one number per chain, is the whole state.

    Parameters
    ----------
    seed
        Number from 0 to 2**63 - 1.
    chains
        Number of chains, or their numbers.
    stream
        Name of the stream; streams of the same seed are independent.
    device
        Device of the numbers that are returned.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> numbers = sv.Rng(seed=0, chains=4).uniform(3)
    >>> numbers.shape
    torch.Size([4, 3])
    >>> bool((sv.Rng(seed=0, chains=[2]).uniform(3) == numbers[2]).all())
    True
    """

    def __init__(
        self,
        seed: int,
        chains: int | Sequence[int],
        stream: str = "run",
        device: torch.device | str = "cpu",
    ) -> None:
        check_seed(seed)
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
        """Return independent streams with the same seed, for pilot chains or for numbers that all chains share."""
        indices = self.chains.tolist() if chains is None else chains
        return type(self)(self.seed, indices, f"{self.stream}/{stream}", self.device)

    def select(self, rows: Int[Tensor, " row"]) -> Self:
        """Return the streams of the selected chains, with their counters."""
        rows = rows.to(self.chains.device)
        selection = type(self)(self.seed, self.chains[rows].tolist(), self.stream, self.device)
        selection.counter = self.counter[rows]
        return selection

    def catch_up(self, rows: Int[Tensor, " row"], selection: Rng) -> None:
        """Copy the counters of a selection back."""
        self.counter[rows.to(self.counter.device)] = selection.counter

    def uniform(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Return numbers that are uniform on (0, 1), with 52 random bits."""
        count = math.prod(shape)
        blocks = (count + 1) // 2  # a block of four words gives two numbers
        steps = self.counter[:, None] + torch.arange(blocks, device=self.counter.device)
        self.counter = self.counter + blocks
        words = philox(
            (steps & _MASK, steps >> 32, (self.chains & _MASK)[:, None], (self.chains >> 32)[:, None]),
            self._key,
        )
        pairs = torch.stack([_unit(words[0], words[1]), _unit(words[2], words[3])], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape).to(self.device, self._dtype)

    def normal(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Return standard normal numbers (Box–Muller)."""
        count = math.prod(shape)
        u, v = self.uniform((count + 1) // 2, 2).unbind(-1)
        radius = (-2 * u.log()).sqrt()
        pairs = torch.stack([radius * (2 * math.pi * v).cos(), radius * (2 * math.pi * v).sin()], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape)

    def categorical(self, log_weights: Float[Tensor, "chain *shape token"]) -> Int[Tensor, chain * shape]:
        """Return one index per row with probability ∝ exp(log_weights), by inversion."""
        return inverse_cdf(log_weights, self.uniform(*log_weights.shape[1:-1]))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, but float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in the widest type of its device, which energies and cumulative sums use."""
    return tensor.to(widest_dtype(tensor.device))


def inverse_cdf(
    log_weights: Float[Tensor, "*shape token"], level: Float[Tensor, "*shape"], memory: int = MEMORY
) -> Int[Tensor, "*shape"]:
    """Return the index at which the cumulative distribution ∝ exp(log_weights) passes ``level``, by blocks of rows."""
    rows, levels = log_weights.flatten(0, -2) if log_weights.ndim > 1 else log_weights[None], level.reshape(-1)
    size = block_rows(3 * 8 * rows.shape[-1], memory)
    parts = []
    for begin in range(0, len(rows), size):
        weights = widened(rows[begin : begin + size]).softmax(-1)
        parts.append(index_at_level(weights, levels[begin : begin + size]))
    return torch.cat(parts).view(level.shape)


def index_at_level(weights: Float[Tensor, "row token"], level: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """Return the index at which the cumulative distribution ∝ weights passes ``level``."""
    cumulative = widened(weights).cumsum(-1)
    index: Tensor = torch.searchsorted(cumulative, (level[:, None] * cumulative[:, -1:]).to(cumulative)).squeeze(-1)
    return index.clamp(max=weights.shape[-1] - 1)  # NaN weights lead past the end


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return Philox4x32-10 of 32-bit words in int64 tensors; products modulo 2^64 keep the low bits."""
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
    """Return how many rows fit into memory: at least one, and a multiple of 8 where possible."""
    fit = max(1, memory // max(1, bytes_each))
    return fit if fit < BLOCK else fit // BLOCK * BLOCK


def in_blocks(function: Callable[..., Any], *inputs: Tensor, rows_at_a_time: int | None = None) -> Any:
    """Return ``function(*inputs)``, computed in blocks of rows that are padded to a multiple of 8.

    The last bits of matrix products depend on the number of rows. With padding, the numbers of a chain do not depend on
    the other chains. The function returns a tensor or a tuple of tensors with one row for each row of the inputs.
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
    """Call the function with copies of the last row as padding, and drop the results of the padding."""
    count = len(inputs[0])
    extra = -count % BLOCK
    if extra and count:
        inputs = [torch.cat([part, part[-1:].expand(extra, *part.shape[1:])]) for part in inputs]
    result = function(*inputs)
    return result[:count] if isinstance(result, Tensor) else tuple(part[:count] for part in result)
