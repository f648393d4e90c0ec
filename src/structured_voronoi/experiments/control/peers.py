"""genlm-control, where it is installed (`pip install 'structured-voronoi[peers]'`): its SMC on the same language model.

Its language model is ours, over the allowed tokens alone and exactly N of them; our controls are its critic, which
scores whole texts, as genlm-control does with a critic that knows nothing of prefixes.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import numpy as np
import torch

from structured_voronoi.baselines.smc import Particles
from structured_voronoi.targets.controlled import ControlledTarget


def is_installed() -> bool:
    """Is genlm-control there?"""
    return importlib.util.find_spec("genlm") is not None and importlib.util.find_spec("genlm.control") is not None


class Peer:
    """genlm-control's SMC with systems of so many particles, for a target without prompt, suffix or end."""

    def __init__(self, target: ControlledTarget, particles: int, threshold: float) -> None:
        from genlm.backend.llm import AsyncTransformer
        from genlm.control import SMC, direct_token_sampler

        self.target, self.particles, self.threshold = target, particles, threshold
        model = target.model
        backend = AsyncTransformer(model.network, model.tokenizer, batch_size=particles)
        first = model.tokenizer.bos_token_id
        first = model.tokenizer.eos_token_id if first is None else first
        masked, critic = _make_potentials()
        self._backend, self._tokens = backend, masked(backend, [first], target.allowed)
        self._smc = SMC(direct_token_sampler(self._tokens), critic(self._tokens.vocab, target))

    def run(self, systems: int, seed: int) -> Particles:
        """As many systems one after another; its caches are emptied before each."""
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002, its generators are the global ones
        drawn = []
        for _ in range(systems):
            self._backend.clear_cache()
            drawn.append(asyncio.run(self._run_system()))
        tokens = torch.tensor([[[token.token_id for token in row[:-1]] for row in rows] for rows, _ in drawn])
        energy = -self.target.log_prob(tokens.flatten(0, 1)).double().view(tokens.shape[:2])
        return Particles(tokens, energy, torch.tensor(np.stack([weights for _, weights in drawn])))

    async def _run_system(self) -> tuple[list[list[Any]], np.ndarray]:
        length = self.target.length
        found = await self._smc(
            n_particles=self.particles,
            ess_threshold=self.threshold,
            max_tokens=length + 1,
            terminate_when=lambda context: len(context) == length,
        )
        return found.contexts, found.log_weights


def _make_potentials() -> tuple[Any, Any]:
    """The classes that genlm-control asks for, whose base classes are its own."""
    from genlm.control import Potential, PromptedLLM

    class Masked(PromptedLLM):  # type: ignore[misc]
        """The language model over allowed tokens: texts have a length, not an end."""

        def __init__(self, backend: Any, prompt_ids: list[int], allowed: torch.Tensor) -> None:
            super().__init__(backend, prompt_ids=prompt_ids)
            self.possible = torch.tensor([*(bool(allowed[token.token_id]) for token in self.vocab), False])

        async def logw_next(self, context: Any) -> Any:
            return self._mask(await super().logw_next(context))

        async def batch_logw_next(self, contexts: Any) -> Any:
            return self._mask(await super().batch_logw_next(contexts))

        def _mask(self, found: Any) -> Any:
            weights = torch.as_tensor(found.weights).masked_fill(~self.possible, -torch.inf)
            return self.make_lazy_weights(weights.log_softmax(-1))

    class Critic(Potential):  # type: ignore[misc]
        """The weighted scores of whole texts."""

        def __init__(self, vocabulary: list[Any], target: ControlledTarget) -> None:
            super().__init__(vocabulary)
            self.target = target

        def is_terminal_only(self) -> bool:
            return True

        async def prefix(self, context: list[Any]) -> float:
            return 0.0

        async def complete(self, context: list[Any]) -> float:
            return float((await self.batch_complete([context]))[0])

        async def batch_complete(self, contexts: list[list[Any]]) -> np.ndarray:
            tokens = torch.tensor([[token.token_id for token in context] for context in contexts])
            scores = self.target.control_log_probs(tokens)
            total = sum(weight * scores[name].double() for name, weight in self.target.weights.items() if weight)
            return np.asarray(total)

    return Masked, Critic
