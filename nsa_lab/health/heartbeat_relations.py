"""Relations between heartbeats, which a thread of the trainer writes, and the events of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nsa_lab.config import RunConfig
from nsa_lab.health.due_steps import count_tokens
from nsa_lab.health.verdict import LIMITS, Problem
from nsa_lab.runs.attempts import group_positions
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History

MIN_IDLE = 10  # heartbeats in a row in the phase `step` whose GPU utilization cannot all be 0 (at most 2, measured)
USUAL_RATE = 0.5  # minimum steps per second between two of them / the median
MAX_RACES = 1  # heartbeats that are written between the two assignments of a step and its tokens (0 measured)
GAP = 5.0  # maximum time of training without a heartbeat / interval of heartbeats (1.0 measured)
MIN_GAP_S = 30.0  # with short intervals, other threads may delay a heartbeat
MAX_OTHER_STEPS = 2  # steps of heartbeats in a phase without an event of it (0 measured)
MIN_INTERVALS = 5  # intervals between readings with which the usual one is known


class _AttemptEvents(NamedTuple):
    """Heartbeats and `step` events of an attempt, in the order of the record. `config`: None if unknown."""

    number: int
    config: RunConfig | None
    beats: Events
    steps: Events


def _check_attempts(history: History) -> Problem | None:
    """Check the relations of each attempt; their events are selected once."""
    beats, steps = history.events_of_kind("heartbeat"), history.events_of_kind("step")
    steps_of = group_positions(steps.ints("attempt"))
    for number, own in group_positions(beats.ints("attempt")).items():
        if number in steps_of:
            config = history.config_of_attempt(number)
            attempt = _AttemptEvents(number, config, beats.select(own), steps.select(steps_of[number]))
            if problem := next(filter(None, (find(attempt) for find in ATTEMPT_RELATIONS)), None):
                return problem
    return None


def _check_steps(attempt: _AttemptEvents) -> Problem | None:
    """A heartbeat has the last completed step, between the `step` events before and after it.

    It may be written one event later than its step was read. The trainer reads the results of a step after the next one.
    """
    own, recorded = attempt.beats.ints("step"), attempt.steps.ints("step")
    n_before = np.searchsorted(attempt.steps.lines(), attempt.beats.lines())
    lowest = np.where(n_before >= 2, recorded[np.maximum(n_before - 2, 0)], 0)
    highest = np.where(n_before + 1 < len(recorded), recorded[np.minimum(n_before + 1, len(recorded) - 1)], np.inf)
    is_wrong = (own < lowest) | (own > highest)
    if not is_wrong.any():
        return None
    first = int(is_wrong.argmax())
    text = f"a heartbeat of step {own[first]:,} between readings of steps {lowest[first]:,} and {highest[first]:,.0f}"
    return Problem(own[is_wrong], text)


def _check_tokens(history: History) -> Problem | None:
    """A heartbeat has the tokens of its step, or of the step before if it was written while the step changed."""
    beats = history.events_of_kind("heartbeat")
    steps = beats.ints("step")
    is_wrong = beats.numbers("tokens") != count_tokens(history, steps)
    if is_wrong.sum() <= MAX_RACES:
        return None
    return Problem(steps[is_wrong], "the heartbeats have other numbers of tokens than their steps")


def _check_suspensions(attempt: _AttemptEvents) -> Problem | None:
    """A suspension is not longer than the time since the heartbeat before the last.

    The heartbeat after a suspension may be written before the trainer knows of it; then the next one has its duration.
    """
    times, suspended = attempt.beats.numbers("t"), attempt.beats.numbers("suspended_s")
    elapsed = times[2:] - times[:-2]
    is_wrong = suspended[2:] > elapsed + LIMITS.clock_back_s
    if not is_wrong.any():
        return None
    first = int(is_wrong.argmax())
    text = (
        f"a suspension of {suspended[first + 2]:,.0f} s in the {elapsed[first]:,.0f} s since the heartbeat before the last"
    )
    return Problem(attempt.beats.ints("step")[2:][is_wrong], text)


def _check_utilization(attempt: _AttemptEvents) -> Problem | None:
    """A GPU that trains is not idle at heartbeats in a row: it would be the utilization of another one.

    A GPU that waits is idle, so only heartbeats count between which the steps go on at their usual rate.
    """
    utilization, steps, times = (attempt.beats.numbers(name) for name in ("gpu_util", "step", "t"))
    is_training = np.array([phase == "step" for phase in attempt.beats.values("phase")], dtype=bool)
    utilization, steps, times = (values[is_training & np.isfinite(utilization)] for values in (utilization, steps, times))
    if len(utilization) <= MIN_IDLE:
        return None
    rates = np.diff(steps) / np.maximum(np.diff(times), 1e-3)
    is_busy = utilization[1:] > 0
    usual = np.median(rates[is_busy] if is_busy.any() else rates)
    is_idle = ~is_busy & (rates >= USUAL_RATE * usual) & (np.diff(steps) > 0)
    streaks = np.convolve(is_idle, np.ones(MIN_IDLE), "valid") > MIN_IDLE - 0.5
    if not streaks.any():
        return None
    first = int(streaks.argmax()) + 1
    text = f"the GPU utilization is 0 at {MIN_IDLE} heartbeats in a row in the phase step of attempt {attempt.number},"
    return Problem(steps[first:].astype(np.int64), text)


def _check_gaps(attempt: _AttemptEvents) -> Problem | None:
    """Heartbeats go on while the trainer trains.

    An interval between readings that is longer than usual may include a suspension, an evaluation or a save, which is
    then not counted: it may be within the gap.
    """
    times = np.maximum.accumulate(attempt.steps.numbers("t"))
    intervals = np.diff(times)
    if attempt.config is None or len(intervals) < MIN_INTERVALS:
        return None
    others = np.concatenate([[0.0], np.cumsum(np.maximum(intervals - np.median(intervals), 0.0))])
    beats = np.clip(attempt.beats.numbers("t"), times[0], times[-1])
    edges = np.maximum.accumulate(np.concatenate([times[:1], beats, times[-1:]]))
    first = np.searchsorted(times, edges[:-1], "right") - 1
    gaps = np.diff(edges) - (others[np.searchsorted(times, edges[1:])] - others[first])
    worst, interval = int(gaps.argmax()), attempt.config.runtime.heartbeat_s
    if not gaps[worst] > max(GAP * interval, MIN_GAP_S):
        return None
    text = f"no heartbeat in {gaps[worst]:,.0f} s of training of attempt {attempt.number}, expected one every "
    step = attempt.steps.ints("step")[first[worst]]
    return Problem(np.array([step]), f"{text}{interval:g} s, from")


def _check_phases(history: History) -> Problem | None:
    """Heartbeats in the phase of an evaluation or a save are of steps that were evaluated or saved.

    The last one may have been interrupted, and a heartbeat may be written while the step changes.
    """
    beats = history.events_of_kind("heartbeat")
    phases = np.array(beats.values("phase"), dtype=object)
    for phase, kind in (("eval", "eval"), ("save", "checkpoint")):
        events, own = history.events_of_kind(kind).ints("attempt"), beats.select(phases == phase)
        for number, positions in group_positions(own.ints("attempt")).items():
            steps, count = np.unique(own.ints("step")[positions]), int((events == number).sum())
            if len(steps) > count + MAX_OTHER_STEPS:
                text = f"heartbeats in the phase {phase} of {len(steps)} steps in attempt {number}, which has {count},"
                return Problem(steps, text)
    return None


ATTEMPT_RELATIONS: tuple[Callable[[_AttemptEvents], Problem | None], ...] = (
    _check_steps,
    _check_suspensions,
    _check_utilization,
    _check_gaps,
)
RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_attempts,
    _check_tokens,
    _check_phases,
)
