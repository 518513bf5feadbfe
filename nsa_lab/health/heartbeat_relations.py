"""Relations between heartbeats, which a thread of the trainer writes, and the events of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from nsa_lab.health.due_steps import count_tokens
from nsa_lab.health.verdict import LIMITS, Problem
from nsa_lab.runs.attempts import group_positions
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History

MIN_IDLE = 10  # steps with heartbeats in the phase `step` whose GPU utilization cannot all be 0 (at most 7% are, measured)
MAX_RACES = 1  # heartbeats that are written between the two assignments of a step and its tokens (0 measured)
GAP = 5.0  # maximum time of training without a heartbeat / interval of heartbeats (1.0 measured)
MIN_GAP_S = 30.0  # with short intervals, other threads may delay a heartbeat
MIN_INTERVALS = 5  # intervals between readings with which the usual one is known
USUAL = 3.0  # a longer interval / the median is an evaluation, a save or a suspension


class _BeatsAndSteps(NamedTuple):
    """Heartbeats and `step` events of an attempt, in the order of the record."""

    number: int
    beats: Events
    steps: Events


def _iterate_attempts(history: History) -> Iterator[_BeatsAndSteps]:
    beats, steps = history.events_of_kind("heartbeat"), history.events_of_kind("step")
    steps_of = group_positions(steps.ints("attempt"))
    for number, own in group_positions(beats.ints("attempt")).items():
        if number in steps_of:
            yield _BeatsAndSteps(number, beats.select(own), steps.select(steps_of[number]))


def _check_steps(history: History) -> Problem | None:
    """A heartbeat has the last completed step, between the `step` events before and after it.

    It may be written one event later than its step was read. The trainer reads the results of a step after the next one.
    """
    for attempt in _iterate_attempts(history):
        own, recorded = attempt.beats.ints("step"), attempt.steps.ints("step")
        n_before = np.searchsorted(attempt.steps.lines(), attempt.beats.lines())
        lowest = np.where(n_before >= 2, recorded[np.maximum(n_before - 2, 0)], 0)
        highest = np.where(n_before + 1 < len(recorded), recorded[np.minimum(n_before + 1, len(recorded) - 1)], np.inf)
        is_wrong = (own < lowest) | (own > highest)
        if is_wrong.any():
            first = int(is_wrong.argmax())
            text = f"a heartbeat of step {own[first]:,} between readings of steps {lowest[first]:,} and "
            text += f"{highest[first]:,.0f}"
            return Problem(own[is_wrong], text)
    return None


def _check_tokens(history: History) -> Problem | None:
    """A heartbeat has the tokens of its step, or of the step before if it was written while the step changed."""
    beats = history.events_of_kind("heartbeat")
    steps = beats.ints("step")
    is_wrong = beats.numbers("tokens") != count_tokens(history, steps)
    if is_wrong.sum() <= MAX_RACES:
        return None
    return Problem(steps[is_wrong], "the heartbeats have other numbers of tokens than their steps")


def _check_suspensions(history: History) -> Problem | None:
    """A suspension since the last heartbeat is not longer than the time since then."""
    for attempt in _iterate_attempts(history):
        times, suspended = attempt.beats.numbers("t"), attempt.beats.numbers("suspended_s")
        is_wrong = suspended[1:] > np.diff(times) + LIMITS.clock_back_s
        if is_wrong.any():
            first = int(is_wrong.argmax()) + 1
            text = (
                f"a suspension of {suspended[first]:,.0f} s in the {times[first] - times[first - 1]:,.0f} s since the last"
            )
            return Problem(attempt.beats.ints("step")[1:][is_wrong], f"{text} heartbeat")
    return None


def _check_utilization(history: History) -> Problem | None:
    """A GPU that trains is not idle at every heartbeat: it would be the utilization of another one."""
    beats = history.events_of_kind("heartbeat")
    utilization, steps = beats.numbers("gpu_util"), beats.ints("step")
    is_training = np.array([phase == "step" for phase in beats.values("phase")], dtype=bool) & np.isfinite(utilization)
    for number, positions in group_positions(beats.ints("attempt")).items():
        own = positions[is_training[positions]]
        if len(np.unique(steps[own])) >= MIN_IDLE and not utilization[own].any():
            text = f"the GPU utilization is 0 at all {len(own)} heartbeats in the phase step of attempt {number},"
            return Problem(steps[own], text)
    return None


def _check_gaps(history: History) -> Problem | None:
    """Heartbeats go on while steps are recorded. Intervals in which the trainer may have been suspended do not count."""
    for attempt in _iterate_attempts(history):
        config = history.config_of_attempt(attempt.number)
        times = attempt.steps.numbers("t")
        intervals = np.diff(times)
        if config is None or len(intervals) < MIN_INTERVALS:
            continue
        trained = np.where(intervals <= USUAL * np.median(intervals), np.maximum(intervals, 0.0), 0.0)
        # Time of training up to each reading, and between a heartbeat and the next one.
        total = np.concatenate([[0.0], np.cumsum(trained)])
        edges = np.concatenate([[0], np.searchsorted(attempt.steps.lines(), attempt.beats.lines()), [len(times)]])
        first, last = np.minimum(edges[:-1], len(times) - 1), np.maximum(edges[1:] - 1, 0)
        gaps = np.where(last > first, total[last] - total[first], 0.0)
        worst = int(gaps.argmax())
        if gaps[worst] > max(GAP * config.runtime.heartbeat_s, MIN_GAP_S):
            text = f"no heartbeat in {gaps[worst]:,.0f} s of training of attempt {attempt.number}, expected one every "
            step = attempt.steps.ints("step")[first[worst]]
            return Problem(np.array([step]), f"{text}{config.runtime.heartbeat_s:g} s, from")
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_steps,
    _check_tokens,
    _check_suspensions,
    _check_utilization,
    _check_gaps,
)
