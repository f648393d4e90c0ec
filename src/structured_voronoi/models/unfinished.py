"""Trainings that can be stopped at any time: what is trained, and its optimiser, kept in a folder until all is done.

Torch's own random state is kept, too; trainings change it within `torch.random.fork_rng` only.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from structured_voronoi.core.stopping import Stopping
from structured_voronoi.storage.store import Store

CHECKPOINT_STEPS, CHECKPOINT_SECONDS = 200, 120.0


class Unfinished:
    """A training under way. Entered, it has loaded what was kept, and ``step`` and ``seconds`` say how far that is.

    Ctrl-C and SIGTERM wait until the step under way is done and kept; a second one does not.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        network: nn.Module,
        optimiser: torch.optim.Optimizer,
        steps: int,
        resume: bool = True,
    ) -> None:
        self.folder, self.settings, self.network, self.optimiser = folder, settings, network, optimiser
        self.steps, self.resume = steps, resume
        self.step, self.seconds = 0, 0.0
        self._stopping = Stopping()

    def __enter__(self) -> Self:
        self._store = Store(self.folder, self.resume)
        try:
            self._store.begin("training", self.settings, {"torch": torch.__version__})
            for name in self._store.names("state-"):
                self._load(load(self._store.read(name)))
                self.step, self.seconds = (self._store.run.progress[key] for key in ("done", "seconds"))
        except BaseException:
            self._store.close()
            raise
        self._saved = time.monotonic()
        self._stopping.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._store.__exit__(kind, error, trace)
        self._stopping.let_through()

    def advance(self, seconds: float) -> None:
        """Count a step; keep it if it is time or somebody has asked to stop."""
        self.step, self.seconds = self.step + 1, seconds
        is_due = self.step % CHECKPOINT_STEPS == 0 or time.monotonic() - self._saved > CHECKPOINT_SECONDS
        if is_due or self._stopping.asked:
            progress = {"done": self.step, "of": self.steps, "unit": "steps", "seconds": seconds}
            state = save({name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()})
            self._store.commit({f"state-{self.step:09}.safetensors": state}, self._store.names("state-"), progress)
            self._saved = time.monotonic()
        if self._stopping.asked:
            self._stopping.let_through()

    def remove(self) -> None:
        """Of no use any more: the training is done, and what came of it is written."""
        self._store.commit({}, self._store.names(""), finished=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {
            f"model.{name}": parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad
        }
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        return {**tensors, "random": torch.get_rng_state()}

    def _load(self, tensors: dict[str, Tensor]) -> None:
        torch.set_rng_state(tensors["random"])  # of dropout
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[f"model.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimiser."):
                _, number, field = name.split(".", 2)
                state.setdefault(int(number), {})[field] = tensor
        self.optimiser.load_state_dict({"state": state, "param_groups": self.optimiser.state_dict()["param_groups"]})
