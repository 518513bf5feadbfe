"""Pictures of an evaluation: what was found, by length and depth, and loss by position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.style import SEL, panel
from nsa_lab.runs.evaluation import found_at_depth

NAMES = {"needle": "needle", "multi_key": "needle among other facts", "multi_query": "several questions"}


def retrieval_map(evaluation: dict[str, Any]) -> Figure:
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
        pictures.append(_map(one, [cell for cell in evaluation["retrieval"] if cell["task"] == task]))
        one.set_title(NAMES.get(task, task), fontsize=9)
        one.set(xlabel="length, bytes", ylabel="" if place else "depth of the fact (1: at the question)")
    figure.colorbar(pictures[-1], ax=axes.tolist(), label="found")
    return figure


def _map(axes: Axes, cells: list[dict[str, Any]]) -> Any:
    counts = [(cell["length"], cell["depth"], found_at_depth(cell)) for cell in cells]
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


def loss_by_position(evaluation: dict[str, Any]) -> Figure:
    """Bits per byte on held-out text against the bytes that stand before, with standard errors over windows."""
    found = evaluation["positions"]
    octaves = found["octaves"]
    figure, axes = panel(
        7, 3.4, f"Loss by position of {evaluation['run']}: {found['windows']} windows of {found['length']:,}"
    )
    middle = range(len(octaves))
    bits = [octave["loss"] / math.log(2) for octave in octaves]
    errors = [octave["error"] / math.log(2) for octave in octaves]
    axes.errorbar(middle, bits, yerr=errors, color=SEL, marker="o", capsize=3)
    axes.set_xticks(middle, [f"{octave['first']:,}–{octave['last']:,}" for octave in octaves], fontsize=7)
    axes.set(xlabel="position, bytes", ylabel="bits per byte")
    return figure
