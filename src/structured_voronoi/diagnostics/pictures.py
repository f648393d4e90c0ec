"""Pictures of a run: energies, ranks, how often each position changes, weights. All can be read in grey."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from structured_voronoi.diagnostics.diagnosis import Diagnosis, diagnose_record
from structured_voronoi.diagnostics.findings import LEAST_DRAWS
from structured_voronoi.diagnostics.records import Record
from structured_voronoi.metrics.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK, LIGHT = "#0b3c5d", "#b8c4cc"
CHAINS_DRAWN = 6
"""Chains whose lines can be told apart; the others are drawn behind them."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
COLOURS = ("#0b3c5d", "#c8553d", "#0b6e4f", "#e0a030", "#7a4f8a", "#000000")
BINS = 20


def draw_pictures(record: Record) -> dict[str, Figure]:
    """The pictures that the run has something to show in, by name."""
    diagnosis = diagnose_record(record)
    chains, draws = record.energy.shape
    pictures = {"energy": _energy_trace(record) if draws > 1 else _energy_histogram(record)}
    if draws >= LEAST_DRAWS and chains > 1:
        pictures["ranks"] = _ranks(record, diagnosis)
    if record.tokens is not None and draws > 1:
        pictures["swaps"] = _swaps(record.tokens)
    log_weights = record.counts.get("log_weights")
    if log_weights is not None and np.isfinite(log_weights).any():
        pictures["weights"] = _weights(log_weights.ravel(), diagnosis)
    return pictures


def _energy_trace(record: Record) -> Figure:
    """The energy of every chain, draw by draw; those that differ most from the others in front."""
    energy, numbers = np.where(np.isfinite(record.energy), record.energy, np.nan), record.numbers
    figure, axis = new_figure(8, 3.6)
    means = np.array([np.nanmean(chain) if np.isfinite(chain).any() else math.inf for chain in energy])
    order = np.argsort(-np.abs(means - np.median(means)), kind="stable")
    for chain in order[CHAINS_DRAWN:]:
        axis.plot(energy[chain], color=LIGHT, linewidth=0.6)
    for chain, style, colour in zip(sorted(order[:CHAINS_DRAWN].tolist()), STYLES, COLOURS, strict=False):
        axis.plot(energy[chain], linestyle=style, color=colour, linewidth=1.0, label=f"chain {numbers[chain]}")
    unit = "step, in the later half" if record.one_text else "draw"
    axis.set(xlabel=unit, ylabel="energy U = −log p (nats)", xlim=(0, energy.shape[1] - 1))
    axis.set_title(f"{record.sampler}: energy of {len(energy)} chains", fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _energy_histogram(record: Record) -> Figure:
    """The energies of single draws."""
    energy = record.energy[np.isfinite(record.energy)]
    figure, axis = new_figure(6, 3.6)
    axis.hist(energy, bins=min(BINS, max(4, len(energy) // 4)), color=DARK, edgecolor="white")
    axis.set(xlabel="energy U = −log p (nats)", ylabel="texts")
    axis.set_title(f"{record.sampler}: energy of {len(energy)} draws, one a chain", fontsize=11, loc="left")
    return figure


def _ranks(record: Record, diagnosis: Diagnosis) -> Figure:
    """Where the energies of each chain stand among all: even rows are what chains that agree look like."""
    energy, numbers = record.energy, record.numbers
    chains, draws = energy.shape
    bins = max(4, min(BINS, draws // 5))
    by_chance = np.random.default_rng(0).permutation(energy.size)  # equal energies stand in any order
    ranks = np.lexsort((by_chance, energy.ravel())).argsort().reshape(energy.shape)
    counts = np.stack([np.histogram(chain, bins, (0, energy.size))[0] for chain in ranks]) * bins / draws
    figure, axis = new_figure(7, 1.8 + min(4.5, 0.25 * chains))
    shown = axis.imshow(
        counts, cmap="Blues", aspect="auto", vmin=0, vmax=max(2.0, counts.max()), extent=(0, 1, chains, 0)
    )
    every = math.ceil(chains / 16)
    axis.set_yticks(np.arange(0, chains, every) + 0.5, [str(number) for number in numbers[::every]])
    axis.set(xlabel="rank of the energy among all draws (0 lowest, 1 highest)", ylabel="chain")
    rhat = diagnosis.mixing["energy"].rhat
    said = "" if rhat is None else f", R-hat {rhat:.3g}"
    axis.set_title(f"{record.sampler}: ranks{said}; even rows are chains that agree", fontsize=11, loc="left")
    figure.colorbar(shown, ax=axis, label="draws, 1 = as many as expected")
    return figure


def _swaps(tokens: np.ndarray) -> Figure:
    """How often the token of each position changes from one draw to the next: the mean over chains, and their range."""
    shares = (tokens[:, 1:] != tokens[:, :-1]).mean(1)
    edges = np.arange(shares.shape[1] + 1) - 0.5
    figure, axis = new_figure(8, 3.4)
    axis.stairs(shares.max(0), edges, baseline=shares.min(0), fill=True, color=LIGHT, label="least to most")
    axis.stairs(shares.mean(0), edges, baseline=None, color=DARK, linewidth=1.6, label="mean over chains")
    axis.set(xlabel="position", ylabel="share of draws\nwith another token", ylim=(0, 1.02), xlim=(edges[0], edges[-1]))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title("How often each position changes", fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _weights(log_weights: np.ndarray, diagnosis: Diagnosis) -> Figure:
    """The weights of the texts that guided steps proposed, relative to their mean."""
    finite = log_weights[np.isfinite(log_weights)]
    relative = (finite - np.logaddexp.reduce(finite) + math.log(len(log_weights))) / math.log(10)
    figure, axis = new_figure(6, 3.6)
    axis.hist(relative, bins=BINS, color=DARK, edgecolor="white")
    axis.axvline(0, color="#c8553d", linestyle="--", linewidth=1.2)
    axis.annotate(" mean", (0, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axis.set(xlabel="weight p W / q over its mean, as a power of ten", ylabel="proposed texts", yscale="log")
    lost = len(log_weights) - len(finite)
    figures = diagnosis.figures
    said = [
        f"effective share {figures['effective share of weights']:.2g}",
        f"Pareto k̂ {figures['Pareto k̂ of weights']:.2f}",
        f"largest {figures['largest weight of all']:.1%} of all",
        f"{lost:,} of {len(log_weights):,} impossible",
    ]
    axis.set_title("Weights of guided proposals", fontsize=11, loc="left", pad=20)
    axis.annotate(", ".join(said), (0, 1.03), xycoords="axes fraction", fontsize=8)
    return figure
