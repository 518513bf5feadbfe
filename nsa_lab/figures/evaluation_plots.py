"""Pictures of evaluations: what was found, by length and depth, and loss by position. Of one run, or of models together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.style import DENSE, SEL, add_legend, make_panel
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.runs.evaluation import get_depth_counts

TASK_NAMES = {"needle": "needle", "multi_key": "needle among other facts", "multi_query": "several questions"}


def plot_retrieval(evaluation: dict[str, Any]) -> Figure:
    """Share of the facts at each depth that were found, length by depth, one panel for each task; from `evaluation.json`.

    Of several questions in a sequence the first alone asks for the fact at that depth. An evaluation that did not count it
    apart shows all of them, without depths.
    """
    tasks = list(dict.fromkeys(cell["task"] for cell in evaluation["retrieval"]))
    figure = Figure(figsize=(1.2 + 3.4 * max(len(tasks), 1), 3.8), layout="constrained")
    figure.suptitle(f"Facts found by {evaluation['run']} at step {evaluation['step']:,}, share of facts", fontsize=11)
    axes = figure.subplots(1, max(len(tasks), 1), squeeze=False)[0]
    if not tasks:
        axes[0].set_axis_off()
        axes[0].annotate("no task fits into the lengths asked", (0.5, 0.5), xycoords="axes fraction", ha="center")
        return figure
    pictures = []
    for place, (one, task) in enumerate(zip(axes, tasks, strict=True)):
        pictures.append(_draw_heatmap(one, [cell for cell in evaluation["retrieval"] if cell["task"] == task]))
        one.set_title(TASK_NAMES.get(task, task), fontsize=9)
        one.set(xlabel="length, bytes", ylabel="" if place else "depth of the fact (1: at the question)")
    figure.colorbar(pictures[-1], ax=axes.tolist(), label="found")
    return figure


def plot_retrieval_grid(cells: Mapping[str, Sequence[dict[str, Any]]], tasks: Sequence[str]) -> Figure:
    """`retrieval_map` of models side by side, all seeds of each together: a row for a task, a column for a model.

    `cells` are the entries of `retrieval` in the model's evaluations. Raises ValueError where there is no model or no task.
    """
    if not cells or not tasks:
        raise ValueError(f"{len(cells)} models and {len(tasks)} tasks to draw: expected one of each at least")
    figure = Figure(figsize=(1.2 + 3.6 * len(cells), 0.8 + 2.6 * len(tasks)), layout="constrained")
    figure.suptitle("Facts found by length and depth, share of facts", fontsize=11)
    grid = figure.subplots(len(tasks), len(cells), squeeze=False)
    pictures = []
    for row, task in zip(grid, tasks, strict=True):
        for axes, (model, own) in zip(row, cells.items(), strict=True):
            pictures.append(_draw_heatmap(axes, [cell for cell in own if cell["task"] == task]))
            axes.set_title(f"{model}:\n{TASK_NAMES.get(task, task)}", fontsize=8)  # a long name has a line of its own
            axes.set(xlabel="length, bytes" if row is grid[-1] else "", ylabel="" if axes is not row[0] else "depth")
    figure.colorbar(pictures[-1], ax=grid.ravel().tolist(), label="found")
    return figure


def plot_difference_by_position(text: TextDifference, target: float | None = None) -> Figure:
    """Bits per byte of a model less those of another, by octave of the position, with 95 % intervals; `bar` is a level.

    Intervals over windows are drawn whole. Those over two or three seeds may be many times as long, and end at the edge.
    """
    figure, axes = make_panel(8, 3.8, f"{text.text}: {text.model} less {text.baseline}; below 0 the first is better")
    places = get_position_ranges(text)
    middle = np.arange(len(places))
    axes.axhline(0, color="black", linewidth=0.8)
    if target is not None:
        axes.axhline(target, color=DENSE, linewidth=0.8, linestyle="--", label=f"{target:+g}")
    for aside, colour, label, intervals in (
        (-0.08, SEL, "95 % over windows", [place.over_windows for place in places]),
        (0.08, DENSE, "95 % over seeds", [place.over_seeds for place in places]),
    ):
        told = [(at, place.difference, *found) for at, place, found in zip(middle, places, intervals, strict=True) if found]
        if told:
            at, mean, low, high = np.array(told).T
            axes.errorbar(at + aside, mean, [mean - low, high - mean], fmt="o", ms=4, capsize=3, color=colour, label=label)
    axes.plot(middle, [place.difference for place in places], "x", color="black", markersize=4, label="mean")
    if shown := [bound for place in places for bound in place.over_windows or ()]:
        low, high = min(0.0, *shown), max(target or 0.0, *shown)
        axes.set_ylim(low - (high - low) / 4, high + (high - low) / 4)
    axes.set_xticks(middle, [place.place.replace(" to ", "–") for place in places], fontsize=7)
    axes.set(xlabel="position, bytes", ylabel="bits per byte")
    add_legend(axes, columns=2)
    return figure


def get_position_ranges(text: TextDifference) -> list[RangeDifference]:
    """Octaves of the position among the places of a text: neither whole documents nor a slope."""
    return [place for place in text.places if place.place[0].isdigit()]


def _draw_heatmap(axes: Axes, cells: list[dict[str, Any]]) -> Any:
    counts = [(cell["length"], cell["depth"], get_depth_counts(cell)) for cell in cells]
    if any(count is None for *_, count in counts):
        counts = [(cell["length"], "any", (cell["right"], cell["answers"])) for cell in cells]
    lengths, depths = sorted({length for length, *_ in counts}), sorted({depth for _, depth, _ in counts})
    shares = np.full((len(depths), len(lengths)), np.nan)
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            own = [count for *place, count in counts if count and place == [length, depth]]
            if not own:
                continue
            shares[row, column] = share = sum(right for right, _ in own) / sum(asked for _, asked in own)
            axes.annotate(
                f"{share:.0%}", (column, row), ha="center", va="center", fontsize=6, color="w" if share < 0.6 else "k"
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
    axes.set_yticks(range(len(depths)), [depth if depth == "any" else f"{depth:g}" for depth in depths], fontsize=7)
    return axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")


def plot_loss_by_position(evaluation: dict[str, Any]) -> Figure:
    """Bits per byte on held-out text against the bytes that stand before, with standard errors over windows."""
    found = evaluation["positions"]
    octaves = found["octaves"]
    figure, axes = make_panel(
        7, 3.4, f"Loss by position of {evaluation['run']}: {found['windows']} windows of {found['length']:,}"
    )
    middle = range(len(octaves))
    bits = [octave["loss"] / math.log(2) for octave in octaves]
    errors = [octave["error"] / math.log(2) for octave in octaves]
    axes.errorbar(middle, bits, yerr=errors, color=SEL, marker="o", capsize=3)
    axes.set_xticks(middle, [f"{octave['first']:,}–{octave['last']:,}" for octave in octaves], fontsize=7)
    axes.set(xlabel="position, bytes", ylabel="bits per byte")
    return figure
