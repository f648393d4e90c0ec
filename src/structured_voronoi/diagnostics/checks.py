"""Checks of a run, each of which may yield a warning with a code and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from structured_voronoi.diagnostics.records import DISTANCE, LOG_PROB, Mixing, Record


@dataclass(frozen=True)
class DiagnosticWarning:
    """A problem of a run.

    Examples
    --------
    >>> warning = DiagnosticWarning("low-ess", "effective sample size of log p 40 in 400 draws", "use draws=1000")
    >>> warning.code, warning.serious
    ('low-ess', False)
    >>> str(warning)
    'effective sample size of log p 40 in 400 draws; use draws=1000'
    """

    code: str
    """Kind of the problem, for example "r-hat"."""
    message: str
    remedy: str
    serious: bool = False
    """Whether the draws may not follow the target."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `generate` to try, with values."""

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True)
class DiagnosticSettings:
    """Thresholds of the checks."""

    min_draws: int = 20
    """Draws or steps per chain below which mixing is not assessed."""
    max_rhat: float = 1.1
    rhat_allowance: float = 4.0
    """R-hat of n draws exceeds 1 by up to about ``rhat_allowance / n`` by chance."""
    serious_rhat_of_steps: float = 2.0
    """R-hat above which single texts depend on their start. In the second half of the steps, autoregressive chains that
    keep 1 % of their start until the end have 1.7, 5 % gives 2.0 and 30 % gives 2.6."""
    min_effective_samples: float = 100.0
    """Of all chains together, for means."""
    min_effective_samples_per_text: float = 5.0
    """Per chain, where each chain gives one text."""
    max_impossible_share: float = 0.5
    """Share of proposals with probability 0."""
    max_diverging_share: float = 0.01
    max_unreliable_share: float = 0.1
    """Share of draws in cells whose mass is poorly known."""
    min_accepted_share: float = 0.02
    """Share of redrawn blocks that are accepted."""
    min_copies: int = 3
    max_copy_probability: float = 1e-6
    """Probability of as many occurrences of a text below which they are copies."""


def check_record(record: Record, mixing: Mapping[str, Mixing], settings: DiagnosticSettings) -> list[DiagnosticWarning]:
    """All warnings about a run, given how its quantities mixed."""
    return [
        *_check_draws(record),
        *_check_copies(record, settings),
        *_check_movement(record, settings),
        *_check_mixing(record, mixing, settings),
        *_check_weights(record),
        *_check_proposals(record, settings),
        *_check_interruption(record),
    ]


def _check_draws(record: Record) -> Iterator[DiagnosticWarning]:
    impossible = ~np.isfinite(record.log_prob)
    if impossible.any():
        chain, draw = np.argwhere(impossible)[0].tolist()
        yield DiagnosticWarning(
            "impossible-draws",
            f"{impossible.sum()} of {impossible.size} draws have probability 0 or log p = NaN (the first is draw "
            f"{draw} of chain {record.numbers[chain]})",
            "use a `start` with positive probability, and check `log_prob` for NaN",
            serious=True,
        )


def _check_copies(record: Record, settings: DiagnosticSettings) -> Iterator[DiagnosticWarning]:
    """Texts that occur more often than their probability permits, given the most probable text of the same prompt."""
    found: dict[str, dict[str, list[float]]] = {}
    for (prompt, text), log_prob in zip(record.texts, record.log_prob[:, 0].tolist(), strict=False):
        found.setdefault(prompt, {}).setdefault(text, []).append(log_prob)
    for texts in found.values():
        best = max(texts, key=lambda text: texts[text][0])
        for text, log_probs in texts.items():
            times, others, gap = len(log_probs), len(texts[best]), texts[best][0] - log_probs[0]
            ways = math.lgamma(times + others + 1) - math.lgamma(times + 1) - math.lgamma(others + 1)
            log_chance = ways - times * np.logaddexp(0, gap)  # of at least as many occurrences among these two texts
            if text != best and times >= settings.min_copies and log_chance < math.log(settings.max_copy_probability):
                yield DiagnosticWarning(
                    "copies",
                    f"the text {text[:60]!r} occurs {times} times, and one that is e^{gap:.0f} times as probable "
                    f"{others} time{plural(others)}: the draws are copies of each other",
                    "use more particles, or a sampler whose draws are independent",
                    serious=True,
                )
                return


