"""Trainings that can be interrupted and resumed: a checkpoint holds the trained parameters and the optimiser's state.

The checkpoint also holds torch's random state; trainings change it within `torch.random.fork_rng` only.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from structured_voronoi.core.stopping import Stopping
from structured_voronoi.models.batches import optimiser_step
from structured_voronoi.storage.store import Store

CHECKPOINT_FOLDER = "checkpoint"
"""Name of the default checkpoint folder, inside the output folder."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Where and how often a training is saved.

    Parameters
    ----------
    folder
        The checkpoint's folder. None means a folder inside the output folder. It is removed after the training.
    resume
        Whether a training that is found there is resumed.
    steps, seconds
        The training is saved after so many steps, and when so many seconds have passed since it was last saved.
    """

    folder: Path | None = None
    resume: bool = True
    steps: int = 200
    seconds: float = 120.0


class TrainingRun:
    """A training that saves its state; a context manager.

    On entry it loads the checkpoint, if there is one; ``step`` and ``seconds`` tell how far that training had come.
    Ctrl-C and SIGTERM take effect after the current step, which is saved; a second one takes effect at once.

    Parameters
    ----------
    checkpoint
        Where and how often the training is saved.
    out
        The output folder.
    settings
        What a resumed training must have in common with the interrupted one.
    network, optimiser
        What is trained; parameters that do not require gradients are not saved.
    steps
        Total number of steps.
    """

    def __init__(
        self,
        checkpoint: TrainingCheckpoint,
        out: Path,
        settings: Mapping[str, Any],
        network: nn.Module,
        optimiser: torch.optim.Optimizer,
        steps: int,
    ) -> None:
        self.checkpoint, self.folder = checkpoint, checkpoint.folder or out / CHECKPOINT_FOLDER
        self.settings, self.network, self.optimiser, self.steps = settings, network, optimiser, steps
        self.step, self.seconds = 0, 0.0
        self._stopping = Stopping()

    def __enter__(self) -> Self:
        self._store = Store(self.folder, self.checkpoint.resume)
        try:
            self._store.begin("training", self.settings, {"torch": torch.__version__})
            for name in self._store.names("state-"):
                self._load_state(load(self._store.read(name)))
                self.step, self.seconds = (self._store.run.progress[key] for key in ("done", "seconds"))
        except BaseException:
            self._store.close()
            raise
        self._saved_at = time.monotonic()
        self._started_at = time.monotonic() - self.seconds
        self._stopping.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._store.__exit__(kind, error, trace)
        self._stopping.deliver()

    def advance(self, loss: Tensor, rate: float) -> str:
        """Take a step of the optimiser, and save it if that is due or a stop was requested; returns a progress note."""
        note = optimiser_step(loss, self.network, self.optimiser, rate)
        self.step, self.seconds = self.step + 1, time.monotonic() - self._started_at
        seconds_since_save = time.monotonic() - self._saved_at
        is_due = self.step % self.checkpoint.steps == 0 or seconds_since_save > self.checkpoint.seconds
        if is_due or self._stopping.requested:
            progress = {"done": self.step, "of": self.steps, "unit": "steps", "seconds": self.seconds}
            state = save({name: tensor.detach().cpu().contiguous() for name, tensor in self._state().items()})
            self._store.commit({f"state-{self.step:09}.safetensors": state}, self._store.names("state-"), progress)
            self._saved_at = time.monotonic()
        if self._stopping.requested:
            self._stopping.deliver()
        return note

    def remove(self) -> None:
        """Remove the checkpoint after the results are written."""
        self._store.commit({}, self._store.names(""), finished=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {
            f"model.{name}": parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad
        }
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        return {**tensors, "random": torch.get_rng_state()}

    def _load_state(self, tensors: dict[str, Tensor]) -> None:
        torch.set_rng_state(tensors["random"])  # dropout uses it
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
