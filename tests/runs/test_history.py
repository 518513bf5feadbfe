"""What a record is read as: attempts, stretches, facts, and the runs beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import make_config, make_eval_event, make_healthy_events, make_step_event, write_run

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs import directory, environment, events, lifecycle, live_view, monitor_settings, older_variables, resolve
from nsa_lab.runs import evaluation as found_file
from nsa_lab.runs.history import History, StepRange, collect_facts, select_latest
from nsa_lab.runs.summary import describe_memory, format_differences, format_facts, format_lengths


def make_start_event(attempt: int, step: int) -> dict[str, Any]:
    return {"kind": "resume" if step else "start", "attempt": attempt, "step": step, "from_step": step, "t": 0.0}


def test_an_attempt_is_cut_where_any_later_one_began() -> None:
    record = [make_start_event(1, 0), *({"kind": "step", "attempt": 1, "step": n} for n in (4, 5, 6, 9, 10))]
    record += [make_start_event(2, 10), {"kind": "step", "attempt": 2, "step": 12}]
    record += [make_start_event(3, 5), {"kind": "step", "attempt": 3, "step": 8}]
    assert [(e["attempt"], e["step"]) for e in events.get_step_events(record)] == [(1, 4), (1, 5), (3, 8)]


def test_evaluations_of_another_split_are_others() -> None:
    record = [make_start_event(1, 0), make_eval_event(0, 8.0), {**make_eval_event(5, 1.0), "split": "train"}]
    assert [e["step"] for e in events.get_eval_events(record)] == [0]
    assert [e["step"] for e in events.get_eval_events(record, "train")] == [5]


def test_what_a_trainer_wrote_last_is_read_though_it_is_gone_by_then(tmp_path: Path) -> None:
    path = tmp_path / directory.EVENTS
    path.write_text("")
    asked: list[int] = []

    def is_alive() -> bool:
        asked.append(1)
        # It writes its last word, and ends, while we ask.
        if len(asked) == 2:
            path.write_text('{"kind": "end", "attempt": 1, "step": 1, "t": 1.0}\n')
        return len(asked) < 2

    assert [e["kind"] for e in events.follow(tmp_path, is_alive=is_alive, poll_s=0.0)] == ["end"]


def test_training_is_told_by_a_tenth_of_the_readings() -> None:
    values = 2.0 + 0.001 * np.arange(40.0)
    assert list(select_latest(values)) == list(values[-4:])


def test_the_best_and_the_highest_and_all_seconds_are_told(tmp_path: Path) -> None:
    def spoil(record: list[dict[str, Any]]) -> None:
        steps = [event for event in record if event["kind"] == "step"]
        steps[3]["mem_peak_bytes"] = 9 * 10**9
        [event for event in record if event["kind"] == "eval"][2]["bpb"] = 0.5

    known = collect_facts(write_run(tmp_path, spoil=spoil))
    assert known.best_validation_bpb == 0.5 and known.memory_peak_bytes == 9e9


def make_two_attempts(tmp_path: Path) -> History:
    config = make_config()
    record = [e for e in make_healthy_events(config) if e["step"] <= 120 and e["kind"] != "end"]
    end = {"kind": "end", "attempt": 2, "step": 200, "status": "DONE", "reason": "done"}
    record = [{**e, "t": float(n)} for n, e in enumerate(record)]
    seconds = record[-1]["t"]
    trouble = {"kind": "error", "attempt": 1, "step": 120, "where": "save", "fatal": False, "t": seconds}
    record += [
        trouble,
        {**make_start_event(2, 100), "t": seconds + 1000},
        {**make_step_event(200, config, 2), "t": seconds + 1007},
    ]
    return History.read(write_run(tmp_path, config, spoil=lambda _: [*record, {**end, "t": seconds + 1007}]))


def test_the_time_of_a_run_is_that_of_all_attempts(tmp_path: Path) -> None:
    run = make_two_attempts(tmp_path)
    known = collect_facts(run)
    first = run.attempts()[0]
    assert (
        known.wall_s == first.ended_at - first.started_at + 7
        and known.elapsed_s == first.ended_at - first.started_at + 1007
    )
    assert dict(format_facts(run))["training time"] == "41 s over 2 attempts; 17 min 21 s from start to end"


def test_trouble_that_ended_nothing_is_no_failure(tmp_path: Path) -> None:
    assert [a.outcome for a in make_two_attempts(tmp_path).attempts()] == ["killed", "done"]


def test_what_every_divides_includes_the_last_step() -> None:
    assert StepRange(1, 4, 9, None).list_multiples(3) == {6, 9} and StepRange(1, 3, 3, None).list_multiples(3) == {3}


def test_a_record_up_to_a_step_includes_it(tmp_path: Path) -> None:
    run = History.read(write_run(tmp_path)).truncate_at(100)
    assert (run.steps[-1]["step"], run.evaluations[-1]["step"]) == (100, 100)


def test_an_attempt_that_did_nothing_has_no_stretch(tmp_path: Path) -> None:
    config = make_config()
    run = write_run(
        tmp_path, config, spoil=lambda record: [*record[:-1], make_start_event(2, 200), {**record[-1], "attempt": 2}]
    )
    assert [(s.attempt, s.first, s.last) for s in History.read(run).step_ranges()] == [(1, 1, 200)]


def make_staged_config(*lengths: int) -> TrainConfig:
    return TrainConfig(stages=[{"steps": 100, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in lengths])


def test_training_is_told_at_the_length_that_the_run_is_in(tmp_path: Path) -> None:
    config = make_config().model_copy(update={"train": make_staged_config(2048, 512)})
    run = History.read(write_run(tmp_path, config))
    steps, _ = run.select_current_length(*run.series("bpb"))
    assert steps[0] > 100 and steps[-1] == 200


def test_a_length_that_does_not_change_is_told_once() -> None:
    assert (
        format_lengths(make_staged_config(512, 512)) == "512"
        and format_lengths(make_staged_config(2048, 512)) == "2,048, then 512"
    )


def test_a_difference_is_how_much_more_the_other_has(tmp_path: Path) -> None:
    one = collect_facts(write_run(tmp_path))
    other = replace(one, tokens_per_s=one.tokens_per_s * 1.5, last_validation_bpb=one.last_validation_bpb - 0.25)
    told = format_differences(one, other)
    assert told["tokens per second, median"] == "+50.0%" and told["validation, bits per byte"].startswith("-0.2500 (-")


def test_it_is_said_what_the_peak_of_memory_counts(tmp_path: Path) -> None:
    known = collect_facts(write_run(tmp_path))
    assert describe_memory(replace(known, device="cpu")) == "the whole process, with Python and torch"
    assert describe_memory(replace(known, device="NVIDIA H100")) == "tensors on the GPU"


def test_what_a_record_is_judged_by_is_told_whole() -> None:
    others = {"log_every": 3, "stats_every": 3, "eval_every": 3, "save_every": 3}
    train = {**others, "spike_sigma": 3.0, "min_tokens_per_s": 3.0, "stall_action": "halt"}
    one, other = RunConfig(), RunConfig.from_dict({"train": train, "runtime": {"heartbeat_s": 3.0}})
    assert monitor_settings.apply_monitor_settings(one, monitor_settings.get_monitor_settings(other)) == other


def test_a_run_that_halted_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start_run", lambda *_, **__: pytest.fail("started"))
    for state in (directory.DONE, directory.HALTED):
        run_dir = write_run(tmp_path / state, status={"status": state})
        assert lifecycle.ensure(run_dir) == run_dir


def test_runs_are_named_latest_first(tmp_path: Path) -> None:
    for stamp in ("20260101T000000Z-aaaa", "20260301T000000Z-aaaa", "20260201T000000Z-aaaa"):
        (tmp_path / f"x-{stamp}").mkdir()
        (tmp_path / f"x-{stamp}" / directory.CONFIG).write_text("")
    assert [path.name[6:8] for path in lifecycle.list_runs_named("x", tmp_path)] == ["03", "02", "01"]


def test_a_trainer_finds_what_its_launcher_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/ones/own")
    assert lifecycle._make_environment(None)["PYTHONPATH"].split(":")[-1] == "/of/ones/own"


def test_a_run_that_is_done_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(directory.RunDirectoryError, match="this run is DONE"):
        lifecycle.resume(write_run(tmp_path))


def test_a_status_keeps_nothing_of_another_run(tmp_path: Path) -> None:
    directory.write_status(tmp_path, run="a", status="DONE", exit_code=0, step=12)
    directory.write_status(tmp_path, run="b", status="RUNNING")
    assert {"exit_code", "step"}.isdisjoint(directory.read_status(tmp_path))


def test_the_longest_beginning_counts() -> None:
    found = older_variables.older_variables(["NSA_USE_SEL_MASK", "NSA_TRAIN_LR", "NSA_GATE_X", "NSA_USE_FA2", "nsa_gc"])
    assert found["NSA_TRAIN_LR"] == "set train.lr" and found["nsa_gc"] == "set runtime.gradient_checkpointing"
    for name, key in ((name, name.removeprefix("nsa_")) for name in map("nsa_{}".format, older_variables.REPLACED_BY)):
        assert older_variables.older_variables([name])[name] == older_variables.REPLACED_BY[key], name


def test_outside_a_checkout_nobody_knows_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_run_git", lambda *_: None)
    assert environment.get_code_identity()["dirty"] is None and environment.get_code_identity()["commit"] is None


def test_a_number_of_spins_that_somebody_set_stays() -> None:
    settings = {"GOMP_SPINCOUNT": "7"}
    environment.set_openmp_wait_policy(settings)
    assert settings == {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "PASSIVE"}


def test_the_interval_of_wilson() -> None:
    # Ten of twenty: (0.2993, 0.7007), as published.
    assert found_file.compute_wilson_interval(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_what_was_found_for_another_question_is_dropped(tmp_path: Path) -> None:
    found_file.PartialEvaluation(tmp_path, {"n": 1}).get_or_compute("part", lambda: 1)
    assert found_file.PartialEvaluation(tmp_path, {"n": 1}).get_or_compute("part", lambda: 2) == 1
    assert found_file.PartialEvaluation(tmp_path, {"n": 2}).get_or_compute("part", lambda: 2) == 2


def test_the_view_of_a_run(tmp_path: Path) -> None:
    view = live_view.RunView(write_run(tmp_path))
    view.update(
        [{**make_start_event(1, 0), "t": 1.0}, *({**make_step_event(n, view.config), "t": 2.0} for n in range(10, 101, 10))]
    )
    assert view.eta_s == pytest.approx(100 * 0.5)
    view.update([{**make_step_event(120, view.config), "t": 3.0, "gate_share_cmp": [0.0, 0.3, 0.9]}])
    assert "40%" in view.format_numbers()["gates"]
    view.update([{**make_start_event(2, 50), "t": 4.0}])
    assert max(view._bpb) == 50 and view.step == 50
    assert (live_view.format_clock(3 * 3600 + 25 * 60 + 4), live_view.format_clock(184), live_view.format_clock(None)) == (
        "3:25:04",
        "3:04",
        "–",
    )


def test_the_newest_runs_are_named(tmp_path: Path) -> None:
    for month in range(1, 10):
        folder = tmp_path / f"x-20260{month}01T000000Z-aaaa"
        folder.mkdir()
        (folder / directory.CONFIG).write_text("")
        (folder / directory.STATUS).write_text("{}")
    told = resolve.describe_runs(tmp_path)
    assert "x-20260901" in told and "x-20260101" not in told
