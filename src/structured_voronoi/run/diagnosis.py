"""Can a run be trusted? What its chains say of themselves: figures, and warnings in words with their remedies.

R-hat compares the chains with one another and ESS says how many independent draws theirs are worth (Vehtari et al.
2021). Both are taken of the energy, of every control, and of the number of positions at which a draw differs from the
likeliest one, which tells modes of the same energy apart. A chain that gave a single text is judged by the energies of
its steps: all it must do is to forget its start, which takes fewer of them than a mean does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from structured_voronoi.contracts import REDRAW_LENGTHS, is_independent

if TYPE_CHECKING:
    from xarray import DataTree

    from structured_voronoi.run.presets import Plan
    from structured_voronoi.run.texts import Batch

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
MOST_VALUES = 500_000
"""R-hat and ESS of more draws than this are taken of some of the chains, spread evenly: sorting takes long."""

DISTANCE = "positions unlike the likeliest draw"


@dataclass(frozen=True)
class Record:
    """What a run left to be judged by, chain by chain."""

    sampler: str
    energy: Float[ndarray, "chain draw"]
    """Of every draw; where each chain gave one text, of its later steps."""
    one_text: bool = False
    """Each chain gave one text, and ``energy`` is that of the steps on its way there."""
    chains: Sequence[int] = ()
    """Their numbers; 0, 1, … if not given."""
    scores: Mapping[str, Float[ndarray, "chain draw"]] = field(default_factory=dict)
    """What the controls say of every draw."""
    tokens: Int[ndarray, "chain draw n"] | None = None
    counts: Mapping[str, ndarray] = field(default_factory=dict)
    """Fields of Info, (chain, draw, …); where each chain gave one text, those of all its steps as one draw."""
    steps: int = 1
    """Steps of each chain that the counts are about."""
    independent: bool = False
    """Every draw is one of its own, so that nothing has to mix."""
    scale: float | None = None
    """Of SVS, if it took part."""
    asked: int | None = None
    """Draws that were asked for, if the run was interrupted."""
    texts: Sequence[tuple[str, str]] = ()
    """The prompt and the text of every chain that gave one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further figures."""

    @property
    def numbers(self) -> Sequence[int]:
        return self.chains or range(len(self.energy))

    def total(self, name: str) -> ndarray | None:
        """A count summed over the draws, by chain; None if the run has none."""
        return self.counts[name].sum(1) if name in self.counts else None

    def quantities(self) -> dict[str, Float[ndarray, "chain draw"]]:
        """What chains are compared by."""
        found = {"energy": self.energy, **self.scores}
        if self.tokens is not None and np.isfinite(self.energy).any():
            best = np.unravel_index(np.nanargmin(self.energy), self.energy.shape)
            found[DISTANCE] = (self.tokens != self.tokens[best]).sum(-1).astype(float)
        return found


class Mixing(NamedTuple):
    """How a quantity mixed; None where that cannot be told."""

    mean: float
    sd: float
    rhat: float | None
    ess_bulk: float | None
    ess_tail: float | None


class Finding(NamedTuple):
    """A warning: what was seen, and what may help."""

    words: str
    serious: bool
    """Should the run not be trusted?"""


@dataclass(frozen=True)
class Diagnosis:
    """What is to be said of a run."""

    about: str
    """Its sampler, chains and draws."""
    mixing: dict[str, Mixing]
    """By quantity: the energy, every control, the distance to the likeliest draw; of several runs, by theirs."""
    figures: dict[str, Any]
    """Numbers, numbers by chain (arrays), and numbers by length (dictionaries)."""
    findings: list[Finding]
    untold: str = ""
    """Why nothing is said about mixing, if so."""

    @property
    def trusted(self) -> bool:
        return not any(finding.serious for finding in self.findings)

    @property
    def warnings(self) -> list[str]:
        return [finding.words for finding in self.findings]

    @property
    def verdict(self) -> str:
        if not self.trusted:
            return "not to be trusted"
        return self.untold or "nothing speaks against it"

    def __str__(self) -> str:
        """All in words: the run, how its energy mixed, the verdict, the warnings."""
        said, energy = [self.about], self.mixing.get("energy")
        if energy is not None and energy.rhat is not None:
            said.append(f"R-hat of the energy {_written_rhat(energy.rhat)}")
        if energy is not None and energy.ess_bulk is not None and energy.ess_tail is not None:
            said.append(f"{energy.ess_bulk:,.0f} effective samples of it ({energy.ess_tail:,.0f} in the tails)")
        return " ".join([f"{'; '.join(said)}: {self.verdict}.", *(f"Warning: {words}." for words in self.warnings)])

    def rows(self) -> list[tuple[str, str]]:
        """The further figures, as a table shows them."""
        return [(name, _written(value)) for name, value in self.figures.items()]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, but for numbers that are not finite."""
        return {
            "about": self.about,
            "trusted": self.trusted,
            "verdict": self.verdict,
            "warnings": [finding._asdict() for finding in self.findings],
            "mixing": {name: mixing._asdict() for name, mixing in self.mixing.items()},
            "figures": {name: _plain(value) for name, value in self.figures.items()},
        }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, ndarray) else value


