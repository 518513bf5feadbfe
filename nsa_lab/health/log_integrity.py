"""Checks of the record itself: one run, monotonic time, and no missing entries.

A missing entry that was due fails the check. If nothing was due yet, the result is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nsa_lab.config import TrainConfig
from nsa_lab.health.verdict import Limits, Verdict, join_lines
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import Attempt, History

# Fields of a reading of statistics, one value per layer.
LAYER_STATISTICS = ("grad_norm_layers",)
BRANCH_STATISTICS = (
    *(f"gate_share_{branch}" for branch in ("cmp", "sel", "win")),
    *("gate_entropy", "gate_saturation", "gate_update", "sel_reuse", "sel_distance", "sel_sink_share"),
    *(f"norm_{branch}" for branch in ("cmp", "sel", "win")),
)


def check_one_run(history: History, limits: Limits) -> Verdict:
    """Check that status and events name the same run."""
    event_runs = sorted({str(event["run"]) for event in history.events if "run" in event})
    status_run = history.status.get("run")
    if len(event_runs) > 1:
        return Verdict(
            "one run", False, len(event_runs), 1, f"the events belong to several runs: {', '.join(event_runs[:3])}"
        )
    if not event_runs or status_run is None:
        return Verdict("one run", None, None, 1, "no events yet" if status_run else "no status")
    started = {event["attempt"] for event in history.events_of_kind("start", "resume")}
    if status_run == event_runs[0] and (lost := sorted({event["attempt"] for event in history.events} - started)):
        text = f"status and events belong to {status_run}, but the first event of attempt {lost[0]} is missing"
        return Verdict("one run", None, len(event_runs), 1, text)
    text = (
        f"status and events belong to {status_run}"
        if status_run == event_runs[0]
        else f"the status belongs to {status_run}, the events to {event_runs[0]}"
    )
    return Verdict("one run", status_run == event_runs[0], len({status_run, *event_runs}), 1, text)


def check_clock(history: History, limits: Limits) -> Verdict:
    """Check that the time increases from event to event, over all attempts."""
    times = [(event["t"], event["step"]) for event in history.events if isinstance(event.get("t"), (int, float))]
    latest, back, where = float("-inf"), 0.0, 0
    for t, step in times:
        latest = max(latest, t)
        if latest - t > back:
            back, where = latest - t, step
    if len(times) < 2:
        return Verdict("clock", None, None, limits.clock_back_s, "fewer than two events")
    ok = back <= limits.clock_back_s
    text = "increases from event to event" if ok else f"goes back by {back:,.0f} s at step {where:,}"
    return Verdict("clock", ok, back, limits.clock_back_s, text)


def check_heartbeats(history: History, limits: Limits) -> Verdict:
    """Check the number of heartbeats in the last attempt, and that every long enough earlier attempt has some."""
    beats = [event["attempt"] for event in history.events_of_kind("heartbeat")]
    intervals = {
        a: config.runtime.heartbeat_s for a in history.attempts() if (config := history.config_of_attempt(a.number))
    }

    def count_due(attempt: Attempt) -> int:
        return int((attempt.ended_at - attempt.started_at) / intervals[attempt])

    # With fewer than three, the start time of the thread and the load of the machine dominate the count.
    long = [attempt for attempt in intervals if count_due(attempt) >= 3]
    for attempt in long:
        n_required = limits.heartbeats * count_due(attempt) if attempt.number == history.last_attempt else 1
        if beats.count(attempt.number) < n_required:
            text = (
                f"{beats.count(attempt.number)} in the {attempt.ended_at - attempt.started_at:,.0f} s of attempt "
                f"{attempt.number}, expected one every {intervals[attempt]:g} s"
            )
            return Verdict("heartbeats", False, beats.count(attempt.number), n_required, text)
    every = ", then ".join(dict.fromkeys(f"{every_s:g}" for every_s in intervals.values()))
    if not long:
        every = every or f"{history.config.runtime.heartbeat_s:g}"
        return Verdict("heartbeats", None, len(beats), None, f"too short for heartbeats every {every} s")
    return require_known_settings(
        history, Verdict("heartbeats", True, len(beats), None, f"{len(beats)}, one every {every} s")
    )


def check_evaluations(history: History, limits: Limits) -> Verdict:
    """Check that there is an evaluation before the first step, at every multiple of `eval_every`, and at the end."""
    due = {0} if history.last_step else set[int]()
    due |= get_due_steps(history, lambda train: train.eval_every)
    if history.is_done and (config := history.config_of_attempt(history.last_attempt)) and config.train.eval_every:
        due.add(config.train.steps)
    # The current step may be evaluated next.
    due -= set() if history.is_done else {history.last_step}
    return _check_complete(history, "evaluations", due, {event["step"] for event in history.evaluations}, "evaluations")


def check_statistics(history: History, limits: Limits) -> Verdict:
    """Check that every reading of layer statistics that was due is complete and not a copy of earlier readings."""
    names = LAYER_STATISTICS + (BRANCH_STATISTICS if history.config.model.attention == "nsa" else ())
    due = get_due_steps(history, lambda train: train.stats_every)
    complete = {event["step"] for event in history.steps if all(event.get(name) for name in names)}
    verdict = _check_complete(history, "statistics", due, complete, "readings of the layers")
    repeated = _find_repeated_readings(history, limits.equal_readings) if verdict.ok else None
    return verdict if repeated is None else replace(verdict, ok=False, text=repeated)


def _find_repeated_readings(history: History, n_equal: int) -> str | None:
    """Return which statistics are bitwise equal in all layers in `n_equal` readings in a row: they are no longer measured.

    Gates and zero branches have other checks. If all blocks are selected, the statistics of selection are constant anyway.
    """
    nsa, train = history.config.model.nsa, history.config.train
    for subject, prefix in (("selection statistics are", "sel_"), ("branch norms are", "norm_")):
        names = [name for name in BRANCH_STATISTICS if name.startswith(prefix)]
        readings = [(event["step"], [event.get(name) for name in names]) for event in history.steps if names[0] in event]
        streak, previous = 1, None
        for step, reading in readings:
            can_vary = prefix == "norm_" or train.stage_at(step).seq_len > nsa.n_sel * nsa.l_sel
            streak = streak + 1 if can_vary and reading == previous and _has_nonzero(reading) else 1
            previous = reading
            if streak >= n_equal:
                return f"{subject} bitwise equal in {streak} readings in a row, up to step {step:,}"
    return None


def _has_nonzero(reading: list[Any]) -> bool:
    return any(value for layers in reading if isinstance(layers, list) for value in layers)


def _check_complete(history: History, name: str, due: set[int], recorded: Iterable[int], subject: str) -> Verdict:
    """Check that all steps that were `due` are `recorded`."""
    missing = sorted(due - set(recorded))
    if missing:
        text = f"{len(missing)} of {len(due)} {subject} are missing, the first at step {missing[0]:,}"
        return Verdict(name, False, len(due) - len(missing), len(due), text)
    if not due:
        return require_known_settings(history, Verdict(name, None, 0, 0, "none due yet"))
    return require_known_settings(history, Verdict(name, True, len(due), len(due), f"{len(due)}, none missing"))


def get_due_steps(history: History, every: Callable[[TrainConfig], int]) -> set[int]:
    """Return the completed steps that are multiples of an attempt's interval, `every(settings)`."""
    return {
        step
        for step_range in history.step_ranges()
        if step_range.config
        for step in step_range.list_multiples(every(step_range.config.train))
    }


