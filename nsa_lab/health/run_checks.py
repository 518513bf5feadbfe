"""Checks of the course of a run: its end, guards, finite numbers, errors, stalls and preflight.

The last attempt is judged. Problems of earlier attempts, from which the run has recovered, are reported but do not fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nsa_lab.health.preflight_relations import find_preflight_problem
from nsa_lab.health.recovered_problems import format_guard, format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict, join_lines, list_names
from nsa_lab.runs import directory
from nsa_lab.runs.event_columns import INT, NUMBER, NUMBERS, OBJECT
from nsa_lab.runs.event_fields import get_fields, is_number
from nsa_lab.runs.event_schema import ErrorEvent, PreflightEvent, StallEvent
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_guards


def check_finished(history: History, limits: Limits) -> Verdict:
    """Check the final status. A run that is DONE must also have recorded its end."""
    status, steps = history.status, history.config.train.steps
    state, progress = status.get("status", "unknown"), f"step {history.last_step:,} of {steps:,}"
    reason = join_lines(status.get("reason"))
    if state == directory.DONE:
        ok = history.last_step == steps
        if ok and history.last_attempt not in history.events_of_kind("end").ints("attempt"):
            text = f"{progress}; status.json is DONE, but the end is not recorded: events are missing"
            return Verdict("finished", False, history.last_step, steps, text)
        return Verdict("finished", ok, history.last_step, steps, progress if ok else f"status DONE at {progress}")
    if state == directory.PREEMPTED:
        text = f"{progress}: {reason or 'stopped on request'}; resume it to finish"
        return Verdict("finished", None, history.last_step, steps, text)
    if state == directory.RUNNING and history.is_alive:
        return Verdict("finished", None, history.last_step, steps, f"running, {progress}")
    if state == directory.RUNNING:
        return Verdict("finished", False, history.last_step, steps, f"the trainer was killed at {progress}; resume it")
    return Verdict("finished", False, history.last_step, steps, f"{state} at {progress}: {reason or 'no reason given'}")


def check_guards(history: History, limits: Limits) -> Verdict:
    """Check that no guard fired; one that only warns is a warning. Damaged checkpoints and slowdowns have other checks."""
    events = history.current_events("guard")
    own = [event for event in events if event.get("action") != "quarantined" and event.get("rule") != "slowdown"]
    fired, recovered = split_by_attempt(history, own)
    # A halt explains more than the warnings before it.
    fired.sort(key=lambda event: event.get("action") != "halt")
    if not fired:
        config = history.config_of_attempt(history.last_attempt)
        rules = format_guards(config.train) if config else "enabled guards unknown"
        result = "no guard fired" if len(own) == len(events) else "no other guard fired"
        return _pass_if_recorded("guards", history, f"{result}; {rules}" + format_recovered(recovered, format_guard))
    verdict = Verdict("guards", False, len(fired), 0, format_guard(fired[0]) + _format_more(fired))
    return verdict.to_warning() if fired[0].get("action") == "warn" else verdict


# Kinds of events whose numbers must be within the bounds of the schema.
BOUNDED_KINDS = ("start", "resume", "step", "eval", "reach", "conversion", "heartbeat", "checkpoint", "reference")


def check_finite(history: History, limits: Limits) -> Verdict:
    """Check that all recorded and required numbers are finite and possible according to the schema.

    null counts as non-finite, also if the event does not list it under `nonfinite`.
    """
    events = history.current_events("step", "eval")
    if not events:
        return Verdict("finite numbers", None, 0, 0, "no numbers were recorded")
    if nonfinite := _find_nonfinite(events):
        position, _, name = min(nonfinite)
        step, count = events.ints("step")[position], len(nonfinite)
        text = f"{name} is not finite at step {step:,} ({count} such numbers)"
        return Verdict("finite numbers", False, count, 0, text)
    bounded = history.current_events(*BOUNDED_KINDS)
    if impossible := _find_impossible(bounded):
        position = min(impossible)
        step, count = bounded.ints("step")[position], len(impossible)
        text = f"{impossible[position]} at step {step:,}, which is impossible ({count} such events)"
        return Verdict("finite numbers", False, count, 0, text)
    has_skipped = "non_finite" in history.current_events("guard").values("rule")
    note = "; a non-finite step was skipped, see guards" if has_skipped else ""
    return Verdict("finite numbers", True, 0, 0, f"all recorded numbers are finite{note}")


def _find_nonfinite(events: Events[Any]) -> list[tuple[int, int, str]]:
    """Return (position, rank, name) of the numbers that are not finite, missing ones included. Ranks order names."""
    forms = _list_required_numbers() | events.list_fields()
    found: dict[tuple[int, str], int] = {}
    has_listed = events.has("nonfinite")
    listed = events.select(has_listed).values("nonfinite")
    for position, names in zip(np.flatnonzero(has_listed).tolist(), listed, strict=True):
        found |= {(position, name): 0 for name in list_names(names)}
    for rank, (name, form) in enumerate(forms.items(), 1):
        if form == NUMBERS:
            rows, indices, values = _flatten_lists(events, name)
            for entry in np.flatnonzero(~np.isfinite(values)).tolist():
                found.setdefault((int(rows[entry]), f"{name}[{indices[entry]}]"), rank)
        else:
            for position in _find_null_positions(events, name, form).tolist():
                found.setdefault((position, name), rank)
    return [(position, rank, name) for (position, name), rank in found.items()]


def _list_required_numbers() -> dict[str, str]:
    fields = (field for kind in ("step", "eval") for field in get_fields(kind).values())
    return {field.name: field.form for field in fields if field.form == NUMBER and field.is_required}


def _find_null_positions(events: Events[Any], name: str, form: str) -> np.ndarray:
    """Return the events in which a field is null or not finite, or required by the schema and missing."""
    has = events.has(name)
    if form in (NUMBER, INT):
        is_null = has & ~np.isfinite(events.numbers(name))
    else:
        is_null = has & np.array([value is None or value != value for value in events.values(name)], dtype=bool)
    for kind in ("step", "eval"):
        field = get_fields(kind).get(name)
        if field and field.form == NUMBER and field.is_required:
            is_null |= events.is_kind(kind) & ~has
    return np.flatnonzero(is_null)


def _flatten_lists(events: Events[Any], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, indices and values of all numbers in the lists of a field."""
    positions, lists = events.lists(name)
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    indices = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(positions, lengths), indices, np.concatenate(lists) if lists else np.zeros(0)


