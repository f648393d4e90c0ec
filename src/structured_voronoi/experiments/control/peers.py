"""SMC of genlm-control on this package's targets, if it is installed (`pip install 'structured-voronoi[peers]'`).

Its language model is restricted to the target's allowed tokens and to exactly N tokens. The controls are its critic,
which scores whole texts.
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
    """Whether genlm-control is installed."""
    return importlib.util.find_spec("genlm") is not None and importlib.util.find_spec("genlm.control") is not None


class GenlmSMC:
    """SMC of genlm-control, for a target without prompt, suffix or end of text."""

    def __init__(self, target: ControlledTarget, particles: int, threshold: float) -> None:
        from genlm.backend.llm import AsyncTransformer
        from genlm.control import SMC, direct_token_sampler

        self.target, self.particles, self.threshold = target, particles, threshold
        network, tokenizer = target.text.network, target.text.tokenizer
        backend = AsyncTransformer(network, tokenizer, batch_size=particles)
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        masked, critic = _make_potentials()
        self._backend, self._tokens = backend, masked(backend, [first], target.text.allowed)
        self._smc = SMC(direct_token_sampler(self._tokens), critic(self._tokens.vocab, target))

    def run(self, systems: int, seed: int) -> Particles:
        """Run the systems one after another, each with empty caches."""
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002, genlm-control uses the global generators
        finished = []
        for _ in range(systems):
            self._backend.clear_cache()
            finished.append(asyncio.run(self._run_system()))
        tokens = torch.tensor([[[token.token_id for token in row[:-1]] for row in rows] for rows, _ in finished])
        energy = -self.target.log_prob(tokens.flatten(0, 1)).double().view(tokens.shape[:2])
        return Particles(tokens, energy, torch.tensor(np.stack([weights for _, weights in finished])))

    async def _run_system(self) -> tuple[list[list[Any]], np.ndarray]:
        length = self.target.length
        sequences = await self._smc(
            n_particles=self.particles,
            ess_threshold=self.threshold,
            max_tokens=length + 1,
            terminate_when=lambda context: len(context) == length,
        )
        return sequences.contexts, sequences.log_weights


def _make_potentials() -> tuple[Any, Any]:
    """Define potentials for genlm-control, whose base classes exist only if it is installed."""
    from genlm.control import Potential, PromptedLLM

    class Masked(PromptedLLM):  # type: ignore[misc]
        """The language model over the allowed tokens, without the end of text."""

        def __init__(self, backend: Any, prompt_ids: list[int], allowed: torch.Tensor) -> None:
            super().__init__(backend, prompt_ids=prompt_ids)
            self.allowed = torch.tensor([*(bool(allowed[token.token_id]) for token in self.vocab), False])

        async def logw_next(self, context: Any) -> Any:
            return self._mask(await super().logw_next(context))

        async def batch_logw_next(self, contexts: Any) -> Any:
            return self._mask(await super().batch_logw_next(contexts))

        def _mask(self, weighted: Any) -> Any:
            weights = torch.as_tensor(weighted.weights).masked_fill(~self.allowed, -torch.inf)
            return self.make_lazy_weights(weights.log_softmax(-1))

    class Critic(Potential):  # type: ignore[misc]
        """Weighted scores of whole texts."""

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