def _written(value: Any) -> str:
    if isinstance(value, ndarray):
        return f"{value.mean():.3g} (by chain {value.min():.3g} – {value.max():.3g})"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part:.2g}" for key, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def diagnose_record(record: Record) -> Diagnosis:
    """Everything that can be said of a run."""
    chains, draws = record.energy.shape
    mixing = {name: mixing_of(values) for name, values in record.quantities().items()}
    what = f"{chains} text{_s(chains)}" if record.one_text else f"{chains} chain{_s(chains)} of {draws} draw{_s(draws)}"
    findings = [
        *_impossible_draws(record),
        *_copies(record),
        *_stuck_chains(record),
        *([] if record.independent else _disagreement(record, mixing)),
        *_weights(record),
        *_lost_steps(record),
        *_interruption(record),
    ]
    return Diagnosis(f"{record.sampler}, {what}", mixing, _figures(record), findings, _untold(record))


def diagnose_records(records: Mapping[str, Record]) -> Diagnosis:
    """Everything that can be said of one run, or of several with a name each."""
    found = {name: diagnose_record(record) for name, record in records.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    return Diagnosis(
        about=f"{len(found)} runs",
        mixing={f"{name}: {what}": mixing for name, one in found.items() for what, mixing in one.mixing.items()},
        figures={f"{name}: {what}": figure for name, one in found.items() for what, figure in one.figures.items()},
        findings=[
            Finding(f"{name}: {finding.words}", finding.serious)
            for name, one in found.items()
            for finding in one.findings
        ],
        untold="; ".join(f"{name}: {one.untold}" for name, one in found.items() if one.untold),
    )


def mixing_of(values: Float[ndarray, "chain draw"]) -> Mixing:
    """R-hat and ESS of one quantity; R-hat needs two chains, both need four draws that are not all the same."""
    finite = values[np.isfinite(values)]
    mean, sd = (float(finite.mean()), float(finite.std())) if len(finite) else (math.nan, math.nan)
    if values.shape[1] < 4 or len(finite) < values.size or np.ptp(values) == 0:
        return Mixing(mean, sd, None, None, None)
    from arviz_stats.base import array_stats

    some = values[:: math.ceil(values.size / MOST_VALUES)]
    with np.errstate(all="ignore"):  # chains that do not move have no variance to compare with
        rhat = float(array_stats.rhat(some)) if len(some) > 1 else None
        bulk, tail = (
            float(array_stats.ess(some, method=method, prob=prob)) * len(values) / len(some)
            for method, prob in (("bulk", None), ("tail", (0.05, 0.95)))
        )
    if rhat is not None and math.isnan(rhat):
        rhat = math.inf
    return Mixing(mean, sd, rhat, bulk, tail)


def _untold(record: Record) -> str:
    chains, draws = record.energy.shape
    if record.independent:
        return "drawn independently, so that nothing has to mix"
    if draws == 1 and not record.counts:
        return "one draw a chain, which cannot say whether the chains mixed; the run itself says so when it ends"
    if draws < LEAST_DRAWS:
        unit = "step" if record.one_text else "draw"
        return f"{draws} {unit}{_s(draws)} a chain, too few to say whether the chains mixed"
    if chains == 1:
        return "one chain, which cannot be compared with others; run four or more"
    return ""


def _figures(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = dict(record.extra)
    tokens, draws = record.tokens, record.energy.shape[1]
    if tokens is not None:
        found["states visited"] = np.array([len(np.unique(chain, axis=0)) for chain in tokens])
        if draws > 1:
            changed = (tokens[:, 1:] != tokens[:, :-1]).any((0, 1))
            found["positions that changed"] = f"{int(changed.sum())} of {len(changed)}"
    swaps = record.total("swaps")
    if swaps is not None and not record.independent:
        found["positions changed a step"] = swaps / record.steps
    for name, part, whole in (
        ("redraws accepted", "refreshed", "redraws"),
        ("proposals without a finite energy", "nonfinite", "evaluations"),
    ):
        share = _share(record, part, whole)
        if share is not None:
            found[name] = share
    if {"redraws_by_length", "refreshed_by_length"} <= record.counts.keys():
        asked, taken = (record.counts[name].sum((0, 1)) for name in ("redraws_by_length", "refreshed_by_length"))
        found["redraws accepted, by tokens"] = {
            name: float(took / count) for name, count, took in zip(_lengths(), asked, taken, strict=True) if count
        }
    if "diverging" in record.counts:
        found["trajectories abandoned"] = _abandoned(record)
    weights = _summary_of_weights(record)
    if weights is not None:
        found["effective share of weights"] = weights.effective_share
        found["Pareto k̂ of weights"] = weights.pareto_k
        found["largest weight of all"] = weights.largest_share
    return found


def _lengths() -> list[str]:
    """The lengths by which redraws are counted, in words."""
    ends = [*(longer - 1 for longer in REDRAW_LENGTHS[1:]), None]
    return [
        f"{least}+" if end is None else str(least) if end == least else f"{least}–{end}"
        for least, end in zip(REDRAW_LENGTHS, ends, strict=True)
    ]


def _share(record: Record, part: str, whole: str) -> float | None:
    some, every = record.total(part), record.total(whole)
    return None if some is None or every is None or not every.sum() else float(some.sum() / every.sum())


def _abandoned(record: Record) -> float:
    """The least share of trajectories that were abandoned: of the steps of a draw it is known whether any was."""
    diverging = record.counts.get("diverging")
    return 0.0 if diverging is None else float(diverging.sum(1).mean() / record.steps)


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
    stuck = _is_stuck(record)
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


def _is_stuck(record: Record) -> ndarray:
    """Which chains never changed a token; none where that is not known."""
    stuck = np.ones(len(record.energy), dtype=bool)
    swaps = record.total("swaps")
    if swaps is None and (record.tokens is None or record.tokens.shape[1] < 2):
        return ~stuck
    if swaps is not None:
        stuck &= swaps == 0
    if record.tokens is not None:
        stuck &= (record.tokens == record.tokens[:, :1]).all((1, 2))
    return stuck


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
        return [f"--sampler {name}" for name in ("svs+refresh", "guided") if name != record.sampler]
    if "redraws" in record.counts:
        return ["Guided(), which proposes what the controls ask for"]
    return ["another step size"] * (record.scale is None) + ["Cycle(…, Refresh()) where tokens can be redrawn"]


def _disagreement(record: Record, mixing: Mapping[str, Mixing]) -> Iterator[Finding]:
    """Chains that stay in places of their own; or that agree, but hardly move."""
    draws = record.energy.shape[1]
    if draws < LEAST_DRAWS or _is_stuck(record).all():
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
        f"{_quantity(name)} (R-hat {_written_rhat(mixing.rhat)}; means from {means[low]:.3g} in chain "
        f"{numbers[low]} to {means[high]:.3g} in chain {numbers[high]})"
    )


def _written_rhat(rhat: float | None) -> str:
    return "unknown" if rhat is None else "above 100" if rhat > 100 else f"{rhat:.3g}"


def _quantity(name: str) -> str:
    if name == "energy":
        return "the energy"
    return "the " + name if name == DISTANCE else f"the control {name!r}"


def _summary_of_weights(record: Record) -> Any:
    """The weights of the fresh texts of guided steps; None where there are none."""
    if "log_weights" not in record.counts:
        return None
    from structured_voronoi.run.probability import summarise_weights

    log_weight = record.counts["log_weights"].astype(float).ravel()
    return summarise_weights(log_weight - np.max(log_weight, initial=0.0, where=np.isfinite(log_weight)))


def _weights(record: Record) -> Iterator[Finding]:
    found = _summary_of_weights(record)
    if found is None:
        return
    fresh = record.counts["log_weights"].shape[-1]
    leftover = (1 + found.effective_share * fresh) ** -(record.steps + 1)  # the start is chosen by weight, too
    remedy = "fit the lookahead on more texts, Lookahead.fit(target, texts=8192), or take more `tries` or steps"
    said = f"the effective share of guided weights is {found.effective_share:.2g}"
    if leftover > MOST_LEFTOVER:
        yield Finding(
            f"{said}: after {record.steps} step{_s(record.steps)} about {leftover:.0%} of chains still depend on their "
            f"start; {remedy}",
            serious=True,
        )
    if MOST_PARETO < found.pareto_k < math.inf:
        yield Finding(
            f"the tail of guided weights is heavy (Pareto k̂ {found.pareto_k:.2f}, the largest is "
            f"{found.largest_share:.0%} of all), so that texts which the lookahead misses may be missing; {remedy}",
            serious=found.pareto_k > 1,
        )


def _lost_steps(record: Record) -> Iterator[Finding]:
    """Steps that came to nothing, for whatever reason."""
    impossible = _share(record, "nonfinite", "evaluations")
    if impossible is not None and impossible > MOST_IMPOSSIBLE and not record.independent:
        yield Finding(
            f"{impossible:.0%} of proposals had no finite energy and were refused: if no control forbids them, look "
            "for NaN in `log_prob`; if one does, Guided() proposes what it allows",
            serious=False,
        )
    abandoned = _abandoned(record)
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
    accepted = _share(record, "refreshed", "redraws")
    if accepted is not None and accepted < LEAST_ACCEPTED and not _is_stuck(record).all():
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
    return f"chain{_s(len(numbers))} {_listed(shown, 'and')}"


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def record_of_draws(draws: DataTree) -> Record:
    """What `sample` returned, or what was read back from a file."""
    stats, attributes = draws["sample_stats"].to_dataset(), draws.attrs
    counts = {
        str(name): column.values
        for name, column in stats.data_vars.items()
        if name not in ("energy", "log_factors")
        and column.dims[:2] == ("chain", "draw")
        and column.dtype.kind in "biuf"
    }
    scores = {}
    if "log_factors" in stats:
        factors = stats["log_factors"]
        scores = {str(name): factors.sel(factor=name).values for name in factors["factor"].values}
    energy = stats["energy"].values.astype(float)
    settings = json.loads(attributes.get("sampler_settings", "{}"))
    parts = [part["sampler"] for part in settings.get("samplers", ())]
    return Record(
        sampler=name_sampler(str(attributes.get("sampler", "a sampler")), parts),
        energy=energy,
        scores=scores,
        tokens=draws["posterior"].to_dataset()["tokens"].values,
        counts=counts,
        steps=energy.shape[1] * max(1, int(attributes.get("thin", 1))),
        independent=bool(attributes.get("independent", False)),
        scale=find_scale(settings),
        asked=int(attributes["draws"]) if attributes.get("interrupted") else None,
    )


def name_sampler(name: str, parts: Sequence[str]) -> str:
    """A sampler's name, with those of the samplers that it is made of."""
    return f"{name}({', '.join(parts)})" if parts else name


def find_scale(settings: Mapping[str, Any]) -> float | None:
    """The scale of SVS among the settings of a sampler and of those it is made of."""
    scale = settings.get("scale")
    if isinstance(scale, float | int):
        return float(scale)
    scales = [find_scale(part) for part in settings.get("samplers", ()) if isinstance(part, dict)]
    return next((scale for scale in scales if scale is not None), None)


def record_of_texts(batches: list[Batch], plan: Plan) -> Record:
    """Texts of chains that gave one each."""
    from structured_voronoi.run.sampling import describe_settings
    from structured_voronoi.run.texts import later_energies

    infos = [batch.info._asdict() for batch in batches]
    counts = {
        name: np.concatenate([info[name].cpu().numpy() for info in infos])[:, None]
        for name, part in infos[0].items()
        if part is not None and name != "energy"
    }
    return Record(
        sampler=plan.name,
        energy=later_energies(batches),
        one_text=True,
        chains=[text.chain for batch in batches for text in batch.texts],
        counts=counts,
        steps=plan.steps,
        independent=is_independent(plan.sampler),
        scale=find_scale(describe_settings(plan.sampler)),
    )