def _find_impossible(events: Events[Any]) -> dict[int, str]:
    """Return the first number outside the bounds of the schema, as text, of each event that has one, by position."""
    impossible: dict[int, str] = {}
    for kind in BOUNDED_KINDS:
        positions, own = np.flatnonzero(events.is_kind(kind)), events.select(events.is_kind(kind))
        for name, form in own.list_fields().items():
            field = get_fields(kind).get(name)
            if field is None:
                continue
            rows, values = _get_numbers(own, name, form)
            is_impossible = np.isfinite(values) & ~field.info.allows(values)
            for row, value in zip(rows[is_impossible].tolist(), values[is_impossible].tolist(), strict=True):
                impossible.setdefault(int(positions[row]), f"{name} is {value:g}")
    return impossible


def _get_numbers(events: Events[Any], name: str, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and values of the numbers in a field, also in lists and mappings."""
    if form == NUMBERS:
        rows, _, values = _flatten_lists(events, name)
        return rows, values
    if form != OBJECT:
        return np.arange(len(events)), events.numbers(name)
    entries = [
        (row, entry)
        for row, value in enumerate(events.values(name))
        if isinstance(value, dict)
        for entry in value.values()
        if is_number(entry)
    ]
    return np.array([row for row, _ in entries], dtype=np.int64), np.array([float(entry) for _, entry in entries])


# Parts whose errors do not end training and leave the record complete.
NONCRITICAL_PARTS = frozenset({"status", "tensorboard", "diagnosis"})


def check_errors(history: History, limits: Limits) -> Verdict:
    """Check for errors that ended the run or left a gap in its record. Noncritical errors are only reported.

    If several processes died from one cause, the cause is reported. Failed saves belong to the check of checkpoints.
    """
    errors, recovered = split_by_attempt(
        history, [e for e in history.events_of_kind("error") if _is_fatal(e) or e.get("where") != "save"]
    )
    errors.sort(key=lambda event: (event.get("cause") is not True, not _is_fatal(event)))

    def format_error(event: ErrorEvent) -> str:
        kind = event.get("type", "error")
        kind = kind if _is_fatal(event) else f"{kind} ({event.get('where', 'unknown')})"
        return f"{kind} at step {event['step']:,}: {join_lines(event.get('message'))}"

    critical = [event for event in errors if _is_fatal(event) or event.get("where") not in NONCRITICAL_PARTS]
    if critical:
        return Verdict("errors", False, len(critical), 0, format_error(critical[0]) + _format_more(critical))
    if errors:
        text = f"none that ended the run; {format_error(errors[0])}{_format_more(errors)}"
        return Verdict("errors", True, 0, 0, text + format_recovered(recovered, format_error))
    return _pass_if_recorded("errors", history, "none" + format_recovered(recovered, format_error))


def _is_fatal(event: ErrorEvent) -> bool:
    return event.get("fatal") is not False


def _format_more(events: Sequence[Any]) -> str:
    return f" (and {len(events) - 1} more)" if len(events) > 1 else ""


def _pass_if_recorded(name: str, history: History, text: str) -> Verdict:
    """Return a passed check if there are events at all, otherwise an unknown one."""
    return Verdict(name, True, 0, 0, text) if history.events else Verdict(name, None, 0, 0, "no events yet")


def check_stalls(history: History, limits: Limits) -> Verdict:
    """Check that no phase exceeded its time limit. It is a warning if the run finished all the same."""
    stalls, recovered = split_by_attempt(history, history.events_of_kind("stall"))

    def format_stall(event: StallEvent) -> str:
        age_s = event.get("phase_age_s")
        detected = "detected" if age_s is None else f"detected after {age_s:.0f} s"
        return f"in phase {event.get('phase')} at step {event['step']:,}, {detected}"

    if not stalls:
        return _pass_if_recorded("stalls", history, "none" + format_recovered(recovered, format_stall))
    worst = max(stalls, key=lambda event: event.get("phase_age_s") or 0)
    verdict = Verdict("stalls", False, len(stalls), 0, f"{len(stalls)}; the longest {format_stall(worst)}")
    return verdict.to_warning() if history.is_done else verdict


def check_preflight(history: History, limits: Limits) -> Verdict:
    """Check the preflight of the last attempt that started at step 0. Resumed attempts have none."""
    events = history.events_of_kind("preflight")
    last = max((event["attempt"] for event in events), default=0)
    checks = [event for event in events if event["attempt"] == last]
    failed = [event for event in checks if event.get("ok") is False]
    unknown = [event for event in checks if event.get("ok") not in (True, False)]

    def format_check(event: PreflightEvent) -> str:
        return join_lines(f"{event.get('name', 'a check')}: {event.get('value')}, limit {event.get('limit')}")

    if not checks:
        is_trained = history.last_step > 0
        text = "no check was recorded before the first step" if is_trained else "no check was recorded"
        return Verdict("preflight", False if is_trained else None, 0, None, text)
    if failed:
        text = f"{format_check(failed[0])} ({len(failed)} of {len(checks)} failed)"
        return Verdict("preflight", False, len(checks) - len(failed), len(checks), text)
    if unknown:
        return Verdict("preflight", None, None, len(checks), f"{format_check(unknown[0])}: neither passed nor failed")
    if problem := find_preflight_problem(history, checks):
        return Verdict("preflight", False, 1, 0, problem)
    recovered = [event for event in events if event["attempt"] != last and event.get("ok") is False]
    return Verdict(
        "preflight",
        True,
        len(checks),
        len(checks),
        f"{len(checks)} checks passed" + format_recovered(recovered, format_check),
    )
