"""Losses of runs over their steps, the gap to a dense twin, and the optimiser: learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.run_axes import (
    RUN_COLOURS,
    STEP_LABEL,
    Run,
    format_step_axis,
    make_panel_column,
    mark_level,
    mark_resumes,
    read_histories,
)
from nsa_lab.figures.style import DENSE, add_legend, make_panel
from nsa_lab.health import LIMITS
from nsa_lab.runs.history import History

LONG_RUN_READINGS = 400  # readings from which on a run is long


def plot_loss_curves(runs: Run | Sequence[Run], *, smoothing: int = 10) -> Figure:
    """Loss in nats per token, and bits per byte with the validation, over steps; thin as recorded and thick smoothed.

    The mean is over `smooth` readings: over fewer where there are few, so that it does not lag behind, more where there are
    many.
    """
    histories = read_histories(runs)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle("Loss: " + ", ".join(h.run for h in histories), fontsize=11)
    nats, bits = figure.subplots(1, 2)
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _line_widths(histories), strict=False):
        named = f"{_make_label_prefix(history, histories)}training"
        _draw_smoothed(nats, *history.series("loss"), smoothing, colour, named, width)
        mark_resumes(nats, history)
    nats.set(xlabel=STEP_LABEL, ylabel="loss, nats per token")
    add_legend(nats)
    draw_loss(bits, histories, smoothing)
    zoom_to_late_steps([(nats, "loss"), (bits, "bpb")], histories)
    return figure


def plot_validation_gap(nsa: Run, dense: Run, limit: float = LIMITS.dense_gap) -> Figure:
    """Validation bits per byte of a run over that of its dense twin, in percent, at the steps that both evaluated."""
    ours, theirs = (dict(zip(*(v.tolist() for v in History.read(run).validation()), strict=True)) for run in (nsa, dense))
    steps = [step for step in ours if step in theirs]
    figure, axes = make_panel(8, 3.4, "Validation beside the dense twin")
    gaps = [100 * (ours[step] / theirs[step] - 1) for step in steps]
    axes.plot(steps, gaps, color=RUN_COLOURS[0], marker="o", markersize=3.5)
    axes.axhline(0, color="black", linewidth=0.8)
    mark_level(axes, 100 * limit, f"limit, {limit:+.0%}")
    axes.set(xlabel=STEP_LABEL, ylabel="bits per byte, NSA over dense, %")
    format_step_axis(axes)
    return figure


def plot_learning_rate(runs: Run | Sequence[Run]) -> Figure:
    """Learning rate and gradient norm over steps."""
    figure, (rate, norm) = make_panel_column("Optimiser", 2)
    for history, colour in zip(read_histories(runs), cycle(RUN_COLOURS), strict=False):
        rate.plot(*history.series("lr"), color=colour, label=history.run)
        norm.plot(*history.series("grad_norm"), color=colour, linewidth=0.8, label=history.run)
        norm.axhline(history.config.train.grad_clip, color=colour, linestyle=":", linewidth=1)
    for axes in (rate, norm):
        format_step_axis(axes)
    rate.set_ylabel("learning rate")
    norm.set(ylabel="gradient norm\n(clipped at the dotted line)", yscale="log", xlabel=STEP_LABEL)
    rate.legend(frameon=False, fontsize=8)
    return figure


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, fewer at the start; values that are not finite are left out."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    count = np.cumsum(finite)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def draw_loss(axes: Axes, histories: list[History], smoothing: int) -> None:
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _line_widths(histories), strict=False):
        named = _make_label_prefix(history, histories)
        _draw_smoothed(axes, *history.series("bpb"), smoothing, colour, f"{named}training", width)
        held_out, validation = history.validation()
        axes.plot(
            held_out,
            validation,
            color=colour,
            linestyle="--",
            marker="o",
            markersize=3.5,
            zorder=3,
            label=f"{named}validation",
        )
        mark_resumes(axes, history)
    axes.set(xlabel=STEP_LABEL, ylabel="bits per byte")
    add_legend(axes)
    format_step_axis(axes)


def _draw_smoothed(
    axes: Axes, steps: np.ndarray, values: np.ndarray, smoothing: int, colour: str, label: str, width: float
) -> None:
    axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
    window = max(1, min(smoothing, len(values) // 20), len(values) // 50)
    axes.plot(steps, moving_average(values, window), color=colour, linewidth=width, label=label)
    format_step_axis(axes)


def _line_widths(histories: list[History]) -> list[float]:
    """Of each run's curve: the first of several is the widest, so that one that lies under another is seen."""
    return [1.6] if len(histories) == 1 else [max(3.2 - 1.8 * index, 1.0) for index in range(len(histories))]


def zoom_to_late_steps(panels: list[tuple[Axes, str]], histories: list[History]) -> None:
    """Where a run is long, its first tenth would press all the rest into a line: the axes show from there on upwards."""
    for axes, name in panels:
        shown = [
            values[len(values) // 10 :]
            for values in (history.series(name)[1] for history in histories)
            if len(values) >= LONG_RUN_READINGS and np.isfinite(values[len(values) // 10 :]).any()
        ]
        if shown and len(shown) == len(histories):
            low, high = min(np.nanmin(values) for values in shown), max(np.nanmax(values) for values in shown)
            margin = 0.1 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + 3 * margin)
            # Outside the axes, where no curve and no mark of an attempt can be.
            axes.annotate(
                "the beginning lies above ↑", (0.0, 1.01), xycoords="axes fraction", fontsize=8, va="bottom", color=DENSE
            )


def _make_label_prefix(history: History, histories: list[History]) -> str:
    """What tells a run apart in a legend: its attention where that does, else its name; nothing if it is alone."""
    if len(histories) < 2:
        return ""
    kinds = [other.config.model.attention for other in histories]
    return f"{history.config.model.attention if len(set(kinds)) == len(kinds) else history.run}: "