def require_known_settings(history: History, verdict: Verdict) -> Verdict:
    """Return `verdict`; unknown instead if the settings of an attempt, which determine the due entries, are unknown."""
    unknown = [f"{step_range.attempt}" for step_range in history.step_ranges() if step_range.config is None]
    if not unknown:
        return verdict
    attempts = f"attempt {unknown[0]}" if len(unknown) == 1 else f"attempts {', '.join(unknown)}"
    text = f"settings of {attempts} unknown: config.yaml has changed since, and the events do not record them"
    return replace(verdict, ok=None, text=f"{verdict.text}; {text}")


def split_by_attempt(history: History, events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Return the events of the last attempt, and those of earlier attempts, from which the run has recovered."""
    last = history.last_attempt
    return [event for event in events if event["attempt"] == last], [event for event in events if event["attempt"] != last]


def format_guard(event: Event) -> str:
    """Return the rule, the action and the text of a guard event."""
    text = event.get("text") or f"step {event['step']}: value {event.get('value')}, limit {event.get('limit')}"
    return f"{event.get('rule', 'a rule')} ({event.get('action')}): {join_lines(text)}"


def format_recovered(events: list[Event], format_event: Callable[[Event], str]) -> str:
    """Return a suffix that lists the problems of earlier attempts; empty if there are none."""
    if not events:
        return ""
    problems = "; ".join(f"attempt {event['attempt']}: {format_event(event)}" for event in events[:3])
    return f" (recovered from: {problems}{' …' if len(events) > 3 else ''})"
