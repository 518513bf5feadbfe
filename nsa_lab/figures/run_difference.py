"""The difference of two runs, with its noise; two curves would hide each other."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.run_axes import RUN_COLOURS, STEP_LABEL, Run, format_step_axis
from nsa_lab.figures.style import add_legend, annotate_empty, make_panel
from nsa_lab.health.paired_difference import PairedDifference, compute_paired_difference, pair_training_losses
from nsa_lab.runs.history import History

N_SEGMENTS = 24
# Where learning begins, runs are apart by what one of them learns some steps earlier; that would hide all the rest.
SKIPPED_FRACTION = 0.1


def plot_loss_difference(first: Run, second: Run, *, title: str = "NSA less dense") -> Figure:
    """Bits per byte of a run less those of another over steps: batches in stretches with their 95 % intervals, validation.

    The first tenth of the steps lies outside the axes, and what its largest difference was is said.
    """
    runs = History.read(first), History.read(second)
    figure, axes = make_panel(9, 4.2, f"{title}: bits per byte, below 0 the first is better")
    steps, apart = (array[1:] for array in _get_training_differences(*runs))
    axes.axhline(0, color="black", linewidth=0.8)
    if len(steps) < 2 * N_SEGMENTS:
        annotate_empty(axes, "too few batches that both logged")
        return figure
    later = steps > SKIPPED_FRACTION * steps[-1]
    _draw_segments(axes, steps[later], apart[later])
    held_out = _get_validation_differences(*runs)
    shown = held_out[held_out[:, 0] > SKIPPED_FRACTION * steps[-1]]
    axes.plot(shown[:, 0], shown[:, 1], "o", markersize=3.5, color=RUN_COLOURS[1], label="validation, each evaluation")
    axes.set(xlabel=STEP_LABEL, ylabel="bits per byte")
    format_step_axis(axes)
    add_legend(axes)
    early = held_out[(held_out[:, 0] > 0) & (held_out[:, 0] <= SKIPPED_FRACTION * steps[-1])]
    if len(early):
        at, most = early[np.abs(early[:, 1]).argmax()]
        axes.set_title(
            f"before the axes begin, validation was apart by {most:+.2f} at most, at step {at:,.0f}",
            fontsize=8,
            loc="left",
            y=-0.24,
        )
    return figure


def _draw_segments(axes: Axes, steps: np.ndarray, differences: np.ndarray) -> None:
    found = [
        (mine.mean(), compute_paired_difference("", values, np.zeros(len(values))))
        for mine, values in zip(np.array_split(steps, N_SEGMENTS), np.array_split(differences, N_SEGMENTS), strict=True)
    ]
    told = [(at, one.mean, one.half_width) for at, one in found if isinstance(one, PairedDifference)]
    at, mean, half = np.array(told).T
    axes.errorbar(
        at, mean, half, fmt="s", markersize=3, linewidth=1, capsize=2, color=RUN_COLOURS[0],
        label="training, same batches: mean and 95 % interval",
    )  # fmt: skip


def _get_training_differences(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = pair_training_losses(first, second)
    return steps, losses[0] - losses[1]


def _get_validation_differences(first: History, second: History) -> np.ndarray:
    """[n, 2]: step and difference of every evaluation of both."""
    ours, theirs = (dict(zip(*(values.tolist() for values in run.validation()), strict=True)) for run in (first, second))
    return np.array([(step, ours[step] - theirs[step]) for step in ours if step in theirs]).reshape(-1, 2)
