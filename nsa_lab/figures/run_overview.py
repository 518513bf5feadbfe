"""Plots of one run: the first panels of its report, an overview of a finished run, and the progress of a running one."""

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
    """Return the first figures of a report, one per panel: loss and gate shares.

    `references` whose value is near the loss are drawn as horizontal lines.
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
    """Plot a finished run: loss, gate shares, selection and throughput."""
    history = History.read(run)
    is_dense = history.config.model.attention == "dense"
    figure = Figure(figsize=(7.5, 5.6 if is_dense else 10.6), layout="constrained")
    figure.suptitle(history.run, fontsize=11)
    loss, *branch_panels, speed = figure.subplots(2 if is_dense else 4, 1)
    loss.set_title("Loss", fontsize=10)
    draw_loss(loss, [history], smoothing=10)
    zoom_to_late_steps([(loss, "bpb")], [history])
    if not is_dense:
        gates, reuse = branch_panels
        gates.set_title("Gate shares, mean and range over layers", fontsize=10)
        draw_gate_shares(gates, history)
        reuse.set_title("Blocks shared with the previous query, by layer", fontsize=10)
        draw_layers(figure, reuse, history, "sel_reuse")
    speed.set_title("Throughput", fontsize=10)
    draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens per second")
    speed.set_xlabel(STEP_LABEL)
    return figure


def plot_progress(run: Run) -> Figure:
    """Plot a running run: loss, learning rate, gate shares and throughput."""
    history = History.read(run)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    figure.suptitle(f"{history.run}, step {history.last_step:,} of {history.config.train.steps:,}", fontsize=11)
    (loss, gates), (rate, speed) = figure.subplots(2, 2)
    loss.set_title("Loss, logged values and moving mean", fontsize=10)
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
