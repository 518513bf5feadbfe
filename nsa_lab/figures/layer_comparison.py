"""Plots that compare runs at one layer over steps: its gates, and one statistic of its selection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.config import BRANCHES
from nsa_lab.figures.run_axes import RUN_COLOURS, STEP_LABEL, Run, format_step_axis
from nsa_lab.figures.style import BRANCH_COLOURS
from nsa_lab.runs.history import History

STATISTICS = {
    "gate_entropy": "gate entropy, nats",
    "sel_reuse": "blocks shared with the previous query",
    "sel_distance": "distance, blocks",
    "sel_sink_share": "first block's share",
    "sel_window_overlap": "overlap with window",
}
LINE_STYLES = ("-", "--", ":", "-.")


def plot_layer_gates(runs: Sequence[Run], layer: int, step: int | None = None) -> Figure:
    """Plot the gate shares of one layer: one colour per branch, one line style per run. Mark `step`."""
    histories = [History.read(run) for run in runs]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"Gate shares of layer {layer}", xlabel=STEP_LABEL, ylabel="share of the gates", ylim=(0, 1))
    for history, style in zip(histories, cycle(LINE_STYLES), strict=False):
        for branch, branch_name in BRANCHES.items():
            steps, values = history.layer_series(f"gate_share_{branch}")
            if values.shape[1] > layer:
                label = f"{history.run}: {branch_name}" if len(histories) > 1 else branch_name
                axes.plot(steps, values[:, layer], color=BRANCH_COLOURS[branch], linestyle=style, label=label)
    _finish_axes(figure, axes, step)
    return figure


def plot_layer_statistic(runs: Sequence[Run], name: str, layer: int, step: int | None = None) -> Figure:
    """Plot one of `STATISTICS` of one layer, one colour per run. Mark `step`."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"{STATISTICS[name].capitalize()}, layer {layer}", xlabel=STEP_LABEL, ylabel=STATISTICS[name])
    for history, colour in zip(map(History.read, runs), cycle(RUN_COLOURS), strict=False):
        steps, values = history.layer_series(name)
        if values.shape[1] > layer:
            axes.plot(steps, values[:, layer], color=colour, label=history.run)
    _finish_axes(figure, axes, step)
    return figure


def _finish_axes(figure: Figure, axes: Axes, step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color="black", linestyle=":", linewidth=1)
    format_step_axis(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    else:
        axes.annotate("not recorded", (0.5, 0.5), xycoords="axes fraction", ha="center")
