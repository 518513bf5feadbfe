"""Telemetry: one line per event, torn lines are tolerated, attempts are distinguished, stalls are reported."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_lab.runs import events
from nsa_lab.train.telemetry import awake_clock
from nsa_lab.train.telemetry import heartbeat as heartbeats
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.heartbeat import Heartbeat, StallRule
from nsa_lab.train.telemetry.phases import Phases
from nsa_lab.train.telemetry.system_metrics import compute_percentile, count_bytes_by_dtype, get_resident_bytes


def log_of(folder: Path, attempt: int = 1) -> EventLog:
    return EventLog(folder, "a-run", attempt)


def test_an_event_carries_its_envelope_and_fields(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.step, log.tokens = 3, 300
    log.append("step", loss=2.5, grad_norm_layers=[1.0, 2.0])
    (event,) = events.read_events(tmp_path)
    assert {k: event[k] for k in ("v", "run", "attempt", "kind", "step", "tokens", "loss")} == {
        "v": 1,
        "run": "a-run",
        "attempt": 1,
        "kind": "step",
        "step": 3,
        "tokens": 300,
        "loss": 2.5,
    }
    assert abs(event["t"] - time.time()) < 60


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    log_of(tmp_path).append("step", loss=float("nan"), layers=[1.0, float("inf")])
    text = (tmp_path / "events.jsonl").read_text()
    event = json.loads(text, parse_constant=lambda constant: 1 / 0)
    assert event["loss"] is None and event["layers"] == [1.0, None] and event["nonfinite"] == ["loss", "layers[1]"]


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    log_of(tmp_path).append("step", step=1)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"v":1,"kind":"step","st')
    assert [e["step"] for e in events.read_events(tmp_path)] == [1]
    log_of(tmp_path, attempt=2).append("step", step=2)
    assert [e["step"] for e in events.read_events(tmp_path)] == [1, 2]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    log = log_of(tmp_path)

    def write() -> None:
        for _ in range(50):
            log.append("heartbeat", phase="x" * 500)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events.read_events(tmp_path)) == 200


def test_repeated_steps_count_once_and_discarded_ones_do_not_count(tmp_path: Path) -> None:
    recorded = [(1, "start", 0), *((1, "step", n) for n in range(1, 9)), (2, "resume", 5), (2, "step", 6), (3, "resume", 5)]
    for attempt, kind, step in recorded:
        log_of(tmp_path, attempt).append(kind, step=step, **({"from_step": step} if kind != "step" else {}))
    result = events.get_step_events(events.read_events(tmp_path))
    assert [(e["step"], e["attempt"]) for e in result] == [(n, 1) for n in range(1, 6)], (
        "step 6 has to be done a third time"
    )
    log_of(tmp_path, 3).append("step", step=6)
    result = events.get_step_events(events.read_events(tmp_path))
    assert [(e["step"], e["attempt"]) for e in result][-1] == (6, 3)


def test_tail_returns_a_line_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    tail, path = events.Tail(tmp_path), tmp_path / "events.jsonl"
    assert tail.read() == []
    a, b = (b'{"kind":"%c","t":1.0,"attempt":1,"step":0}\n' % kind for kind in b"ab")
    path.write_bytes(a + b[:8])
    assert [e["kind"] for e in tail.read()] == ["a"]
    path.write_bytes(a + b)
    assert [e["kind"] for e in tail.read()] == ["b"]
    assert tail.read() == []


def test_follow_ends_with_the_trainer(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.append("start", from_step=0)
    lives = iter([True, False])

    def alive() -> bool:
        log.append("step", step=1)
        return next(lives)

    kinds = [e["kind"] for e in events.follow(tmp_path, is_alive=alive, poll_s=0.01)]
    assert kinds == ["start", "step", "step"], "what came last is not lost"


def heartbeat(folder: Path, phases: Phases, rule: StallRule) -> Heartbeat:
    beat = Heartbeat(
        log_of(folder), phases, every_s=0.02, rule=rule, stacks=folder / "stacks.txt", get_gpu_util=lambda: None
    )
    beat.start()
    return beat


def test_the_heartbeat_names_the_phase_and_its_age(tmp_path: Path) -> None:
    phases = Phases()
    beat = heartbeat(tmp_path, phases, StallRule())
    with phases("data"):
        time.sleep(0.15)
    beat.stop()
    beats = [e for e in events.read_events(tmp_path) if e["kind"] == "heartbeat" and e["phase"] == "data"]
    assert len(beats) >= 2 and beats[-1]["phase_age_s"] > beats[0]["phase_age_s"] > 0
    assert beats[0]["rss_bytes"] > 1e6 and beats[0]["gpu_util"] is None


def test_a_stalled_phase_is_reported_once_with_all_stacks(tmp_path: Path) -> None:
    phases = Phases()
    beat = heartbeat(tmp_path, phases, StallRule(floor_s=0.05))
    with phases("data"):
        time.sleep(0.25)
    beat.stop()
    stalls = [e for e in events.read_events(tmp_path) if e["kind"] == "stall"]
    assert [e["phase"] for e in stalls] == ["data"] and stalls[0]["phase_age_s"] > stalls[0]["limit_s"]
    assert "test_telemetry" in (tmp_path / "stacks.txt").read_text()


def test_a_phase_that_is_always_slow_is_not_a_stall(tmp_path: Path) -> None:
    phases = Phases()
    for _ in range(3):
        with phases("eval"):
            time.sleep(0.03)
    beat = heartbeat(tmp_path, phases, StallRule(floor_s=0.01, factor=20))
    with phases("eval"):
        time.sleep(0.1)
    beat.stop()
    assert not [e for e in events.read_events(tmp_path) if e["kind"] == "stall"]


def test_limits_are_the_larger_of_floor_and_own_median() -> None:
    rule = StallRule(factor=20, floor_s=120, floors_s={"compile": 1800})
    cases = [("step", None), ("step", 0.2), ("step", 30.0), ("compile", None)]
    assert [rule.get_limit_s(*case) for case in cases] == [120, 120, 600, 1800]


def test_phases_nest_and_restore_the_outer_phase() -> None:
    phases = Phases()
    with phases("eval"):
        with phases("data"):
            assert phases.get_current()[0] == "data"
        assert phases.get_current()[0] == "eval"
    assert phases.get_current()[0] == "start" and phases.get_last_duration("eval") >= phases.get_last_duration("data") > 0


def test_a_phase_duration_uses_the_latest_occurrences_and_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    recorded = Phases(max_durations=3)
    for seconds, counts in ((50.0, True), (1.0, True), (2.0, True), (90.0, False), (4.0, True)):
        with recorded("step", record_duration=counts):
            now[0] += seconds
    assert (recorded.get_last_duration("step"), recorded.get_median_duration("step")) == (4.0, 2.0)


def test_a_phase_that_is_entered_again_restarts_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall in it is a new one; its time counts from the return."""
    now = [0.0]
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    recorded = Phases()
    with recorded("eval"):
        with recorded("data"):
            now[0] += 5.0
        now[0] += 1.0
        assert recorded.get_current() == ("eval", 1.0) and recorded.get_idle_s() == 1.0


