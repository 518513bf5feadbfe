"""Validation of the variants of a sweep, over tokens and over seconds of training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from nsa_lab.figures.run_axes import RUN_COLOURS
from nsa_lab.figures.style import add_legend, make_panel_row
from nsa_lab.health.sweep_results import Curve


def plot_sweep(curves: Sequence[Curve], *, title: str = "Sweep") -> Figure:
    """A line for the mean of each variant's seeds, in a band from its lowest run to its highest; evaluations are marked.

    Seconds are those of optimiser steps, without evaluations, saves and compilation.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = dict(zip(("tokens", "seconds"), make_panel_row(figure, 2), strict=True))
    for key, axes in panels.items():
        for curve, colour in zip(curves, cycle(RUN_COLOURS), strict=False):
            along = getattr(curve, key)
            label = f"{curve.variant} ({curve.seeds} seed{'s' * (curve.seeds != 1)})"
            axes.fill_between(along, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(along, curve.mean, color=colour, marker="o", markersize=3.5, linewidth=1.2, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.grid(alpha=0.25, linewidth=0.5)
    panels["tokens"].set(xlabel="tokens", ylabel="validation, bits per byte")
    panels["seconds"].set(xlabel="seconds of optimiser steps")
    add_legend(panels["tokens"])
    return figure
