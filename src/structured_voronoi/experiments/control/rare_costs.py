"""What each method spends on an effective text of one case, in evaluations and in seconds of one core."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines import smc
from structured_voronoi.baselines.fudge import Fudge
from structured_voronoi.core.errors import NoStartError, SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.draws import FUDGE_LEAST
from structured_voronoi.experiments.control.peers import Peer, is_installed
from structured_voronoi.experiments.control.rare_cases import (
    BOOTSTRAP,
    CHAINS,
    FOOD,
    FUDGE,
    GENLM,
    GUIDED,
    REJECTION,
    SMC,
    WAVE,
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
from structured_voronoi.metrics.probability import estimate_probability
from structured_voronoi.models.prefix_classifier import PrefixClassifier
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.controlled import ControlledTarget

AT_A_TIME = 256
"""Weighted texts that are drawn at a time."""
ENOUGH = 30
"""Texts that rejection must have accepted for its cost to be measured; else it follows from the probability."""
LEAST_STEPS = 8
"""Of svs+refresh, however long they take."""

Row = dict[str, Any]
"""The cost of a method: evaluations and seconds of an effective text, seconds of its pilot, and what else is known."""


def measure_costs(case: Case, models: Models, budget: Budget) -> dict[str, Any]:
    """Every method on one case. Without a lookahead there is no probability to measure the others by."""
    target = models.target(case, budget.length)
    problem, about = bind(target), {"case": case.name, "kind": case.kind}
    begun = process_time()
    try:
        lookahead = Lookahead.fit(problem, texts=budget.pilot, seed=budget.seed)
    except SamplingError as error:
        return {**about, "failed": str(error)}
    pilot, begun = process_time() - begun, process_time()
    tokens, energy, log_weight = _weighted_texts(problem, lookahead, budget)
    seconds, found = process_time() - begun, estimate_probability(log_weight.numpy(), len(log_weight))
    if not found.value:
        return {**about, "failed": found.verdict}
    truth, met = weighted_energy(energy, log_weight), share_satisfied(target, tokens, log_weight.softmax(0))
    guided, bootstrap = (smc.SMC(kind, budget.particles, budget.threshold) for kind in (lookahead, "none"))
    rows = [
        _row(GUIDED, 1 / found.effective_share, seconds / budget.weighted, pilot, met=met),
        _rejection_row(target, budget, found.value),
        _chain_row(target, budget, truth, found.value),
        _smc_row(SMC, guided, target, budget, truth, pilot),
        _smc_row(BOOTSTRAP, bootstrap, target, budget, truth, 0.0),
        _genlm_row(target, budget, truth),
        _fudge_row(case, models, target, budget, truth),
    ]
    figures = ("value", "low", "high", "effective_share", "largest_share", "pareto_k", "reliable")
    probability = {name: getattr(found, name) for name in figures}
    return {**about, "probability": probability, "truth": list(truth), "rows": rows}


def _weighted_texts(
    problem: Problem, lookahead: Lookahead, budget: Budget
) -> tuple[Int[Tensor, "text n"], Float[Tensor, " text"], Float[Tensor, " text"]]:
    """Tokens, energies and log-weights, whose mean is the probability."""
    parts = []
    for begin in range(0, budget.weighted, AT_A_TIME):
        rng = Rng(budget.seed, range(begin, min(begin + AT_A_TIME, budget.weighted)), "rare", problem.device)
        drawn = lookahead.draw(problem, rng.uniform(problem.length))
        parts.append((drawn.tokens, -(drawn.log_p.sum(-1) + drawn.log_rest), drawn.log_weight - log_bound(problem)))
    tokens, energy, log_weight = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, energy.double(), log_weight.double()


def weighted_energy(energy: Float[Tensor, " text"], log_weight: Float[Tensor, " text"]) -> Truth:
    """The weighted mean and its standard error."""
    weight = log_weight.softmax(0)
    energy = torch.where(weight > 0, energy, 0.0)  # else 0 · inf, which is no number
    mean = (weight * energy).sum()
    return Truth(float(mean), float((weight * (energy - mean)).square().sum().sqrt()))


def _row(method: str, evaluations: float, seconds_each: float, pilot: float = 0.0, **more: Any) -> Row:
    seconds = evaluations * seconds_each
    return {"method": method, "evaluations": evaluations, "seconds": seconds, "pilot": pilot, **more}


def _absent(method: str, note: str) -> Row:
    """A method that has no cost here, and why."""
    return {"method": method, "note": note}


def _rejection_row(target: ControlledTarget, budget: Budget, probability: float) -> Row:
    """Accepted tries where there were enough; else 1/P tries, each as long as a measured one."""
    begun = process_time()
    drawn = [draw_tries(bind(target), budget.seed, wave) for wave in range(-(-budget.tries // WAVE))]
    seconds_each = (process_time() - begun) / (len(drawn) * WAVE)
    chance = torch.cat([tries.log_chance for tries in drawn]).exp().nan_to_num(0.0)
    if float(chance.sum()) >= ENOUGH:
        return _row(REJECTION, 1 / float(chance.mean()), seconds_each)
    return _row(REJECTION, 1 / probability, seconds_each, note="extrapolated")


def _chain_row(target: ControlledTarget, budget: Budget, truth: Truth, probability: float) -> Row:
    """The second half of a run, by the effective samples of its energy; the search for a start and the first half are
    its pilot."""
    if probability < budget.chain_rate:
        return _absent(CHAINS, f"left out below {budget.chain_rate:g}")
    begun = process_time()
    try:
        chains = start_chains(target, text_sampler(CHAINS), budget.chains, budget.seed)
    except NoStartError:
        return _absent(CHAINS, "no start found")
    moments, energies, evaluations = [process_time()], [], []
    for _, info in chains:
        moments.append(process_time())
        energies.append(info.energy.double().numpy())
        evaluations.append(int(info.evaluations.sum()))
        if moments[-1] - moments[0] >= budget.chain_seconds and len(energies) >= LEAST_STEPS:
            break
    half = len(energies) // 2
    later = np.stack(energies[half:], axis=1)  # (chain, step)
    if np.ptp(later, axis=-1).max() == 0:
        return _absent(CHAINS, f"no chain moved in {len(later[0])} steps")
    import arviz_stats

    count, seconds, effective = sum(evaluations[half:]), moments[-1] - moments[half], float(arviz_stats.ess(later))
    gap, pilot = truth.gap(later.mean(-1)), moments[half] - begun
    return _row(CHAINS, count / effective, seconds / count, pilot, gap=gap)


def _smc_row(
    method: str, sampler: smc.SMC, target: ControlledTarget, budget: Budget, truth: Truth, pilot: float
) -> Row:
    begun = process_time()
    found = sampler.run(target, Rng(budget.seed, budget.systems, f"rare {method}"))
    return _particle_row(method, found, process_time() - begun, pilot, target, truth, budget.seed)


def _genlm_row(target: ControlledTarget, budget: Budget, truth: Truth) -> Row:
    if not is_installed():
        return _absent(GENLM, "not installed")
    peer, begun = Peer(target, budget.particles, budget.threshold), process_time()
    found = peer.run(budget.slow_systems, budget.seed)
    return _particle_row(GENLM, found, process_time() - begun, 0.0, target, truth, budget.seed)


def _particle_row(
    method: str, found: smc.Particles, seconds: float, pilot: float, target: ControlledTarget, truth: Truth, seed: int
) -> Row:
    """An effective text is a distinct one among those of all systems after their last resampling."""
    count = found.log_weight.numel()
    tokens, energy = last_texts(found, Rng(seed, len(found.log_z), f"rare {method} last"))
    if not len(tokens):
        return _absent(method, f"none of {count:,} particles had a weight")
    texts = tokens.flatten(0, 1)
    distinct, met = count_distinct(texts), share_satisfied(target, texts)
    gap, kept = truth.gap(energy.mean(-1).numpy()), len(texts)
    return _row(method, count / distinct, seconds / count, pilot, distinct=distinct, texts=kept, gap=gap, met=met)


def _fudge_row(case: Case, models: Models, target: ControlledTarget, budget: Budget, truth: Truth) -> Row:
    """One evaluation a text, and many questions to the predictor. Not exact: its energy is what to look at."""
    if case.kind != "classifier":
        return _absent(FUDGE, "there is no predictor of prefixes for this")
    if models.prefix is None:
        return _absent(FUDGE, "no predictor of prefixes; `svs reproduce topic --data` trains one")
    predictor = partial(PrefixClassifier.load(Path(models.prefix)).log_prob, label=FOOD)
    count, begun = budget.particles * budget.slow_systems, process_time()
    state, info = next(
        start_chains(target, Fudge(predictor, case.weight, min_probability=FUDGE_LEAST), count, budget.seed)
    )
    seconds = process_time() - begun
    gap, met = truth.gap(info.energy.double().numpy()), share_satisfied(target, state.tokens)
    distinct = count_distinct(state.tokens)
    return _row(FUDGE, count / distinct, seconds / count, distinct=distinct, texts=count, gap=gap, met=met)
