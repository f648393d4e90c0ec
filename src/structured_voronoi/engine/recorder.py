"""The draws and statistics of a run of `sample`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structured_voronoi.core.info import Info, merge_infos, restored_info
from structured_voronoi.engine.checkpoint import Checkpoint

DRAWS = "draws-"
"""Values of a checkpoint that hold draws begin with this."""
COUNTS = "counts"
"""The value of a checkpoint that a finished run has besides its draws."""


class Recorder:
    """Records draws and their statistics in tensors that are filled step by step.

    Parameters
    ----------
    draws
        Number of draws per chain.
    warmup
        Number of steps before the first draw.
    thin
        Number of steps per draw.
    keep_warmup
        Also record the steps of the warm-up.
    """

    def __init__(self, draws: int, warmup: int = 0, thin: int = 1, keep_warmup: bool = False) -> None:
        self.draws, self.warmup, self.thin = draws, warmup, thin
        self.warmup_rows = warmup if keep_warmup else 0
        """Number of recorded rows that belong to the warm-up."""
        self.steps = 0
        self.count = 0
        """Number of recorded rows."""
        self.warmup_cost = 0
        """Evaluations during the warm-up."""
        self.columns: dict[str, Tensor] = {}
        """(row, chain, …) each."""
        self._pending: Any = None
        """Statistics of the steps since the last draw."""
        self._saved_rows = 0

    @property
    def all_steps(self) -> int:
        """Number of steps of a complete run."""
        return self.warmup + self.draws * self.thin

    def add(self, state: Any, info: Info) -> None:
        """Record one step of all chains; each ``thin`` steps make a draw."""
        self.steps += 1
        if self.steps <= self.warmup:
            self.warmup_cost += int(info.evaluations.sum())
            if self.warmup_rows:
                self._append_row(state.tokens, info)
            return
        self._pending = info if self._pending is None else merge_infos(self._pending, info)
        if (self.steps - self.warmup) % self.thin == 0:
            self._append_row(state.tokens, self._pending)
            self._pending = None

    def _append_row(self, tokens: Tensor, info: Info) -> None:
        statistics = {name: part for name, part in info._asdict().items() if part is not None}
        statistics["lp"] = -statistics.pop("energy")
        self.append({name: part[None] for name, part in ({"tokens": tokens} | statistics).items()})

    def append(self, columns: dict[str, Tensor]) -> None:
        """Append rows, (row, chain, …) each column."""
        for name, part in columns.items():
            if name not in self.columns:
                self.columns[name] = torch.empty((self.warmup_rows + self.draws, *part.shape[1:]), dtype=part.dtype)
            self.columns[name][self.count : self.count + len(part)] = part.cpu()
        self.count += len(columns["tokens"])

    def save(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put the rows since the last save into a checkpoint, and return the counts."""
        if self.count > self._saved_rows:
            rows = {name: column[self._saved_rows : self.count] for name, column in self.columns.items()}
            checkpoint.put(f"{DRAWS}{len(checkpoint.names(DRAWS)):06}", rows)
            self._saved_rows = self.count
        checkpoint.record_progress(self.steps, self.all_steps, "steps")
        pending = None if self._pending is None else self._pending._asdict()
        return {"steps": self.steps, "warmup_cost": self.warmup_cost, "pending": pending}

    def finish(self, checkpoint: Checkpoint) -> None:
        """Put all that is not saved into a checkpoint."""
        checkpoint.put(COUNTS, self.save(checkpoint))

    def restore(self, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
        """Continue after the saved rows and counts."""
        for name in checkpoint.names(DRAWS):
            self.append(checkpoint.get(name))
        self._saved_rows = self.count
        self.steps, self.warmup_cost = saved["steps"], saved["warmup_cost"]
        self._pending = None if saved["pending"] is None else restored_info(saved["pending"])

    def values(self, name: str) -> Any:
        """A column as an array, (chain, draw, …)."""
        return self.columns[name][: self.count].transpose(0, 1).contiguous().numpy()
