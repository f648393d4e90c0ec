"""Tables and pictures of the experiments on controlled generation, with the paper's values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.experiments.control.methods import ComparisonSettings
from structured_voronoi.experiments.report import COLOURS, format_interval, new_figure, table
from structured_voronoi.metrics.text import bootstrap_mean, wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sections(results: dict[str, Any], name: str, stem: str, settings: ComparisonSettings, length: int) -> list[str]:
    """The sections that all reports have; ``name`` is the task, ``stem`` the name of the report's files."""
    rows, file = results["rows"], Path(__file__).with_name("published.toml")
    published = tomllib.loads(file.read_text(encoding="utf-8"))[name]
    return [
        average_table(rows, published, settings.energy_weight),
        f"![success against perplexity]({stem}.png)",
        "## By target",
        target_table(rows, published.get("target", {})),
        f"![six axes]({stem}_axes.png)",
        "## Classifiers",
        classifier_table(results["classifiers"], published.get("classifiers", {}), length),
        "## Grid search",
        f"{settings.grid_texts} texts per target, {settings.grid_seconds:g} seconds of one core per batch. Score: "
        "success rate by the guide minus log10(perplexity / perplexity of ancestral texts).",
        grid_table(results["grid"]),
        "## Samples",
        sample_table(rows),
    ]


def pictures(results: dict[str, Any], stem: str) -> dict[str, Figure]:
    """The two pictures of a report, by file name."""
    return {stem: scatter(results["rows"]), f"{stem}_axes": six_axes(results["rows"])}


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Averages per method: success with Wilson interval, perplexity with bootstrap interval, Dist-n, cost."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        ppl = np.concatenate([row["perplexities"] for row in of_method])
        lines.append(
            {
                "method": method,
                "success": wilson(sum(row["successes"] for row in of_method), sum(row["count"] for row in of_method)),
                "perplexity": bootstrap_mean(ppl),
                "distinct": np.mean([row["distinct"] for row in of_method], axis=0).tolist(),
                "energy": float(np.mean([row["energy"] for row in of_method])),
                "evaluations": float(np.mean([row["evaluations"] for row in of_method])),
                "control_evaluations": float(np.mean([row["control_evaluations"] for row in of_method])),
                "seconds": float(np.mean([row["seconds_taken"] for row in of_method])),
            }
        )
    return lines


def average_table(rows: list[dict[str, Any]], published: dict[str, Any], energy_weight: float) -> str:
    """Averages per method, with the paper's."""
    body = []
    for row in averages(rows):
        success, ppl, paper = row["success"], row["perplexity"], published["average"].get(row["method"])
        body.append(
            [
                row["method"],
                format_interval(success),
                format_interval(ppl),
                " / ".join(f"{value:.2f}" for value in row["distinct"]),
                row["energy"],
                row["evaluations"],
                row["control_evaluations"],
                row["seconds"],
                "–" if paper is None else ", ".join(f"{value:.2f}" for value in paper),
                published.get("seconds", {}).get(row["method"], "–"),
            ]
        )
    header = ["method", "success", "perplexity", "Dist-1/2/3", f"energy at γ = {energy_weight:g}"]
    header += ["LM evaluations per text", "control evaluations", "seconds per batch"]
    return table([*header, "paper: success, perplexity, Dist", "paper: seconds"], body)


def target_table(rows: list[dict[str, Any]], published: dict[str, dict[str, float]]) -> str:
    """Success and perplexity of every method on every target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        by_target = {row["target"]: row for row in rows if row["method"] == method}
        shown = [by_target[target] for target in targets]
        body.append(
            [method] + [f"{row['successes'] / row['count']:.2f}, {np.mean(row['perplexities']):.1f}" for row in shown]
        )
    if set(targets) <= set(published):
        for method in published[targets[0]]:
            body.append([f"paper: {method}", *(f"{published[target][method]:.2f}" for target in targets)])
    return table(["success, perplexity", *targets], body)


def grid_table(grids: dict[str, dict[str, Any]]) -> str:
    """All settings of the grid search, with the best one marked."""
    body = []
    for method, grid in grids.items():
        for place, row in enumerate(grid["grid"]):
            setting = f"γ = {row['weight']:g}, ε = {row['step_size']:g}, {row['start']} start"
            mark = "only setting" if len(grid["grid"]) == 1 else "**best**" if place == grid["winner"] else ""
            body.append([method, setting, *(row.get(key, "–") for key in ("success", "perplexity", "score")), mark])
    return table(["method", "setting", "success by the guide", "perplexity", "score", ""], body)


def sample_table(rows: list[dict[str, Any]]) -> str:
    """One text of each method for the first target."""
    target = rows[0]["target"]
    body = [[row["method"], row["example"]] for row in rows if row["target"] == target]
    return table(["method", f"text for {target}"], body)


def classifier_table(reports: dict[str, Any], published: dict[str, list[float]], length: int) -> str:
    """F1, precision and recall on the test split, with the paper's."""
    body = []
    for name, report in reports.items():
        classes = report["whole"]["classes"].values()
        precision, recall = (sum(scores[key] for scores in classes) / len(classes) for key in ("precision", "recall"))
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
    header = ["classifier", "macro F1", "precision", "recall", f"F1 at {length} tokens", "parameters", "texts"]
    return table([*header, "paper: F1 / precision / recall, parameters"], body)


def scatter(rows: list[dict[str, Any]]) -> Figure:
    """Success by perplexity; the upper left is best."""
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
    """The paper's comparison on six axes, one plot per target; each axis runs from the worst to the best method."""
    labels = ("success", "-ppl mean", "-ppl sd", "dist-1", "dist-2", "dist-3")
    targets = list(dict.fromkeys(row["target"] for row in rows))
    columns = min(4, len(targets))
    lines = -(-len(targets) // columns)
    figure, axes = new_figure(
        3.2 * columns, 3.2 * lines, nrows=lines, ncols=columns, subplot_kw={"polar": True}, squeeze=False
    )
    angles = np.linspace(0, 2 * np.pi, len(labels), endpoint=False)
    for axis in axes.flat[len(targets) :]:
        axis.set_visible(False)
    for axis, target in zip(axes.flat, targets, strict=False):
        on_target = [row for row in rows if row["target"] == target]
        values = np.array(
            [
                [row["successes"] / row["count"], -np.log(np.mean(row["perplexities"])),
                 -np.log(np.std(row["perplexities"]) + 1e-9), *row["distinct"]]
                for row in on_target
            ]
        )  # fmt: skip
        scaled = (values - values.min(0)) / np.maximum(np.ptp(values, axis=0), 1e-9)
        for row, line in zip(on_target, scaled, strict=True):
            closed = np.append(line, line[0])
            axis.plot(np.append(angles, 0), closed, color=COLOURS[row["method"]], linewidth=1.2, label=row["method"])
        axis.set(xticks=angles, xticklabels=labels, yticks=[], title=target)
        axis.tick_params(labelsize=6)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
