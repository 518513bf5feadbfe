"""Edits of endings, times, questions and paths of a recorded run fail their check; the record itself passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_run import Event, edit_history

from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.health.attempt_checks import check_attempts_agree, check_evaluated_text
from nsa_lab.health.consistency_checks import check_consistent
from nsa_lab.health.ending_checks import check_status_agrees
from nsa_lab.health.log_integrity import check_clock
from nsa_lab.health.step_accounting import check_checkpoints
from nsa_lab.runs import resolve
from nsa_lab.runs.history import History

OUTPUTS = resolve.get_root() / "outputs"
RECENT, RESUMED = "whole4-20261126T030637Z-8c93", "production_50k-20261121T141448Z-afd3"
Check = Callable[[History, Limits], Verdict]
Edit = Callable[[list[Event]], Any]
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def records() -> dict[str, History]:
    return {name: History.read(OUTPUTS / name) for name in (RECENT, RESUMED)}


def change(
    kind: str, get_values: Callable[[Event], Event], first_step: int = 0, attempts: tuple[int, ...] = (1, 2)
) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == kind and event["step"] >= first_step and event["attempt"] in attempts:
                event.update(get_values(event))

    return edit


def set_fields(kind: str, first_step: int = 0, **values: Any) -> Edit:
    return change(kind, lambda event: values, first_step)


def shift_time(seconds: float) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in events:
            event["t"] += seconds

    return edit


def drop(kind: str, name: str) -> Edit:
    return lambda events: [event.pop(name) for event in events if event["kind"] == kind] and None


def set_accuracy(event: Event) -> Event:
    return {"accuracy": event["accuracy"] | {"random": 0.3}}


@pytest.mark.slow
def test_edits_fail(records: dict[str, History]) -> None:
    cases: list[tuple[str, Edit, Check, str]] = [
        (RESUMED, drop("resume", "data_identity"), check_attempts_agree, "attempt 2 does not record its text"),
        (RESUMED, set_fields("resume", data_identity=""), check_attempts_agree, "attempt 2 does not record its text"),
        (RESUMED, drop("resume", "code"), check_attempts_agree, "attempt 2 does not record its code"),
        (RESUMED, set_fields("resume", checkpoint="../../step-00010000"), check_attempts_agree, "but from ../../step"),
        (
            RECENT,
            set_fields("end", reason="disk full"),
            check_status_agrees,
            "the last event has status DONE with the reason",
        ),
        (RECENT, set_fields("reach", 5000, sequences=4), check_evaluated_text, "reach: 4 sequences at step 5,250, 16 at 0"),
        (RECENT, set_fields("reach", 5000, length=1024), check_evaluated_text, "reach: sequences of 1,024 tokens at step"),
        (RECENT, change("reach", set_accuracy), check_consistent, "random: 0.3 of 16 answers are right"),
        (RECENT, shift_time(73 * 365 * DAY_S), check_clock, "status.json was written 26,645 days before the last event"),
        (RECENT, shift_time(-56 * 365 * DAY_S), check_clock, "status.json was written 20,440 days after the last event"),
        (RECENT, set_fields("checkpoint", path="../../step-00003500"), check_checkpoints, "saved as ../../step-00003500,"),
    ]
    for record, edit, check, text in cases:
        verdict = check(edit_history(records[record], edit), LIMITS)
        assert verdict.ok is False and text in verdict.text, verdict.text
        assert check(records[record], LIMITS).ok is not False, text


def test_status_with_another_reason_or_time(records: dict[str, History]) -> None:
    history = records[RECENT]

    def set_status(**values: Any) -> History:
        return replace(history, status=history.status | values)

    ended = history.status["updated"]
    for values, check, ok in (
        ({"reason": "loss is NaN"}, check_status_agrees, False),
        ({"reason": None}, check_status_agrees, True),
        ({"updated": 1.0}, check_clock, False),
        ({"updated": ended + 2 * DAY_S}, check_clock, False),
        ({"updated": ended + 0.9 * DAY_S}, check_clock, True),
        ({"updated": "today"}, check_clock, True),
        # A command that continues the run writes the status again, and so does a later attempt.
        ({"updated": ended + 2 * DAY_S, "status": "PREEMPTED"}, check_clock, True),
        ({"updated": ended + 2 * DAY_S, "attempt": 2, "status": "RUNNING"}, check_clock, True),
    ):
        assert check(set_status(**values), LIMITS).ok is ok, values


def test_record_of_the_future_is_unknown(records: dict[str, History]) -> None:
    """Nobody knows which clock is wrong: that of the trainer, or that of the reader."""
    history = records[RECENT]
    ahead = time.time() + 2 * DAY_S - history.status["updated"]
    status = history.status | {"updated": history.status["updated"] + ahead}
    verdict = check_clock(replace(edit_history(history, shift_time(ahead)), status=status), LIMITS)
    assert verdict.ok is None and "2 days ahead of this machine's clock" in verdict.text


def test_more_questions_of_a_newer_version_are_a_warning(records: dict[str, History]) -> None:
    def add(events: list[Event]) -> None:
        for event in list(events):
            if event["kind"] == "reach" and event["step"] > 5000:
                event |= {"attempt": 2, "sequences": 32}

    verdict = check_evaluated_text(edit_history(records[RECENT], add), LIMITS)
    assert verdict.level == "warning" and "reach: 32 sequences" in verdict.text
