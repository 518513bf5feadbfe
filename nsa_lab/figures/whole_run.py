"""A run at a glance: one that is over, as the first screen of its report, and one under way."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.branches import draw_gates
from nsa_lab.figures.loss import close_to_the_end, draw_loss
from nsa_lab.figures.pace import draw_speed
from nsa_lab.figures.run_axes import RUN_COLOURS, STEP, Run, draw_layers, over_steps
from nsa_lab.figures.style import legend, panel, say_nothing
from nsa_lab.health.worth import Reference
from nsa_lab.runs.history import History


def first_screen(run: Run, references: Sequence[Reference] = ()) -> list[Figure]:
    """The first screen of a report, a figure for each panel so that they can stand below each other: loss, and gates.

    `references` are drawn as levels where the loss comes near them.
    """
    history = History.read(run)
    loss, axes = panel(6.2, 3.6, "Bits per byte")
    draw_loss(axes, [history], smooth=10)
    close_to_the_end([(axes, "bpb")], [history])
    _draw_references(axes, references)
    if history.config.model.attention == "dense":
        return [loss]
    gates, axes = panel(6.2, 3.6, "Gate shares, mean and range over layers")
    draw_gates(axes, history)
    axes.set_xlabel(STEP)
    return [loss, gates]


def _draw_references(axes: Axes, references: Sequence[Reference]) -> None:
    low, high = axes.get_ylim()
    for reference, line in zip(references, ("--", ":"), strict=False):
        if low - 0.3 * (high - low) < reference.bpb < high:
            axes.axhline(reference.bpb, color="black", linestyle=line, linewidth=1, label=str(reference))
    legend(axes)


def overview(run: Run) -> Figure:
    """A run that is over: loss, gates, selection and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    figure.suptitle(history.run, fontsize=11)
    dense = history.config.model.attention == "dense"
    panels = figure.subplots(1 if dense else 2, 2, squeeze=False)
    loss, speed = panels[-1][0] if dense else panels[0][0], panels[-1][1]
    loss.set_title("Loss", fontsize=10)
    draw_loss(loss, [history], smooth=10)
    close_to_the_end([(loss, "bpb")], [history])
    if not dense:
        panels[0][1].set_title("Gate shares, mean and range over layers", fontsize=10)
        draw_gates(panels[0][1], history)
        panels[1][0].set_title("Blocks shared with the query before, by layer", fontsize=10)
        draw_layers(figure, panels[1][0], history, "sel_reuse")
    speed.set_title("Throughput", fontsize=10)
    draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens per second")
    for axes in panels[-1]:
        axes.set_xlabel(STEP)
    return figure


def progress(run: Run) -> Figure:
    """A run under way: loss, learning rate, gates and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    figure.suptitle(f"{history.run}, step {history.reached:,} of {history.config.train.steps:,}", fontsize=11)
    (loss, gates), (rate, speed) = figure.subplots(2, 2)
    loss.set_title("Loss, as recorded and smoothed", fontsize=10)
    draw_loss(loss, [history], smooth=10)
    gates.set_title("Gate shares, mean and range over layers", fontsize=10)
    if history.config.model.attention == "nsa":
        draw_gates(gates, history)
    else:
        say_nothing(gates, "a dense model has no gates")
    rate.set_title("Learning rate", fontsize=10)
    rate.plot(*history.series("lr"), color=RUN_COLOURS[0])
    over_steps(rate)
    rate.set_ylabel("learning rate")
    speed.set_title("Throughput", fontsize=10)
    draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens per second")
    for axes in (rate, speed):
        axes.set_xlabel(STEP)
    return figure
