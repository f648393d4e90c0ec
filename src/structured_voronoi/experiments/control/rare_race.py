"""A race: each method draws texts under one control for the same seconds of one core, including its pilot."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.baselines import smc
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.peers import GenlmSMC, is_installed
from structured_voronoi.experiments.control.rare_cases import (
    Budget,
    Case,
    Method,
    Models,
    Reference,
    count_distinct,
    draw_tries,
    final_texts,
    share_satisfied,
)
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.targets.controlled import ControlledTarget

RACE_METHODS: tuple[Method, ...] = ("guided", "rejection", "smc", "bootstrap smc", "genlm-control")

DrawBatch = Callable[[int], tuple[Tensor, Tensor]]
"""(number of the batch) -> tokens (part, text, n) and energies (part, text); parts are independent of each other."""


def race(task: tuple[Case, Reference, Method], models: Models, budget: Budget) -> dict[str, Any]:
    """The texts that a method draws within the time; at least one batch, even if it takes longer."""
    case, reference, method = task
    description = {"case": case.name, "method": method}
    if method == "genlm-control" and not is_installed():
        return {**description, "note": "not installed"}
    target = models.target(case, budget.length)
    began = process_time()
    draw_batch = _prepare(method, target, budget)
    batches: list[tuple[Tensor, Tensor]] = []
    while not batches or process_time() - began < budget.race_seconds:
        batches.append(draw_batch(len(batches)))
    seconds = process_time() - began
    texts = torch.cat([tokens.flatten(0, 1) for tokens, _ in batches])
    # the parts of guided sampling are its chains, which continue in the next batch
    energy = torch.cat([energies for _, energies in batches], dim=1 if method == "guided" else 0)
    row = {**description, "seconds": seconds, "texts": len(texts), "distinct": count_distinct(texts)}
    if not len(texts):
        return {**row, "note": "no texts"}
    return {**row, "gap": reference.gap(energy.mean(-1).numpy()), "met": share_satisfied(target, texts)}


def _prepare(method: Method, target: ControlledTarget, budget: Budget) -> DrawBatch:
    """Run the method's pilot, with a seed other than that of the reference energy."""
    problem, seed = bind(target), budget.seed + 1
    if method == "rejection":

        def draw_accepted(batch: int) -> tuple[Tensor, Tensor]:
            tries = draw_tries(problem, seed, batch, budget.batch_size)
            return tries.tokens[tries.accepted][:, None], tries.energy[tries.accepted][:, None]

        return draw_accepted
    if method == "genlm-control":
        genlm = GenlmSMC(target, budget.particles, budget.threshold)
        return lambda batch: final_texts(genlm.run(1, seed + batch), Rng(seed, [batch], "race last"))
    lookahead = None if method == "bootstrap smc" else Lookahead.fit(problem, budget.pilot, seed)
    if method == "guided":
        chains = start_chains(problem, Guided(lookahead), budget.chains, seed)

        def step(batch: int) -> tuple[Tensor, Tensor]:
            state, info = next(chains)
            return state.tokens[:, None], info.energy.double()[:, None]

        return step
    sampler = smc.SMC("none" if lookahead is None else lookahead, budget.particles, budget.threshold)

    def run_system(batch: int) -> tuple[Tensor, Tensor]:
        return final_texts(sampler.run(problem, Rng(seed, [batch], "race")), Rng(seed, [batch], "race last"))

    return run_system
