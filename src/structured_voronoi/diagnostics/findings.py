"""What speaks against a run: warnings in words, each with what may help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from structured_voronoi.diagnostics.records import DISTANCE, Mixing, Record

LEAST_DRAWS = 20
"""With fewer draws or steps a chain, nothing is said about mixing."""
MOST_RHAT, STRAY = 1.1, 4.0
"""Above this, chains disagree; by chance R-hat strays from 1 by up to STRAY / draws."""
MOST_RHAT_OF_STEPS = 2.0
"""The same in the later half of the steps before a single text: there R-hat is 1.7 of autoregressive chains that carry
1 % of their start to the end, 2.0 at 5 % and 2.6 at 30 %."""
WANTED_EFFECTIVE = 100
"""Effective samples of all chains together, below which means are rough."""
MOST_IMPOSSIBLE, MOST_DIVERGING, MOST_UNRELIABLE, LEAST_ACCEPTED = 0.5, 0.01, 0.1, 0.02
"""Shares beyond which something is said: proposals without a finite energy, trajectories abandoned, draws in cells of
unknown mass, redraws accepted."""
MOST_PARETO, MOST_LEFTOVER = 0.7, 0.05
"""Of guided texts: the tail of their weights, and the share that may still depend on their start."""
LEAST_COPIES, CHANCE = 3, 1e-6
"""A text must occur so often to be taken for copies, and so many times must be so improbable."""


class Finding(NamedTuple):
    """A warning: what was seen, and what may help."""

    words: str
    serious: bool
    """Should the run not be trusted?"""


def find_all(record: Record, mixing: Mapping[str, Mixing]) -> list[Finding]:
    """Everything that speaks against a run, given how its quantities mixed."""
    return [
        *_impossible_draws(record),
        *_copies(record),
        *_stuck_chains(record),
        *([] if record.independent else _disagreement(record, mixing)),
        *_weights(record),
        *_lost_steps(record),
        *_interruption(record),
    ]


def _impossible_draws(record: Record) -> Iterator[Finding]:
    lost = ~np.isfinite(record.energy)
    if lost.any():
        chain, draw = np.argwhere(lost)[0].tolist()
        yield Finding(
            f"{lost.sum()} of {lost.size} draws have no finite energy (the first is draw {draw} of chain "
            f"{record.numbers[chain]}), so that the chains stand where the target says nobody can: look for NaN in "
            "`log_prob`, or give a `start` that is possible",
            serious=True,
        )


def _copies(record: Record) -> Iterator[Finding]:
    """Texts that occur far more often than their energies allow beside the likeliest text of the same prompt."""
    if not record.texts:
        return
    found: dict[str, dict[str, list[float]]] = {}
    for (prompt, text), energy in zip(record.texts, record.energy[:, 0].tolist(), strict=True):
        found.setdefault(prompt, {}).setdefault(text, []).append(energy)
    for texts in found.values():
        best = min(texts, key=lambda text: texts[text][0])
        for text, energies in texts.items():
            times, others, gap = len(energies), len(texts[best]), energies[0] - texts[best][0]
            ways = math.lgamma(times + others + 1) - math.lgamma(times + 1) - math.lgamma(others + 1)
            log_chance = ways - times * np.logaddexp(0, gap)  # of so many times, and more, among these two texts
            if text != best and times >= LEAST_COPIES and log_chance < math.log(CHANCE):
                yield Finding(
                    f"a text occurs {times} times although another, that occurs {others} times, is e^{gap:.0f} times "
                    f"as probable: {text[:60]!r}; its chains are copies of one another: take more particles, or a "
                    "sampler that draws each text anew",
                    serious=True,
                )
                return


def _stuck_chains(record: Record) -> Iterator[Finding]:
    if record.independent or record.steps < 2:
        return
    stuck = record.is_stuck
    if not stuck.any():
        return
    events, evaluations = record.total("events"), record.total("evaluations")
    tried = evaluations if events is None else events
    idle = tried is not None and not tried[stuck].any()
    cause = "nothing was proposed" if idle else "every proposal was refused"
    yield Finding(
        f"{_name_chains(record, stuck)} never moved in {record.steps} steps ({cause}): try {_moving(record, idle)}",
        serious=record.steps >= LEAST_DRAWS,
    )


def _moving(record: Record, idle: bool) -> str:
    """What may make chains move: longer jumps where they met nothing, shorter ones where all was refused."""
    if record.scale is None:
        return _listed(_other_samplers(record), "or")
    scale = 2 * record.scale if idle else record.scale / 2
    own = f"--scale {scale:.2g}" if record.one_text else f"scale={scale:.2g}"
    return _listed([own, *_other_samplers(record)], "or")


def _mixing_better(record: Record) -> str:
    """What may bring chains together: more steps, or moves that reach farther."""
    longer = f"--warmup {4 * record.steps}" if record.one_text else f"warmup={4 * record.steps} with as many draws"
    return _listed([longer, *_other_samplers(record)], "or")


def _other_samplers(record: Record) -> list[str]:
    if record.one_text:
        return [f"--sampler {name}" for name in ("svs+refresh", "adaptive") if name != record.sampler]
    if "redraws" in record.counts:
        return ["Guided(), which proposes what the controls ask for"]
    return ["another step size"] * (record.scale is None) + ["Cycle(…, Refresh()) where tokens can be redrawn"]


def _disagreement(record: Record, mixing: Mapping[str, Mixing]) -> Iterator[Finding]:
    """Chains that stay in places of their own; or that agree, but hardly move."""
    draws = record.energy.shape[1]
    if draws < LEAST_DRAWS or record.is_stuck.all():
        return
    most = MOST_RHAT_OF_STEPS if record.one_text else max(MOST_RHAT, 1 + STRAY / draws)
    apart = [name for name, found in mixing.items() if found.rhat is not None and found.rhat > most]
    if apart:
        values = record.quantities()
        said = _listed([_describe_gap(record, name, values[name], mixing[name]) for name in apart], "and")
        yield Finding(
            f"the chains disagree about {said}, so that they depend on where they began: try {_mixing_better(record)}",
            serious=True,
        )
    if apart or record.one_text:
        return
    effective = [(found.ess_bulk, name) for name, found in mixing.items() if found.ess_bulk is not None]
    count, worst = min(effective, default=(math.inf, ""))
    if count < WANTED_EFFECTIVE:
        yield Finding(
            f"{count:.0f} effective samples of {_quantity(worst)} in {record.energy.size:,} draws: its mean is off by "
            f"{1 / math.sqrt(count):.0%} of its standard deviation; "
            f"draws={math.ceil(draws * WANTED_EFFECTIVE / count)} would come to {WANTED_EFFECTIVE}",
            serious=False,
        )


def _describe_gap(record: Record, name: str, values: ndarray, mixing: Mixing) -> str:
    means, numbers = values.mean(1), record.numbers
    low, high = int(means.argmin()), int(means.argmax())
    return (
        f"{_quantity(name)} (R-hat {written_rhat(mixing.rhat)}; means from {means[low]:.3g} in chain "
        f"{numbers[low]} to {means[high]:.3g} in chain {numbers[high]})"
    )


def written_rhat(rhat: float | None) -> str:
    return "unknown" if rhat is None else "above 100" if rhat > 100 else f"{rhat:.3g}"


def _quantity(name: str) -> str:
    if name == "energy":
        return "the energy"
    return "the " + name if name == DISTANCE else f"the control {name!r}"


def _weights(record: Record) -> Iterator[Finding]:
    found = record.summary_of_weights()
    if found is None:
        return
    choices, fresh = record.counts["log_weights"].shape[-2:]
    proposals = 1 + fresh * choices * record.steps
    remedy = (
        "fit the lookahead on more texts, Lookahead.fit(target, texts=8192), or take more `tries`, `choices` or steps"
    )
    if found.effective_share * proposals < 1:
        yield Finding(
            f"the effective share of guided weights is {found.effective_share:.2g}: {proposals} proposals per chain "
            f"are too few to forget the start; {remedy}",
            serious=True,
        )
    if not found.reliable and found.pareto_k is not None and found.pareto_k > MOST_PARETO:
        yield Finding(
            f"the tail of guided weights is heavy (Pareto k {found.pareto_k:.2f} ± {found.pareto_k_error:.2f}, the "
            f"largest is {found.largest_share:.0%} of all), so that texts which the lookahead misses may be missing; "
            f"{remedy}",
            serious=False,
        )


def _lost_steps(record: Record) -> Iterator[Finding]:
    """Steps that came to nothing, for whatever reason."""
    is_guided = "log_weights" in record.counts  # its weights say more than what was refused
    impossible = record.share("nonfinite", "evaluations")
    if impossible is not None and impossible > MOST_IMPOSSIBLE and not (record.independent or is_guided):
        yield Finding(
            f"{impossible:.0%} of proposals had no finite energy and were refused: if no control forbids them, look "
            "for NaN in `log_prob`; if one does, Guided() proposes what it allows",
            serious=False,
        )
    abandoned = record.abandoned
    if abandoned > MOST_DIVERGING:
        smaller = "" if record.scale is None else f", or scale={record.scale / 2:.2g}"
        yield Finding(
            f"{abandoned:.0%} of trajectories were abandoned after too many events, and their chains stayed "
            f"where they were: raise max_events{smaller}",
            serious=False,
        )
    unreliable = record.counts.get("unreliable")
    if unreliable is not None and unreliable.mean() > MOST_UNRELIABLE:
        yield Finding(
            f"{unreliable.mean():.0%} of draws lie in cells whose mass comes from fewer than 50 counts: raise "
            'mass_draws, or use walls="open", which needs no masses',
            serious=False,
        )
    accepted = record.share("refreshed", "redraws")
    if accepted is not None and accepted < LEAST_ACCEPTED and not (is_guided or record.is_stuck.all()):
        yield Finding(
            f"{accepted:.2%} of redraws were accepted: shorter blocks, Refresh(block=2), or a lookahead, "
            "Refresh(lookahead=…), are refused less often",
            serious=False,
        )


def _interruption(record: Record) -> Iterator[Finding]:
    if record.asked is not None:
        draws = record.energy.shape[1]
        yield Finding(
            f"interrupted after {draws} of {record.asked} draws: run it to its end for the others", serious=False
        )


def _name_chains(record: Record, chosen: ndarray) -> str:
    numbers = [number for number, is_chosen in zip(record.numbers, chosen, strict=True) if is_chosen]
    if len(numbers) == len(chosen) > 1:
        return f"all {len(numbers)} chains"
    shown = [str(number) for number in numbers[:6]]
    if len(numbers) > 6:
        shown.append(f"{len(numbers) - 6} others")
    return f"chain{plural(len(numbers))} {_listed(shown, 'and')}"


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(count: int) -> str:
    return "" if count == 1 else "s"
