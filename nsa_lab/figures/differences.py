"""The difference of two runs, with its noise; two curves would hide each other."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.run_axes import RUN_COLOURS, STEP, Run, over_steps
from nsa_lab.figures.style import legend, panel, say_nothing
from nsa_lab.health.paired import Difference, difference, paired_losses
from nsa_lab.runs.history import History

STRETCHES = 24
# Where learning begins, runs are apart by what one of them learns some steps earlier; that would hide all the rest.
LEFT_OUT = 0.1


def loss_difference(first: Run, second: Run, *, named: str = "NSA less dense") -> Figure:
    """Bits per byte of a run less those of another over steps: batches in stretches with their 95 % intervals, validation.

    The first tenth of the steps lies outside the axes, and what its largest difference was is said.
    """
    runs = History.read(first), History.read(second)
    figure, axes = panel(9, 4.2, f"{named}: bits per byte, below 0 the first is better")
    steps, apart = (array[1:] for array in _training(*runs))
    axes.axhline(0, color="black", linewidth=0.8)
    if len(steps) < 2 * STRETCHES:
        say_nothing(axes, "too few batches that both logged")
        return figure
    later = steps > LEFT_OUT * steps[-1]
    _draw_stretches(axes, steps[later], apart[later])
    held_out = _validation(*runs)
    shown = held_out[held_out[:, 0] > LEFT_OUT * steps[-1]]
    axes.plot(shown[:, 0], shown[:, 1], "o", markersize=3.5, color=RUN_COLOURS[1], label="validation, each evaluation")
    axes.set(xlabel=STEP, ylabel="bits per byte")
    over_steps(axes)
    legend(axes)
    early = held_out[(held_out[:, 0] > 0) & (held_out[:, 0] <= LEFT_OUT * steps[-1])]
    if len(early):
        at, most = early[np.abs(early[:, 1]).argmax()]
        axes.set_title(
            f"before the axes begin, validation was apart by {most:+.2f} at most, at step {at:,.0f}",
            fontsize=8,
            loc="left",
            y=-0.24,
        )
    return figure


def _draw_stretches(axes: Axes, steps: np.ndarray, apart: np.ndarray) -> None:
    found = [
        (mine.mean(), difference("", values, np.zeros(len(values))))
        for mine, values in zip(np.array_split(steps, STRETCHES), np.array_split(apart, STRETCHES), strict=True)
    ]
    told = [(at, one.mean, one.half) for at, one in found if isinstance(one, Difference)]
    at, mean, half = np.array(told).T
    axes.errorbar(
        at, mean, half, fmt="s", markersize=3, linewidth=1, capsize=2, color=RUN_COLOURS[0],
        label="training, same batches: mean and 95 % interval",
    )  # fmt: skip


def _training(first: History, second: History) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = paired_losses(first, second)
    return steps, losses[0] - losses[1]


def _validation(first: History, second: History) -> np.ndarray:
    """[n, 2]: step and difference of every evaluation of both."""
    ours, theirs = (dict(zip(*(values.tolist() for values in run.validation()), strict=True)) for run in (first, second))
    return np.array([(step, ours[step] - theirs[step]) for step in ours if step in theirs]).reshape(-1, 2)
