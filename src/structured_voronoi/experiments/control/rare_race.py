"""A race: every method draws texts under one control for the same time of one core, its pilot included."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.baselines import smc
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.peers import Peer, is_installed
from structured_voronoi.experiments.control.rare_cases import (
    BOOTSTRAP,
    GENLM,
    GUIDED,
    REJECTION,
    SMC,
    Budget,
    Case,
    Models,
    Truth,
    count_distinct,
    draw_tries,
    last_texts,
    share_satisfied,
)
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.targets.controlled import ControlledTarget

RACERS = (GUIDED, REJECTION, SMC, BOOTSTRAP, GENLM)

More = Callable[[int], tuple[Tensor, Tensor]]
"""(number of the batch) -> tokens (part, text, n) and energies (part, text); parts are independent of each other."""


def race(task: tuple[Case, Truth, str], models: Models, budget: Budget) -> dict[str, Any]:
    """All texts that a method has drawn when its time is over; at least one batch, even if that takes longer."""
    case, truth, method = task
    about = {"case": case.name, "method": method}
    if method == GENLM and not is_installed():
        return {**about, "note": "not installed"}
    target = models.target(case, budget.length)
    begun = process_time()
    more = _start(method, target, budget)
    batches: list[tuple[Tensor, Tensor]] = []
    while not batches or process_time() - begun < budget.race_seconds:
        batches.append(more(len(batches)))
    seconds = process_time() - begun
    texts = torch.cat([tokens.flatten(0, 1) for tokens, _ in batches])
    # the parts of guided sampling are its chains, which go on from batch to batch
    energy = torch.cat([energies for _, energies in batches], dim=1 if method == GUIDED else 0)
    row = {**about, "seconds": seconds, "texts": len(texts), "distinct": count_distinct(texts)}
    if not len(texts):
        return {**row, "note": "no text"}
    return {**row, "gap": truth.gap(energy.mean(-1).numpy()), "met": share_satisfied(target, texts)}


def _start(method: str, target: ControlledTarget, budget: Budget) -> More:
    """What a method learns first is learnt here, on other random numbers than the truth that it is measured by."""
    problem, seed = bind(target), budget.seed + 1
    if method == REJECTION:

        def try_again(batch: int) -> tuple[Tensor, Tensor]:
            tries = draw_tries(problem, seed, batch)
            return tries.tokens[tries.accepted][:, None], tries.energy[tries.accepted][:, None]

        return try_again
    if method == GENLM:
        peer = Peer(target, budget.particles, budget.threshold)
        return lambda batch: last_texts(peer.run(1, seed + batch), Rng(seed, [batch], "race last"))
    lookahead = None if method == BOOTSTRAP else Lookahead.fit(problem, budget.pilot, seed)
    if method == GUIDED:
        chains = start_chains(problem, Guided(lookahead), budget.chains, seed)

        def step(batch: int) -> tuple[Tensor, Tensor]:
            state, info = next(chains)
            return state.tokens[:, None], info.energy.double()[:, None]

        return step
    sampler = smc.SMC("none" if lookahead is None else lookahead, budget.particles, budget.threshold)

    def run_system(batch: int) -> tuple[Tensor, Tensor]:
        return last_texts(sampler.run(problem, Rng(seed, [batch], "race")), Rng(seed, [batch], "race last"))

    return run_system
