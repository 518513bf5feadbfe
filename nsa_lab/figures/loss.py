"""Plots of loss over steps, the gap to a dense baseline, the variants of a sweep, learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

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
from nsa_lab.figures.style import DENSE, add_legend, make_panel, stack_panels
from nsa_lab.health import LIMITS
from nsa_lab.health.sweep_results import Curve
from nsa_lab.runs.history import History

LONG_RUN_READINGS = 400  # a run with at least this many logged values is long


def plot_loss_curves(runs: Run | Sequence[Run], *, smoothing: int = 10) -> Figure:
    """Plot the training loss in nats per token, and training and validation in bits per byte.

    Thin lines are logged values and thick lines their moving mean over `smoothing` values. In short runs the mean is over
    fewer values, so that the curve does not lag behind. In long runs it is over more.
    """
    histories = read_histories(runs)
    figure = Figure(figsize=(7.5, 7.6), layout="constrained")
    figure.suptitle("Loss: " + ", ".join(h.run for h in histories), fontsize=11)
    nats, bits = figure.subplots(2, 1)
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _line_widths(histories), strict=False):
        label = f"{_make_label_prefix(history, histories)}training"
        _draw_smoothed(nats, *history.series("loss"), smoothing, colour, label, width)
        mark_resumes(nats, history)
    nats.set(xlabel=STEP_LABEL, ylabel="loss, nats per token")
    add_legend(nats)
    draw_loss(bits, histories, smoothing)
    zoom_to_late_steps([(nats, "loss"), (bits, "bpb")], histories)
    return figure


def plot_validation_gap(nsa: Run, dense: Run, limit: float = LIMITS.dense_gap) -> Figure:
    """Plot the validation loss of NSA relative to its dense baseline, in percent, at the steps that both runs evaluated."""
    nsa_bpb, dense_bpb = (
        dict(zip(*(v.tolist() for v in History.read(run).validation()), strict=True)) for run in (nsa, dense)
    )
    steps = [step for step in nsa_bpb if step in dense_bpb]
    figure, axes = make_panel(8, 3.4, "Validation compared with the dense baseline")
    gaps = [100 * (nsa_bpb[step] / dense_bpb[step] - 1) for step in steps]
    axes.plot(steps, gaps, color=RUN_COLOURS[0], marker="o", markersize=3.5)
    axes.axhline(0, color="black", linewidth=0.8)
    mark_level(axes, 100 * limit, f"limit, {limit:+.0%}")
    axes.set(xlabel=STEP_LABEL, ylabel="bits per byte, NSA relative to dense, %")
    format_step_axis(axes)
    return figure


def plot_sweep(curves: Sequence[Curve], *, title: str = "Sweep") -> Figure:
    """Plot the validation loss of the variants of a sweep against tokens and against step time (optimizer steps only).

    Each line is the mean over the seeds of a variant. The band ranges from its lowest to its highest run. Markers are
    evaluations.
    """
    figure = Figure(figsize=(7.5, 7.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = dict(zip(("tokens", "seconds"), stack_panels(figure, 2), strict=True))
    for key, axes in panels.items():
        for curve, colour in zip(curves, cycle(RUN_COLOURS), strict=False):
            x = getattr(curve, key)
            label = f"{curve.variant} ({curve.seeds} seed{'s' * (curve.seeds != 1)})"
            axes.fill_between(x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, curve.mean, color=colour, marker="o", markersize=3.5, linewidth=1.2, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_ylabel("validation, bits per byte")
    panels["tokens"].set_xlabel("tokens")
    panels["seconds"].set_xlabel("step time, seconds")
    add_legend(panels["tokens"])
    return figure


def plot_learning_rate(runs: Run | Sequence[Run]) -> Figure:
    """Plot learning rate and gradient norm over steps."""
    figure, (rate, norm) = make_panel_column("Optimizer", 2)
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
    """Return the mean of the last `window` values, fewer at the start. Non-finite values are ignored."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    count = np.cumsum(finite)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def draw_loss(axes: Axes, histories: list[History], smoothing: int) -> None:
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _line_widths(histories), strict=False):
        prefix = _make_label_prefix(history, histories)
        _draw_smoothed(axes, *history.series("bpb"), smoothing, colour, f"{prefix}training", width)
        steps, validation = history.validation()
        axes.plot(
            steps,
            validation,
            color=colour,
            linestyle="--",
            marker="o",
            markersize=3.5,
            zorder=3,
            label=f"{prefix}validation",
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
    """Return the line width of each run's curve. The first curve is the widest, so that it stays visible below another."""
    return [1.6] if len(histories) == 1 else [max(3.2 - 1.8 * index, 1.0) for index in range(len(histories))]


def zoom_to_late_steps(panels: list[tuple[Axes, str]], histories: list[History]) -> None:
    """Scale the y axis of long runs to the steps after the first tenth, whose high loss would flatten the rest."""
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
            # Outside the axes, so that it covers neither a curve nor the label of an attempt.
            axes.annotate(
                "the first steps are above ↑", (0.0, 1.01), xycoords="axes fraction", fontsize=8, va="bottom", color=DENSE
            )


def _make_label_prefix(history: History, histories: list[History]) -> str:
    """Return the label of a run: its attention kind if that is unique, else its name. Empty if there is only one run."""
    if len(histories) < 2:
        return ""
    kinds = [other.config.model.attention for other in histories]
    return f"{history.config.model.attention if len(set(kinds)) == len(kinds) else history.run}: "
