"""Plot the loss difference of two runs with its uncertainty. Two loss curves in one figure would hide small differences."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.run_axes import RUN_COLOURS, STEP_LABEL, Run, format_step_axis
from nsa_lab.figures.style import add_legend, annotate_empty, make_panel
from nsa_lab.health.paired_difference import PairedDifference, compute_paired_difference, pair_training_losses
from nsa_lab.runs.history import History

N_SEGMENTS = 24
# Early in training, a model that learns something a few steps later has a large difference, which would set the scale.
SKIPPED_FRACTION = 0.1


def plot_loss_difference(first: Run, second: Run, *, title: str = "NSA minus dense") -> Figure:
    """Plot the bits per byte of `first` minus those of `second` over steps.

    Shown are the means of N_SEGMENTS segments of logged training batches with 95% intervals, and the validation loss. The
    axes omit the first tenth of the steps, and a note gives the largest validation difference there.
    """
    runs = History.read(first), History.read(second)
    figure, axes = make_panel(9, 4.2, f"{title}, bits per byte (below 0 the first is better)")
    steps, differences = (array[1:] for array in _get_training_differences(*runs))
    axes.axhline(0, color="black", linewidth=0.8)
    if len(steps) < 2 * N_SEGMENTS:
        annotate_empty(axes, "too few batches that both runs logged")
        return figure
    later = steps > SKIPPED_FRACTION * steps[-1]
    _draw_segments(axes, steps[later], differences[later])
    validation = _get_validation_differences(*runs)
    shown = validation[validation[:, 0] > SKIPPED_FRACTION * steps[-1]]
    axes.plot(shown[:, 0], shown[:, 1], "o", markersize=3.5, color=RUN_COLOURS[1], label="validation, each evaluation")
    axes.set(xlabel=STEP_LABEL, ylabel="bits per byte")
    format_step_axis(axes)
    add_legend(axes)
    early = validation[(validation[:, 0] > 0) & (validation[:, 0] <= SKIPPED_FRACTION * steps[-1])]
    if len(early):
        step, largest = early[np.abs(early[:, 1]).argmax()]
        axes.set_title(
            f"largest validation difference in the omitted steps: {largest:+.2f} at step {step:,.0f}",
            fontsize=8,
            loc="left",
            y=-0.24,
        )
    return figure


def _draw_segments(axes: Axes, steps: np.ndarray, differences: np.ndarray) -> None:
    segments = [
        (segment_steps.mean(), compute_paired_difference("", values, np.zeros(len(values))))
        for segment_steps, values in zip(
            np.array_split(steps, N_SEGMENTS), np.array_split(differences, N_SEGMENTS), strict=True
        )
    ]
    points = [(step, result.mean, result.half_width) for step, result in segments if isinstance(result, PairedDifference)]
    step, mean, half_width = np.array(points).T
    axes.errorbar(
        step, mean, half_width, fmt="s", markersize=3, linewidth=1, capsize=2, color=RUN_COLOURS[0],
        label="training, same batches: mean and 95% interval",
    )  # fmt: skip


def _get_training_differences(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = pair_training_losses(first, second)
    return steps, losses[0] - losses[1]


def _get_validation_differences(first: History, second: History) -> np.ndarray:
    """Return [n, 2]: step and difference of every evaluation that both runs have."""
    first_bpb, second_bpb = (
        dict(zip(*(values.tolist() for values in run.validation()), strict=True)) for run in (first, second)
    )
    return np.array([(step, first_bpb[step] - second_bpb[step]) for step in first_bpb if step in second_bpb]).reshape(-1, 2)
