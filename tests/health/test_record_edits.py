"""Edits of endings, times, questions and paths of a recorded run fail their check; the record itself passes."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import Event, edit_history

from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.health.attempt_checks import check_attempts_agree, check_evaluated_text
from nsa_lab.health.consistency_checks import check_consistent
from nsa_lab.health.ending_checks import check_status_agrees
from nsa_lab.health.evaluation_relations import find_evaluation_problem
from nsa_lab.health.record_checks import check_clock, check_one_run, check_record_format
from nsa_lab.health.step_accounting import check_checkpoints
from nsa_lab.runs import resolve
from nsa_lab.runs.evaluation import EVALUATION
from nsa_lab.runs.event_schema import PHASES
from nsa_lab.runs.history import History

OUTPUTS = resolve.get_root() / "outputs"
RECENT, RESUMED = "whole4-20261126T030637Z-8c93", "production_50k-20261121T141448Z-afd3"
EVALUATED = "long_64k-20261126T122445Z-0d29"
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


def move_away(event: Event) -> Event:
    return {"path": f"../../step-{event['step']:08d}"}


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
        (RECENT, set_fields("heartbeat", 5000, phase_age_s=500.0), check_consistent, "the phase step is 500 s old"),
        (RECENT, change("reach", set_accuracy), check_consistent, "random: 0.3 of 16 answers are right"),
        (RECENT, shift_time(73 * 365 * DAY_S), check_clock, "status.json was written 26,645 days before the last event"),
        (RECENT, shift_time(-56 * 365 * DAY_S), check_clock, "status.json was written 20,440 days after the last event"),
        (RECENT, change("checkpoint", move_away), check_checkpoints, "saved as ../../step-00003500,"),
    ]
    for record, edit, check, text in cases:
        verdict = check(edit_history(records[record], edit), LIMITS)
        assert verdict.ok is False and text in verdict.text, verdict.text
        assert check(records[record], LIMITS).ok is not False, text


def test_status_with_another_reason_or_time(records: dict[str, History]) -> None:
    history = records[RECENT]

    def set_status(**values: Any) -> History:
        return replace(history, status=history.status | values)

    both = replace(edit_history(history, set_fields("end", exit_code=3)), status=history.status | {"exit_code": 3})
    assert "has exit code 3, expected 0" in check_status_agrees(both, LIMITS).text
    ended = history.status["updated"]
    for values, check, ok in (
        ({"reason": "loss is NaN"}, check_status_agrees, False),
        ({"reason": None}, check_status_agrees, True),
        ({"exit_code": 3}, check_status_agrees, False),
        ({"updated": 1.0}, check_clock, False),
        ({"updated": ended + 2 * DAY_S}, check_clock, False),
        ({"updated": ended + 0.9 * DAY_S}, check_clock, False),
        ({"updated": ended + 50.0}, check_clock, True),
        ({"updated": "today"}, check_clock, True),
        # A command that continues the run writes the status again, and so does a later attempt.
        ({"updated": ended + 2 * DAY_S, "status": "PREEMPTED"}, check_clock, True),
        ({"updated": ended + 2 * DAY_S, "attempt": 2, "status": "RUNNING"}, check_clock, True),
    ):
        assert check(set_status(**values), LIMITS).ok is ok, values


def test_record_of_the_future_is_unknown(records: dict[str, History]) -> None:
    """Nobody knows which clock is wrong, the trainer's or the reader's."""
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


def test_unknown_versions_and_phases_are_a_warning(records: dict[str, History]) -> None:
    for edit, text in (
        (set_fields("step", 5000, v=2), "276 events have version 2 of the format, expected 1"),
        (set_fields("heartbeat", 5000, phase="banana"), "the phase 'banana' at step"),
    ):
        verdict = check_record_format(edit_history(records[RECENT], edit), LIMITS)
        assert verdict.level == "warning" and text in verdict.text, verdict.text
    assert check_record_format(records[RECENT], LIMITS).level == "passed"


def test_the_trainer_has_no_other_phases() -> None:
    sources = "".join(path.read_text() for path in (resolve.get_root() / "nsa_lab/train").rglob("*.py"))
    found = set(re.findall(r'(?:phases?|_exclude_from_step_time)\("(\w+)"', sources))
    assert found - set(PHASES) == set() and len(found) >= 9


def test_foreign_evaluations_fail(tmp_path: Path) -> None:
    run = tmp_path / EVALUATED
    shutil.copytree(OUTPUTS / EVALUATED, run)
    history, file = History.read(run), run / EVALUATION
    record = json.loads(file.read_text())
    for value, text in (
        ([1], "evaluation.json: expected a JSON object"),
        (record | {"config_hash": "0" * 16}, "evaluation.json belongs to configuration 0000000000000000"),
        (record | {"step": 777}, "evaluation.json is of step 777, which the run did not save"),
        (record | {"run": "another"}, "evaluation.json: it is of another run"),
        (record | {"retrieval": 3}, "evaluation.json: retrieval"),
    ):
        file.write_text(json.dumps(value))
        verdict = check_one_run(history, LIMITS)
        assert verdict.ok is False and text in verdict.text, verdict.text
    halved = {
        name: text | {"loss": text["loss"] / 4, "rows": [[n, x / 4] for n, x in text["rows"]]}
        for name, text in record["texts"].items()
    }
    documents = {name: x / 2 for name, x in record["documents"].items() if isinstance(x, float)}
    wrong = [cell | {"right": 0} for cell in record["retrieval"]]
    octaves = [part | {"tokens": 3} for part in record["positions"]["octaves"]]
    names, n = list(record["texts"]), 3 * 65_536
    long_rows = {name: part | {"tokens": n, "rows": [[n, part["loss"]]]} for name, part in record["texts"].items()}
    copied = record["texts"] | {names[0]: record["texts"][names[1]] | {"identity": "0" * 16}}
    for changes, text in (
        ({"positions": record["positions"] | {"octaves": octaves}}, "have 3 tokens, expected"),
        ({"texts": {name: part | {"tokens": 17} for name, part in record["texts"].items()}}, "has 17 tokens, its rows"),
        ({"texts": long_rows}, "tokens, expected at most 65,536"),
        ({"texts": copied}, "have the same losses"),
        ({"texts": halved}, "nats per token, the run measured"),
        ({"documents": record["documents"] | documents}, "whole documents has"),
        ({"retrieval": wrong}, "single facts at 65,536 tokens are answered, the run measured 100%"),
    ):
        assert text in (find_evaluation_problem(history, record | changes) or "")
    two_names = record["texts"] | {"again": record["texts"][names[0]]}
    for value in (record, record | {"texts": two_names}, record | {"step": 1000}, {"v": 2}):
        file.write_text(json.dumps(value))
        assert check_one_run(history, LIMITS).ok, value.keys()
