"""Attempts that ran with other settings: each is judged by its own, and what is not known is not called good.

And events that lack what their kind usually has: no verdict traces back, and what it would have needed is not "ok".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import (
    Event,
    make_checkpoint_event,
    make_config,
    make_eval_event,
    make_healthy_events,
    make_step_event,
    write_run,
)

from nsa_lab.config import RunConfig
from nsa_lab.health import Verdict, examine
from nsa_lab.runs import directory, monitor_settings
from nsa_lab.runs import events as record
from nsa_lab.runs.history import History

# The trainer stopped at step 120 with a save, and was resumed with other settings.
BEFORE = make_config()
AFTER = make_config(
    train__log_every=7, train__stats_every=30, train__eval_every=40, train__save_every=60, runtime__heartbeat_s=1.0
)
DUE_CHECKS = ("heartbeats", "evaluations", "statistics", "every step once", "checkpoints")


def make_resumed_events() -> list[Event]:
    first = [event for event in make_healthy_events(BEFORE) if event["step"] <= 120 and event["kind"] != "end"]
    first += [
        make_checkpoint_event(120),
        {"kind": "end", "attempt": 1, "step": 120, "status": directory.PREEMPTED, "reason": "stopped"},
    ]
    second: list[Event] = [{"kind": "resume", "attempt": 2, "step": 120, "from_step": 120, "steps": 200, "device": "cpu"}]
    for step in range(121, 201):
        if step % 7 == 0 or step % 30 == 0 or step == 200:
            second.append(make_step_event(step, AFTER, attempt=2))
        if step % 40 == 0:
            second.append(make_eval_event(step, 2.1, attempt=2))
        if step % 60 == 0 or step == 200:
            second.append(make_checkpoint_event(step, attempt=2))
        second.append({"kind": "heartbeat", "attempt": 2, "step": step, "phase": "step", "rss_bytes": 10**9})
    end = {"kind": "end", "attempt": 2, "step": 200, "status": directory.DONE, "exit_code": 0, "reason": "done"}
    return [*first, *second, end]


def with_settings(*configs: RunConfig, key: str = "settings") -> Callable[[list[Event]], list[Event]]:
    """Two attempts that say what they ran with."""

    def spoil(events: list[Event]) -> list[Event]:
        events = make_resumed_events()
        begun = [event for event in events if event["kind"] in ("start", "resume")]
        for event, config in zip(begun, configs, strict=True):
            event[key] = monitor_settings.get_monitor_settings(config) if key == "settings" else config.hash()
        return events

    return spoil


def examine_run(folder: Path, spoil: Any) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in examine(write_run(folder, AFTER, spoil)).verdicts}


def test_settings_that_changed_between_attempts_make_no_run_ill(tmp_path: Path) -> None:
    found = examine_run(tmp_path, with_settings(BEFORE, AFTER))
    assert {name: verdict.text for name, verdict in found.items() if verdict.ok is not True} == {}
    assert found["evaluations"].text == "5, each when it was due"
    assert found["statistics"].limit == 6 + 2
    assert found["heartbeats"].text.endswith(", one every 10, then 1 s")


@pytest.mark.parametrize(
    ("kind", "step", "name"),
    [
        *(("eval", 50, "evaluations"), ("eval", 160, "evaluations")),
        *(("step", 60, "statistics"), ("step", 180, "statistics")),
        *(("step", 70, "every step once"), ("step", 161, "every step once")),
        *(("checkpoint", 100, "checkpoints"), ("checkpoint", 180, "checkpoints")),
    ],
)
def test_each_attempt_owes_what_its_own_settings_say(kind: str, step: int, name: str, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [e for e in with_settings(BEFORE, AFTER)(events) if (e["kind"], e["step"]) != (kind, step)]

    assert examine_run(tmp_path, spoil)[name].ok is False


def test_where_the_record_does_not_tell_its_settings_that_is_said(tmp_path: Path) -> None:
    found = examine_run(tmp_path, with_settings(BEFORE, AFTER, key="config_hash"))
    assert {name for name, verdict in found.items() if verdict.ok is not True} == set(DUE_CHECKS)
    assert all(
        found[name].ok is None and "what was due in attempt 1 is not known" in found[name].text for name in DUE_CHECKS
    )


def test_what_is_known_to_be_missing_is_missing_whatever_is_not_known(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [
            e for e in with_settings(BEFORE, AFTER, key="config_hash")(events) if (e["kind"], e["step"]) != ("eval", 160)
        ]

    assert examine_run(tmp_path, spoil)["evaluations"].ok is False


def test_a_silent_guard_is_worth_what_was_on_in_its_attempt(tmp_path: Path) -> None:
    guarded = make_config(train__spike_sigma=8.0, train__stall_action="halt")
    assert ", a loss 8 deviations over its window, a stall; off: train.min_tokens_per_s" in (
        examine_run(tmp_path / "told", with_settings(BEFORE, guarded))["guards"].text
    )
    not_told = examine_run(tmp_path / "not told", with_settings(AFTER, guarded, key="config_hash"))["guards"]
    assert not_told.ok is True and not_told.text == "no guard fired; which of them were on is not known"


@pytest.mark.parametrize("settings", [None, [1], {"train.log_every": "often"}, {"train.log_every": -1}])
def test_settings_that_are_none_are_not_known(settings: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, spoil=lambda events: events[0].update(settings=settings))
    assert History.read(run_dir).config_of_attempt(1) is None


def test_settings_that_a_younger_version_tells_are_passed_over(tmp_path: Path) -> None:
    settings = monitor_settings.get_monitor_settings(BEFORE) | {"train.log_every": 5, "train.of_tomorrow": 1}
    run_dir = write_run(tmp_path, spoil=lambda events: events[0].update(settings=settings))
    config = History.read(run_dir).config_of_attempt(1)
    assert config is not None and config.train.log_every == 5


def collect_fields(events: list[Event]) -> set[tuple[str, str]]:
    kept = {"kind", "attempt", "step", "t"}
    return {(event["kind"], name) for event in events for name in event if name not in kept}


TROUBLES: list[Event] = [
    {"kind": "guard", "attempt": 1, "step": 90, "rule": "slow", "value": 1.0, "limit": 2.0, "action": "warn", "text": "a"},
    {"kind": "stall", "attempt": 1, "step": 60, "phase": "data", "phase_age_s": 130.0, "limit_s": 120.0},
    {"kind": "error", "attempt": 1, "step": 60, "where": "save", "type": "OSError", "message": "full", "fatal": False},
    {"kind": "error", "attempt": 2, "step": 130, "where": "step", "type": "A", "message": "b", "fatal": 1, "cause": True},
    {"kind": "signal", "attempt": 1, "step": 60, "signal": "SIGTERM", "phase": "step", "action": "save and exit"},
    {"kind": "halt", "attempt": 1, "step": 119, "status": "HALTED", "exit_code": 3, "reason": "a"},
]


# Of these not all can be good without that field; a line in which it is of another kind is no event, and missing.
NEEDS: dict[tuple[str, str], list[str]] = {
    ("step", "dt_s"): ["finite numbers", "statistics"],
    ("step", "data_s"): ["data wait"],
    ("step", "lr"): ["learning rate"],
    ("step", "tokens"): ["every step once"],
    ("step", "gate_entropy"): ["statistics", "gates alive"],
    ("heartbeat", "rss_bytes"): ["memory"],
    ("preflight", "ok"): ["preflight"],
    ("eval", "bpb"): ["finite numbers", "evaluations"],
    ("eval", "split"): ["evaluations"],
}


@pytest.mark.slow
def test_no_field_that_is_missing_null_or_of_another_kind_stops_a_verdict(tmp_path: Path) -> None:
    """Of every kind of event, in both attempts: readers are sure of its kind, time, attempt and step alone."""
    run_dir = write_run(tmp_path, AFTER, lambda events: [*TROUBLES, *with_settings(BEFORE, AFTER)(events)])
    (run_dir / directory.CHECKPOINTS).mkdir()
    file = run_dir / directory.EVENTS
    whole = [json.loads(line) for line in file.read_text().splitlines()]
    few = [e for e in whole if e["kind"] not in ("step", "heartbeat") or e["step"] % 30 in (0, 1)]
    history = History.read(run_dir)
    for kind, name in sorted(collect_fields(few)):
        for value in (..., None, [None, {}]):
            edited = copy.deepcopy(few)
            for event in edited:
                if event["kind"] == kind and name in event:
                    event.pop(name) if value is ... else event.update({name: value})
            file.write_text("".join(json.dumps(event) + "\n" for event in edited))
            try:
                read = record.read_events(file)
                edited_history = replace(
                    history, events=read, steps=record.get_step_events(read), evaluations=record.get_eval_events(read)
                )
                found = {verdict.name: verdict.ok for verdict in examine(edited_history).verdicts}
            except Exception as error:
                raise AssertionError(f"{name} of {kind} as {value!r}: {error!r}") from error
            needs = NEEDS.get((kind, name))
            assert needs is None or not all(found[verdict] for verdict in needs), (kind, name, value)


def test_an_earlier_attempt_without_a_heartbeat_is_named(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        kept = [e for e in with_settings(BEFORE, AFTER)(events) if (e["kind"], e["attempt"]) != ("heartbeat", 1)]
        for index, event in enumerate(event for event in kept if event["attempt"] == 1):
            event["t"] = 10.0 * index
        return kept

    found = examine_run(tmp_path, spoil)["heartbeats"]
    assert found.ok is False and found.text.startswith("0 in the ") and "of attempt 1, one every 10 s" in found.text
