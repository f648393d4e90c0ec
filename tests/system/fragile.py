"""A target that kills a worker process, and settings that save every step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.engine.checkpoint import CheckpointSettings


def every_step(folder: Path | None = None) -> CheckpointSettings:
    """A checkpoint that is saved after every step."""
    return CheckpointSettings(folder, interval=0.0, max_time_share=1e9)


class KillingTarget:
    """A distribution that prefers equal neighbours.

    In another process than the first, evaluation number ``fatal`` kills the process, once.
    """

    def __init__(self, scratch: Path, fatal: int) -> None:
        self.embeddings = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
        self.length = 3
        self.mark, self.fatal, self.evaluations, self.home = scratch / "killed", fatal, 0, os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "evaluations": 0}

    def log_prob(self, tokens: Tensor) -> Tensor:
        self.evaluations += 1
        if self.evaluations >= self.fatal and os.getpid() != self.home and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.5 * (tokens[:, 1:] == tokens[:, :-1]).sum(-1) + 0.1 * tokens[:, 0]
