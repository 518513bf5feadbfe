"""Reading the record of a run: attempts, step ranges, key numbers, and neighboring runs."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import make_config, make_eval_event, make_healthy_events, make_step_event, write_run

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs import directory, environment, events, lifecycle, live_view, resolve
from nsa_lab.runs import evaluation as evaluation_file
from nsa_lab.runs.event_table import EventTable
from nsa_lab.runs.history import (
    History,
    StepRange,
    apply_monitor_settings,
    collect_facts,
    get_monitor_settings,
    select_latest,
)
from nsa_lab.runs.summary import describe_memory, format_differences, format_facts, format_lengths


def make_start_event(attempt: int, step: int) -> dict[str, Any]:
    return {"kind": "resume" if step else "start", "attempt": attempt, "step": step, "from_step": step, "t": 0.0}


def test_attempt_ends_where_a_later_attempt_starts() -> None:
    record = [make_start_event(1, 0), *({"kind": "step", "attempt": 1, "step": n} for n in (4, 5, 6, 9, 10))]
    record += [make_start_event(2, 10), {"kind": "step", "attempt": 2, "step": 12}]
    record += [make_start_event(3, 5), {"kind": "step", "attempt": 3, "step": 8}]
    assert [(e["attempt"], e["step"]) for e in events.get_step_events(record)] == [(1, 4), (1, 5), (3, 8)]


def test_evaluations_are_separated_by_split() -> None:
    record = [make_start_event(1, 0), make_eval_event(0, 8.0), {**make_eval_event(5, 1.0), "split": "train"}]
    assert [e["step"] for e in events.get_eval_events(record)] == [0]
    assert [e["step"] for e in events.get_eval_events(record, "train")] == [5]


def test_follow_reads_the_last_event_of_an_exited_trainer(tmp_path: Path) -> None:
    path = tmp_path / directory.EVENTS
    path.write_text("")
    polls: list[int] = []

    def is_alive() -> bool:
        polls.append(1)
        # The trainer writes its last event and exits during the second poll.
        if len(polls) == 2:
            path.write_text('{"kind": "end", "attempt": 1, "step": 1, "t": 1.0}\n')
        return len(polls) < 2

    assert [e["kind"] for e in events.follow(tmp_path, is_alive=is_alive, poll_s=0.0)] == ["end"]


def test_training_loss_uses_the_last_tenth_of_readings() -> None:
    values = 2.0 + 0.001 * np.arange(40.0)
    assert list(select_latest(values)) == list(values[-4:])


def test_first_events_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, built = make_two_attempts(tmp_path), list[int]()
    make_event = EventTable.make_event
    monkeypatch.setattr(EventTable, "make_event", lambda table, row: built.append(row) or make_event(table, row))
    for _ in range(3):
        assert [event["attempt"] for event in history.first_events] == [1, 2]
        assert history.first_events[-1] is history.first_events[1] and history.first_events[:1][0]["attempt"] == 1
    copied = copy.deepcopy(history.first_events)
    copied[0]["attempt"] = 7
    assert history.first_events[0]["attempt"] == 1
    assert len(built) == 2 + 3 + 2, "two once, three that were sliced, two copies"


def test_facts_contain_best_validation_and_peak_memory(tmp_path: Path) -> None:
    def spoil(record: list[dict[str, Any]]) -> None:
        steps = [event for event in record if event["kind"] == "step"]
        steps[3]["mem_peak_bytes"] = 9 * 10**9
        [event for event in record if event["kind"] == "eval"][2]["bpb"] = 0.5

    facts = collect_facts(write_run(tmp_path, spoil=spoil))
    assert facts.best_validation_bpb == 0.5 and facts.memory_peak_bytes == 9e9


def make_two_attempts(tmp_path: Path) -> History:
    config = make_config()
    record = [e for e in make_healthy_events(config) if e["step"] <= 120 and e["kind"] != "end"]
    end = {"kind": "end", "attempt": 2, "step": 200, "status": "DONE", "reason": "done"}
    record = [{**e, "t": float(n)} for n, e in enumerate(record)]
    seconds = record[-1]["t"]
    error = {"kind": "error", "attempt": 1, "step": 120, "where": "save", "fatal": False, "t": seconds}
    record += [
        error,
        {**make_start_event(2, 100), "t": seconds + 1000},
        {**make_step_event(200, config, 2), "t": seconds + 1007},
    ]
    return History.read(write_run(tmp_path, config, spoil=lambda _: [*record, {**end, "t": seconds + 1007}]))


def test_run_time_includes_all_attempts(tmp_path: Path) -> None:
    run = make_two_attempts(tmp_path)
    facts = collect_facts(run)
    first = run.attempts()[0]
    assert (
        facts.wall_s == first.ended_at - first.started_at + 7
        and facts.elapsed_s == first.ended_at - first.started_at + 1007
    )
    assert dict(format_facts(run))["training time"] == "43 s over 2 attempts; 17 min 23 s from start to end"


def test_nonfatal_error_is_not_a_failed_attempt(tmp_path: Path) -> None:
    assert [a.outcome for a in make_two_attempts(tmp_path).attempts()] == ["killed", "done"]


def test_multiples_include_the_last_step() -> None:
    assert [*StepRange(1, 4, 9, None).list_multiples(3)] == [6, 9] and [*StepRange(1, 3, 3, None).list_multiples(3)] == [3]
    assert not StepRange(1, 4, 9, None).list_multiples(0)


def test_truncated_record_includes_the_step(tmp_path: Path) -> None:
    run = History.read(write_run(tmp_path)).truncate_at(100)
    assert (run.steps[-1]["step"], run.evaluations[-1]["step"]) == (100, 100)


def test_attempt_without_steps_has_no_step_range(tmp_path: Path) -> None:
    config = make_config()
    run = write_run(
        tmp_path, config, spoil=lambda record: [*record[:-1], make_start_event(2, 200), {**record[-1], "attempt": 2}]
    )
    assert [(s.attempt, s.first, s.last) for s in History.read(run).step_ranges()] == [(1, 1, 200)]


def make_staged_config(*lengths: int) -> TrainConfig:
    return TrainConfig(stages=[{"steps": 100, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in lengths])


def test_training_loss_uses_the_current_length(tmp_path: Path) -> None:
    config = make_config().model_copy(update={"train": make_staged_config(2048, 512)})
    run = History.read(write_run(tmp_path, config))
    steps, _ = run.select_current_length(*run.series("bpb"))
    assert steps[0] > 100 and steps[-1] == 200


def test_equal_lengths_are_listed_once() -> None:
    assert (
        format_lengths(make_staged_config(512, 512)) == "512"
        and format_lengths(make_staged_config(2048, 512)) == "2,048, then 512"
    )


def test_differences_are_second_relative_to_first(tmp_path: Path) -> None:
    first = collect_facts(write_run(tmp_path))
    second = replace(first, tokens_per_s=first.tokens_per_s * 1.5, last_validation_bpb=first.last_validation_bpb - 0.25)
    texts = format_differences(first, second)
    assert texts["tokens per second, median"] == "+50.0%" and texts["validation, bits per byte"].startswith("-0.2500 (-")


def test_memory_description_depends_on_device(tmp_path: Path) -> None:
    facts = collect_facts(write_run(tmp_path))
    assert describe_memory(replace(facts, device="cpu")) == "the whole process, with Python and torch"
    assert describe_memory(replace(facts, device="NVIDIA H100")) == "tensors on the GPU"


def test_monitor_settings_are_complete() -> None:
    others = {"log_every": 3, "stats_every": 3, "eval_every": 3, "save_every": 3}
    train = {**others, "spike_sigma": 3.0, "min_tokens_per_s": 3.0, "stall_action": "halt"}
    first, second = RunConfig(), RunConfig.from_dict({"train": train, "runtime": {"heartbeat_s": 3.0}})
    assert apply_monitor_settings(first, get_monitor_settings(second)) == second


def test_ensure_does_not_start_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start", lambda *_, **__: pytest.fail("started"))
    for state in (directory.DONE, directory.HALTED):
        run_dir = write_run(tmp_path / state, status={"status": state})
        assert lifecycle.ensure(run_dir) == run_dir


def test_runs_are_listed_latest_first(tmp_path: Path) -> None:
    for stamp in ("20260101T000000Z-aaaa", "20260301T000000Z-aaaa", "20260201T000000Z-aaaa"):
        (tmp_path / f"x-{stamp}").mkdir()
        (tmp_path / f"x-{stamp}" / directory.CONFIG).write_text("")
    assert [path.name[6:8] for path in lifecycle.list_runs_named("x", tmp_path)] == ["03", "02", "01"]
    for hour, digits in enumerate(("ffff", "0000", "8888")):
        run_dir = tmp_path / f"y-20260101T000000Z-{digits}"
        run_dir.mkdir()
        (run_dir / directory.CONFIG).write_text("")
        os.utime(run_dir / directory.CONFIG, (1000.0 + hour / 10, 1000.0 + hour / 10))
    found = [path.name[-4:] for path in lifecycle.list_runs_named("y", tmp_path)]
    assert found == ["8888", "0000", "ffff"], "of runs of one second, the latest file"


def test_trainer_inherits_the_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/users/path")
    assert lifecycle._make_environment(None)["PYTHONPATH"].split(":")[-1] == "/users/path"


def test_done_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(directory.RunDirectoryError, match="this run is DONE"):
        lifecycle.resume(write_run(tmp_path))


def test_status_drops_fields_of_another_run(tmp_path: Path) -> None:
    directory.write_status(tmp_path, run="a", status="DONE", exit_code=0, step=12)
    directory.write_status(tmp_path, run="b", status="RUNNING")
    assert {"exit_code", "step"}.isdisjoint(directory.read_status(tmp_path))


def test_code_identity_is_unknown_outside_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_run_git", lambda *_: None)
    assert environment.get_code_identity()["dirty"] is None and environment.get_code_identity()["commit"] is None


def test_spin_count_set_by_the_user_is_kept() -> None:
    settings = {"GOMP_SPINCOUNT": "7"}
    environment.set_openmp_wait_policy(settings)
    assert settings == {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "PASSIVE"}


def test_wilson_interval() -> None:
    # 10 of 20: (0.2993, 0.7007), as published.
    assert evaluation_file.compute_wilson_interval(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_partial_results_of_another_request_are_dropped(tmp_path: Path) -> None:
    evaluation_file.PartialEvaluation(tmp_path, {"n": 1}).get_or_compute("part", lambda: 1)
    assert evaluation_file.PartialEvaluation(tmp_path, {"n": 1}).get_or_compute("part", lambda: 2) == 1
    assert evaluation_file.PartialEvaluation(tmp_path, {"n": 2}).get_or_compute("part", lambda: 2) == 2


def test_run_view(tmp_path: Path) -> None:
    view = live_view.RunView(write_run(tmp_path))
    events_of_steps = [{**make_step_event(n, view.config), "dt_s": 0.5, "t": 2.0} for n in range(10, 101, 10)]
    view.update([{**make_start_event(1, 0), "t": 1.0}, *events_of_steps])
    assert view.eta_s == pytest.approx(100 * 0.5)
    view.update([{**make_step_event(120, view.config), "t": 3.0, "gate_share_cmp": [0.0, 0.3, 0.9]}])
    assert "40%" in view.format_numbers()["gates"]
    view.update([{**make_step_event(120, view.config), "t": 3.0, "gate_share_cmp": [None, 0.3, "x"]}])
    assert "40%" in view.format_numbers()["gates"], "a damaged reading does not replace the last one"
    view.update([{**make_start_event(2, 50), "t": 4.0}])
    assert max(view._bpb) == 50 and view.step == 50
    assert (live_view.format_clock(3 * 3600 + 25 * 60 + 4), live_view.format_clock(184), live_view.format_clock(None)) == (
        "3:25:04",
        "3:04",
        "–",
    )


def test_newest_runs_are_listed(tmp_path: Path) -> None:
    for month in range(1, 10):
        folder = tmp_path / f"x-20260{month}01T000000Z-aaaa"
        folder.mkdir()
        (folder / directory.CONFIG).write_text("")
        (folder / directory.STATUS).write_text("{}")
    text = resolve.describe_runs(tmp_path)
    assert "x-20260901" in text and "x-20260101" not in text
