"""Tables and pictures of controlled generation, from the numbers of every cell; the paper's stand beside ours."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.experiments.control_runs import ENERGY_WEIGHT, GRID_SECONDS, GRID_TEXTS, settings
from structured_voronoi.experiments.report import COLOURS, new_figure, table
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.metrics.text import bootstrap_mean, wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
AXES = ("success", "-ppl mean", "-ppl sd", "dist-1", "dist-2", "dist-3")


def sections(results: dict[str, Any], name: str) -> list[str]:
    """The parts of a report that all tasks have."""
    rows, published = results["rows"], PUBLISHED[name]
    return [
        average_table(rows, published),
        f"![success against perplexity]({name}.png)",
        "## By target",
        target_table(rows, published.get("target", {})),
        f"![six axes]({name}_axes.png)",
        "## Classifiers",
        classifier_table(results["classifiers"], published.get("classifiers", {})),
        "## Grid search",
        f"{GRID_TEXTS} texts a target, {GRID_SECONDS:g} seconds of one core a batch; the score is the share that the "
        "guide believes minus log10(perplexity / that of ancestral texts).",
        grid_table(results["grid"]),
        "## Samples",
        sample_table(rows),
    ]


def pictures(results: dict[str, Any], name: str) -> dict[str, Figure]:
    return {name: scatter(results["rows"]), f"{name}_axes": six_axes(results["rows"])}


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a method: success with its Wilson interval, perplexity with its bootstrap interval, Dist-n, cost."""
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        ppl = np.concatenate([row["perplexities"] for row in mine])
        found.append(
            {
                "method": method,
                "success": wilson(sum(row["successes"] for row in mine), sum(row["count"] for row in mine)),
                "perplexity": bootstrap_mean(ppl),
                "distinct": np.mean([row["distinct"] for row in mine], axis=0).tolist(),
                "energy": float(np.mean([row["energy"] for row in mine])),
                "evaluations": float(np.mean([row["evaluations"] for row in mine])),
                "control_evaluations": float(np.mean([row["control_evaluations"] for row in mine])),
                "seconds": float(np.mean([row["seconds_taken"] for row in mine])),
            }
        )
    return found


def average_table(rows: list[dict[str, Any]], published: dict[str, Any]) -> str:
    """Ours beside the paper's."""
    body = []
    for row in averages(rows):
        success, ppl, paper = row["success"], row["perplexity"], published["average"].get(row["method"])
        body.append(
            [
                row["method"],
                f"{success.mean:.2f} ({success.low:.2f} – {success.high:.2f})",
                f"{ppl.mean:.2f} ({ppl.low:.2f} – {ppl.high:.2f})",
                " / ".join(f"{value:.2f}" for value in row["distinct"]),
                row["energy"],
                row["evaluations"],
                row["control_evaluations"],
                row["seconds"],
                "–" if paper is None else ", ".join(f"{value:.2f}" for value in paper),
                published.get("seconds", {}).get(row["method"], "–"),
            ]
        )
    header = ["method", "success", "perplexity", "Dist-1/2/3", f"energy at γ = {ENERGY_WEIGHT:g}"]
    header += ["LM evaluations a text", "control evaluations", "seconds a batch"]
    return table([*header, "the paper: success, perplexity, Dist", "its seconds"], body)


def target_table(rows: list[dict[str, Any]], published: dict[str, dict[str, float]]) -> str:
    """Success and perplexity of every method on every target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = {row["target"]: row for row in rows if row["method"] == method}
        body.append(
            [method]
            + [
                f"{mine[t]['successes'] / mine[t]['count']:.2f}, {np.mean(mine[t]['perplexities']):.1f}"
                for t in targets
            ]
        )
    if set(targets) <= set(published):
        for method in published[targets[0]]:
            body.append([f"the paper's {method}", *(f"{published[t][method]:.2f}" for t in targets)])
    return table(["success, perplexity", *targets], body)


def grid_table(winners: dict[str, dict[str, Any]]) -> str:
    body = []
    for method, found in winners.items():
        for row in found["grid"]:
            cell = settings(method)[row["place"]]
            mark = "**winner**" if row["place"] == found["winner"] else ""
            setting = f"γ = {cell.weight:g}, ε = {cell.step_size:g}, {cell.start} start"
            body.append([method, setting, row["success"], row["perplexity"], row["score"], mark])
    return table(["method", "setting", "guide's success", "perplexity", "score", ""], body)


def sample_table(rows: list[dict[str, Any]]) -> str:
    target = rows[0]["target"]
    return table(
        ["method", f"a text, target {target}"], [[r["method"], r["example"]] for r in rows if r["target"] == target]
    )


def classifier_table(reports: dict[str, Any], published: dict[str, list[float]]) -> str:
    """F1, precision and recall on the test split, beside the paper's."""
    body = []
    for name, report in reports.items():
        classes = report["whole"]["classes"].values()
        precision, recall = (sum(one[key] for one in classes) / len(classes) for key in ("precision", "recall"))
        paper = published.get(name)
        body.append(
            [
                name,
                report["whole"]["macro_f1"],
                precision,
                recall,
                report["cut"]["macro_f1"],
                f"{report['parameters']:,}",
                f"{report['texts']:,}",
                "–" if paper is None else " / ".join(f"{value:.2f}" for value in paper[:3]) + f", {paper[3]} M",
            ]
        )
    header = ["classifier", "macro F1", "precision", "recall", f"F1 at {LENGTH} tokens", "parameters", "texts"]
    return table([*header, "the paper: F1 / precision / recall, parameters"], body)


def scatter(rows: list[dict[str, Any]]) -> Figure:
    """Success against perplexity: the upper left is where to be."""
    figure, axis = new_figure(6, 4)
    for row in averages(rows):
        success, ppl = row["success"], row["perplexity"]
        bars = {"xerr": [[ppl.mean - ppl.low], [ppl.high - ppl.mean]]}
        bars["yerr"] = [[success.mean - success.low], [success.high - success.mean]]
        axis.errorbar(ppl.mean, success.mean, fmt="o", color=COLOURS[row["method"]], label=row["method"], **bars)
    axis.set(xscale="log", xlabel="perplexity", ylabel="success by the judge", ylim=(-0.02, 1.02))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def six_axes(rows: list[dict[str, Any]]) -> Figure:
    """The paper's comparison along six axes, one picture a target; each axis runs from the worst to the best method."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    columns = min(4, len(targets))
    lines = -(-len(targets) // columns)
    figure, axes = new_figure(
        3.2 * columns, 3.2 * lines, nrows=lines, ncols=columns, subplot_kw={"polar": True}, squeeze=False
    )
    angles = np.linspace(0, 2 * np.pi, len(AXES), endpoint=False)
    for axis in axes.flat[len(targets) :]:
        axis.set_visible(False)
    for axis, target in zip(axes.flat, targets, strict=False):
        mine = [row for row in rows if row["target"] == target]
        values = np.array(
            [
                [row["successes"] / row["count"], -np.log(np.mean(row["perplexities"])),
                 -np.log(np.std(row["perplexities"]) + 1e-9), *row["distinct"]]
                for row in mine
            ]
        )  # fmt: skip
        scaled = (values - values.min(0)) / np.maximum(np.ptp(values, axis=0), 1e-9)
        for row, line in zip(mine, scaled, strict=True):
            closed = np.append(line, line[0])
            axis.plot(np.append(angles, 0), closed, color=COLOURS[row["method"]], linewidth=1.2, label=row["method"])
        axis.set(xticks=angles, xticklabels=AXES, yticks=[], title=target)
        axis.tick_params(labelsize=6)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
