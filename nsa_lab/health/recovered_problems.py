"""Describe problems of earlier attempts, from which a run has recovered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_lab.health.verdict import join_lines
from nsa_lab.runs.event_schema import GuardEvent
from nsa_lab.runs.history import History


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
