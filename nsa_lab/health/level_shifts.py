"""Sudden and lasting changes of the size of a measured number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nsa_lab.health.verdict import Limits
from nsa_lab.runs.history import History, find_stages

SHIFT_READINGS = 3  # readings before and after, whose medians are compared
GAP_READINGS = 12  # in random order, 12 documents of one kind do not precede 12 of another kind
TINY = 1e-12


class LevelShift(NamedTuple):
    """Step, index of the layer and factor of the largest change."""

    step: int
    layer: int
    factor: float


def find_level_shift(history: History, steps: np.ndarray, values: np.ndarray, limits: Limits) -> LevelShift | None:
    """Return a change of `values` [readings, layers] by more than a factor from readings to the next ones; None without.

    Stages are not compared. The first tenth of a stage, in which a model changes fast, is not judged.
    """
    largest = LevelShift(0, 0, 1.0)
    stages, size = find_stages(steps, history.config.train), SHIFT_READINGS
    for stage in np.unique(stages):
        own_steps, own = steps[stages == stage], values[stages == stage]
        start = int(len(own) * limits.course_start)
        own_steps, own = own_steps[start:], own[start:]
        if len(own) < 2 * size:
            continue
        medians = np.median(np.lib.stride_tricks.sliding_window_view(own, size, axis=0), axis=-1)
        before, after = medians[:-size], medians[size:]
        is_known = (before > 0) & (after > 0)  # other checks judge zeros
        ratios = np.divide(after, before, out=np.ones_like(after), where=is_known)
        factors = np.maximum(ratios, 1 / ratios)
        index, layer = (int(place) for place in np.unravel_index(factors.argmax(), factors.shape))
        if factors[index, layer] > largest.factor:
            largest = LevelShift(int(own_steps[index + size]), layer, float(factors[index, layer]))
    return largest if largest.factor > limits.level_shift else None


def find_gap(history: History, steps: np.ndarray, values: np.ndarray, limits: Limits) -> LevelShift | None:
    """Return a change by which all `values` [readings] of a window are far from all of the next window; None without.

    For numbers with much noise, such as the loss of the few documents that start in a batch, of which no median is known.
    """
    largest = LevelShift(0, 0, 0.0)
    stages = find_stages(steps, history.config.train)
    for stage in np.unique(stages):
        own_steps, own = steps[stages == stage], values[stages == stage]
        start = int(len(own) * limits.course_start)
        own_steps, own = own_steps[start:], own[start:]
        if len(own) < 2 * GAP_READINGS:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(own, GAP_READINGS)
        lowest, highest = np.maximum(windows.min(axis=1), TINY), np.maximum(windows.max(axis=1), TINY)
        before, after = slice(None, -GAP_READINGS), slice(GAP_READINGS, None)
        factors = np.maximum(lowest[before] / highest[after], lowest[after] / highest[before])
        index = int(factors.argmax())
        if factors[index] > largest.factor:
            largest = LevelShift(int(own_steps[index + GAP_READINGS]), 0, float(factors[index]))
    return largest if largest.factor > limits.loss_shift else None


def find_swings(values: np.ndarray, factor: float, count: int) -> tuple[int, int] | None:
    """Return the number of changes in a row that rise and fall in turns, and the index of their last reading.

    Only changes of `values` [readings] by more than `factor` count. None unless there are at least `count`.
    """
    changes = np.diff(np.log(np.maximum(values, TINY)))
    directions = np.where(np.abs(changes) > np.log(factor), np.sign(changes), 0.0)
    streak = 0
    for index in range(1, len(directions)):
        streak = streak + 1 if directions[index] * directions[index - 1] < 0 else 0
        if streak + 1 >= count:
            return streak + 1, index + 1
    return None
