"""Plots of a run: log p, ranks, changes by position, weights. Readable in greyscale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from structured_voronoi.diagnostics.checks import DiagnosticSettings
from structured_voronoi.diagnostics.records import LOG_PROB, Record, mixing_of
from structured_voronoi.metrics.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK, LIGHT = "#0b3c5d", "#b8c4cc"
MAX_BINS = 20


def make_plots(record: Record) -> dict[str, Figure]:
    """The plots for which the run has data, by name."""
    chains, draws = record.log_prob.shape
    plots = {"log_p": _plot_traces(record) if draws > 1 else _plot_histogram(record)}
    if draws >= DiagnosticSettings().min_draws and chains > 1:
        plots["ranks"] = _plot_ranks(record)
    if record.tokens is not None and draws > 1:
        plots["swaps"] = _plot_swaps(record.tokens)
    log_weights = record.counts.get("log_weights")
    if log_weights is not None and np.isfinite(log_weights).any():
        plots["weights"] = _plot_weights(record)
    return plots


def _plot_traces(record: Record) -> Figure:
    """log p of every chain by draw. The chains that differ most from the others are in front."""
    styles = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
    colours = ("#0b3c5d", "#c8553d", "#0b6e4f", "#e0a030", "#7a4f8a", "#000000")
    log_prob, numbers = np.where(np.isfinite(record.log_prob), record.log_prob, np.nan), record.numbers
    figure, axis = new_figure(8, 3.6)
    means = np.array([np.nanmean(chain) if np.isfinite(chain).any() else -math.inf for chain in log_prob])
    order = np.argsort(-np.abs(means - np.median(means)), kind="stable")
    for chain in order[len(styles) :]:
        axis.plot(log_prob[chain], color=LIGHT, linewidth=0.6)
    for chain, style, colour in zip(sorted(order[: len(styles)].tolist()), styles, colours, strict=False):
        axis.plot(log_prob[chain], linestyle=style, color=colour, linewidth=1.0, label=f"chain {numbers[chain]}")
    unit = "step in the second half of the run" if record.one_text else "draw"
    axis.set(xlabel=unit, ylabel="log p (nats)", xlim=(0, log_prob.shape[1] - 1))
    axis.set_title(f"{record.sampler}: log p of {len(log_prob)} chains", fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _plot_histogram(record: Record) -> Figure:
    """log p of one draw per chain."""
    log_prob = record.log_prob[np.isfinite(record.log_prob)]
    figure, axis = new_figure(6, 3.6)
    axis.hist(log_prob, bins=min(MAX_BINS, max(4, len(log_prob) // 4)), color=DARK, edgecolor="white")
    axis.set(xlabel="log p (nats)", ylabel="texts")
    axis.set_title(f"{record.sampler}: log p of {len(log_prob)} draws, one per chain", fontsize=11, loc="left")
    return figure


def _plot_ranks(record: Record) -> Figure:
    """Histogram of the ranks of each chain's log p among all draws, a row per chain. Uniform rows agree."""
    log_prob, numbers = record.log_prob, record.numbers
    chains, draws = log_prob.shape
    bins = max(4, min(MAX_BINS, draws // 5))
    tie_breaks = np.random.default_rng(0).permutation(log_prob.size)
    ranks = np.lexsort((tie_breaks, log_prob.ravel())).argsort().reshape(log_prob.shape)
    counts = np.stack([np.histogram(chain, bins, (0, log_prob.size))[0] for chain in ranks]) * bins / draws
    figure, axis = new_figure(7, 1.8 + min(4.5, 0.25 * chains))
    image = axis.imshow(
        counts, cmap="Blues", aspect="auto", vmin=0, vmax=max(2.0, counts.max()), extent=(0, 1, chains, 0)
    )
    every = math.ceil(chains / 16)
    axis.set_yticks(np.arange(0, chains, every) + 0.5, [str(number) for number in numbers[::every]])
    axis.set(xlabel="rank of log p among all draws (0 lowest, 1 highest)", ylabel="chain")
    rhat = mixing_of(record.quantities()[LOG_PROB]).rhat
    suffix = "" if rhat is None else f", R-hat {rhat:.3g}"
    axis.set_title(f"{record.sampler}: ranks{suffix} (uniform if chains agree)", fontsize=11, loc="left")
    figure.colorbar(image, ax=axis, label="draws / expected draws")
    return figure


def _plot_swaps(tokens: np.ndarray) -> Figure:
    """Share of draws in which each position has another token than in the draw before: mean and range over chains."""
    shares = (tokens[:, 1:] != tokens[:, :-1]).mean(1)
    edges = np.arange(shares.shape[1] + 1) - 0.5
    figure, axis = new_figure(8, 3.4)
    axis.stairs(shares.max(0), edges, baseline=shares.min(0), fill=True, color=LIGHT, label="range of chains")
    axis.stairs(shares.mean(0), edges, baseline=None, color=DARK, linewidth=1.6, label="mean of chains")
    axis.set(xlabel="position", ylabel="share of draws\nwith a new token", ylim=(0, 1.02), xlim=(edges[0], edges[-1]))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title("Changes by position", fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _plot_weights(record: Record) -> Figure:
    """Histogram of the weights of the texts that `Guided` proposed, relative to their mean."""
    log_weights, summary = record.counts["log_weights"].ravel(), record.weights()
    assert summary is not None
    finite = log_weights[np.isfinite(log_weights)]
    relative = (finite - np.logaddexp.reduce(finite) + math.log(len(log_weights))) / math.log(10)
    figure, axis = new_figure(6, 3.6)
    axis.hist(relative, bins=MAX_BINS, color=DARK, edgecolor="white")
    axis.axvline(0, color="#c8553d", linestyle="--", linewidth=1.2)
    axis.annotate(" mean", (0, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axis.set(xlabel="log10(weight / mean weight)", ylabel="proposed texts", yscale="log")
    impossible = len(log_weights) - len(finite)
    facts = [
        f"effective share {summary.effective_share:.2g}",
        f"largest weight {summary.largest_share:.1%} of the sum",
        f"{impossible:,} of {len(log_weights):,} have weight 0",
    ]
    if summary.pareto_k is not None:
        facts.insert(1, f"Pareto k {summary.pareto_k:.2f} ± {summary.pareto_k_error:.2f}")
    axis.set_title("Weights of proposed texts", fontsize=11, loc="left", pad=20)
    axis.annotate(", ".join(facts), (0, 1.03), xycoords="axes fraction", fontsize=8)
    return figure
