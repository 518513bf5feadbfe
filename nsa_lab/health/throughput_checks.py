"""Checks of throughput, data wait and memory growth."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from nsa_lab.health.recovered_problems import format_guard, format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.attempts import group_positions
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History, find_stages
from nsa_lab.runs.summary import format_size, format_speed

SETTLED_READINGS = 3  # readings of a stage after which its peak hardly grows (0.3% measured)
SETTLED_SHARE = 0.25  # of the readings of a stage, after which its peak does not grow (0.2% measured)
TREND_SHARE = 0.3  # of an attempt: the shortest part whose growth is judged (8% measured)
PART_READINGS = 3  # minimum number of heartbeats in a part of an attempt whose highest memory is compared
MIN_RISES = 3  # a longer text or another shape may raise the peak memory once or twice


def check_throughput(history: History, limits: Limits) -> Verdict:
    """Check for slowdowns: warnings of the trainer, and windows that are slow compared with the best tenth of their stage.

    All windows have the same number of steps, so if half of the run is ten times slower, half of the windows are slow. The
    first interval of each attempt contains compilation and is omitted. A slow run is a warning: its model is not affected.
    """
    warnings, recovered = split_by_attempt(
        history, [e for e in history.current_events("guard") if e.get("rule") == "slowdown"]
    )
    if warnings:
        text = f"{format_guard(warnings[0])}; possible cause: other programs on this machine"
        return Verdict("throughput", False, len(warnings), 0, text).to_warning()
    windows = _split_windows(history, limits.pace_window_s)
    if len(windows) < 5:
        return Verdict("throughput", None, None, limits.slow_share, "too short to judge")
    stages, speed, duration_s = (np.array(column) for column in zip(*windows, strict=True))
    # Stages with longer sequences are slower, so each stage has its own reference.
    best = {int(n): _compute_best_tenth(speed[stages == n]) for n in np.unique(stages)}
    slow = speed < limits.slow_factor * np.array([best[stage] for stage in stages])
    share, slow_s = float(slow.mean()), float(duration_s[slow].sum())
    text = (
        f"median {format_speed(history)} tokens/s; "
        f"{share:.1%} of the steps below {limits.slow_factor:.0%} of the speed of the best tenth, "
        f"{', then '.join(f'{tokens_per_s:,.0f}' for tokens_per_s in best.values())} (slowest {speed.min():,.0f})"
    )
    ok = share <= limits.slow_share or slow_s < limits.slow_min_s
    text += format_recovered(recovered, format_guard)
    return Verdict("throughput", ok, share, limits.slow_share, text).to_warning()


def _compute_best_tenth(speed: np.ndarray) -> float:
    """Return the highest median speed among ten parts of the run; fewer parts if a part would have under three windows."""
    return max(float(np.median(part)) for part in np.array_split(speed, min(10, max(1, len(speed) // 3))))


def _split_windows(history: History, window_s: float) -> list[tuple[int, float, float]]:
    """Split training into windows with equal numbers of steps. Return stage, tokens per second and seconds of each.

    A window lasts `window_s` at the median speed of its stage. It lies within one stage and one attempt.
    """
    train = history.config.train
    attempts, stages, n_steps, seconds = _list_intervals(history)
    windows: list[tuple[int, float, float]] = []
    for stage in np.unique(stages):
        in_stage = stages == stage
        steps_per_window = window_s / float(np.median(seconds[in_stage] / n_steps[in_stage]))
        positions = np.flatnonzero(in_stage)
        for group in group_positions(attempts[in_stage]).values():
            own = positions[group]
            ends = _find_window_ends(n_steps[own], steps_per_window)
            steps, durations = (np.diff(np.cumsum(values)[ends], prepend=0) for values in (n_steps[own], seconds[own]))
            speeds = steps * train.plan[stage].tokens_per_step / durations
            windows += zip([int(stage)] * len(ends), speeds.tolist(), durations.tolist(), strict=True)
    return windows


def _find_window_ends(n_steps: np.ndarray, steps_per_window: float) -> np.ndarray:
    """Return the indices of the last intervals of the windows, which have at least `steps_per_window` steps each."""
    totals: list[int] = np.cumsum(n_steps).tolist()
    ends, start = list[int](), 0
    while (end := bisect_left(totals, start + steps_per_window)) < len(totals):
        ends.append(end)
        start = totals[end]
    return np.array(ends, dtype=np.int64)


def _list_intervals(history: History) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return attempts, stages, steps and seconds of the intervals between log points of one stage and one attempt."""
    train = history.config.train
    steps, attempts = history.steps.ints("step"), history.steps.ints("attempt")
    stages = find_stages(steps, train)
    tokens = np.array([stage.tokens_per_step for stage in train.plan])[stages]
    # Both fields record the same time. If they differ, use the longer one.
    step_s = np.fmax(
        _keep_positive(history.steps.numbers("dt_s")), tokens / _keep_positive(history.steps.numbers("tokens_per_s"))
    )
    is_interval = np.concatenate([[False], (np.diff(attempts) == 0) & (np.diff(stages) == 0)])[: len(steps)]
    is_interval &= np.isfinite(step_s)
    n_steps = np.diff(steps, prepend=0)[is_interval]
    return attempts[is_interval], stages[is_interval], n_steps, n_steps * step_s[is_interval]


