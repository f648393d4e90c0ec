"""Evaluations and seconds of one core that each method needs per effective text of one case."""

from __future__ import annotations

from time import process_time
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines import smc
from structured_voronoi.core.errors import NoStartError, SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.draws import fudge_sampler
from structured_voronoi.experiments.control.peers import GenlmSMC, is_installed
from structured_voronoi.experiments.control.rare_cases import (
    FOOD,
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
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.controlled import ControlledTarget

Row = dict[str, Any]
"""Cost of a method: evaluations and seconds per effective text, seconds of its pilot, and further results."""


def measure_costs(case: Case, models: Models, budget: Budget) -> dict[str, Any]:
    """Costs of all methods on one case, or the reason why they cannot be measured."""
    target = models.target(case, budget.length)
    problem, description = bind(target), {"case": case.name, "kind": case.kind}
    began = process_time()
    try:
        lookahead = Lookahead.fit(problem, texts=budget.pilot, seed=budget.seed)
    except SamplingError as error:
        return {**description, "failed": str(error)}
    pilot, began = process_time() - began, process_time()
    tokens, energy, log_weight = _weighted_texts(problem, lookahead, budget)
    seconds, estimate = process_time() - began, estimate_probability(log_weight.numpy(), len(log_weight))
    if not estimate.value:
        return {**description, "failed": estimate.verdict}
    reference, met = weighted_energy(energy, log_weight), share_satisfied(target, tokens, log_weight.softmax(0))
    guided, bootstrap = (smc.SMC(kind, budget.particles, budget.threshold) for kind in (lookahead, "none"))
    rows = [
        _row("guided", 1 / estimate.effective_share, seconds / budget.weighted, pilot, met=met),
        _rejection_row(target, budget, estimate.value),
        _chain_row(target, budget, reference, estimate.value),
        _smc_row("smc", guided, target, budget, reference, pilot),
        _smc_row("bootstrap smc", bootstrap, target, budget, reference, 0.0),
        _genlm_row(target, budget, reference),
        _fudge_row(case, models, target, budget, reference),
    ]
    fields = ("value", "low", "high", "effective_share", "largest_share", "pareto_k", "reliable")
    probability = {name: getattr(estimate, name) for name in fields}
    return {**description, "probability": probability, "truth": list(reference), "rows": rows}


def _weighted_texts(
    problem: Problem, lookahead: Lookahead, budget: Budget, batch_size: int = 256
) -> tuple[Int[Tensor, "text n"], Float[Tensor, " text"], Float[Tensor, " text"]]:
    """Tokens, energies and log-weights of guided texts; the mean weight is the probability of the control."""
    parts = []
    for begin in range(0, budget.weighted, batch_size):
        rng = Rng(budget.seed, range(begin, min(begin + batch_size, budget.weighted)), "rare", problem.device)
        drawn = lookahead.draw(problem, rng.uniform(problem.length))
        parts.append((drawn.tokens, -(drawn.log_p.sum(-1) + drawn.log_rest), drawn.log_weight - log_bound(problem)))
    tokens, energy, log_weight = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, energy.double(), log_weight.double()


def weighted_energy(energy: Float[Tensor, " text"], log_weight: Float[Tensor, " text"]) -> Reference:
    """The weighted mean and its standard error."""
    weight = log_weight.softmax(0)
    energy = torch.where(weight > 0, energy, 0.0)  # 0 · inf is NaN
    mean = (weight * energy).sum()
    return Reference(float(mean), float((weight * (energy - mean)).square().sum().sqrt()))


def _row(method: Method, evaluations: float, seconds_each: float, pilot: float = 0.0, **more: Any) -> Row:
    seconds = evaluations * seconds_each
    return {"method": method, "evaluations": evaluations, "seconds": seconds, "pilot": pilot, **more}


def _not_measured(method: Method, note: str) -> Row:
    """A method without a cost, and the reason."""
    return {"method": method, "note": note}


def _rejection_row(target: ControlledTarget, budget: Budget, probability: float) -> Row:
    """Cost from accepted tries; extrapolated from the probability if too few are accepted."""
    began, size = process_time(), budget.batch_size
    batches = [draw_tries(bind(target), budget.seed, batch, size) for batch in range(-(-budget.tries // size))]
    seconds_each = (process_time() - began) / (len(batches) * size)
    chance = torch.cat([tries.log_chance for tries in batches]).exp().nan_to_num(0.0)
    if float(chance.sum()) >= budget.min_accepted:
        return _row("rejection", 1 / float(chance.mean()), seconds_each)
    return _row("rejection", 1 / probability, seconds_each, note="extrapolated")


def _chain_row(target: ControlledTarget, budget: Budget, reference: Reference, probability: float) -> Row:
    """Cost per effective sample of the energy in the second half; the start and the first half count as the pilot."""
    if probability < budget.min_chain_probability:
        return _not_measured("svs+refresh", f"not run below P = {budget.min_chain_probability:g}")
    began = process_time()
    try:
        chains = start_chains(target, text_sampler("svs+refresh"), budget.chains, budget.seed)
    except NoStartError:
        return _not_measured("svs+refresh", "no start found")
    moments, energies, evaluations = [process_time()], [], []
    for _, info in chains:
        moments.append(process_time())
        energies.append(info.energy.double().numpy())
        evaluations.append(int(info.evaluations.sum()))
        if moments[-1] - moments[0] >= budget.chain_seconds and len(energies) >= budget.min_steps:
            break
    half = len(energies) // 2
    later = np.stack(energies[half:], axis=1)  # (chain, step)
    if np.ptp(later, axis=-1).max() == 0:
        return _not_measured("svs+refresh", f"no chain moved in {len(later[0])} steps")
    import arviz_stats

    count, seconds, effective = sum(evaluations[half:]), moments[-1] - moments[half], float(arviz_stats.ess(later))
    gap, pilot = reference.gap(later.mean(-1)), moments[half] - began
    return _row("svs+refresh", count / effective, seconds / count, pilot, gap=gap)


def _smc_row(
    method: Method, sampler: smc.SMC, target: ControlledTarget, budget: Budget, reference: Reference, pilot: float
) -> Row:
    began = process_time()
    particles = sampler.run(target, Rng(budget.seed, budget.systems, f"rare {method}"))
    return _particle_row(method, particles, process_time() - began, pilot, target, reference, budget.seed)


def _genlm_row(target: ControlledTarget, budget: Budget, reference: Reference) -> Row:
    if not is_installed():
        return _not_measured("genlm-control", "not installed")
    sampler, began = GenlmSMC(target, budget.particles, budget.threshold), process_time()
    particles = sampler.run(budget.slow_systems, budget.seed)
    return _particle_row("genlm-control", particles, process_time() - began, 0.0, target, reference, budget.seed)


def _particle_row(
    method: Method,
    particles: smc.Particles,
    seconds: float,
    pilot: float,
    target: ControlledTarget,
    reference: Reference,
    seed: int,
) -> Row:
    """Cost per distinct text after the last resampling."""
    count = particles.log_weight.numel()
    tokens, energy = final_texts(particles, Rng(seed, len(particles.log_z), f"rare {method} last"))
    if not len(tokens):
        return _not_measured(method, f"none of {count:,} particles had a positive weight")
    texts = tokens.flatten(0, 1)
    distinct, met = count_distinct(texts), share_satisfied(target, texts)
    gap = reference.gap(energy.mean(-1).numpy())
    return _row(method, count / distinct, seconds / count, pilot, distinct=distinct, texts=len(texts), gap=gap, met=met)


def _fudge_row(case: Case, models: Models, target: ControlledTarget, budget: Budget, reference: Reference) -> Row:
    """Cost per distinct text of FUDGE, which is not exact."""
    if case.kind != "classifier":
        return _not_measured("fudge", "no prefix classifier for this control")
    if models.prefix is None:
        return _not_measured("fudge", "no prefix classifier; `svs reproduce topic --data` trains one")
    sampler, count = fudge_sampler(models.prefix, FOOD, case.weight), budget.particles * budget.slow_systems
    began = process_time()
    state, info = next(start_chains(target, sampler, count, budget.seed))
    seconds = process_time() - began
    gap, met = reference.gap(info.energy.double().numpy()), share_satisfied(target, state.tokens)
    distinct = count_distinct(state.tokens)
    return _row("fudge", count / distinct, seconds / count, distinct=distinct, texts=count, gap=gap, met=met)
