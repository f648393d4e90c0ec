"""Figures that need no display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **layout: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, without the top and right spines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**layout)
    for axis in [axes] if not hasattr(axes, "flat") else axes.flat:
        for side in {"top", "right"} & set(axis.spines):
            axis.spines[side].set_visible(False)
    return figure, axes
