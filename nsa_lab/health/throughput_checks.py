"""Checks of throughput, data wait and memory growth."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np

from nsa_lab.health.log_integrity import format_guard, format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_size, format_speed


def check_throughput(history: History, limits: Limits) -> Verdict:
    """Check for slowdowns: warnings of the trainer, and windows that are slow compared with the best tenth of their stage.

    All windows have the same number of steps, so if half of the run is ten times slower, half of the windows are slow. The
    first interval of each attempt contains compilation and is omitted.
    """
    warnings, recovered = split_by_attempt(
        history, [e for e in history.current_events("guard") if e.get("rule") == "slowdown"]
    )
    if warnings:
        text = f"{format_guard(warnings[0])}; possible cause: other programs on this machine"
        return Verdict("throughput", False, len(warnings), 0, text)
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
    return Verdict("throughput", ok, share, limits.slow_share, text + format_recovered(recovered, format_guard))


def _compute_best_tenth(speed: np.ndarray) -> float:
    """Return the highest median speed among ten parts of the run; fewer parts if a part would have under three windows."""
    return max(float(np.median(part)) for part in np.array_split(speed, min(10, max(1, len(speed) // 3))))


def _split_windows(history: History, window_s: float) -> list[tuple[int, float, float]]:
    """Split training into windows with equal numbers of steps. Return stage, tokens per second and seconds of each.

    A window lasts `window_s` at the median speed of its stage. It lies within one stage and one attempt.
    """
    train = history.config.train
    intervals = _list_intervals(history)
    windows: list[tuple[int, float, float]] = []
    for stage, in_stage in ((n, [i for i in intervals if i[1] == n]) for n in range(len(train.plan))):
        if not in_stage:
            continue
        steps_per_window = window_s / float(np.median([duration_s / steps for *_, steps, duration_s in in_stage]))
        for _, in_attempt in groupby(in_stage, key=lambda interval: interval[0]):
            steps, duration_s = 0, 0.0
            for *_, interval_steps, interval_s in in_attempt:
                steps, duration_s = steps + interval_steps, duration_s + interval_s
                if steps >= steps_per_window:
                    windows.append((stage, steps * train.plan[stage].tokens_per_step / duration_s, duration_s))
                    steps, duration_s = 0, 0.0
    return windows


def _list_intervals(history: History) -> list[tuple[int, int, int, float]]:
    """Return attempt, stage, steps and seconds between consecutive log points of one stage and one attempt."""
    intervals: list[tuple[int, int, int, float]] = []
    train = history.config.train
    previous_key, previous_step = (0, 0), 0
    for event in history.steps:
        stage = train.locate_step(event["step"])[0]
        steps, tokens = event["step"] - previous_step, train.plan[stage].tokens_per_step
        step_s = [_positive_or(event.get("dt_s")), tokens / _positive_or(event.get("tokens_per_s"), math.inf)]
        if (event["attempt"], stage) == previous_key and max(step_s) > 0:
            # Both fields record the same time. If they differ, use the longer one.
            intervals.append((event["attempt"], stage, steps, steps * max(step_s)))
        previous_key, previous_step = (event["attempt"], stage), event["step"]
    return intervals


def _positive_or(value: Any, default: float = 0.0) -> float:
    """Return `value` if it is a positive finite number, otherwise `default`."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else default


def check_data_wait(history: History, limits: Limits) -> Verdict:
    """Check the fraction of the training time spent waiting for data.

    A reading is a mean over the steps since the previous reading. Readings without both times are omitted.
    """
    total_wait_s = total_s = 0.0
    previous_step = 0
    for event in history.steps:
        step_s, wait_s = _positive_or(event.get("dt_s")), event.get("data_s")
        if step_s and wait_s is not None and math.isfinite(wait_s):
            total_wait_s += (event["step"] - previous_step) * wait_s
            total_s += (event["step"] - previous_step) * step_s
        previous_step = event["step"]
    if not total_s:
        return Verdict("data wait", None, None, limits.data_wait, "not recorded")
    share = total_wait_s / total_s
    text = f"{share:.1%} of the training time was spent waiting for data"
    return Verdict("data wait", share <= limits.data_wait, share, limits.data_wait, text)


def check_memory(history: History, limits: Limits) -> Verdict:
    """Check that resident memory does not grow from the first to the second half of the heartbeats."""
    resident = [rss for event in history.events_of_kind("heartbeat") if (rss := _positive_or(event.get("rss_bytes")))]
    if len(resident) < 8:
        return Verdict("memory", None, None, limits.memory_growth, "too few heartbeats to detect growth")
    early, late = max(resident[: len(resident) // 2]), max(resident[len(resident) // 2 :])
    return Verdict(
        "memory",
        late / early <= limits.memory_growth,
        late / early,
        limits.memory_growth,
        f"resident memory at most {format_size(early)} in the first half, {format_size(late)} in the second",
    )