def _keep_positive(values: np.ndarray) -> np.ndarray:
    """Return `values` with NaN for those that are not positive finite numbers."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _sum_in_order(values: np.ndarray) -> float:
    """Return the sum, added from the first value to the last, so that recorded verdicts are reproduced to the last bit."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def check_data_wait(history: History, limits: Limits) -> Verdict:
    """Check the fraction of the training time spent waiting for data.

    A reading is a mean over the steps since the previous reading. Readings without both times are omitted.
    """
    n_steps = np.diff(history.steps.ints("step"), prepend=0)
    step_s, wait_s = _keep_positive(history.steps.numbers("dt_s")), history.steps.numbers("data_s")
    has_both = np.isfinite(step_s) & np.isfinite(wait_s)
    total_s = _sum_in_order((n_steps * step_s)[has_both])
    if not total_s:
        return Verdict("data wait", None, None, limits.data_wait, "not recorded")
    share = _sum_in_order((n_steps * wait_s)[has_both]) / total_s
    text = f"{share:.1%} of the training time was spent waiting for data"
    return Verdict("data wait", share <= limits.data_wait, share, limits.data_wait, text).to_warning()


def check_memory(history: History, limits: Limits) -> Verdict:
    """Check that memory does not grow: of the process over its heartbeats, and of the device over the peaks so far."""
    beats, steps = history.events_of_kind("heartbeat"), history.steps
    resident, peaks = _keep_positive(beats.numbers("rss_bytes")), _keep_positive(steps.numbers("mem_peak_bytes"))
    stages = find_stages(steps.ints("step"), history.config.train)
    beats_of, steps_of = group_positions(beats.ints("attempt")), group_positions(steps.ints("attempt"))
    on_gpu = {event["attempt"] for event in history.first_events if event.get("device", "cpu") != "cpu"}
    none = np.zeros(0, dtype=int)
    for attempt in sorted(beats_of.keys() | steps_of.keys()):
        own_beats, own_steps = beats_of.get(attempt, none), steps_of.get(attempt, none)
        problem = _find_memory_trend(_keep_finite(resident[own_beats]), attempt, limits)
        problem = problem or _find_peak_growth(_keep_finite(peaks[own_steps]), attempt, limits)
        if attempt in on_gpu:
            problem = problem or _find_peak_rises(peaks[own_steps], stages[own_steps], attempt, limits)
            problem = problem or _find_late_rise(history, steps.select(own_steps), stages[own_steps], limits)
        if problem:
            return Verdict("memory", False, *problem)
    is_finite = np.isfinite(resident)
    resident, phases = resident[is_finite], np.array(list(beats.values("phase")), dtype=object)[is_finite]
    if len(resident) < limits.memory_readings:
        return Verdict("memory", None, None, limits.memory_growth, "too few heartbeats to detect growth")
    half = len(resident) // 2
    # A save holds a copy of the optimizer's state for a moment, so phases are compared that both halves have.
    known = {*phases[:half]}
    is_known = np.array([phase in known for phase in phases[half:]])
    early, late = float(resident[:half].max()), float(resident[half:].max(where=is_known, initial=0.0))
    return Verdict(
        "memory",
        late / early <= limits.memory_growth,
        late / early,
        limits.memory_growth,
        f"resident memory at most {format_size(early)} in the first half, {format_size(late)} in the second",
    )


