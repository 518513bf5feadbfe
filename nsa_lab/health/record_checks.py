"""Checks of the record itself: its files belong to one run, its lines are events, and their times and steps increase."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from nsa_lab.config.errors import shorten
from nsa_lab.health import evaluation_checks, ruler_relations, start_checks
from nsa_lab.health.completeness_checks import list_layer_statistics
from nsa_lab.health.edited_config import find_config_edit
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.event_schema import FIRST_KINDS, PHASES, SCHEMA_VERSION, SUPERSEDED_KINDS
from nsa_lab.runs.history import History, get_monitor_settings

DAY_S = 86_400.0


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
    edit = find_config_edit(history)
    if edit and not edit.is_accepted:
        return Verdict("one run", False, 2, 1, edit.text)
    if problem := _find_foreign_file(history, edit is not None):
        return Verdict("one run", False, 2, 1, problem)
    started, text = {event["attempt"] for event in history.first_events}, f"status and events belong to {status_run}"
    if lost := sorted({*history.events.ints("attempt").tolist()} - started):
        return Verdict("one run", None, 1, 1, f"{text}, but the first event of attempt {lost[0]} is missing")
    if edit:
        return Verdict("one run", False, 2, 1, edit.text).to_warning()
    last = history.first_events[-1]
    config, recorded = history.config_of_attempt(last["attempt"]), last.get("config_hash")
    if recorded is not None and (config is None or recorded != config.hash()):
        # Every version computes the hashes of earlier ones, but not those of code that was changed and not committed. Older
        # runs do not record the settings that may change between attempts: one of them could be the difference.
        is_known = config is not None and (last.get("code") or {}).get("dirty") is not True
        text += f", but config.yaml {'does' if is_known else 'may'} not: its hash is {(config or history.config).hash()}, "
        text += f"that of the last attempt {recorded}; restore the file that was trained"
        return Verdict("one run", False if is_known else None, 2, 1, text)
    if problem := _find_other_setting(history):
        return Verdict("one run", False, 2, 1, problem)
    if difference := start_checks.find_other_creation(history):
        return Verdict("one run", False, 2, 1, difference).to_warning()
    if gap := start_checks.find_gap(history):
        return Verdict("one run", None, 1, 1, f"{text}, but {gap}")
    return Verdict("one run", True, 1, 1, text)


def _find_other_setting(history: History) -> str | None:
    """Return a text on a setting of a finished run that is not the one of its last attempt; None if there is none.

    The hash of the configuration does not see it: `History.config_of_attempt` takes these settings from the first event.
    Settings of a run that can resume may be edited.
    """
    if not history.is_done:
        return None
    recorded = history.first_events[-1].get("settings")
    for key, value in get_monitor_settings(history.config).items():
        if isinstance(recorded, dict) and recorded.get(key, value) != value:
            text = f"config.yaml has {key} = {value}, but attempt {history.first_events[-1]['attempt']} had"
            return f"{text} {shorten(str(recorded[key]))}; restore the file that was trained"
    return None


def _find_foreign_file(history: History, is_edited: bool) -> str | None:
    """Return a text on a file of another run, or that contradicts the events; None if there is none.

    `is_edited`: config.yaml describes the next attempt, so execution settings may differ from the last one.
    """
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
        or (None if is_edited else start_checks.find_contradiction(history))
        or evaluation_checks.find_foreign_evaluation(history)
        or ruler_relations.find_ruler_problem(history)
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
    heartbeats = history.events_of_kind("heartbeat")
    for index, phase in enumerate(heartbeats.values("phase")):
        if phase is not None and phase not in PHASES:
            return f"the phase {shorten(str(phase))!r} at step {heartbeats[index]['step']:,} is unknown: {remedy}"
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
    if ok and (problem := _find_other_date(history, limits)):
        return Verdict("clock", False, 1, 0, problem)
    if ok and (ahead := float(times.max()) - time.time()) > DAY_S:
        text = f"the last event is {ahead / DAY_S:,.0f} days ahead of this machine's clock; one of the two clocks is wrong"
        return Verdict("clock", None, None, limits.clock_back_s, text)
    text = "increases from event to event" if ok else f"goes back by {back:,.0f} s at step {steps[worst]:,}"
    return Verdict("clock", ok, back, limits.clock_back_s, text)


def _find_other_date(history: History, limits: Limits) -> str | None:
    """Return a text on a status that was written long before or after the events of its attempt; None without one.

    The status of a finished run was written with its last event. Any other is written again by later commands.
    """
    updated: Any = history.status.get("updated")
    attempt = history.last_attempt
    own = history.events.select(history.events.ints("attempt") == attempt)
    if not is_finite(updated) or history.status.get("attempt") not in (None, attempt):
        return None
    state = history.status.get("status")
    ends = own.of_kind("end").numbers("t")
    is_end_known = state == directory.DONE and np.isfinite(ends).any()
    # A thread, or another rank, may write events after the end.
    times, tolerance = (ends, limits.clock_back_s) if is_end_known else (own.numbers("t"), DAY_S)
    first, last = (float(function(times)) for function in (np.nanmin, np.nanmax))
    lowest = (last if state in (directory.DONE, directory.HALTED) else first) - tolerance
    highest = last + tolerance if state == directory.DONE else math.inf
    if lowest <= updated <= highest:
        return None
    apart, when = abs(updated - last), "after" if updated > last else "before"
    duration = f"{apart / DAY_S:,.0f} days" if apart > DAY_S else f"{apart:,.0f} s"
    return f"status.json was written {duration} {when} the last event of attempt {attempt}"


# A guard may be about an earlier step.
COMPLETED_KINDS = tuple(sorted(SUPERSEDED_KINDS - {"guard"}))


def _find_disorder(history: History) -> str | None:
    """Return a text on events in an impossible order; None if there are none.

    An attempt starts once, ends before the next one starts, trains its steps in order, and evaluates, measures and saves
    each of them once. A heartbeat, which a thread writes, may be ahead of an event of another kind, and repeats a long
    step.
    """
    started = history.events.of_kind(*FIRST_KINDS).ints("attempt")
    if (is_repeated := np.diff(started) == 0).any():
        return f"attempt {started[1:][is_repeated][0]} starts twice"
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
        if kind == "heartbeat" and (is_repeated := (np.diff(own.numbers("t")) == 0) & (np.diff(attempts) == 0)).any():
            index = int(is_repeated.argmax()) + 1
            return f"attempt {attempts[index]} has two heartbeats at the same time, at step {steps[index]:,}"
    return None
