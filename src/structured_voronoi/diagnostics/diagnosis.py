"""Can a run be trusted? The verdict: figures, and warnings in words with their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from structured_voronoi.core.contracts import REDRAW_LENGTHS
from structured_voronoi.diagnostics.findings import LEAST_DRAWS, Finding, find_all, plural, written_rhat
from structured_voronoi.diagnostics.records import Mixing, Record, mixing_of


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
            said.append(f"R-hat of the energy {written_rhat(energy.rhat)}")
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
    what = (
        f"{chains} text{plural(chains)}"
        if record.one_text
        else f"{chains} chain{plural(chains)} of {draws} draw{plural(draws)}"
    )
    return Diagnosis(f"{record.sampler}, {what}", mixing, _figures(record), find_all(record, mixing), _untold(record))


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


def _untold(record: Record) -> str:
    chains, draws = record.energy.shape
    if record.independent:
        return "drawn independently, so that nothing has to mix"
    if draws == 1 and not record.counts:
        return "one draw a chain, which cannot say whether the chains mixed; the run itself says so when it ends"
    if draws < LEAST_DRAWS:
        unit = "step" if record.one_text else "draw"
        return f"{draws} {unit}{plural(draws)} a chain, too few to say whether the chains mixed"
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
        share = record.share(part, whole)
        if share is not None:
            found[name] = share
    if {"redraws_by_length", "refreshed_by_length"} <= record.counts.keys():
        asked, taken = (record.counts[name].sum((0, 1)) for name in ("redraws_by_length", "refreshed_by_length"))
        found["redraws accepted, by tokens"] = {
            name: float(took / count) for name, count, took in zip(_lengths(), asked, taken, strict=True) if count
        }
    if "diverging" in record.counts:
        found["trajectories abandoned"] = record.abandoned
    weights = record.summary_of_weights()
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
