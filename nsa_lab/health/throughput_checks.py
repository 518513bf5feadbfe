"""Verdicts on the pace: throughput, waiting for data, and memory that grows."""

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
    """Against the run's own best tenth, stage by stage, and by what the trainer warned of while it ran. The first
    interval of each attempt, which holds compilation, is left out.

    The windows that are compared are equal in work: a half of the run that is ten times slower is half of them.
    """
    warned, overcome = split_by_attempt(
        history, [e for e in history.current_events("guard") if e.get("rule") == "slowdown"]
    )
    if warned:
        text = f"{format_guard(warned[0])}; other work on this machine would explain it"
        return Verdict("throughput", False, len(warned), 0, text)
    windows = _split_windows(history, limits.pace_window_s)
    if len(windows) < 5:
        return Verdict("throughput", None, None, limits.slow_share, "too short to judge how steady it was")
    stages, speed, took_s = (np.array(column) for column in zip(*windows, strict=True))
    # A stage of longer texts is slower by its nature.
    best = {int(n): _compute_best_tenth(speed[stages == n]) for n in np.unique(stages)}
    slow = speed < limits.slow_factor * np.array([best[stage] for stage in stages])
    share, slow_s = float(slow.mean()), float(took_s[slow].sum())
    text = (
        f"median {format_speed(history)} tokens/s; "
        f"{share:.1%} of the work below {limits.slow_factor:.0%} of the best tenth's pace, "
        f"{', then '.join(f'{pace:,.0f}' for pace in best.values())} (slowest {speed.min():,.0f})"
    )
    ok = share <= limits.slow_share or slow_s < limits.slow_min_s
    return Verdict("throughput", ok, share, limits.slow_share, text + format_recovered(overcome, format_guard))


def _compute_best_tenth(speed: np.ndarray) -> float:
    """The highest median among ten parts of the run, fewer where a part would have less than three windows."""
    return max(float(np.median(part)) for part in np.array_split(speed, min(10, max(1, len(speed) // 3))))


def _split_windows(history: History, window_s: float) -> list[tuple[int, float, float]]:
    """Stage, tokens per second and seconds of stretches of training equal in work, within a stage and an attempt.

    Each takes `window_s` at the median pace of its stage.
    """
    train = history.config.train
    intervals = _list_intervals(history)
    windows: list[tuple[int, float, float]] = []
    for stage, of_stage in ((n, [i for i in intervals if i[1] == n]) for n in range(len(train.plan))):
        if not of_stage:
            continue
        enough = window_s / float(np.median([took_s / steps for *_, steps, took_s in of_stage]))
        for _, stretch in groupby(of_stage, key=lambda interval: interval[0]):
            steps, took_s = 0, 0.0
            for *_, more_steps, more_s in stretch:
                steps, took_s = steps + more_steps, took_s + more_s
                if steps >= enough:
                    windows.append((stage, steps * train.plan[stage].tokens_per_step / took_s, took_s))
                    steps, took_s = 0, 0.0
    return windows


def _list_intervals(history: History) -> list[tuple[int, int, int, float]]:
    """Attempt, stage, steps and seconds between one log point and the next, within a stage and an attempt."""
    intervals: list[tuple[int, int, int, float]] = []
    train = history.config.train
    stretch, before = (0, 0), 0
    for event in history.steps:
        stage = train.locate_step(event["step"])[0]
        steps, tokens = event["step"] - before, train.plan[stage].tokens_per_step
        took = [_positive_or(event.get("dt_s")), tokens / _positive_or(event.get("tokens_per_s"), math.inf)]
        if (event["attempt"], stage) == stretch and max(took) > 0:
            # The two say the same; where they do not, the slower is believed.
            intervals.append((event["attempt"], stage, steps, steps * max(took)))
        stretch, before = (event["attempt"], stage), event["step"]
    return intervals


def _positive_or(value: Any, otherwise: float = 0.0) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else otherwise


def check_data_wait(history: History, limits: Limits) -> Verdict:
    """Of the readings that say both, each a mean over the steps since the reading before."""
    waited_s = took_s = 0.0
    before = 0
    for event in history.steps:
        took, waited = _positive_or(event.get("dt_s")), event.get("data_s")
        if took and waited is not None and math.isfinite(waited):
            waited_s += (event["step"] - before) * waited
            took_s += (event["step"] - before) * took
        before = event["step"]
    if not took_s:
        return Verdict("data wait", None, None, limits.data_wait, "not recorded")
    share = waited_s / took_s
    text = f"{share:.1%} of the training time was spent waiting for data"
    return Verdict("data wait", share <= limits.data_wait, share, limits.data_wait, text)


def check_memory(history: History, limits: Limits) -> Verdict:
    resident = [held for event in history.events_of_kind("heartbeat") if (held := _positive_or(event.get("rss_bytes")))]
    if len(resident) < 8:
        return Verdict("memory", None, None, limits.memory_growth, "too few heartbeats to see growth")
    early, late = max(resident[: len(resident) // 2]), max(resident[len(resident) // 2 :])
    return Verdict(
        "memory",
        late / early <= limits.memory_growth,
        late / early,
        limits.memory_growth,
        f"resident memory at most {format_size(early)} in the first half, {format_size(late)} in the second",
    )
