"""A run at a glance: one that is over, as the first screen of its report, and one under way."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.branch_curves import draw_gate_shares
from nsa_lab.figures.loss import draw_loss, zoom_to_late_steps
from nsa_lab.figures.run_axes import RUN_COLOURS, STEP_LABEL, Run, draw_layers, format_step_axis
from nsa_lab.figures.speed_curves import draw_speed
from nsa_lab.figures.style import add_legend, annotate_empty, make_panel
from nsa_lab.health.references import Reference
from nsa_lab.runs.history import History


def plot_report_panels(run: Run, references: Sequence[Reference] = ()) -> list[Figure]:
    """The first screen of a report, a figure for each panel so that they can stand below each other: loss, and gates.

    `references` are drawn as levels where the loss comes near them.
    """
    history = History.read(run)
    loss, axes = make_panel(6.2, 3.6, "Bits per byte")
    draw_loss(axes, [history], smoothing=10)
    zoom_to_late_steps([(axes, "bpb")], [history])
    _draw_references(axes, references)
    if history.config.model.attention == "dense":
        return [loss]
    gates, axes = make_panel(6.2, 3.6, "Gate shares, mean and range over layers")
    draw_gate_shares(axes, history)
    axes.set_xlabel(STEP_LABEL)
    return [loss, gates]


def _draw_references(axes: Axes, references: Sequence[Reference]) -> None:
    low, high = axes.get_ylim()
    for reference, line in zip(references, ("--", ":"), strict=False):
        if low - 0.3 * (high - low) < reference.bpb < high:
            axes.axhline(reference.bpb, color="black", linestyle=line, linewidth=1, label=str(reference))
    add_legend(axes)


def plot_overview(run: Run) -> Figure:
    """A run that is over: loss, gates, selection and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    figure.suptitle(history.run, fontsize=11)
    dense = history.config.model.attention == "dense"
    panels = figure.subplots(1 if dense else 2, 2, squeeze=False)
    loss, speed = panels[-1][0] if dense else panels[0][0], panels[-1][1]
    loss.set_title("Loss", fontsize=10)
    draw_loss(loss, [history], smoothing=10)
    zoom_to_late_steps([(loss, "bpb")], [history])
    if not dense:
        panels[0][1].set_title("Gate shares, mean and range over layers", fontsize=10)
        draw_gate_shares(panels[0][1], history)
        panels[1][0].set_title("Blocks shared with the query before, by layer", fontsize=10)
        draw_layers(figure, panels[1][0], history, "sel_reuse")
    speed.set_title("Throughput", fontsize=10)
    draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens per second")
    for axes in panels[-1]:
        axes.set_xlabel(STEP_LABEL)
    return figure


def plot_progress(run: Run) -> Figure:
    """A run under way: loss, learning rate, gates and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    figure.suptitle(f"{history.run}, step {history.last_step:,} of {history.config.train.steps:,}", fontsize=11)
    (loss, gates), (rate, speed) = figure.subplots(2, 2)
    loss.set_title("Loss, as recorded and smoothed", fontsize=10)
    draw_loss(loss, [history], smoothing=10)
    gates.set_title("Gate shares, mean and range over layers", fontsize=10)
    if history.config.model.attention == "nsa":
        draw_gate_shares(gates, history)
    else:
        annotate_empty(gates, "a dense model has no gates")
    rate.set_title("Learning rate", fontsize=10)
    rate.plot(*history.series("lr"), color=RUN_COLOURS[0])
    format_step_axis(rate)
    rate.set_ylabel("learning rate")
    speed.set_title("Throughput", fontsize=10)
    draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens per second")
    for axes in (rate, speed):
        axes.set_xlabel(STEP_LABEL)
    return figure