def _keep_finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _find_memory_trend(resident: np.ndarray, attempt: int, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text if the resident memory of an attempt grows along a line; None if it does not."""
    first, half, size = len(resident) // 5, len(resident) // 2, int(len(resident) * TREND_SHARE)
    ranges = [(first, len(resident), limits.memory_trend), (half, len(resident), limits.memory_trend_late)]
    ranges += [
        (start, start + size, limits.memory_trend) for start in range(first, len(resident) - size, max(size // 4, 1))
    ]
    for start, end, limit in ranges:
        if found := _fit_memory_trend(resident[start:end], limit, limits):
            growth, relative = found
            text = f"resident memory grows steadily in attempt {attempt}, by {format_size(growth)} ({relative:.0%}): a leak"
            return relative, limit, text
    # Shards are mapped into memory, so that resident memory may rise and fall again and again; its highest values stay.
    if len(resident) - first < limits.memory_readings * PART_READINGS:
        return None
    highest = np.array([part.max() for part in np.array_split(resident[first:], limits.memory_readings)])
    if found := _fit_memory_trend(highest, limits.memory_trend, limits):
        growth, relative = found
        text = f"the highest resident memory grows steadily in attempt {attempt}, by {format_size(growth)} ({relative:.0%})"
        return relative, limits.memory_trend, f"{text}: a leak"
    return None


def _fit_memory_trend(resident: np.ndarray, limit: float, limits: Limits) -> tuple[float, float] | None:
    """Return the growth along a line in bytes, and relative to the mean, if it is above the limit."""
    if len(resident) < limits.memory_readings or np.ptp(resident) == 0:
        return None
    places = np.arange(len(resident))
    growth = float(np.polyfit(places, resident, 1)[0]) * len(resident)
    correlation = float(np.corrcoef(places, resident)[0, 1])
    relative = growth / float(resident.mean())
    return (growth, relative) if relative > limit and correlation > limits.memory_correlation else None


def _find_peak_rises(
    peaks: np.ndarray, stages: np.ndarray, attempt: int, limits: Limits
) -> tuple[float, float, str] | None:
    """Return value, limit and text if the peak of a GPU keeps rising within the stages of an attempt; None if not.

    The first steps, evaluation and save of a stage allocate what the later ones use again. On a CPU it is the peak
    of the process, which grows for longer.
    """
    growth, n_rises = 1.0, 0
    for stage in np.unique(stages):
        settled = peaks[stages == stage]
        settled = settled[np.isfinite(settled)][SETTLED_READINGS:]
        if len(settled):
            growth, n_rises = growth * float(settled[-1] / settled[0]), n_rises + int((np.diff(settled) > 0).sum())
    if growth - 1 <= limits.peak_growth_steps or n_rises < MIN_RISES:
        return None
    text = f"the peak memory grows {n_rises} times within the stages of attempt {attempt}, by {growth - 1:.0%}: a leak"
    return growth - 1, limits.peak_growth_steps, text


def _find_late_rise(history: History, steps: Events, stages: np.ndarray, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text if the peak of a GPU rises after all kinds of work of a stage were done once.

    None if it does not. `steps`: the `step` events of an attempt.
    """
    numbers, peaks = steps.ints("step"), _keep_positive(steps.numbers("mem_peak_bytes"))
    own = history.events.select(history.events.ints("attempt") == steps[0]["attempt"]) if len(steps) else history.events
    work = [own.of_kind(kind).ints("step") for kind in ("eval", "reach", "conversion", "checkpoint")]
    work.append(numbers[steps.has("grad_norm_layers")])
    for stage in np.unique(stages):
        in_stage = numbers[stages == stage]
        first_of_each = [done[(done >= in_stage[0]) & (done < in_stage[-1])].min(initial=in_stage[-1] + 1) for done in work]
        done = [step for step in first_of_each if step <= in_stage[-1]]
        settled = peaks[stages == stage][int(len(in_stage) * SETTLED_SHARE) :]
        settled = settled[in_stage[int(len(in_stage) * SETTLED_SHARE) :] > max(done, default=0)]
        settled = _keep_finite(settled)[1:]  # the first one may include that work
        if len(settled) < limits.memory_readings:
            continue
        growth = float(settled[-1] / settled[0] - 1)
        if growth > limits.peak_rise_late:
            text = f"the peak memory rises by {growth:.0%} in stage {stage + 1}, after an evaluation, statistics and a save"
            return growth, limits.peak_rise_late, f"{text}: a leak, or other kernels"
    return None


def _find_peak_growth(peaks: np.ndarray, attempt: int, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text if the peak memory keeps growing in the second half of an attempt; None if not."""
    if streak := _find_peak_streak(peaks, limits):
        text = f"the peak memory grows in {streak[0]} readings in a row of attempt {attempt}, by {streak[1]:.0%}: a leak"
        return streak[1], limits.peak_growth, text
    late = peaks[len(peaks) // 2 :]
    if len(late) < limits.memory_readings:
        return None
    growth = float(late[-1] / late[0] - 1)
    rises = np.diff(late) > 0
    is_steady = growth > limits.peak_growth and rises.mean() > 0.5
    if not is_steady and (growth <= limits.peak_growth_steps or rises.sum() < MIN_RISES):
        return None
    when = "in most readings" if is_steady else f"{rises.sum()} times"
    text = f"the peak memory grows {when} in the second half of attempt {attempt}, by {growth:.0%}: a leak"
    return growth, limits.peak_growth if is_steady else limits.peak_growth_steps, text


def _find_peak_streak(peaks: np.ndarray, limits: Limits) -> tuple[int, float] | None:
    """Return the number and the growth of readings in a row that each rise, after the first ones; None if they are few.

    On a CPU it is the peak of the process, which grows a little for long (1.4% in 19 readings measured).
    """
    settled = peaks[SETTLED_READINGS:]
    rises = np.diff(settled) > 0
    # Index of the last reading that did not rise, up to each one.
    indices = np.arange(1, len(settled))
    starts = np.maximum.accumulate(np.where(rises, 0, indices)) if len(rises) else indices
    counts, growth = indices - starts, settled[1:] / settled[starts] - 1 if len(rises) else np.zeros(0)
    is_leak = (counts >= limits.memory_readings) & (growth > limits.peak_growth)
    if not is_leak.any():
        return None
    longest = int(np.where(is_leak, growth, 0.0).argmax())
    return int(counts[longest]), float(growth[longest])
