"""Checks of the record itself: one run, monotonic time, and no missing entries.

A missing entry that was due fails the check. If nothing was due yet, the result is unknown.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nsa_lab.config import ModelConfig
from nsa_lab.config.errors import shorten
from nsa_lab.health import evaluation_checks, start_checks
from nsa_lab.health.due_steps import DueSteps
from nsa_lab.health.verdict import Limits, Verdict, join_lines
from nsa_lab.runs import directory
from nsa_lab.runs.attempts import Attempt, group_positions
from nsa_lab.runs.event_columns import NUMBER
from nsa_lab.runs.event_schema import FIRST_KINDS, PHASES, SCHEMA_VERSION, SUPERSEDED_KINDS, GuardEvent, is_finite
from nsa_lab.runs.history import History, find_stages

MIN_ZERO_LOSSES = 5

DAY_S = 86_400.0


def list_layer_statistics(model: ModelConfig) -> list[str]:
    """Return the fields of a reading of statistics that have one value per layer, for the branches that the model has."""
    names = ["grad_norm_layers"]
    if model.attention == "dense":
        return names
    if len(model.branches) > 1:  # a single branch has no gate
        names += [f"gate_share_{branch}" for branch in model.branches]
        names += ["gate_entropy", "gate_saturation", "gate_update"]
    if "sel" in model.branches:
        names += ["sel_reuse", "sel_distance", "sel_sink_share"]
    return names + [f"norm_{branch}" for branch in model.branches]


def check_one_run(history: History, limits: Limits) -> Verdict:
    """Check that status, events, config.yaml and environment.json belong to the same run."""
    event_runs = sorted({str(run) for run in history.events.values("run") if run is not None})
    status_run = history.status.get("run")
    if len(event_runs) > 1:
        return Verdict(
            "one run", False, len(event_runs), 1, f"the events belong to several runs: {', '.join(event_runs[:3])}"
        )
    if not event_runs or status_run is None:
        return Verdict("one run", None, None, 1, "no events yet" if status_run else "no status")
    if status_run != event_runs[0]:
        return Verdict("one run", False, 2, 1, f"the status belongs to {status_run}, the events to {event_runs[0]}")
    if problem := _find_foreign_file(history):
        return Verdict("one run", False, 2, 1, problem)
    started, text = {event["attempt"] for event in history.first_events}, f"status and events belong to {status_run}"
    if lost := sorted({*history.events.ints("attempt").tolist()} - started):
        return Verdict("one run", None, 1, 1, f"{text}, but the first event of attempt {lost[0]} is missing")
    last = history.first_events[-1]
    config, recorded = history.config_of_attempt(last["attempt"]), last.get("config_hash")
    if recorded is not None and (config is None or recorded != config.hash()):
        # Every version computes the hashes of earlier ones, but not those of code that was changed and not committed. Older
        # runs do not record the settings that may change between attempts: one of them could be the difference.
        is_known = config is not None and (last.get("code") or {}).get("dirty") is not True
        text += f", but config.yaml {'does' if is_known else 'may'} not: its hash is {(config or history.config).hash()}, "
        text += f"that of the last attempt {recorded}; restore the file that was trained"
        return Verdict("one run", False if is_known else None, 2, 1, text)
    if difference := start_checks.find_other_creation(history):
        return Verdict("one run", False, 2, 1, difference).to_warning()
    if gap := start_checks.find_gap(history):
        return Verdict("one run", None, 1, 1, f"{text}, but {gap}")
    return Verdict("one run", True, 1, 1, text)


def _find_foreign_file(history: History) -> str | None:
    """Return a text on a file of another run, or that contradicts the events; None if there is none."""
    n_steps, n_layers = history.config.train.steps, history.config.model.n_layers
    for event in history.first_events:
        if event.get("steps") not in (None, n_steps):
            return f"attempt {event['attempt']} trains {event['steps']:,} steps, but config.yaml has {n_steps:,}"
        if event["kind"] == "start" and event.get("from_step"):
            return f"attempt {event['attempt']} starts the run, but at step {event['from_step']:,}"
    if history.status.get("steps") not in (None, n_steps):
        return f"status.json has {history.status['steps']} steps, but config.yaml has {n_steps:,}"
    for name in list_layer_statistics(history.config.model):
        _, values = history.layer_series(name)
        if len(values) and values.shape[1] != n_layers:
            return f"{name} has {values.shape[1]} layers, but config.yaml has {n_layers}"
    created, recorded = history.environment.get("config_hash"), history.first_events[:1].values("config_hash")
    if created and recorded and created != recorded[0]:
        return f"environment.json belongs to configuration {created}, the first event to {recorded[0]}"
    return (
        start_checks.find_wrong_environment(history)
        or start_checks.find_contradiction(history)
        or evaluation_checks.find_foreign_evaluation(history)
    )


def check_record_format(history: History, limits: Limits) -> Verdict:
    """Check that every line of the record is an event that follows the schema.

    A line that a killed attempt or a full disk left incomplete is expected. A missing or invalid optional value is a
    warning.
    """
    name, violations = "record format", history.events.violations
    expected = _find_explained_lines(history)
    unknown = _find_unknown_values(history)
    others = [violation for violation in violations.listed if violation.line not in expected]
    count = violations.count - (len(violations.listed) - len(others))
    if not others and unknown:
        return Verdict(name, False, 1, 0, unknown).to_warning()
    if not others:
        note = f"; {len(expected)} incomplete at the end of an attempt" if expected else ""
        return (
            Verdict(name, True, 0, 0, f"every line follows the schema{note}")
            if history.events
            else Verdict(name, None, None, 0, "no events yet")
        )
    others.sort(key=lambda violation: not violation.is_skipped)
    verdict = Verdict(name, False, count, 0, f"{others[0]}" + (f" ({count} such lines)" if count > 1 else ""))
    is_damage = others[0].is_skipped and others[0].line not in violations.torn
    return verdict if is_damage else verdict.to_warning()


def _find_unknown_values(history: History) -> str | None:
    """Return a text on events of another version of the format, or on an unknown phase; None if there are none.

    A newer version may write both.
    """
    versions = history.events.numbers("v")
    others = versions[np.isfinite(versions) & (versions != SCHEMA_VERSION)]
    remedy = "a newer version of nsa_lab may have written it; read the run with that version"
    if len(others):
        return f"{len(others):,} events have version {others[0]:g} of the format, expected {SCHEMA_VERSION}: {remedy}"
    for event in history.events_of_kind("heartbeat"):
        if event.get("phase") is not None and event["phase"] not in PHASES:
            return f"the phase {shorten(str(event['phase']))!r} at step {event['step']:,} is unknown: {remedy}"
    return None


def _find_explained_lines(history: History) -> set[int]:
    """Return the incomplete lines that are followed by a new attempt, by an error, or by the end of the attempt."""
    if not history.events.violations.torn:
        return set()
    lines = history.events.lines()
    explained = set()
    for line in history.events.violations.torn:
        index = int(np.searchsorted(lines, line))
        if index < len(lines):
            following = history.events[index]
            previous_attempt = history.events[index - 1]["attempt"] if index else 0
            if following["attempt"] > previous_attempt or following["kind"] in ("error", "halt"):
                explained.add(line)
    return explained


def check_clock(history: History, limits: Limits) -> Verdict:
    """Check that time, attempts, and the steps of an attempt increase from event to event."""
    times, steps = history.events.numbers("t"), history.events.ints("step")
    times, steps = times[np.isfinite(times)], steps[np.isfinite(times)]
    if len(times) < 2:
        return Verdict("clock", None, None, limits.clock_back_s, "fewer than two events")
    setbacks = np.maximum.accumulate(times) - times
    worst = int(setbacks.argmax())
    back = float(setbacks[worst])
    ok = back <= limits.clock_back_s
    if ok and (problem := _find_disorder(history)):
        return Verdict("clock", False, 1, 0, problem)
    if ok and (problem := _find_other_date(history)):
        return Verdict("clock", False, 1, 0, problem)
    if ok and (ahead := float(times.max()) - time.time()) > DAY_S:
        text = f"the last event is {ahead / DAY_S:,.0f} days ahead of this machine's clock; one of the two clocks is wrong"
        return Verdict("clock", None, None, limits.clock_back_s, text)
    text = "increases from event to event" if ok else f"goes back by {back:,.0f} s at step {steps[worst]:,}"
    return Verdict("clock", ok, back, limits.clock_back_s, text)


def _find_other_date(history: History) -> str | None:
    """Return a text on a status that was written days before or after the events of its attempt; None without one.

    The status of a finished run was written with its last event. Any other is written again by later commands.
    """
    updated: Any = history.status.get("updated")
    attempt = history.last_attempt
    times = history.events.numbers("t")[history.events.ints("attempt") == attempt]
    if not is_finite(updated) or history.status.get("attempt") not in (None, attempt):
        return None
    state = history.status.get("status")
    first, last = (float(function(times)) for function in (np.nanmin, np.nanmax))
    lowest = (last if state in (directory.DONE, directory.HALTED) else first) - DAY_S
    highest = last + DAY_S if state == directory.DONE else math.inf
    if lowest <= updated <= highest:
        return None
    text = f"status.json was written {abs(updated - last) / DAY_S:,.0f} days {'after' if updated > last else 'before'}"
    return f"{text} the last event of attempt {attempt}"


# A guard may be about an earlier step.
COMPLETED_KINDS = tuple(sorted(SUPERSEDED_KINDS - {"guard"}))


def _find_disorder(history: History) -> str | None:
    """Return a text on events in an impossible order; None if there are none.

    An attempt ends before the next one starts, trains its steps in order, and evaluates, measures and saves each of them
    once. A heartbeat, which a thread writes, may be ahead of an event of another kind, and repeats a long step.
    """
    own = history.events.of_kind(*COMPLETED_KINDS, "heartbeat", *FIRST_KINDS)
    attempts, steps = own.ints("attempt"), own.ints("step")
    if (is_back := np.diff(attempts) < 0).any():
        index = int(is_back.argmax()) + 1
        text = f"attempt {attempts[index]} records step {steps[index]:,} after the start of attempt {attempts[index - 1]}"
        return f"{text}: two trainers at once, or lines that were moved"
    for kind in (*COMPLETED_KINDS, "heartbeat"):
        own = history.events.of_kind(kind)
        attempts, steps = own.ints("attempt"), own.ints("step")
        change = np.where(np.diff(attempts) == 0, np.diff(steps), 1)
        if (is_back := change < 0).any():
            index = int(is_back.argmax()) + 1
            text = f"the {kind} events of attempt {attempts[index]} go back from step {steps[index - 1]:,}"
            return f"{text} to {steps[index]:,}"
        if kind in COMPLETED_KINDS and (is_repeated := change == 0).any():
            index = int(is_repeated.argmax()) + 1
            return f"attempt {attempts[index]} has two {kind} events of step {steps[index]:,}"
    return None


def check_heartbeats(history: History, limits: Limits) -> Verdict:
    """Check the number of heartbeats in the last attempt, and that every long enough earlier attempt has some."""
    counts = Counter(history.events_of_kind("heartbeat").ints("attempt").tolist())
    intervals = {
        a: config.runtime.heartbeat_s for a in history.attempts() if (config := history.config_of_attempt(a.number))
    }

    suspended_s = _sum_suspensions(history)

    def count_due(attempt: Attempt) -> int:
        awake_s = attempt.ended_at - attempt.started_at - suspended_s.get(attempt.number, 0.0)
        return int(awake_s / intervals[attempt])

    # With fewer than three, the start time of the thread and the load of the machine dominate the count.
    long = [attempt for attempt in intervals if count_due(attempt) >= 3]
    for attempt in long:
        n_required = limits.heartbeats * count_due(attempt) if attempt.number == history.last_attempt else 1
        if counts[attempt.number] < n_required:
            text = (
                f"{counts[attempt.number]} in the {attempt.ended_at - attempt.started_at:,.0f} s of attempt "
                f"{attempt.number}, expected one every {intervals[attempt]:g} s"
            )
            return Verdict("heartbeats", False, counts[attempt.number], n_required, text)
    every = ", then ".join(dict.fromkeys(f"{every_s:g}" for every_s in intervals.values()))
    suspension = f"; suspended for {sum(suspended_s.values()):,.0f} s" if suspended_s else ""
    if not long:
        every = every or f"{history.config.runtime.heartbeat_s:g}"
        return Verdict("heartbeats", None, counts.total(), None, f"too short for heartbeats every {every} s")
    return require_known_settings(
        history, Verdict("heartbeats", True, counts.total(), None, f"{counts.total()}, one every {every} s{suspension}")
    )


def _sum_suspensions(history: History) -> dict[int, float]:
    """Return the seconds for which the process or the machine was suspended, by attempt; only of those with any."""
    beats = history.events_of_kind("heartbeat")
    seconds, attempts = np.nan_to_num(beats.numbers("suspended_s")), beats.ints("attempt")
    sums = {attempt: float(seconds[own].sum()) for attempt, own in group_positions(attempts).items()}
    return {attempt: total for attempt, total in sums.items() if total > 0}


def check_evaluations(history: History, limits: Limits) -> Verdict:
    """Check that there is an evaluation before the first step, at every multiple of `eval_every`, and at the end."""
    due = {0} if history.last_step else set[int]()
    if history.is_done and (config := history.config_of_attempt(history.last_attempt)) and config.train.eval_every:
        due.add(config.train.steps)
    # The current step may be evaluated next.
    excluded = () if history.is_done else (history.last_step,)
    steps = DueSteps(history, ("evaluation",), due, excluded)
    return _check_complete(history, "evaluations", steps, history.evaluations.ints("step"), "evaluations")


def check_statistics(history: History, limits: Limits) -> Verdict:
    """Check that every reading that was due is complete: its statistics, which are no copies, and its other numbers."""
    due = DueSteps(history, ("statistics",))
    is_complete = np.ones(len(history.steps), dtype=bool)
    for name in list_layer_statistics(history.config.model):
        is_complete &= _has_list(history, name)
    complete = history.steps.ints("step")[is_complete]
    verdict = _check_complete(history, "statistics", due, complete, "readings of the layers")
    repeated = _find_repeated_readings(history, limits.equal_readings) if verdict.ok else None
    stopped = _find_untrained_selection(history) or _find_stopped_number(history, limits)
    problem = repeated or (stopped if verdict.ok is not False else None)
    return verdict if problem is None else replace(verdict, ok=False, text=problem)


def _find_untrained_selection(history: History) -> str | None:
    """Return a text on a selection loss that is 0 or missing in many readings, or in all; None if there is none.

    Its cross-entropy is 0 only if every query has one block.
    """
    model, steps = history.config.model, history.steps
    longest = max(stage.seq_len for stage in history.config.train.plan)
    if not model.has_selection_loss or not len(steps) or longest <= model.nsa.l_sel:
        return None
    where = f"although model.selection_loss is {model.selection_loss:g}: nothing trains the selection"
    if not steps.has("selection_loss").any():
        return f"selection_loss is missing in all {len(steps):,} readings, {where}"
    recorded, values = history.series("selection_loss")
    is_zero = values == 0
    streak, end = find_longest_constant(is_zero.astype(np.float64), is_zero)
    if not is_zero[end] or streak < min(MIN_ZERO_LOSSES, len(values)):
        return None
    return f"selection_loss is 0 in {streak:,} readings in a row, up to step {recorded[end]:,}, {where}"


def _find_stopped_number(history: History, limits: Limits) -> str | None:
    """Return a text on a number that most readings of a stage had until it was no longer recorded; None without one."""
    forms, all_steps = history.steps.list_fields(), history.steps.ints("step")
    stages, size = find_stages(all_steps, history.config.train), limits.missing_readings
    for name in (name for name, form in forms.items() if form == NUMBER):
        for stage in np.unique(stages):
            steps, has = all_steps[stages == stage], history.steps.has(name)[stages == stage]
            recorded = np.flatnonzero(has)
            counts = np.diff(np.append(recorded, len(has))) - 1  # of the readings without it after each one with it
            before = np.arange(1, len(recorded) + 1)
            is_stop = (counts >= size) & (before >= size) & (2 * before > recorded - recorded[:1] + 1)
            if is_stop.any():
                first, count = int(recorded[is_stop.argmax()]) + 1, int(counts[is_stop.argmax()])
                return f"{name} is missing in {count} readings in a row, the first at step {steps[first]:,}"
    return None


def _has_list(history: History, name: str) -> np.ndarray:
    """Return which `step` events have a list of numbers that is not empty, bool."""
    mask = np.zeros(len(history.steps), dtype=bool)
    mask[history.steps.matrix(name)[0]] = True
    return mask


def _find_repeated_readings(history: History, n_equal: int) -> str | None:
    """Return which statistics are bitwise equal in all layers in `n_equal` readings in a row: they are no longer measured.

    Gates and zero branches have other checks. If all blocks are selected, the statistics of selection are constant anyway.
    """
    names = list_layer_statistics(history.config.model)
    for subject, prefix in (("selection statistics are", "sel_"), ("branch norms are", "norm_")):
        readings = [history.layer_series(name) for name in names if name.startswith(prefix)]
        if not readings:
            continue
        steps = readings[0][0]
        values = [own for own_steps, own in readings if np.array_equal(own_steps, steps)]
        layers = np.concatenate(values, axis=1)
        can_repeat = (layers != 0).any(axis=1)
        if prefix == "sel_":
            can_repeat &= find_readings_with_selection(history, steps)
        streak, end = find_longest_constant(layers, can_repeat)
        if streak >= n_equal:
            return f"{subject} bitwise equal in {streak} readings in a row, up to step {steps[end]:,}"
    return None


def find_readings_with_selection(history: History, steps: np.ndarray) -> np.ndarray:
    """Return which readings, at `steps`, are of stages with a choice: blocks that are neither forced nor all selected."""
    nsa, train = history.config.nsa, history.config.train
    has_choice = nsa.n_sel > nsa.sink_blocks + nsa.local_blocks
    has_selection = np.array([has_choice and stage.seq_len > nsa.n_sel * nsa.l_sel for stage in train.plan])
    return has_selection[find_stages(steps, train)]


def find_longest_constant(values: np.ndarray, can_repeat: np.ndarray | bool = True) -> tuple[int, int]:
    """Return the length of the longest streak of bitwise equal readings [n, ...] and the index of its last reading.

    `can_repeat`, bool [n]: whether a reading may continue a streak.
    """
    if not len(values):
        return 0, 0
    rows = values.reshape(len(values), -1)
    is_repeated = (rows[1:] == rows[:-1]).all(axis=1)
    is_repeated &= can_repeat if isinstance(can_repeat, bool) else can_repeat[1:]
    # Number of repeated readings up to each one since the last that was not repeated.
    indices = np.arange(1, len(rows))
    starts = np.maximum.accumulate(np.where(is_repeated, 0, indices))
    streaks = np.concatenate([[1], indices - starts + 1])
    end = int(streaks.argmax())
    return int(streaks[end]), end


def _check_complete(
    history: History, name: str, due: DueSteps, recorded: Sequence[int] | np.ndarray, subject: str
) -> Verdict:
    """Check that all steps that were `due` are `recorded`."""
    count, missing = due.find_missing(recorded)
    if count:
        text = f"{count} of {len(due)} {subject} are missing, the first at step {missing[0]:,}"
        return Verdict(name, False, len(due) - count, len(due), text)
    if not len(due):
        return require_known_settings(history, Verdict(name, None, 0, 0, "none due yet"))
    return require_known_settings(history, Verdict(name, True, len(due), len(due), f"{len(due)}, none missing"))


def require_known_settings(history: History, verdict: Verdict) -> Verdict:
    """Return `verdict`; unknown instead if the settings of an attempt, which determine the due entries, are unknown."""
    unknown = [f"{step_range.attempt}" for step_range in history.step_ranges() if step_range.config is None]
    if not unknown:
        return verdict
    attempts = f"attempt {unknown[0]}" if len(unknown) == 1 else f"attempts {', '.join(unknown)}"
    text = f"settings of {attempts} unknown: config.yaml has changed since, and the events do not record them"
    return replace(verdict, ok=None, text=f"{verdict.text}; {text}")


def split_by_attempt(history: History, events: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the events of the last attempt, and those of earlier attempts, from which the run has recovered."""
    last = history.last_attempt
    return [event for event in events if event["attempt"] == last], [event for event in events if event["attempt"] != last]


def format_guard(event: GuardEvent) -> str:
    """Return the rule, the action and the text of a guard event."""
    text = event.get("text") or f"step {event['step']}: value {event.get('value')}, limit {event.get('limit')}"
    return f"{event.get('rule', 'a rule')} ({event.get('action')}): {join_lines(text)}"


def format_recovered(events: Sequence[Any], format_event: Callable[[Any], str]) -> str:
    """Return a suffix that lists the problems of earlier attempts; empty if there are none."""
    if not events:
        return ""
    problems = "; ".join(f"attempt {event['attempt']}: {format_event(event)}" for event in events[:3])
    return f" (recovered from: {problems}{' …' if len(events) > 3 else ''})"
