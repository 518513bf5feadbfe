"""Attempts with different settings: each is judged by its own settings, and unknown settings give unknown results.

Events without their usual fields: no check crashes, and checks that need the fields do not pass.
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
    make_attempt_facts,
    make_checkpoint_event,
    make_config,
    make_eval_event,
    make_healthy_events,
    make_step_event,
    write_run,
)
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.health import Verdict, examine
from nsa_lab.runs import directory
from nsa_lab.runs import events as record
from nsa_lab.runs.history import History, get_monitor_settings

# The trainer stopped at step 120 with a save, and was resumed with other settings.
BEFORE = make_config()
AFTER = make_config(
    train__log_every=7, train__stats_every=30, train__eval_every=40, train__save_every=60, runtime__heartbeat_s=2.0
)
DUE_CHECKS = ("heartbeats", "evaluations", "statistics", "every step once", "checkpoints")


def make_resumed_events() -> list[Event]:
    first = [event for event in make_healthy_events(BEFORE) if event["step"] <= 120 and event["kind"] != "end"]
    first += [
        make_checkpoint_event(120),
        {"kind": "end", "attempt": 1, "step": 120, "status": directory.PREEMPTED, "reason": "stopped"},
    ]
    first_event = {"kind": "resume", "attempt": 2, "step": 120, "from_step": 120, "steps": 200}
    second: list[Event] = [first_event | make_attempt_facts()]
    for step in range(121, 201):
        if step % 7 == 0 or step % 30 == 0 or step == 200:
            second.append(make_step_event(step, AFTER, attempt=2))
        if step % 40 == 0:
            second.append(make_eval_event(step, 2.1 - step * 1e-6, attempt=2))
        if step % 60 == 0 or step == 200:
            second.append(make_checkpoint_event(step, attempt=2))
        second.append({"kind": "heartbeat", "attempt": 2, "step": step, "phase": "step", "rss_bytes": 10**9})
    end = {"kind": "end", "attempt": 2, "step": 200, "status": directory.DONE, "exit_code": 0}
    end |= {"reason": directory.format_done_reason(200)}
    return [*first, *second, end]


def with_settings(*configs: RunConfig, key: str = "settings") -> Callable[[list[Event]], list[Event]]:
    """Return an edit that makes two attempts, which record these configurations."""

    def spoil(events: list[Event]) -> list[Event]:
        events = make_resumed_events()
        first_events = [event for event in events if event["kind"] in ("start", "resume")]
        for event, config in zip(first_events, configs, strict=True):
            event[key] = get_monitor_settings(config) if key == "settings" else config.hash()
        return events

    return spoil


def examine_run(folder: Path, spoil: Any) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in examine(write_run(folder, AFTER, spoil)).verdicts}


def test_changed_settings_between_attempts_pass_all_checks(tmp_path: Path) -> None:
    found = examine_run(tmp_path, with_settings(BEFORE, AFTER))
    assert {name: verdict.text for name, verdict in found.items() if verdict.ok is not True} == {}
    assert found["evaluations"].text == "5, none missing"
    assert found["statistics"].limit == 6 + 2
    assert found["heartbeats"].text.endswith(", one every 10, then 2 s")


@looped
@pytest.mark.parametrize(
    ("kind", "step", "name"),
    [
        *(("eval", 50, "evaluations"), ("eval", 160, "evaluations")),
        *(("step", 60, "statistics"), ("step", 180, "statistics")),
        *(("step", 70, "every step once"), ("step", 161, "every step once")),
        *(("checkpoint", 100, "checkpoints"), ("checkpoint", 180, "checkpoints")),
    ],
)
def test_due_entries_follow_the_settings_of_each_attempt(kind: str, step: int, name: str, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [e for e in with_settings(BEFORE, AFTER)(events) if (e["kind"], e["step"]) != (kind, step)]

    assert examine_run(tmp_path, spoil)[name].ok is False


def test_unrecorded_settings_give_unknown_results(tmp_path: Path) -> None:
    found = examine_run(tmp_path, with_settings(BEFORE, AFTER, key="config_hash"))
    assert {name for name, verdict in found.items() if verdict.ok is not True} == set(DUE_CHECKS)
    assert all(found[name].ok is None and "settings of attempt 1 unknown" in found[name].text for name in DUE_CHECKS)


def test_entry_missing_by_known_settings_fails(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [
            e for e in with_settings(BEFORE, AFTER, key="config_hash")(events) if (e["kind"], e["step"]) != ("eval", 160)
        ]

    assert examine_run(tmp_path, spoil)["evaluations"].ok is False


def test_guards_are_those_enabled_in_the_attempt(tmp_path: Path) -> None:
    guarded = make_config(train__spike_sigma=8.0, train__stall_action="halt")
    assert ", a loss 8 standard deviations above its window, a stall; disabled: train.min_tokens_per_s" in (
        examine_run(tmp_path / "recorded", with_settings(BEFORE, guarded))["guards"].text
    )
    unrecorded = examine_run(tmp_path / "not recorded", with_settings(AFTER, guarded, key="config_hash"))["guards"]
    assert unrecorded.ok is True and unrecorded.text == "no guard fired; enabled guards unknown"


@looped
@pytest.mark.parametrize("settings", [None, [1], {"train.log_every": "often"}, {"train.log_every": -1}])
def test_invalid_recorded_settings_are_unknown(settings: Any, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, spoil=lambda events: events[0].update(settings=settings))
    assert History.read(run_dir).config_of_attempt(1) is None


def test_unknown_recorded_settings_are_ignored(tmp_path: Path) -> None:
    settings = get_monitor_settings(BEFORE) | {"train.log_every": 5, "train.of_tomorrow": 1}
    run_dir = write_run(tmp_path, spoil=lambda events: events[0].update(settings=settings))
    config = History.read(run_dir).config_of_attempt(1)
    assert config is not None and config.train.log_every == 5


def collect_fields(events: list[Event]) -> set[tuple[str, str]]:
    guaranteed = {"kind", "attempt", "step", "t"}
    return {(event["kind"], name) for event in events for name in event if name not in guaranteed}


PROBLEMS: list[Event] = [
    {"kind": "guard", "attempt": 1, "step": 90, "rule": "slow", "value": 1.0, "limit": 2.0, "action": "warn", "text": "a"},
    {"kind": "stall", "attempt": 1, "step": 60, "phase": "data", "phase_age_s": 130.0, "limit_s": 120.0},
    {"kind": "error", "attempt": 1, "step": 60, "where": "save", "type": "OSError", "message": "full", "fatal": False},
    {"kind": "error", "attempt": 2, "step": 130, "where": "step", "type": "A", "message": "b", "fatal": 1, "cause": True},
    {"kind": "signal", "attempt": 1, "step": 60, "signal": "SIGTERM", "phase": "step", "action": "save and exit"},
    {"kind": "halt", "attempt": 1, "step": 119, "status": "HALTED", "exit_code": 3, "reason": "a"},
]


# Checks that cannot all pass without the field. A line with another type in the field is not an event, and missing.
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
def test_missing_null_or_invalid_fields_crash_no_check(tmp_path: Path) -> None:
    """All kinds of events in both attempts. Readers can rely only on kind, time, attempt and step."""
    run_dir = write_run(tmp_path, AFTER, lambda events: [*PROBLEMS, *with_settings(BEFORE, AFTER)(events)])
    (run_dir / directory.CHECKPOINTS).mkdir()
    file = run_dir / directory.EVENTS
    all_events = [json.loads(line) for line in file.read_text().splitlines()]
    sampled = [e for e in all_events if e["kind"] not in ("step", "heartbeat") or e["step"] % 30 in (0, 1)]
    history = History.read(run_dir)
    for kind, name in sorted(collect_fields(sampled)):
        for value in (..., None, [None, {}]):
            edited = copy.deepcopy(sampled)
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


def test_earlier_attempt_without_heartbeats_fails(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        remaining = [e for e in with_settings(BEFORE, AFTER)(events) if (e["kind"], e["attempt"]) != ("heartbeat", 1)]
        for index, event in enumerate(event for event in remaining if event["attempt"] == 1):
            event["t"] = 10.0 * index
        return remaining

    heartbeats = examine_run(tmp_path, spoil)["heartbeats"]
    assert (
        heartbeats.ok is False
        and heartbeats.text.startswith("0 in the ")
        and "of attempt 1, expected one every 10 s" in heartbeats.text
    )


@pytest.mark.parametrize(("suspended_s", "ok"), [(None, False), (10.0, False), (100.0, True)])
def test_heartbeats_are_not_due_during_a_suspension(suspended_s: float | None, ok: bool, tmp_path: Path) -> None:
    """A run of 116 s with every fifth heartbeat: too few, unless the process was suspended for most of the time."""

    def spoil(events: list[Event]) -> list[Event]:
        beats = [event for event in events if event["kind"] == "heartbeat"]
        dropped = {id(beat) for number, beat in enumerate(beats) if number % 5}
        if suspended_s is not None:
            beats[10]["suspended_s"] = suspended_s
        for index, event in enumerate(events):
            event["t"] = 1000.0 + 2 * index
        return [event for event in events if id(event) not in dropped]

    history = History.read(write_run(tmp_path, make_config(runtime__heartbeat_s=2.0), spoil=spoil))
    verdict = next(verdict for verdict in examine(history).verdicts if verdict.name == "heartbeats")
    assert verdict.ok is ok, (verdict.text, verdict.value, verdict.limit)
    assert ("suspended for 100 s" in verdict.text) == ok
