"""What all trainings share: padding the rows of a batch, one step of the optimiser, fast products."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn


def padded(
    rows: list[list[int]], device: torch.device | str = "cpu", filler: int = 0
) -> tuple[Int[Tensor, "row n"], Int[Tensor, " row"]]:
    """Rows of different lengths as one tensor, filled up on the right, and their lengths."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [filler] * (width - len(row)) for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def descend(loss: Tensor, network: nn.Module, optimiser: torch.optim.Optimizer) -> str:
    """One step of the optimiser with clipped gradients; returns a note for the progress bar."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    return f"loss {float(loss.detach()):.3f}"


def fast_arithmetic() -> contextlib.AbstractContextManager[Any]:
    """Products in bfloat16 where the processor has them, twice as fast; weights and sums stay in float32."""
    can = torch.cpu.get_capabilities()
    has_bfloat16 = bool(can.get("avx512_bf16") or can.get("amx_bf16"))
    # the cache would keep the bfloat16 copies of weights that have changed since
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16, cache_enabled=False)
