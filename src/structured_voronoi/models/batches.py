"""What all trainings share: their schedule, padding, steps of the optimiser, fast matrix products."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn


class Schedule:
    """Base class of the dataclasses with the settings of a training, which declare these fields with defaults.

    Parameters
    ----------
    batch_size
        Texts per step.
    epochs
        Passes over the texts.
    learning_rate
        Largest learning rate.
    seed
        Seed of all random numbers.
    """

    batch_size: int
    epochs: float
    learning_rate: float
    seed: int

    def steps(self, texts: int) -> int:
        """Number of training steps for so many texts."""
        return math.ceil(self.epochs * texts / self.batch_size)


def pad_rows(
    rows: list[list[int]], device: torch.device | str = "cpu", padding: int = 0
) -> tuple[Int[Tensor, "row n"], Int[Tensor, " row"]]:
    """Rows of different lengths as one tensor, padded on the right, and their lengths."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [padding] * (width - len(row)) for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def learning_rate(peak: float, step: int, share: float, warmup_steps: float, final: float = 0.0) -> float:
    """A linear warm-up to ``peak``, times a linear decay to ``final`` of it; ``share`` is the share of the training."""
    return peak * min(1.0, (step + 1) / warmup_steps) * (final + (1 - final) * (1 - share))


def optimiser_step(
    loss: Tensor, network: nn.Module, optimiser: torch.optim.Optimizer, rate: float | None = None
) -> str:
    """Take one step with clipped gradients, at the learning rate ``rate`` if given; returns a progress note."""
    if rate is not None:
        optimiser.param_groups[0]["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    return f"loss {float(loss.detach()):.3f}"


def bfloat16_products() -> contextlib.AbstractContextManager[Any]:
    """Compute matrix products in bfloat16 if the processor supports it; weights and sums stay in float32."""
    capabilities = torch.cpu.get_capabilities()
    is_supported = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    # autocast's cache would keep bfloat16 copies of weights that have changed since
    return torch.autocast("cpu", torch.bfloat16, enabled=is_supported, cache_enabled=False)
