"""Plots of evaluations: facts found by length and depth, loss by position, and accuracy on the tiny recall task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN, add_legend, add_legend_below, make_panel, stack_panels
from nsa_lab.health.comparison import NeedleResult
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.runs.evaluation import get_depth_counts

TASK_NAMES = {"needle": "needle", "multi_key": "needle among other facts", "multi_query": "several questions"}
MODEL_COLOURS = (DENSE, SEL, CMP, WIN, FORCED)


def plot_retrieval(evaluation: dict[str, Any]) -> Figure:
    """Plot the fraction of facts found at each length and depth, one panel per task, from `evaluation.json`.

    In a sequence with several questions, only the first asks for the fact at that depth. Evaluations that did not count it
    separately show all questions, without depths.
    """
    tasks = list(dict.fromkeys(cell["task"] for cell in evaluation["retrieval"]))
    figure = Figure(figsize=(6.5, 0.8 + 2.7 * max(len(tasks), 1)), layout="constrained")
    figure.suptitle(f"Facts found by {evaluation['run']} at step {evaluation['step']:,}, fraction of facts", fontsize=11)
    panels = figure.subplots(max(len(tasks), 1), 1, squeeze=False).flatten()
    if not tasks:
        panels[0].set_axis_off()
        panels[0].annotate("no task fits into the requested lengths", (0.5, 0.5), xycoords="axes fraction", ha="center")
        return figure
    images = []
    for axes, task in zip(panels, tasks, strict=True):
        images.append(_draw_heatmap(axes, [cell for cell in evaluation["retrieval"] if cell["task"] == task]))
        axes.set_title(TASK_NAMES.get(task, task), fontsize=9)
        axes.set(xlabel="length, bytes", ylabel="depth of the fact\n(1: at the question)")
    figure.colorbar(images[-1], ax=panels.tolist(), label="found")
    return figure


def plot_retrieval_grid(cells: Mapping[str, Sequence[dict[str, Any]]], tasks: Sequence[str]) -> Figure:
    """Plot the fraction of facts found for several models, over all seeds: one row per task, one column per model.

    `cells` maps a model to the `retrieval` entries of its evaluations. Raises ValueError if there is no model or no task.
    """
    if not cells or not tasks:
        raise ValueError(f"expected at least one model and one task, got {len(cells)} models and {len(tasks)} tasks")
    figure = Figure(figsize=(1.2 + 3.3 * len(cells), 0.8 + 2.6 * len(tasks)), layout="constrained")
    figure.suptitle("Facts found by length and depth, fraction of facts", fontsize=11)
    grid = figure.subplots(len(tasks), len(cells), squeeze=False)
    images = []
    for row, task in zip(grid, tasks, strict=True):
        for axes, (model, model_cells) in zip(row, cells.items(), strict=True):
            images.append(_draw_heatmap(axes, [cell for cell in model_cells if cell["task"] == task]))
            axes.set_title(f"{model}:\n{TASK_NAMES.get(task, task)}", fontsize=8)  # long names get a separate line
            axes.set(xlabel="length, bytes" if row is grid[-1] else "", ylabel="" if axes is not row[0] else "depth")
    figure.colorbar(images[-1], ax=grid.ravel().tolist(), label="found")
    return figure


def plot_facts_by_length(results: Sequence[NeedleResult]) -> Figure:
    """Plot the fraction of facts found by length of the text, over all seeds, with 95% intervals: one panel per task.

    Raises ValueError if no result has answers.
    """
    answered = [result for result in results if result.every]
    if not answered:
        raise ValueError("expected at least one result with answers, got none")
    tasks = list(dict.fromkeys(result.task for result in answered))
    models = list(dict.fromkeys(result.model for result in answered))
    figure = Figure(figsize=(7, 0.9 + 2.1 * len(tasks)), layout="constrained")
    figure.suptitle("Facts found by length of the text, over all seeds, with 95% intervals", fontsize=11)
    lengths = sorted({result.length for result in answered})
    lowest = min(result.every.low for result in answered if result.every)
    margin = 0.08 * (1 - lowest) + 1e-3
    for axes, task in zip(stack_panels(figure, len(tasks)), tasks, strict=True):
        for index, model in enumerate(models):
            points = [
                (lengths.index(result.length), result.every.share, result.every.low, result.every.high)
                for result in answered
                if result.every and (result.task, result.model) == (task, model)
            ]
            if points:
                x, share, low, high = np.array(points).T
                offset = 0.12 * (index - (len(models) - 1) / 2)
                axes.errorbar(
                    x + offset,
                    share,
                    [share - low, high - share],
                    fmt="o",
                    markersize=4,
                    capsize=3,
                    color=(SEL, DENSE, CMP, WIN, FORCED)[index % 5],
                    label=model,
                )
        axes.set_title(TASK_NAMES.get(task, task), fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(ylabel="found", ylim=(lowest - margin, 1 + margin))
        axes.grid(alpha=0.25, linewidth=0.5)
    add_legend(figure.axes[0], columns=len(models))
    figure.axes[-1].set_xlabel("length of the text, bytes")
    return figure


def plot_difference_by_position(text: TextDifference, target: float | None = None) -> Figure:
    """Plot the difference in bits per byte between a model and the baseline in each position range, with 95% intervals.

    `target` is drawn as a horizontal line. The y axis covers the intervals over windows. Intervals over two or three
    seeds may be many times longer; they are clipped.
    """
    figure, axes = make_panel(8, 3.8, f"{text.text}: {text.model} minus {text.baseline} (below 0 the first is better)")
    ranges = get_position_ranges(text)
    x = np.arange(len(ranges))
    axes.axhline(0, color="black", linewidth=0.8)
    if target is not None:
        axes.axhline(target, color=DENSE, linewidth=0.8, linestyle="--", label=f"{target:+g}")
    for offset, colour, label, intervals in (
        (-0.08, SEL, "95% over windows", [place.over_windows for place in ranges]),
        (0.08, DENSE, "95% over seeds", [place.over_seeds for place in ranges]),
    ):
        points = [
            (at, place.difference, *interval) for at, place, interval in zip(x, ranges, intervals, strict=True) if interval
        ]
        if points:
            at, mean, low, high = np.array(points).T
            axes.errorbar(at + offset, mean, [mean - low, high - mean], fmt="o", ms=4, capsize=3, color=colour, label=label)
    axes.plot(x, [place.difference for place in ranges], "x", color="black", markersize=4, label="mean")
    if shown := [bound for place in ranges for bound in place.over_windows or ()]:
        low, high = min(0.0, *shown), max(target or 0.0, *shown)
        axes.set_ylim(low - (high - low) / 4, high + (high - low) / 4)
    axes.set_xticks(x, [place.place.replace(" to ", "–") for place in ranges], fontsize=7, rotation=20)
    axes.set(xlabel="position, bytes", ylabel="bits per byte")
    add_legend(axes, columns=2)
    return figure


def get_position_ranges(text: TextDifference) -> list[RangeDifference]:
    """Return the position ranges of a text, without the entries for whole documents and for the slope."""
    return [place for place in text.places if place.place[0].isdigit()]


def _draw_heatmap(axes: Axes, cells: list[dict[str, Any]]) -> Any:
    counts = [(cell["length"], cell["depth"], get_depth_counts(cell)) for cell in cells]
    if any(count is None for *_, count in counts):
        counts = [(cell["length"], "any", (cell["right"], cell["answers"])) for cell in cells]
    lengths, depths = sorted({length for length, *_ in counts}), sorted({depth for _, depth, _ in counts})
    shares = np.full((len(depths), len(lengths)), np.nan)
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell_counts = [count for *place, count in counts if count and place == [length, depth]]
            if not cell_counts:
                continue
            shares[row, column] = share = sum(n_right for n_right, _ in cell_counts) / sum(
                n_questions for _, n_questions in cell_counts
            )
            axes.annotate(
                f"{share:.0%}", (column, row), ha="center", va="center", fontsize=6, color="w" if share < 0.6 else "k"
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
    axes.set_yticks(range(len(depths)), [depth if depth == "any" else f"{depth:g}" for depth in depths], fontsize=7)
    return axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")


def plot_loss_by_position(evaluation: dict[str, Any]) -> Figure:
    """Plot bits per byte on held-out text against position, with standard errors over windows."""
    positions = evaluation["positions"]
    ranges = positions["octaves"]
    figure, axes = make_panel(
        7, 3.4, f"Loss by position of {evaluation['run']}: {positions['windows']} windows of {positions['length']:,}"
    )
    x = range(len(ranges))
    bpb = [item["loss"] / math.log(2) for item in ranges]
    errors = [item["error"] / math.log(2) for item in ranges]
    axes.errorbar(x, bpb, yerr=errors, color=SEL, marker="o", capsize=3)
    axes.set_xticks(x, [f"{item['first']:,}–{item['last']:,}" for item in ranges], fontsize=7, rotation=20)
    axes.set(xlabel="position, bytes", ylabel="bits per byte")
    return figure


def plot_recall_accuracy(curves: Mapping[str, Sequence[tuple[int, float]]], chance: float) -> Figure:
    """Plot the accuracy on the tiny recall task by step, one line per model. `chance` is drawn as a dotted line.

    The step axis is linear up to step 10 and logarithmic beyond, so that the first steps can be seen.
    """
    figure, axes = make_panel(7, 3.6, "Tiny recall: accuracy by step")
    for index, (name, points) in enumerate(curves.items()):
        steps, accuracies = zip(*points, strict=True) if points else ((), ())
        width = 1.2 + 0.8 * (len(curves) - 1 - index)  # a curve below another is wider, so that it stays visible
        axes.plot(
            steps,
            accuracies,
            "o-",
            markersize=3,
            color=MODEL_COLOURS[index % len(MODEL_COLOURS)],
            linewidth=width,
            label=name,
        )
    axes.axhline(chance, color="#999999", linestyle=":", linewidth=1, label="chance")
    axes.set_xscale("symlog", linthresh=10)
    last = max((step for points in curves.values() for step, _ in points), default=10)
    ticks = [step for step in (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if step <= last]
    axes.set_xticks(ticks, [f"{step:,}" for step in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="step (logarithmic from 10 on)", ylabel="accuracy", ylim=(-0.02, 1.02), xlim=(0, last * 1.05))
    add_legend_below(axes)
    return figure


def plot_ablation_accuracy(accuracies: Mapping[str, Mapping[str, float]], model_names: Sequence[str]) -> Figure:
    """Plot the accuracy under each ablation, models next to each other. `accuracies` maps model -> ablation -> accuracy.

    `model_names` lists all models in the order of their curves, so that each keeps its colour. Raises ValueError for a
    model that it does not contain.
    """
    figure, axes = make_panel(8, 3.6, "Tiny recall: accuracy with replaced block selection or a disabled branch")
    ablations = list(dict.fromkeys(name for by_ablation in accuracies.values() for name in by_ablation))
    width = 0.8 / max(len(accuracies), 1)
    for index, (model, by_ablation) in enumerate(accuracies.items()):
        colour = MODEL_COLOURS[list(model_names).index(model) % len(MODEL_COLOURS)]
        x = np.arange(len(ablations)) + (index - (len(accuracies) - 1) / 2) * width
        axes.bar(x, [by_ablation[name] for name in ablations], width, color=colour, label=model)
    axes.set_xticks(range(len(ablations)), ablations, fontsize=8)
    axes.set(ylabel="accuracy", ylim=(0, 1.02))
    add_legend_below(axes)
    return figure
