"""Checks that `status.json` and the last events of an attempt tell one end."""

from __future__ import annotations

import numpy as np

from nsa_lab.config.errors import shorten
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.event_schema import EndEvent
from nsa_lab.runs.history import History

MAX_LATE_STEPS = 10  # after a signal (1 measured)


def check_status_agrees(history: History, limits: Limits) -> Verdict:
    """Check that `status.json` and the last event of the last attempt tell the same end."""
    name = "status agrees"
    attempt = history.last_attempt
    endings = [event for event in history.events_of_kind("end", "halt") if event["attempt"] == attempt]
    status = history.status
    if problem := _find_other_reason(history, endings):
        return Verdict(name, False, 1, 0, problem)
    # A trainer replaces its status, and on a full disk it overwrites it in place, which a reader may see in part.
    if not history.is_alive and directory.has_damaged_status(history.run_dir):
        text = f"{directory.STATUS} is damaged and was ignored; restore it from a copy"
        return Verdict(name, False, 1, 0, text)
    if history.is_alive or not endings:
        return Verdict(name, None, None, 0, "no attempt has ended" if not endings else "a trainer is at work")
    ending = endings[-1]
    if problem := _find_late_event(history, ending):
        return Verdict(name, False, 1, 0, problem)
    recorded_status = ending.get("status") or (directory.HALTED if ending["kind"] == "halt" else directory.DONE)
    recorded = {"status": recorded_status, "attempt": attempt, "step": ending["step"], "tokens": ending.get("tokens")}
    recorded |= {key: ending.get(key) for key in ("exit_code", "reason")}
    different = [
        f"{key} {shorten(str(status[key]))}, event {shorten(str(value))}"
        for key, value in recorded.items()
        if value is not None and status.get(key) is not None and status[key] != value
    ]
    # A run that was resumed and has not recorded anything yet has the state RUNNING or PREEMPTED.
    if different:
        return Verdict(name, False, len(different), 0, f"status.json and the last event disagree: {'; '.join(different)}")
    if recorded_status == directory.DONE and (code := ending.get("exit_code") or status.get("exit_code")):
        return Verdict(name, False, 1, 0, f"a trainer that ended as DONE has exit code {code}, expected 0")
    if problem := _find_ignored_signal(history):
        return Verdict(name, False, 1, 0, problem)
    return Verdict(name, True, 0, 0, f"status.json and the last event: {recorded_status} at step {ending['step']:,}")


def _find_other_reason(history: History, endings: list[EndEvent]) -> str | None:
    """Return a text on a run that is DONE with another reason than that all steps are done; None without one."""
    expected = directory.format_done_reason(history.config.train.steps)
    for place, ending in (("status.json", history.status), *(("the last event", ending) for ending in endings)):
        reason = ending.get("reason")
        if ending.get("status") == directory.DONE and reason not in (None, expected):
            return f"{place} has status DONE with the reason {shorten(str(reason))!r}, expected {expected!r}"
    return None


def _find_ignored_signal(history: History) -> str | None:
    """Return a text on an attempt that trained on after a signal to save and exit; None if there is none.

    The trainer stops after the current step, and records steps whose results it has not read yet.
    """
    trained = history.events_of_kind("step")
    attempts, steps = trained.ints("attempt"), trained.ints("step")
    for event in history.events_of_kind("signal"):
        last = int(steps[attempts == event["attempt"]].max(initial=0))
        if event.get("action") == "save and exit" and last > event["step"] + MAX_LATE_STEPS:
            text = f"attempt {event['attempt']} received {event.get('signal')} at step {event['step']:,} to save and exit"
            return f"{text}, but trained on to step {last:,}"
    return None


def _find_late_event(history: History, ending: EndEvent) -> str | None:
    """Return a text on an attempt that ended twice or in two ways, or trained on after its end; None if it did neither."""
    attempt = ending["attempt"]
    own = history.events.select(history.events.ints("attempt") == attempt)
    kinds = {event["kind"] for event in own.of_kind("end", "halt")}
    if len(kinds) > 1:
        return f"attempt {attempt} has both ended and halted"
    # If a rank fails, another rank and the supervisor may both record the halt.
    n_ranks = max((event.get("ranks") or 1 for event in history.first_events if event["attempt"] == attempt), default=1)
    if len(own.of_kind(ending["kind"])) > (1 if ending["kind"] == "end" or n_ranks == 1 else n_ranks + 1):
        return f"attempt {attempt} has ended twice"
    last = int(np.flatnonzero(own.is_kind(ending["kind"])).max())
    late = own.select(np.arange(len(own)) > last).of_kind("step", "eval")
    return f"attempt {attempt} records step {late[-1]['step']:,} after its end" if late else None