def _check_movement(record: Record, settings: DiagnosticSettings) -> Iterator[DiagnosticWarning]:
    stuck = record.is_stuck
    if record.independent or record.steps < 2 or not stuck.any():
        return
    events, evaluations = record.total("events"), record.total("evaluations")
    proposals = evaluations if events is None else events
    idle = proposals is not None and not proposals[stuck].any()
    cause = "there were no proposals" if idle else "all proposals were rejected"
    scale = {} if record.scale is None else {"scale": float(f"{record.scale * (2 if idle else 0.5):.2g}")}
    yield DiagnosticWarning(
        "stuck-chains",
        f"{_name_chains(record, stuck)} did not move in {record.steps} steps: {cause}",
        serious=record.steps >= settings.min_draws,
        **_suggest(record, scale),
    )


def _check_mixing(
    record: Record, mixing: Mapping[str, Mixing], settings: DiagnosticSettings
) -> Iterator[DiagnosticWarning]:
    """R-hat; and effective sample sizes, which mean something only where the chains agree."""
    chains, draws = record.log_prob.shape
    if record.independent or draws < settings.min_draws or record.is_stuck.all():
        return
    longer = {"warmup": 4 * record.steps} if record.one_text else {"warmup": 4 * record.steps, "draws": 4 * draws}
    most = max(settings.max_rhat, 1 + settings.rhat_allowance / draws)
    large = {name: found.rhat for name, found in mixing.items() if found.rhat is not None and found.rhat > most}
    if large:
        values = record.quantities()
        gaps = _join([_describe_gap(record, name, values[name], rhat) for name, rhat in large.items()], "and")
        yield DiagnosticWarning(
            "r-hat",
            f"the chains differ in {gaps}",
            serious=not record.one_text or max(large.values()) > settings.serious_rhat_of_steps,
            **_suggest(record, longer),
        )
        return
    sizes = [(found.ess_bulk, name) for name, found in mixing.items() if found.ess_bulk is not None]
    size, worst = min(sizes, default=(math.inf, ""))
    wanted = settings.min_effective_samples
    if record.one_text and size < settings.min_effective_samples_per_text * chains:
        yield DiagnosticWarning(
            "low-ess",
            f"effective sample size of {_quantity(worst)} {size / chains:.1f} per chain in the last {draws} steps: the "
            "texts may depend on their start",
            **_suggest(record, longer),
        )
    elif not record.one_text and size < wanted:
        yield DiagnosticWarning(
            "low-ess",
            f"effective sample size of {_quantity(worst)} {size:.0f} in {record.log_prob.size:,} draws: the standard "
            f"error of its mean is {1 / math.sqrt(size):.0%} of its standard deviation",
            f"use draws={math.ceil(draws * wanted / size)} for an effective sample size of {wanted:.0f}",
        )


def _check_weights(record: Record) -> Iterator[DiagnosticWarning]:
    found = record.weights()
    if found is None:
        return
    from structured_voronoi.metrics.probability import MAX_PARETO_K

    choices, fresh = record.counts["log_weights"].shape[-2:]
    proposals = 1 + fresh * choices * record.steps
    remedy = "fit the lookahead on more texts, for example 8192, or use more `tries`, `choices` or steps"
    if found.effective_share * proposals < 1:
        yield DiagnosticWarning(
            "uneven-weights",
            f"{proposals} proposals per chain have an effective sample size of {found.effective_share * proposals:.2g}:"
            " the texts depend on their start",
            remedy,
            serious=True,
        )
    if not found.reliable and found.pareto_k is not None and found.pareto_k > MAX_PARETO_K:
        yield DiagnosticWarning(
            "heavy-weights",
            f"the weights of the proposals have a heavy tail (Pareto k {found.pareto_k:.2f} ± "
            f"{found.pareto_k_error:.2f}, largest weight {found.largest_share:.0%} of the sum): probable texts that "
            "the lookahead rarely proposes may be missing",
            remedy,
        )


