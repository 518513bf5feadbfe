"""Plots of the branches of a run over steps: gates, block selection, output norms and the benefit of selection."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.config import BRANCHES
from nsa_lab.figures.run_axes import STEP_LABEL, Run, draw_band, draw_layers, format_step_axis, get_layer_ticks, mark_level
from nsa_lab.figures.style import (
    BRANCH_COLOURS,
    CMP,
    DENSE,
    FORCED,
    SEL,
    add_legend,
    add_legend_below,
    annotate_empty,
    make_panel,
    stack_panels,
)
from nsa_lab.health.selection_checks import compute_selection_range
from nsa_lab.runs.history import History

# Label and colour of each ablation: the blocks that replace the selected ones.
ABLATION_LINES = {
    "chosen": ("selected blocks", SEL),
    "random": ("random blocks", DENSE),
    "nearest": ("nearest blocks", CMP),
    "no_sel": ("no selected branch", FORCED),
}


def plot_gate_shares(run: Run) -> Figure:
    """Plot each branch's share of the gates, and the gate entropy, of every layer over steps."""
    history = History.read(run)
    branches = history.config.model.branches
    figure = Figure(figsize=(7.5, 2.5 * (len(branches) + 1)), layout="constrained")
    figure.suptitle(f"Gates of {history.run}, by layer", fontsize=11)
    *share_panels, entropy_panel = figure.subplots(len(branches) + 1, 1, sharex=True)
    for axes, branch in zip(share_panels, branches, strict=True):
        draw_layers(figure, axes, history, f"gate_share_{branch}")
        axes.set_title(f"share of the {BRANCHES[branch]} branch", fontsize=9, color=BRANCH_COLOURS[branch])
        axes.axhline(1 / len(branches), color="black", linestyle=":", linewidth=1)
        axes.set(ylabel="share of the gates", ylim=(0, 1))
    draw_layers(figure, entropy_panel, history, "gate_entropy")
    mark_level(entropy_panel, math.log(len(branches)), f"ln {len(branches)}: equal shares")
    entropy_panel.set_title("entropy", fontsize=9)
    entropy_panel.set(ylabel="nats", ylim=(0, 1.25))
    entropy_panel.set_xlabel(STEP_LABEL)
    return figure


def plot_gates_by_layer(run: Run) -> Figure:
    """Plot each layer's gate shares at the first and at the last recorded step."""
    history = History.read(run)
    figure = Figure(figsize=(7.5, 6.8), layout="constrained")
    figure.suptitle(f"Gates by layer: {history.run}", fontsize=11)
    panels = stack_panels(figure, 2)
    steps, _ = history.layer_series("gate_entropy")
    for axes, index in zip(panels, (0, -1), strict=True):
        axes.set(xlabel="layer", ylabel="share of the gates", ylim=(0, 1))
        if len(steps):
            axes.set_title(f"{'last' if index else 'first'} recorded step, {steps[index]:,}", fontsize=9)
            _draw_stacked_shares(axes, history, index)
        else:
            annotate_empty(axes)
        add_legend_below(axes)
    return figure


def plot_selection_statistics(run: Run) -> Figure:
    """Plot four statistics of block selection by layer over steps.

    They are the blocks shared with the previous query, the distance, the attention on the first block, and the overlap
    with the window. Dotted lines are the values of random blocks, of the nearest blocks and of the oldest blocks.
    """
    history = History.read(run)
    length, nsa = history.config.train.stage_at(history.last_step).seq_len, history.config.nsa
    reference_values = compute_selection_range(length, nsa)
    figure = Figure(figsize=(7.5, 10), layout="constrained")
    figure.suptitle(f"Block selection of {history.run} ({length:,} tokens, {nsa.n_sel} blocks of {nsa.l_sel})", fontsize=11)
    panels = figure.subplots(4, 1, sharex=True)
    statistics = {
        "sel_reuse": ("blocks shared with the previous query", {"random blocks": reference_values.chance_reuse}),
        "sel_distance": (
            "mean distance, blocks",
            {"nearest blocks": reference_values.nearest, "oldest blocks": reference_values.farthest},
        ),
        "sel_sink_share": ("share of the attention on the first block", {}),
        "sel_window_overlap": ("share of the selected keys that the window reads too", {}),
    }
    for axes, (name, (label, marks)) in zip(panels, statistics.items(), strict=True):
        draw_layers(figure, axes, history, name)
        axes.set_title(label, fontsize=9)
        for text, value in marks.items():
            mark_level(axes, value, text)
    panels[-1].set_xlabel(STEP_LABEL)
    return figure


def plot_branch_norms(run: Run) -> Figure:
    """Plot the root mean square of each branch's output over steps: mean and range over layers."""
    history = History.read(run)
    figure, axes = make_panel(8, 3.8, f"Norm of each branch's output: {history.run}")
    for branch in history.config.model.branches:
        draw_band(axes, *history.layer_series(f"norm_{branch}"), BRANCH_COLOURS[branch], BRANCHES[branch])
    axes.set(xlabel=STEP_LABEL, ylabel="root mean square of the output")
    add_legend(axes)
    return figure


def plot_selection_benefit(run: Run) -> Figure:
    """Plot the loss of answers that only the selected branch can reach, in nats per byte, at every evaluation."""
    history = History.read(run)
    events = [event for event in history.current_events("reach") if isinstance(event.get("answer_loss"), dict)]
    figure, axes = make_panel(8, 3.8, f"Answers beyond the window: {history.run}")
    if not events:
        annotate_empty(axes, "not recorded: the run is older than this evaluation, or the evaluation did not apply")
    for name, (label, colour) in ABLATION_LINES.items():
        losses = [(event["step"], event["answer_loss"].get(name)) for event in events]
        points = [(step, loss) for step, loss in losses if loss is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour, label=label)
    axes.set(xlabel=STEP_LABEL, ylabel="loss of the answers, nats per byte")
    format_step_axis(axes)
    add_legend(axes)
    return figure


def draw_gate_shares(axes: Axes, history: History) -> None:
    branches = history.config.model.branches
    for branch in branches:
        draw_band(axes, *history.layer_series(f"gate_share_{branch}"), BRANCH_COLOURS[branch], BRANCHES[branch])
    axes.axhline(1 / len(branches), color="black", linestyle=":", linewidth=1)
    axes.set(ylabel="share of the gates", ylim=(0, 1))
    add_legend(axes, columns=3)


def _draw_stacked_shares(axes: Axes, history: History, index: int) -> None:
    bottom: np.ndarray | float = 0.0
    branches = history.config.model.branches
    shares = [history.layer_series(f"gate_share_{branch}")[1][index] for branch in branches]
    for branch, values in zip(branches, shares, strict=True):
        axes.bar(np.arange(len(values)), values, bottom=bottom, color=BRANCH_COLOURS[branch], label=BRANCHES[branch])
        bottom = bottom + values
    axes.set_xticks(get_layer_ticks(len(shares[0])))
