"""The diagnosis of a run: figures and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from structured_voronoi.core.info import REDRAW_LENGTHS
from structured_voronoi.diagnostics.checks import (
    DiagnosticSettings,
    DiagnosticWarning,
    check_record,
    format_rhat,
    plural,
)
from structured_voronoi.diagnostics.records import LOG_PROB, Mixing, Record, mixing_of


@dataclass(frozen=True)
class Diagnosis:
    """Figures and warnings about a run, as `diagnose` returns them.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.SVS(scale=0.5), draws=500, progress=False)
    >>> found = sv.diagnose(draws)
    >>> found.ok, [warning.code for warning in found.warnings]
    (True, [])
    >>> found.mixing["lp"].rhat < 1.1
    True
    """

    run: str
    """Sampler, chains and draws."""
    warnings: list[DiagnosticWarning] = field(default_factory=list)
    mixing: dict[str, Mixing] = field(default_factory=dict)
    """Mean, standard deviation, R-hat and effective sample sizes, by quantity: "lp" (log p), each control, the distance
    to the most probable draw. With several runs, the name of the run precedes that of the quantity."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further figures: numbers, arrays by chain, or dictionaries."""
    note: str = ""
    """Why mixing was not assessed, if it was not."""

    @property
    def ok(self) -> bool:
        """Whether no warning is serious."""
        return not any(warning.serious for warning in self.warnings)

    @property
    def status(self) -> str:
        """One line: the run, R-hat and effective sample size of log p, and the number of warnings."""
        parts, log_prob = [self.run], self.mixing.get(LOG_PROB)
        if log_prob is not None and log_prob.rhat is not None:
            parts.append(f"R-hat of log p {format_rhat(log_prob.rhat)}")
        if log_prob is not None and log_prob.ess_bulk is not None and log_prob.ess_tail is not None:
            parts.append(f"effective sample size {log_prob.ess_bulk:,.0f} (tails {log_prob.ess_tail:,.0f})")
        count, serious = len(self.warnings), sum(warning.serious for warning in self.warnings)
        warnings = f"{count or 'no'} warning{plural(count)}" + (f" ({serious} serious)" if serious else "")
        return "; ".join(filter(None, [*parts, self.note, warnings]))

    def summary(self) -> str:
        """The status and the warnings, one per line."""
        return "\n".join([self.status, *(f"warning ({warning.code}): {warning}" for warning in self.warnings)])

    def __str__(self) -> str:
        return self.summary()

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each further figure, for a table."""
        return [(name, _format(value)) for name, value in self.figures.items()]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, except that numbers may be NaN or infinite."""
        return {
            "run": self.run,
            "ok": self.ok,
            "note": self.note,
            "warnings": [asdict(warning) for warning in self.warnings],
            "mixing": {name: mixing._asdict() for name, mixing in self.mixing.items()},
            "figures": {
                name: value.tolist() if isinstance(value, ndarray) else value for name, value in self.figures.items()
            },
        }


def _format(value: Any) -> str:
    if isinstance(value, ndarray):
        return f"{value.mean():.3g} (by chain {value.min():.3g} – {value.max():.3g})"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part:.2g}" for key, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def diagnose_record(record: Record, settings: DiagnosticSettings | None = None) -> Diagnosis:
    """The diagnosis of one run."""
    settings = settings or DiagnosticSettings()
    chains, draws = record.log_prob.shape
    mixing = {name: mixing_of(values) for name, values in record.quantities().items()}
    size = f"{chains} text{plural(chains)}"
    if not record.one_text:
        size = f"{chains} chain{plural(chains)} of {draws} draw{plural(draws)}"
    return Diagnosis(
        run=f"{record.sampler}, {size}",
        warnings=check_record(record, mixing, settings),
        mixing=mixing,
        figures=_figures(record),
        note=_note(record, settings),
    )


def diagnose_records(records: Mapping[str, Record], settings: DiagnosticSettings | None = None) -> Diagnosis:
    """The diagnosis of one run, or of several by name."""
    found = {name: diagnose_record(record, settings) for name, record in records.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    return Diagnosis(
        run=f"{len(found)} runs",
        warnings=[
            replace(warning, message=f"{name}: {warning.message}")
            for name, one in found.items()
            for warning in one.warnings
        ],
        mixing={f"{name}: {what}": mixing for name, one in found.items() for what, mixing in one.mixing.items()},
        figures={f"{name}: {figure}": value for name, one in found.items() for figure, value in one.figures.items()},
        note="; ".join(f"{name}: {one.note}" for name, one in found.items() if one.note),
    )


def _note(record: Record, settings: DiagnosticSettings) -> str:
    """Why mixing is not assessed."""
    chains, draws = record.log_prob.shape
    if record.independent:
        return "independent draws"
    if draws == 1 and not record.counts:
        return "one draw per chain: mixing not assessed"
    if draws < settings.min_draws:
        unit = "step" if record.one_text else "draw"
        return f"only {draws} {unit}{plural(draws)} per chain: mixing not assessed"
    if chains == 1:
        return "R-hat needs at least two chains, better four"
    return ""


def _figures(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = dict(record.figures)
    tokens, draws = record.tokens, record.log_prob.shape[1]
    if tokens is not None:
        found["states visited"] = np.array([len(np.unique(chain, axis=0)) for chain in tokens])
        if draws > 1:
            changed = (tokens[:, 1:] != tokens[:, :-1]).any((0, 1))
            found["positions that changed"] = f"{int(changed.sum())} of {len(changed)}"
    swaps = record.total("swaps")
    if swaps is not None and not record.independent:
        found["positions changed per step"] = swaps / record.steps
    for name, part, whole in (
        ("redrawn blocks accepted", "refreshed", "redraws"),
        ("impossible proposals", "nonfinite", "evaluations"),
    ):
        share = record.share(part, whole)
        if share is not None:
            found[name] = share
    if {"redraws_by_length", "refreshed_by_length"} <= record.counts.keys():
        redrawn, accepted = (record.counts[name].sum((0, 1)) for name in ("redraws_by_length", "refreshed_by_length"))
        found["redrawn blocks accepted, by length"] = {
            name: float(part / whole)
            for name, whole, part in zip(_redraw_lengths(), redrawn, accepted, strict=True)
            if whole
        }
    if "diverging" in record.counts:
        found["diverging trajectories"] = record.diverging_share
    weights = record.weights()
    if weights is not None:
        found |= {"effective share of weights": weights.effective_share, "largest weight": weights.largest_share}
        if weights.pareto_k is not None:
            found |= {"Pareto k of weights": weights.pareto_k, "standard error of Pareto k": weights.pareto_k_error}
    return found


def _redraw_lengths() -> list[str]:
    """The ranges of lengths by which redrawn blocks are counted."""
    ends = [*(longer - 1 for longer in REDRAW_LENGTHS[1:]), None]
    return [
        f"{least}+" if end is None else str(least) if end == least else f"{least}–{end}"
        for least, end in zip(REDRAW_LENGTHS, ends, strict=True)
    ]