def _check_proposals(record: Record, settings: DiagnosticSettings) -> Iterator[DiagnosticWarning]:
    """Proposals that were lost: impossible ones, divergences, unknown masses, rejected blocks."""
    is_guided = "log_weights" in record.counts  # its weights are checked instead
    impossible = record.share("nonfinite", "evaluations")
    if impossible is not None and impossible > settings.max_impossible_share and not (record.independent or is_guided):
        yield DiagnosticWarning(
            "impossible-proposals",
            f"{impossible:.0%} of proposals have probability 0 or log p = NaN",
            "use Guided() if controls reject them, and check `log_prob` for NaN otherwise",
        )
    if record.diverging_share > settings.max_diverging_share:
        smaller = "" if record.scale is None else f" or scale={record.scale / 2:.2g}"
        yield DiagnosticWarning(
            "diverging",
            f"{record.diverging_share:.0%} of trajectories exceeded the maximum number of events and were rejected",
            f"use a larger max_events{smaller}",
        )
    unreliable = record.counts.get("unreliable")
    if unreliable is not None and unreliable.mean() > settings.max_unreliable_share:
        yield DiagnosticWarning(
            "unreliable-masses",
            f"{unreliable.mean():.0%} of draws lie in cells whose mass was estimated from fewer than 50 counts",
            'use a larger mass_draws, or walls="open", which needs no masses',
        )
    accepted = record.share("refreshed", "redraws")
    if accepted is not None and accepted < settings.min_accepted_share and not (is_guided or record.is_stuck.all()):
        yield DiagnosticWarning(
            "low-acceptance",
            f"{accepted:.2%} of redrawn blocks were accepted",
            "use shorter blocks, Refresh(block=2), or a lookahead, Refresh(lookahead=…)",
        )


def _check_interruption(record: Record) -> Iterator[DiagnosticWarning]:
    if record.requested_draws is not None:
        draws = record.log_prob.shape[1]
        yield DiagnosticWarning(
            "interrupted",
            f"interrupted after {draws} of {record.requested_draws} draws",
            "run it again for all draws; with a checkpoint it resumes",
        )


def _suggest(record: Record, arguments: Mapping[str, float]) -> dict[str, Any]:
    """The remedy: other values of arguments, or another sampler. Of single texts, also as arguments of `generate`."""
    choices = [" and ".join(f"{name}={value}" for name, value in arguments.items())] if arguments else []
    if record.one_text:
        samplers = [name for name in ("svs+refresh", "adaptive") if name != record.sampler]
        choices += [f'sampler="{name}"' for name in samplers]
        return {"remedy": f"use {_join(choices, 'or')}", "arguments": {**arguments, "sampler": samplers[0]}}
    if "redraws" in record.counts:
        choices.append("Guided(), whose proposals follow the controls")
    else:
        choices += ["another step size"] * (record.scale is None) + ["Cycle(…, Refresh()) for autoregressive targets"]
    return {"remedy": f"use {_join(choices, 'or')}"}


def _describe_gap(record: Record, name: str, values: ndarray, rhat: float) -> str:
    means, numbers = values.mean(1), record.numbers
    low, high = int(means.argmin()), int(means.argmax())
    return (
        f"{_quantity(name)} (R-hat {format_rhat(rhat)}; means from {means[low]:.3g} in chain {numbers[low]} to "
        f"{means[high]:.3g} in chain {numbers[high]})"
    )


def format_rhat(rhat: float) -> str:
    return "above 100" if rhat > 100 else f"{rhat:.3g}"


def _quantity(name: str) -> str:
    return {LOG_PROB: "log p", DISTANCE: f"the {DISTANCE}"}.get(name, f"the control {name!r}")


def _name_chains(record: Record, chosen: ndarray) -> str:
    numbers = [number for number, is_chosen in zip(record.numbers, chosen, strict=True) if is_chosen]
    if len(numbers) == len(chosen) > 1:
        return f"all {len(numbers)} chains"
    shown = [str(number) for number in numbers[:6]]
    if len(numbers) > 6:
        shown.append(f"{len(numbers) - 6} others")
    return f"chain{plural(len(numbers))} {_join(shown, 'and')}"


def _join(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(count: int) -> str:
    return "" if count == 1 else "s"
