"""What the branches of a run do, layer by layer over steps: gates, block selection, sizes of the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.config import BRANCHES
from nsa_lab.figures.run_axes import STEP_LABEL, Run, draw_band, draw_layers, get_layer_ticks, mark_level
from nsa_lab.figures.style import BRANCH_COLOURS, add_legend, add_legend_below, annotate_empty, make_panel, make_panel_row
from nsa_lab.health.selection_checks import compute_selection_range
from nsa_lab.runs.history import History


def plot_gate_shares(run: Run) -> Figure:
    """Share of each branch in the gates, and their entropy, of every layer over steps."""
    history = History.read(run)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(f"Gates of {history.run}, by layer", fontsize=11)
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for axes, branch in zip(panels, BRANCHES, strict=False):
        draw_layers(figure, axes, history, f"gate_share_{branch}")
        axes.set_title(f"share of the {BRANCHES[branch]} branch", fontsize=9, color=BRANCH_COLOURS[branch])
        axes.axhline(1 / 3, color="black", linestyle=":", linewidth=1)
        axes.set(ylabel="share of the gates", ylim=(0, 1))
    draw_layers(figure, panels[3], history, "gate_entropy")
    mark_level(panels[3], math.log(3), "ln 3: all branches alike")
    panels[3].set_title("entropy", fontsize=9)
    panels[3].set(ylabel="nats", ylim=(0, 1.25))
    _label_all_step_axes(panels)
    return figure


def plot_gates_by_layer(run: Run) -> Figure:
    """How each layer divides its gates over the branches, at the first reading and at the last."""
    history = History.read(run)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(f"Gates by layer: {history.run}", fontsize=11)
    panels = make_panel_row(figure, 2)
    steps, _ = history.layer_series("gate_entropy")
    for axes, which in zip(panels, (0, -1), strict=True):
        axes.set(xlabel="layer", ylim=(0, 1))
        if len(steps):
            axes.set_title(f"{'last' if which else 'first'} reading, step {steps[which]:,}", fontsize=9)
            _draw_stacked_shares(axes, history, which)
        else:
            annotate_empty(axes)
        axes.tick_params(labelleft=True)
        add_legend_below(axes)
    panels[0].set_ylabel("share of the gates")
    return figure


def _label_all_step_axes(panels: Iterable[Axes]) -> None:
    """Steps below every panel: a page may cut them apart, and set them below each other."""
    for axes in panels:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(STEP_LABEL)


def plot_selection_statistics(run: Run) -> Figure:
    """By layer over steps: reuse between neighbours, distance, first block's share, overlap with the window.

    Dotted lines: what blocks chosen by chance, always the nearest or always the oldest would give.
    """
    history = History.read(run)
    length, nsa = history.config.train.stage_at(history.last_step).seq_len, history.config.nsa
    span = compute_selection_range(length, nsa)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(f"Block selection of {history.run} ({length:,} tokens, {nsa.n_sel} blocks of {nsa.l_sel})", fontsize=11)
    panels = figure.subplots(2, 2, sharex=True).flatten()
    named = {
        "sel_reuse": ("blocks shared with the query before", {"by chance": span.chance_reuse}),
        "sel_distance": ("mean distance, blocks", {"always the nearest": span.nearest, "always the oldest": span.farthest}),
        "sel_sink_share": ("attention on the first block, share", {}),
        "sel_window_overlap": ("selected keys also in the window, share", {}),
    }
    for axes, (name, (label, marks)) in zip(panels, named.items(), strict=True):
        draw_layers(figure, axes, history, name)
        axes.set_title(label, fontsize=9)
        for text, value in marks.items():
            mark_level(axes, value, text)
    _label_all_step_axes(panels)
    return figure


def plot_branch_norms(run: Run) -> Figure:
    """Root mean square of each branch's output, mean and range over layers, over steps."""
    history = History.read(run)
    figure, axes = make_panel(8, 3.8, f"Size of each branch's output: {history.run}")
    for branch, label in BRANCHES.items():
        draw_band(axes, *history.layer_series(f"norm_{branch}"), BRANCH_COLOURS[branch], label)
    axes.set(xlabel=STEP_LABEL, ylabel="root mean square of the output")
    add_legend(axes)
    return figure


def draw_gate_shares(axes: Axes, history: History) -> None:
    for branch, label in BRANCHES.items():
        draw_band(axes, *history.layer_series(f"gate_share_{branch}"), BRANCH_COLOURS[branch], label)
    axes.axhline(1 / 3, color="black", linestyle=":", linewidth=1)
    axes.set(ylabel="share of the gates", ylim=(0, 1))
    add_legend(axes, columns=3)


def _draw_stacked_shares(axes: Axes, history: History, index: int) -> None:
    bottom: np.ndarray | float = 0.0
    shares = [history.layer_series(f"gate_share_{branch}")[1][index] for branch in BRANCHES]
    for (branch, label), values in zip(BRANCHES.items(), shares, strict=True):
        axes.bar(np.arange(len(values)), values, bottom=bottom, color=BRANCH_COLOURS[branch], label=label)
        bottom = bottom + values
    axes.set_xticks(get_layer_ticks(len(shares[0])))
