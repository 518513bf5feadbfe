"""Common parts of plots of runs: step axis, a colour per run, and marks of resumes and stalls.

A run is a path or a `History` that is already loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from nsa_lab.figures.style import DENSE, FORCED, add_legend, annotate_empty
from nsa_lab.runs.history import History

Run = str | Path | History

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STEP_LABEL = "optimizer step"
# Omit the lightest fifth of the colour map, which is hard to see on white.
LAYER_COLORMAP = LinearSegmentedColormap.from_list("layers", colormaps["cividis"](np.linspace(0, 0.82, 64)))


def read_histories(runs: Run | Sequence[Run]) -> list[History]:
    run_list = [runs] if isinstance(runs, str | Path | History) else list(runs)
    return [History.read(run) for run in run_list]


def make_panel_column(title: str, count: int) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(8, 1.2 + 2.2 * count), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(count, 1, sharex=True)


def format_step_axis(axes: Axes) -> None:
    """Format the step axis: at most about five integer ticks and a faint grid."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.25, linewidth=0.5)


def draw_layers(figure: Figure, axes: Axes, history: History, name: str) -> None:
    """Draw one line per layer, with a colour bar of the layers."""
    steps, values = history.layer_series(name)
    if not len(values):
        annotate_empty(axes)
        return
    colours = ScalarMappable(Normalize(0, max(values.shape[1] - 1, 1)), LAYER_COLORMAP)
    for layer, line in enumerate(values.T):
        axes.plot(
            steps, line, color=colours.to_rgba(np.asarray(layer)), linewidth=1.2, marker="." if len(steps) < 30 else None
        )
    format_step_axis(axes)
    figure.colorbar(colours, ax=axes, label="layer", ticks=get_layer_ticks(values.shape[1]))


def draw_band(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    if not len(values):
        annotate_empty(axes)
        return
    axes.fill_between(steps, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.18, linewidth=0)
    axes.plot(steps, values.mean(axis=1), color=colour, label=label, marker="." if len(steps) < 30 else None)
    format_step_axis(axes)


def mark_level(axes: Axes, value: float, text: str) -> None:
    axes.axhline(value, color="black", linestyle=":", linewidth=1)
    axes.margins(y=0.12)
    axes.annotate(
        text, (0, value), xycoords=axes.get_yaxis_transform(), xytext=(4, 3), textcoords="offset points", fontsize=8
    )


def mark_resumes(axes: Axes, history: History) -> None:
    for attempt in history.attempts()[1:]:
        axes.axvline(attempt.from_step, color=DENSE, linestyle="--", linewidth=0.8)
        axes.annotate(
            f"attempt {attempt.number}",
            (attempt.from_step, 0.98),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            rotation=90,
            va="top",
            ha="right",
            color=DENSE,
        )


def mark_stalls(axes: Axes, history: History) -> None:
    for index, stall in enumerate(history.events_of_kind("stall")):
        axes.axvline(stall["step"], color=FORCED, linewidth=1.2, label=None if index else "stall")
    add_legend(axes)


def get_layer_ticks(n_layers: int) -> list[int]:
    return list(range(0, n_layers, max(1, n_layers // 6)))
