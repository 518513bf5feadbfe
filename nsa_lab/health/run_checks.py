"""Checks of the course of a run: its end, guards, finite numbers, errors, stalls and preflight.

The last attempt is judged. Problems of earlier attempts, from which the run has recovered, are reported but do not fail.
"""

from __future__ import annotations

import math

from nsa_lab.health.log_integrity import format_guard, format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict, join_lines, list_names
from nsa_lab.runs import directory
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_guards

# Fields that every `step` event and every `eval` event must have.
REQUIRED_FIELDS = {"step": ("loss", "bpb", "lr", "grad_norm", "dt_s", "tokens_per_s"), "eval": ("loss", "bpb")}


def check_finished(history: History, limits: Limits) -> Verdict:
    """Check the final status. A run that is DONE must also have recorded its end."""
    status, steps = history.status, history.config.train.steps
    state, progress = status.get("status", "unknown"), f"step {history.last_step:,} of {steps:,}"
    reason = join_lines(status.get("reason"))
    if state == directory.DONE:
        ok = history.last_step == steps
        if ok and not any(event["attempt"] == history.last_attempt for event in history.events_of_kind("end")):
            return Verdict("finished", None, history.last_step, steps, f"{progress}, but the end is not recorded")
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
    """Check that no guard fired. Damaged checkpoints and slowdowns have separate checks."""
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
    return Verdict("guards", False, len(fired), 0, format_guard(fired[0]) + _format_more(fired))


# Valid ranges of numbers. Durations and speeds of steps are positive.
POSITIVE_FIELDS = ("dt_s", "tokens_per_s")
NONNEGATIVE_FIELDS = (
    *("loss", "bpb", "lr", "grad_norm", "grad_norm_layers", "data_s", "mem_peak_bytes", "gate_entropy", "gate_update"),
    *("sel_distance", "norm_cmp", "norm_sel", "norm_win"),
)
FRACTION_FIELDS = (
    *("gate_share_cmp", "gate_share_sel", "gate_share_win", "gate_saturation"),
    *("sel_reuse", "sel_sink_share", "sel_window_overlap"),
)
ROUNDING = 1e-3  # tolerance of fractions


def check_finite(history: History, limits: Limits) -> Verdict:
    """Check that all recorded and required numbers are finite and in their valid ranges.

    null counts as non-finite, also if the event does not list it under `nonfinite`.
    """
    nonfinite = [
        (event["step"], name) for event in history.current_events("step", "eval") for name in _list_nonfinite(event)
    ]
    if not nonfinite and not history.current_events("step", "eval"):
        return Verdict("finite numbers", None, 0, 0, "no numbers were recorded")
    impossible = [] if nonfinite else [event for event in history.current_events("step", "eval") if _find_impossible(event)]
    if impossible:
        first = impossible[0]
        text = f"{_find_impossible(first)} at step {first['step']:,}, which is impossible ({len(impossible)} such events)"
        return Verdict("finite numbers", False, len(impossible), 0, text)
    if not nonfinite:
        has_skipped = any(event.get("rule") == "non_finite" for event in history.current_events("guard"))
        note = "; a non-finite step was skipped, see guards" if has_skipped else ""
        return Verdict("finite numbers", True, 0, 0, f"all recorded numbers are finite{note}")
    step, name = nonfinite[0]
    return Verdict(
        "finite numbers", False, len(nonfinite), 0, f"{name} is not finite at step {step:,} ({len(nonfinite)} such numbers)"
    )


def _list_nonfinite(event: Event) -> list[str]:
    """Return the names of the numbers of an event that are not finite, missing ones included."""
    nonfinite = list_names(event.get("nonfinite"))
    fields = {name: value for name, value in event.items() if name != "nonfinite"}
    fields = dict.fromkeys(REQUIRED_FIELDS[event["kind"]]) | fields
    for name, value in fields.items():
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            if entry is None or (isinstance(entry, float) and not math.isfinite(entry)):
                nonfinite.append(name if index is None else f"{name}[{index}]")
    return list(dict.fromkeys(nonfinite))


def _find_impossible(event: Event) -> str | None:
    """Return the name and value of the first number outside its valid range; None if there is none."""
    for name, value in event.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, (int, float)) and not _is_possible(name, entry):
                return f"{name} is {entry:g}"
    return None


def _is_possible(name: str, value: float) -> bool:
    if name in POSITIVE_FIELDS:
        return value > 0
    if name in FRACTION_FIELDS:
        return -ROUNDING <= value <= 1 + ROUNDING
    return name not in NONNEGATIVE_FIELDS or value >= 0


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

    def format_error(event: Event) -> str:
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


def _is_fatal(event: Event) -> bool:
    return event.get("fatal") is not False


def _format_more(events: list[Event]) -> str:
    return f" (and {len(events) - 1} more)" if len(events) > 1 else ""


def _pass_if_recorded(name: str, history: History, text: str) -> Verdict:
    """Return a passed check if there are events at all, otherwise an unknown one."""
    return Verdict(name, True, 0, 0, text) if history.events else Verdict(name, None, 0, 0, "no events yet")


def check_stalls(history: History, limits: Limits) -> Verdict:
    """Check that no phase exceeded its time limit."""
    stalls, recovered = split_by_attempt(history, history.events_of_kind("stall"))

    def format_stall(event: Event) -> str:
        age_s = event.get("phase_age_s")
        detected = "detected" if age_s is None else f"detected after {age_s:.0f} s"
        return f"in phase {event.get('phase')} at step {event['step']:,}, {detected}"

    if not stalls:
        return _pass_if_recorded("stalls", history, "none" + format_recovered(recovered, format_stall))
    worst = max(stalls, key=lambda event: event.get("phase_age_s") or 0)
    return Verdict("stalls", False, len(stalls), 0, f"{len(stalls)}; the longest {format_stall(worst)}")


def check_preflight(history: History, limits: Limits) -> Verdict:
    """Check the preflight of the last attempt that started at step 0. Resumed attempts have none."""
    events = history.events_of_kind("preflight")
    last = max((event["attempt"] for event in events), default=0)
    checks = [event for event in events if event["attempt"] == last]
    failed = [event for event in checks if event.get("ok") is False]
    unknown = [event for event in checks if event.get("ok") not in (True, False)]

    def format_check(event: Event) -> str:
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
    recovered = [event for event in events if event["attempt"] != last and event.get("ok") is False]
    return Verdict(
        "preflight",
        True,
        len(checks),
        len(checks),
        f"{len(checks)} checks passed" + format_recovered(recovered, format_check),
    )
