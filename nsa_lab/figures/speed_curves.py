"""Plots of the throughput of runs over steps, the time spent waiting for data, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from nsa_lab.figures.run_axes import (
    RUN_COLOURS,
    STEP_LABEL,
    Run,
    format_step_axis,
    make_panel_column,
    mark_resumes,
    mark_stalls,
    read_histories,
)
from nsa_lab.figures.style import add_legend
from nsa_lab.runs.history import History, compute_median_speeds


def plot_throughput(runs: Run | Sequence[Run]) -> Figure:
    """Plot tokens per second with the median and stalls, the fraction of time spent waiting for data, and peak memory."""
    histories = read_histories(runs)
    figure, (speed, wait, memory) = make_panel_column("Throughput: " + ", ".join(h.run for h in histories), 3)
    for history, colour in zip(histories, cycle(RUN_COLOURS), strict=False):
        draw_speed(speed, history, colour)
        mark_stalls(speed, history)
        steps, step_s = history.series("dt_s")
        wait.plot(steps, 100 * history.series("data_s")[1] / np.maximum(step_s, 1e-12), color=colour, linewidth=1)
        steps, peak = history.series("mem_peak_bytes")
        format_step_axis(memory)
        memory.plot(steps, peak / 1e9, color=colour, linewidth=1.5)
    _start_y_axis_at_zero(memory)
    speed.set_ylabel("tokens per second")
    wait.set_ylabel("data wait, %")
    memory.set(ylabel="peak memory, GB", xlabel=STEP_LABEL)
    speed.legend(frameon=False, fontsize=8)
    return figure


def _start_y_axis_at_zero(axes: Axes) -> None:
    """Scale the y axis from 0 to well above the highest value, so that a constant line is not on the frame."""
    values = [value for line in axes.lines for value in np.asarray(line.get_ydata(), dtype=float) if np.isfinite(value)]
    axes.set_ylim(0, 1.25 * (max(values, default=0.0) or 1.0))


def draw_speed(axes: Axes, history: History, colour: str) -> None:
    steps, speed = history.series("tokens_per_s")
    format_step_axis(axes)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
    axes.plot(steps, speed, color=colour, linewidth=1, marker="." if len(steps) < 80 else None, label=history.run)
    for median in compute_median_speeds(history):
        axes.axhline(median, color=colour, linestyle=":", linewidth=1, label=f"median {median:,.0f}")
    _start_y_axis_at_zero(axes)
    add_legend(axes)
    mark_resumes(axes, history)