def test_percentiles_are_observed_values() -> None:
    values = [0.5, 0.1, 0.4, 0.2, 0.3]
    assert [compute_percentile(values, share) for share in (0.0, 0.2, 0.21, 0.5, 0.8, 0.95, 1.0)] == [
        0.1,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.5,
    ]
    assert compute_percentile([7.0], 0.5) == 7.0 and compute_percentile([], 0.95) == 0.0


def test_bytes_are_counted_by_dtype() -> None:
    n_bytes = count_bytes_by_dtype([torch.zeros(3, 5), torch.zeros(2), torch.zeros(7, dtype=torch.bfloat16), 1.0, None])
    assert n_bytes == {"float32": 68, "bfloat16": 14}


def test_resident_memory_is_in_bytes() -> None:
    assert 1e7 < get_resident_bytes() < 1e11


@pytest.mark.slow
def test_a_trainer_that_does_not_leave_a_stalled_phase_is_unresponsive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "STOP_TIMEOUT_S", 0.1)
    for action, leaves in ((True, False), (True, True), (False, False)):
        phases, calls, unresponsive = Phases(), [], []

        def on_stall(*recorded: object, calls: list = calls, action: bool = action) -> bool:
            calls.append(recorded)
            return action

        beat = Heartbeat(
            log_of(tmp_path),
            phases,
            every_s=0.02,
            rule=StallRule(floor_s=0.05, floors_s={"save": 60.0}),
            stacks=tmp_path / "stacks.txt",
            get_gpu_util=lambda: None,
            on_stall=on_stall,
            on_unresponsive=lambda unresponsive=unresponsive: unresponsive.append(1),
        )
        beat.start()
        with phases("data"):
            time.sleep(0.1 if leaves else 0.4)
        with phases("save"):
            time.sleep(0.3)
        beat.stop()
        assert [recorded[0] for recorded in calls] == ["data"]
        assert bool(unresponsive) == (action and not leaves), "a save on the way out takes the time that it takes"


def test_a_trainer_that_stalls_while_stopping_is_unresponsive(tmp_path: Path) -> None:
    phases, left, calls = Phases(), threading.Event(), []
    beat = Heartbeat(
        log_of(tmp_path),
        phases,
        every_s=0.01,
        rule=StallRule(floor_s=0.02),
        stacks=tmp_path / "stacks.txt",
        get_gpu_util=lambda: None,
        on_stall=lambda *recorded: calls.append(recorded[0]) or True,
        on_unresponsive=left.set,
    )
    beat.start()
    with phases("data"):
        while not calls:
            time.sleep(0.01)
    with phases("save"):
        assert left.wait(30)
    beat.stop()
    assert calls == ["data"]


def test_a_phase_with_progress_does_not_stall(tmp_path: Path) -> None:
    phases = Phases()
    beat = heartbeat(tmp_path, phases, StallRule(floor_s=0.15))
    with phases("prepare"):
        for _ in range(20):
            time.sleep(0.02)
            phases.report_progress()
    beat.stop()
    recorded = events.read_events(tmp_path)
    assert not [e for e in recorded if e["kind"] == "stall"]
    assert max(e["phase_age_s"] for e in recorded) > 0.3, "its age is that of the phase"
