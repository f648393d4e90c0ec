"""A target that ends the process which evaluates it, once: what happens to a worker that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.engine import checkpoint as checkpoints


class Fragile:
    """Tokens that like their neighbours; the so-manieth evaluation in some other process than the first is fatal."""

    def __init__(self, scratch: Path, fatal: int) -> None:
        self.embeddings = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
        self.length = 3
        self.mark, self.fatal, self.evaluations, self.home = scratch / "killed", fatal, 0, os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a worker, which writes its checkpoint after every step then."""
        self.__dict__.update(state)
        checkpoints.SECONDS, checkpoints.SHARE = 0.0, float("inf")

    def log_prob(self, tokens: Tensor) -> Tensor:
        self.evaluations += 1
        if self.evaluations >= self.fatal and os.getpid() != self.home and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.5 * (tokens[:, 1:] == tokens[:, :-1]).sum(-1) + 0.1 * tokens[:, 0]
