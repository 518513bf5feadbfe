"""Every check: one run on which it fails, and the healthy run on which all pass."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import (
    LAYERS,
    Event,
    edit_history,
    make_attempt_facts,
    make_checkpoint_event,
    make_config,
    make_eval_event,
    make_reach_event,
    make_step_event,
    set_constant_times,
    sign_record,
    write_checkpoint,
    write_run,
)
from looping import looped

from nsa_lab.config import NSAConfig, RunConfig
from nsa_lab.health import CHECKS, Verdict, examine, list_verdicts
from nsa_lab.health.completeness_checks import find_readings_with_selection
from nsa_lab.health.headline_questions import QUESTIONS, answer_questions
from nsa_lab.health.matched_pair import ALLOWED_DIFFERENCES, build_side_by_side, check_matched_pair, find_matched_pair
from nsa_lab.health.selection_checks import compute_selection_range
from nsa_lab.health.verdict_file import to_record
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts, select_latest
from nsa_lab.runs.lock import sign_lock, take_lock
from nsa_lab.runs.summary import format_facts
from nsa_lab.runs.trajectory import CHANGEABLE_DATA_KEYS, CHANGEABLE_TRAIN_KEYS


def get_verdict(verdicts: list[Verdict], name: str) -> Verdict:
    return next(verdict for verdict in verdicts if verdict.name == name)


def set_all(**values: Any) -> Callable[[list[Event]], None]:
    """Return an edit that sets these fields in every `step` event that has them."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            event.update({key: value for key, value in add_consequences(values).items() if key in event})

    return spoil


def add_consequences(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the fields that follow from them: nats from bits, and the speed from the time of a step."""
    added = {}
    if isinstance(values.get("bpb"), float) and "loss" not in values:
        added["loss"] = values["bpb"] * math.log(2)
    if isinstance(values.get("dt_s"), float) and "tokens_per_s" not in values:
        added["tokens_per_s"] = 4096 / values["dt_s"]
    return values | added


def append(*extra: Event) -> Callable[[list[Event]], None]:
    def spoil(events: list[Event]) -> None:
        events[-1:-1] = extra

    return spoil


def keep_events(keep: Callable[[Event], bool]) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [event for event in events if keep(event)]


def set_at(step: int, kind: str = "step", **values: Any) -> Callable[[list[Event]], None]:
    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == kind and event["step"] == step:
                event.update(
                    {key: value for key, value in add_consequences(values).items() if key in event or key in values}
                )

    return spoil


def per_layer(*values: float) -> list[float]:
    assert len(values) == LAYERS
    return list(values)


def slow_down_tail(events: list[Event]) -> None:
    time_s = 1000.0
    for event in events:
        time_s += 2.0
        if event["kind"] == "step" and event["step"] > 150:
            event["dt_s"] = vary(4.0, event)
            event["tokens_per_s"] = 4096 / event["dt_s"]
            time_s += 40.0
        event["t"] = time_s


def duplicate_step(events: list[Event]) -> None:
    events.append(dict(next(e for e in events if e["kind"] == "step" and e["step"] == 70)))


def grow_memory(events: list[Event]) -> None:
    for event in events:
        if event["kind"] == "heartbeat":
            event["rss_bytes"] = 10**9 + event["step"] * 10**7


GUARD = {
    "kind": "guard",
    "attempt": 1,
    "step": 90,
    "rule": "frozen",
    "value": 0.0,
    "limit": 0.0,
    "action": "warn",
    "text": "step 90: the gate weights of layer 1 do not move",
}
STALL = {
    "kind": "stall",
    "attempt": 1,
    "step": 60,
    "phase": "data",
    "phase_age_s": 130.0,
    "limit_s": 120.0,
    "stacks": "stacks.txt",
}
ERROR = {
    "kind": "error",
    "attempt": 1,
    "step": 60,
    "where": "step",
    "type": "ValueError",
    "message": "boom\nmore",
    "fatal": True,
}


def flatten_training(events: list[Event]) -> None:
    for event in events:
        if event["kind"] == "step":
            event["bpb"] = vary(8.0, event)
            event["loss"] = event["bpb"] * math.log(2)


def turn_clock_back(events: list[Event]) -> None:
    for index, event in enumerate(events):
        event["t"] = 1000.0 + 4 * index - (103.0 if index > 30 else 0.0)


def set_reach_losses(**losses: float | None) -> Callable[[list[Event]], None]:
    """Return an edit of the losses in the last `reach` event."""

    def spoil(events: list[Event]) -> None:
        last = [event for event in events if event["kind"] == "reach"][-1]
        last.update({key: value for key, value in make_reach_event(last["step"], **losses).items() if key != "attempt"})

    return spoil


def vary(value: float, event: Event) -> float:
    """Return almost `value`, with the noise of a measurement."""
    return value * (1 - 1e-4 * abs(math.sin(event["step"] ** 2)))


def set_layer(layer: int, slope: float = 0.0, **values: float) -> Callable[[list[Event]], None]:
    """Return an edit of one layer of these statistics in every reading, with `slope` per step: almost constant."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            for name, value in values.items():
                if name in event:
                    event[name][layer] = vary(value, event) + event["step"] * slope

    return spoil


def vary_all(**values: float) -> Callable[[list[Event]], None]:
    """Return an edit of these fields in every `step` event, almost constant, and different between layers."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            for name, value in values.items():
                if name in event:
                    varied = vary(value, event)
                    event[name] = (
                        [varied + layer * 1e-5 for layer in range(LAYERS)] if isinstance(event[name], list) else varied
                    )

    return spoil


def lower_training_loss(bpb: float) -> Callable[[list[Event]], None]:
    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] > 100:
                event["bpb"] = vary(bpb, event)
                event["loss"] = event["bpb"] * math.log(2)

    return spoil


def resume_with(first: dict[str, Any], **facts: Any) -> Callable[[list[Event]], list[Event]]:
    """Return an edit: killed and resumed, with these facts in the first event of the first and of the second attempt."""

    def spoil(events: list[Event]) -> list[Event]:
        resumed_events = kill_and_resume(events)
        resumed_events[0].update(first)
        next(event for event in resumed_events if event["kind"] == "resume").update({**make_attempt_facts(), **facts})
        return resumed_events

    return spoil


def resume_with_other_code(events: list[Event]) -> list[Event]:
    return resume_with({}, code={"source": "fedcba9876543210", "commit": None, "dirty": None})(events)


def resume_with_other_torch(events: list[Event]) -> list[Event]:
    return resume_with({}, versions={"python": "3.11.0", "torch": "2.12.0"})(events)


def resume_with_other_batches(events: list[Event]) -> list[Event]:
    """train.eval_batches may change when a run is resumed."""
    resumed_events = resume_with({})(events)
    for event in resumed_events:
        if event["kind"] == "eval" and event["attempt"] == 2:
            event.update(windows=16, text="of 16 windows")
    return resumed_events


def copy_layer(events: list[Event]) -> None:
    for event in events:
        for name in [name for name, value in event.items() if isinstance(value, list) and len(value) == LAYERS]:
            event[name][2] = event[name][0]


def lower_entropy(events: list[Event]) -> None:
    """The held-out text has no structure: knowing the previous byte does not help."""
    for event in events:
        if event["kind"] == "reference":
            event["bpb"] = 2.13


def lower_order_1_entropy(events: list[Event]) -> None:
    """The model has learned no more than pairs of bytes of a text with structure."""
    for event in events:
        if event["kind"] == "reference" and event["name"] == "order-1 entropy":
            event["bpb"] = 2.13


FAILURES: dict[str, tuple[Callable[[list[Event]], list[Event] | None], str]] = {
    "one run": (set_at(100, run="another"), "the events belong to several runs: another, fake-"),
    "heartbeats": (keep_events(lambda e: e["kind"] != "heartbeat"), "0 in the "),
    "clock": (turn_clock_back, "goes back by 99 s at step 100"),
    "evaluations": (
        keep_events(lambda e: not (e["kind"] == "eval" and e["step"] == 150)),
        "1 of 5 evaluations are missing",
    ),
    "statistics": (set_at(120, sel_reuse=[]), "1 of 10 readings of the layers are missing, the first at step 120"),
    "gradients": (set_at(120, grad_norm=0.0), "the gradient is 0 at 1 logged steps, the first 120"),
    "training loss": (flatten_training, "required: at least 25.0% below"),
    "branch outputs": (
        set_at(120, norm_sel=per_layer(0.5, 0.0, 0.5)),
        "the selected branch is 0 in layer 1, first at step 120",
    ),
    "guards": (append({**GUARD, "action": "halt"}), "frozen (halt): step 90: the gate weights of layer 1"),
    "finite numbers": (set_at(50, grad_norm=None, nonfinite=["grad_norm"]), "grad_norm is not finite at step 50"),
    "errors": (append(ERROR), "ValueError at step 60: boom more"),
    "preflight": (set_at(0, "preflight", ok=False), "data: fine, limit fine (2 of 2 failed)"),
    "loss fell": (set_at(200, "eval", bpb=6.1), "at least 25.0% below"),
    "no leak": (set_at(200, bpb=0.01), "at step 200"),
    "loss kept": (set_at(200, "eval", bpb=2.9), "best 2.239 at step 150"),
    "generalises": (lower_training_loss(1.2), "validation 2.140, training 1.2"),
    "every step once": (keep_events(lambda e: not (e["kind"] == "step" and e["step"] == 110)), "steps missing: 110"),
    "learning rate": (set_at(100, lr=5e-4), "0.0005 at step 100, configured: 0.0005868"),
    "checkpoints": (
        keep_events(lambda e: not (e["kind"] == "checkpoint" and e["step"] == 100)),
        "none saved at step 100",
    ),
    "gates moved": (set_all(gate_entropy=[math.log(3)] * LAYERS), "pinned at ln 3"),
    "gates alive": (set_layer(1, -1e-4, gate_entropy=0.07), "collapsed onto one branch in layer 1"),
    "selection finds": (set_reach_losses(random=0.3), "random blocks are as good: selection saves 0.10 nats"),
    "selection chooses": (vary_all(sel_reuse=1.0), "the same blocks in every layer"),
    "selection reaches": (vary_all(sel_distance=6.98), "only the nearest blocks are selected in every layer"),
    "attention sink": (vary_all(sel_sink_share=0.95), "95% of the selected attention in every layer"),
    "memory": (grow_memory, "grows steadily in attempt 1"),
    "record format": (set_at(120, t="noon"), "step: t: expected a number, got 'noon'"),
    "status agrees": (set_at(200, "end", exit_code=1), "exit_code 0, event 1"),
    "attempts agree": (resume_with_other_code, "attempts 1 and 2 differ in code"),
    "consistent numbers": (set_at(120, tokens_per_s=1e6), "tokens per step, not 4,096"),
    "repeated values": (set_all(grad_norm=0.8), "grad_norm is bitwise equal in 21 readings in a row"),
    "layers differ": (copy_layer, "layers 0 and 2 are equal"),
    "evaluated text": (set_at(150, "eval", text="another"), "changes at step 150"),
    "loss course": (set_at(150, "eval", bpb=3.0), "validation rises to 3.000 bits per byte at step 150"),
    "learned structure": (lower_entropy, "or the text is noise"),
}
WARNINGS = {
    "guards": (append(GUARD), "frozen (warn): step 90: the gate weights of layer 1"),
    "stalls": (append(STALL), "phase data at step 60"),
    "loss kept": (set_at(200, "eval", bpb=2.4), "best 2.239 at step 150"),
    "generalises": (lower_training_loss(1.6), "ratio 1.33"),
    "gates alive": (set_layer(1, -1e-4, gate_entropy=0.17), "collapsed onto one branch in layer 1"),
    "selection chooses": (set_layer(1, sel_reuse=1.0), "the same blocks in layer 1"),
    "selection reaches": (set_layer(2, sel_distance=6.98), "only the nearest blocks are selected in layer 2"),
    "attention sink": (set_layer(1, sel_sink_share=0.95), "95% of the selected attention in layer 1"),
    "throughput": (slow_down_tail, "below 60% of the speed of the best tenth"),
    "data wait": (vary_all(data_s=0.2), "40.0% of the training time"),
    "record format": (set_at(120, sel_window_overlap="much"), "sel_window_overlap: expected a list of numbers"),
    "attempts agree": (resume_with_other_torch, "other versions of torch"),
    "evaluated text": (resume_with_other_batches, "changes at step 150"),
    "learned structure": (lower_order_1_entropy, "or the text is noise"),
}

# A wrong value may fail several checks.
CONSEQUENCES = {
    "loss fell": {"loss kept", "generalises", "loss course", "learned structure"},
    "no leak": {"generalises", "training loss"},
    "gradients": {"consistent numbers"},
    "heartbeats": {"consistent numbers"},  # every event of `write_run` takes two seconds
    "training loss": {"no leak"},
    "gates moved": {"consistent numbers"},
    "record format": {"every step once", "statistics"},
    "loss kept": {"loss course"},
}


def test_healthy_run_passes_all_checks(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for step in (100, 200):
        write_checkpoint(run_dir, step)
    sign_record(run_dir)
    health = examine(run_dir)
    assert [v.name for v in health.verdicts if v.ok is not True] == []
    n_checks = len(CHECKS) - 1  # without a teacher
    assert len(health.verdicts) == n_checks
    assert health.headline == f"healthy: {n_checks} of {n_checks} checks passed"


@looped
@pytest.mark.parametrize("name", FAILURES)
def test_faulty_run_fails_its_check(name: str, tmp_path: Path) -> None:
    spoil, text = FAILURES[name]
    config = make_config(data__source="recall", data__path="texts") if name == "selection finds" else None
    health = examine(write_run(tmp_path, config, spoil=spoil, status={"exit_code": 0}))
    assert {v.name for v in health.failed} - CONSEQUENCES.get(name, set()) == {name}
    assert text in get_verdict(health.verdicts, name).text, get_verdict(health.verdicts, name).text
    assert health.headline.startswith("NOT healthy: ") and health.level == "failed" and "\n" not in health.headline


@looped
@pytest.mark.parametrize("name", WARNINGS)
def test_slight_fault_is_a_warning(name: str, tmp_path: Path) -> None:
    spoil, text = WARNINGS[name]
    health = examine(write_run(tmp_path, spoil=spoil))
    assert health.ok, health.headline
    assert [verdict.name for verdict in health.warnings] == [name] and health.level == "warning"
    assert text in get_verdict(health.verdicts, name).text, get_verdict(health.verdicts, name).text
    assert health.headline.startswith(f"passed with 1 warning: {name}; ")


def test_every_check_has_a_run_that_fails_or_warns() -> None:
    elsewhere = {"finished", "teacher", "record unchanged"}  # test_conversion_checks.py, test_digest_checks.py
    assert len({*FAILURES, *WARNINGS, *elsewhere}) == len(CHECKS)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (set_all(gate_update=per_layer(0.1, 0.0, 0.1)), "never changed in layer 1"),
        (
            set_all(gate_entropy=per_layer(0.9, 0.9, 0.9), gate_share_cmp=[0.3] * LAYERS, gate_share_win=[0.35] * LAYERS),
            "gate never changed in every layer",
        ),
    ],
)
def test_constant_gate_is_named(spoil: Any, text: str, tmp_path: Path) -> None:
    assert text in get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "gates moved").text


def even_gates_in_layer_1(events: list[Event]) -> None:
    """Let the entropy of layer 1 fall while its mean shares stay near 1/3: tokens differ, means do not."""
    for event in events:
        if "gate_entropy" in event:
            for branch, change in (("cmp", -0.01), ("sel", 0.02), ("win", -0.01)):
                event[f"gate_share_{branch}"][1] = 1 / 3 + change * event["step"] / 200
            event["gate_entropy"][1] = 1.0 - event["step"] / 400


def test_gate_shares_and_entropy_are_reported_separately(tmp_path: Path) -> None:
    """Regression: the text gave the range of the entropy for the shares."""
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=even_gates_in_layer_1)), "gates moved")
    assert verdict.ok
    assert verdict.text == (
        "branch shares changed by 0.018 (layer 1) to 0.090 (layer 0); entropy by 0.090 (layer 0) to 0.450 (layer 1), nats; "
        "never specialized (all mean shares within 0.020 of 1/3): layer 1"
    )
    recorded = get_verdict(
        list_verdicts(resolve.get_root() / "outputs/production_50k-20261121T141448Z-afd3"), "gates moved"
    )
    assert "shares changed by 0.035 (layer 0)" in recorded.text and "entropy by 0.251 (layer 0)" in recorded.text
    assert recorded.text.endswith("within 0.023 of 1/3): layer 0")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (set_layer(1, gate_saturation=0.8), "80% of the gate values are saturated at 0 or 1 in layer 1"),
        (set_all(gate_share_sel=per_layer(0.01, 0.01, 0.01)), "the selected branch has 1.0%"),
    ],
)
def test_saturated_gate_is_named(spoil: Any, text: str, tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "gates alive")
    assert verdict.ok is False
    assert text in verdict.text


def test_disabled_branches_are_not_judged(tmp_path: Path) -> None:
    """`model.silent` disables branches for an ablation: their gates are 0 and they have no output."""

    def silence(*branches: str) -> Callable[[list[Event]], None]:
        def spoil(events: list[Event]) -> None:
            for event in events:
                for branch in branches if "gate_entropy" in event else ():
                    event[f"gate_share_{branch}"] = [0.0] * LAYERS
                    event[f"norm_{branch}"] = [0.0] * LAYERS
                if "gate_entropy" in event:
                    remaining = [name for name in ("cmp", "sel", "win") if name not in branches]
                    total = sum(event[f"gate_share_{name}"][0] for name in remaining)
                    for name in remaining:
                        event[f"gate_share_{name}"] = [value / total for value in event[f"gate_share_{name}"]]
                    event["gate_entropy"] = [value * 0.6 * (len(remaining) - 1) for value in event["gate_entropy"]]

        return spoil

    for number, branches in enumerate((("cmp",), ("sel",), ("cmp", "sel"))):
        config = make_config(model__silent=list(branches))
        verdicts = list_verdicts(write_run(tmp_path / str(number), config, silence(*branches)))
        assert [(v.name, v.text) for v in verdicts if v.level != "passed"] == [], branches
        names = {verdict.name for verdict in verdicts}
        assert ("selection reaches" in names) == ("sel" not in branches)
        assert ("gates alive" in names) == (len(branches) == 1)
        if len(branches) == 1:
            enabled = list_verdicts(write_run(tmp_path / f"{number} enabled", spoil=silence(*branches)))
            assert {"gates alive", "branch outputs"} <= {v.name for v in enabled if v.level == "failed"}


@looped
@pytest.mark.parametrize(
    "branches", [("cmp", "sel"), ("cmp", "win"), ("sel", "win"), ("cmp",), ("sel",), ("win",)], ids="-".join
)
def test_branches_that_do_not_exist_are_not_judged(branches: tuple[str, ...], tmp_path: Path) -> None:
    scores = "mean_key" if "sel" in branches and "cmp" not in branches else None
    config = make_config(model__branches=list(branches), nsa__scores=scores)
    verdicts = list_verdicts(write_run(tmp_path / "healthy", config))
    assert [(v.name, v.text) for v in verdicts if v.level != "passed"] == []
    names = {verdict.name for verdict in verdicts}
    assert ("selection reaches" in names) == ("selection finds" in names) == ("sel" in branches)
    assert ("gates alive" in names) == ("gates moved" in names) == (len(branches) > 1)

    def pin(events: list[Event]) -> None:
        for event in events:
            if "gate_entropy" in event:
                event |= {f"gate_share_{name}": [1 / len(branches)] * LAYERS for name in branches}
                event["gate_entropy"] = [math.log(len(branches))] * LAYERS

    if len(branches) > 1:
        pinned = get_verdict(list_verdicts(write_run(tmp_path / "pinned", config, pin)), "gates moved")
        assert pinned.ok is False and "pinned at ln 2 = 0.6931 in every reading of every layer" in pinned.text
        uneven = set_all(**{f"gate_share_{branches[0]}": per_layer(0.5, 0.9, 0.5)})
        wrong = get_verdict(list_verdicts(write_run(tmp_path / "wrong", config, uneven)), "consistent numbers")
        assert wrong.ok is False and "the gate shares of a layer add up to" in wrong.text


def test_constant_selection_statistics_are_repeated_values_unless_all_blocks_are_selected(tmp_path: Path) -> None:
    for n_sel, is_ok in ((16, False), (32, True)):
        config = make_config(nsa__n_sel=n_sel)
        run = write_run(tmp_path / str(n_sel), config, spoil=set_all(sel_reuse=[1.0] * LAYERS))
        assert get_verdict(list_verdicts(run), "repeated values").ok is is_ok


def test_reuse_below_chance_is_named(tmp_path: Path) -> None:
    verdict = get_verdict(
        list_verdicts(write_run(tmp_path, spoil=set_all(sel_reuse=per_layer(0.93, 0.5, 0.93)))), "selection chooses"
    )
    assert verdict.level == "warning"
    assert "layer 1, less than chance" in verdict.text


def test_duplicated_step_is_named(tmp_path: Path) -> None:
    assert "duplicated: 70" in get_verdict(list_verdicts(write_run(tmp_path, spoil=duplicate_step)), "every step once").text


def test_halt_is_reported_before_the_unfinished_run(tmp_path: Path) -> None:
    reason = "step 91: the loss is nan; the update was skipped"

    def spoil(events: list[Event]) -> list[Event]:
        remaining = [e for e in events if e["step"] <= 90 and e["kind"] != "end"]
        guard = {
            "kind": "guard",
            "attempt": 1,
            "step": 91,
            "rule": "non_finite",
            "value": None,
            "limit": 0.0,
            "action": "halt",
            "text": reason,
            "nonfinite": ["value"],
        }
        halt = {"kind": "halt", "attempt": 1, "step": 90, "status": "HALTED", "exit_code": 3, "reason": reason}
        return [*remaining, guard, halt]

    run_dir = write_run(tmp_path, spoil=spoil, status={"status": directory.HALTED, "reason": reason})
    health = examine(run_dir)
    assert health.headline.startswith("NOT healthy: guards: non_finite (halt): step 91: the loss is nan")
    assert get_verdict(health.verdicts, "finished").ok is False
    numbers = get_verdict(health.verdicts, "finite numbers")
    assert numbers.ok and numbers.text.endswith("; a non-finite step was skipped, see guards")


def test_killed_trainer_fails_and_live_trainer_is_unknown(tmp_path: Path) -> None:
    half = keep_events(lambda e: e["step"] <= 100)
    run_dir = write_run(tmp_path, spoil=half, status={"status": directory.RUNNING})
    dead = get_verdict(list_verdicts(run_dir), "finished")
    assert dead.ok is False
    assert "the trainer was killed at step 100 of 200" in dead.text
    lock = take_lock(run_dir)
    sign_lock(lock, os.getpid())
    try:
        health = examine(run_dir)
    finally:
        os.close(lock)
    assert health.ok and get_verdict(health.verdicts, "finished").ok is None
    assert health.headline == "healthy so far: running, step 100 of 200"


def test_stop_on_request_is_not_a_failure(tmp_path: Path) -> None:
    half = keep_events(lambda e: e["step"] <= 100)
    run_dir = write_run(tmp_path, spoil=half, status={"status": directory.PREEMPTED, "reason": None})
    health = examine(run_dir)
    assert health.ok
    assert "resume it to finish" in health.headline


def kill_and_resume(events: list[Event]) -> list[Event]:
    """Killed at step 130, resumed from the checkpoint of step 100."""
    config = make_config()
    first = [e for e in events if e["step"] <= 130 and e["kind"] != "end"]
    facts = {"config_hash": events[0]["config_hash"], **make_attempt_facts()}
    resume = {"kind": "resume", "attempt": 2, "step": 100, "from_step": 100, "steps": 200, **facts}
    second = [make_step_event(step, config, attempt=2) for step in range(110, 201, 10)]
    second += [make_eval_event(step, 2.1 + 5.9 * math.exp(-step / 40), attempt=2) for step in (150, 200)]
    second.append(make_checkpoint_event(200, attempt=2))
    end = {"kind": "end", "attempt": 2, "step": 200, "status": directory.DONE, "exit_code": 0}
    end |= {"reason": directory.format_done_reason(200)}
    return [*first, resume, *sorted(second, key=lambda e: e["step"]), end]


def kill_before_event(events: list[Event]) -> list[Event]:
    """Killed after the checkpoint of step 100 was saved and before its event was written; resumed from it."""
    all_events = kill_and_resume(events)
    remaining = [e for e in all_events if e["attempt"] > 1 or (e["step"] <= 100 and e["kind"] != "checkpoint")]
    assert len(remaining) < len(all_events)
    return remaining


def test_checkpoint_without_event_counts_as_saved(tmp_path: Path) -> None:
    resumed = examine(write_run(tmp_path / "resumed", spoil=kill_before_event))
    assert resumed.ok, resumed.headline
    assert get_verdict(resumed.verdicts, "checkpoints").text.startswith("2 saved, none missing")
    # Killed in its first step after the save: only the files show that it was saved.
    spoil, _ = FAILURES["checkpoints"]
    run_dir = write_run(tmp_path / "files", spoil=spoil)
    assert get_verdict(list_verdicts(run_dir), "checkpoints").ok is False
    folder = write_checkpoint(run_dir, 100)
    write_checkpoint(run_dir, 200)
    assert get_verdict(list_verdicts(run_dir), "checkpoints").ok is True
    (folder / "model.safetensors").write_bytes(b"1")
    assert get_verdict(list_verdicts(run_dir), "checkpoints").ok is False, "an incomplete checkpoint does not count"


SLOWDOWN = {**GUARD, "rule": "slowdown", "text": "step 90: 10 tokens/s"}
FAILED_SAVE = {**ERROR, "step": 100, "where": "save", "type": "OSError", "message": "the disk is full", "fatal": False}
QUARANTINED = {
    **GUARD,
    "rule": "checkpoint",
    "action": "quarantined",
    "text": "the checkpoint of step 90 is damaged and was moved aside: truncated",
}


@looped
@pytest.mark.parametrize(
    ("problem", "name", "text"),
    [
        (GUARD, "guards", " (recovered from: attempt 1: frozen (warn): step 90: the gate weights of layer 1 do not move)"),
        (SLOWDOWN, "throughput", " (recovered from: attempt 1: slowdown (warn): step 90: 10 tokens/s)"),
        (STALL, "stalls", "none (recovered from: attempt 1: in phase data at step 60, detected after 130 s)"),
        (ERROR, "errors", "none (recovered from: attempt 1: ValueError at step 60: boom more)"),
        (FAILED_SAVE, "checkpoints", "(recovered from: attempt 1: a save failed at step 100: the disk is full)"),
        (QUARANTINED, "checkpoints", "(recovered from: attempt 1: the checkpoint of step 90 is damaged"),
    ],
    ids=["guard", "slowdown", "stall", "error", "failed save", "quarantined checkpoint"],
)
def test_problem_fails_only_in_the_last_attempt(problem: Event, name: str, text: str, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        resumed_events = kill_and_resume(events)
        return [*resumed_events[:3], problem, *resumed_events[3:]]

    health = examine(write_run(tmp_path / "earlier", spoil=spoil))
    assert health.ok, health.headline
    assert text in get_verdict(health.verdicts, name).text
    last = examine(write_run(tmp_path / "last", spoil=append(problem)))
    assert [verdict.name for verdict in (*last.failed, *last.warnings)] == [name]


def test_slowdown_belongs_to_throughput(tmp_path: Path) -> None:
    verdicts = list_verdicts(write_run(tmp_path, spoil=append(SLOWDOWN)))
    assert get_verdict(verdicts, "guards").ok and get_verdict(verdicts, "guards").text.startswith(
        "no other guard fired; halts on "
    )
    answer = {answer.name: answer for answer in answer_questions(verdicts)}["How fast?"]
    assert answer.level == "warning"
    assert "slowdown (warn): step 90: 10 tokens/s; possible cause: other programs" in answer.text


@pytest.mark.parametrize("missing", [50, 150])
def test_failed_save_excuses_only_its_own_step(missing: int, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        resumed_events = [*kill_and_resume(events), make_checkpoint_event(150, attempt=2)]
        resumed_events = [e for e in resumed_events if not (e["kind"] == "checkpoint" and e["step"] == missing)]
        return [*resumed_events[:3], {**FAILED_SAVE, "step": 50}, *resumed_events[3:]]

    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(train__save_every=50), spoil)), "checkpoints")
    assert verdict.ok is (missing == 50), verdict.text
    assert missing == 50 or "none saved at step 150" in verdict.text


def test_failed_preflight_is_recovered_by_a_later_one(tmp_path: Path) -> None:
    """The first attempt ends before its first step, for example on a full disk, and the second starts again."""

    def spoil(events: list[Event]) -> list[Event]:
        refused = [{**e, "ok": False} if e.get("name") == "data" else dict(e) for e in events[:5]]
        guard = {**GUARD, "step": 0, "rule": "preflight", "action": "halt", "text": "preflight refuses this run: data"}
        halt = {"kind": "halt", "attempt": 1, "step": 0, "status": "HALTED", "exit_code": 3, "reason": "preflight"}
        return [*refused, guard, halt, *({**event, "attempt": 2} for event in events)]

    health = examine(write_run(tmp_path, spoil=spoil))
    assert health.ok, health.headline
    assert (
        "2 checks passed (recovered from: attempt 1: data: fine, limit fine)"
        in get_verdict(health.verdicts, "preflight").text
    )
    assert "recovered from: attempt 1: preflight (halt)" in get_verdict(health.verdicts, "guards").text


def test_killed_and_resumed_run_counts_every_step_once(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, spoil=kill_and_resume)
    health = examine(run_dir)
    assert health.ok, health.headline
    text = get_verdict(health.verdicts, "every step once").text
    assert text == "none missing, none duplicated; 2 attempts: attempt 1 killed at step 130, attempt 2 resumed at step 100"
    history = History.read(run_dir)
    assert [a.outcome for a in history.attempts()] == ["killed", "done"]
    assert len(history.steps) == 21
    assert collect_facts(history).attempts == 2


@pytest.mark.parametrize("rounding", [-1e-9, 1e-9])
def test_training_loss_is_in_bits_per_byte_despite_rounding(rounding: float, tmp_path: Path) -> None:
    """For bytes, both losses fall by the same fraction up to rounding, which must not matter."""

    def round_losses(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "step":
                event["loss"] = event["bpb"] * math.log(2) * (1 + rounding * (event["step"] > 1))

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=round_losses)), "training loss")
    assert verdict.ok is True and "bits per byte" in verdict.text and "nats" not in verdict.text


def test_training_loss_that_fell_only_per_byte_is_reported_per_token(tmp_path: Path) -> None:
    def flat_per_token(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "step":
                event["loss"] = 5.5 + event["step"] * 1e-6

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=flat_per_token)), "training loss")
    assert verdict.ok is False and "to 5.500 nats per token" in verdict.text


def test_training_loss_is_a_mean_of_the_latest_readings(tmp_path: Path) -> None:
    """The mean is over fewer readings if the run has few, and over more if they differ so much that 50 are not enough."""

    def add_noise(amplitude: float) -> Callable[[list[Event]], None]:
        def spoil(events: list[Event]) -> None:
            for event in events:
                if event["kind"] == "step":
                    event["bpb"] = 1.0 + amplitude * (-1) ** (event["step"] // 10)
            events[-2 if events[-1]["kind"] == "end" else -1]["bpb"] = None

        return spoil

    for amplitude, count in ((0.2, 50), (0.5, 101)):  # 0.5 / 101 ** 0.5 is 1 / 20
        history = History.read(
            write_run(tmp_path / f"long{amplitude}", make_config(train__steps=5000), add_noise(amplitude))
        )
        assert collect_facts(history).last_train_bpb == pytest.approx(1.0, abs=0.02)
        assert dict(format_facts(history))["training, bits per byte"].endswith(f"(mean of the last {count} readings)")
    short = History.read(write_run(tmp_path / "short"))
    assert collect_facts(short).last_train_bpb == pytest.approx(np.mean([event["bpb"] for event in short.steps[-2:]]))
    first = History.read(write_run(tmp_path / "first", spoil=lambda events: [e for e in events if e["step"] <= 1]))
    assert dict(format_facts(first))["training, bits per byte"] == f"{first.steps[0]['bpb']:.3f}"
    none = History.read(write_run(tmp_path / "none", spoil=lambda events: events[:1]))
    assert collect_facts(none).last_train_bpb is None


@looped
@pytest.mark.parametrize(
    ("readings", "count"),
    [
        ([1.0, 0.99] * 20, 4),  # a tenth
        ([1.5, 0.5] * 20, 20),  # steps of one document each: at most half of the readings
        ([1.2, 0.8] * 20, 18),  # 0.2 / 17 ** 0.5 is 1 / 20
        ([9.0, 1.0, 3.0], 1),
        ([9.0, 1.0, float("nan"), 3.0, 2.0], 2),
    ],
)
def test_number_of_latest_readings(readings: list[float], count: int) -> None:
    finite = [value for value in readings if value == value]
    assert list(select_latest(np.array(readings))) == finite[-count:]


def test_headline_questions_are_answered_by_the_checks(tmp_path: Path) -> None:
    healthy = answer_questions(list_verdicts(write_run(tmp_path / "healthy")))
    assert [answer.name for answer in healthy] == list(QUESTIONS)
    assert all(answer.ok for answer in healthy)
    frozen = answer_questions(
        list_verdicts(write_run(tmp_path / "frozen", spoil=set_all(gate_entropy=[math.log(3)] * LAYERS)))
    )
    assert [answer.ok for answer in frozen] == [False, True, False, True]
    assert "pinned at ln 3" in frozen[0].text
    assert "pinned at ln 3" in frozen[2].text
    dense = answer_questions(list_verdicts(write_run(tmp_path / "dense", make_config(model__attention="dense"))))
    assert [answer.ok for answer in dense] == [True, True, None, None]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[History, History]]:
    """pair(gap, **config of the dense run): an NSA run with validation bpb `gap` (relative) above its dense baseline."""

    def make(gap: float, **changes: Any) -> tuple[History, History]:
        def raise_loss(events: list[Event]) -> None:
            for event in events:
                if event["kind"] == "eval" and event["step"]:
                    event["bpb"] *= 1 + gap

        dense = write_run(tmp_path / "dense", make_config(model__attention="dense", **changes))
        return History.read(write_run(tmp_path / "nsa", spoil=raise_loss)), History.read(dense)

    return make


@pytest.mark.parametrize(("gap", "ok"), [(-0.05, True), (0.009, True), (0.011, False)])
def test_gap_to_the_dense_baseline_is_limited(gap: float, ok: bool, pair: Any) -> None:
    nsa, dense = pair(gap)
    assert find_matched_pair([dense, nsa]) == (nsa, dense)
    same_training, gap_check = check_matched_pair(nsa, dense)
    assert same_training.ok is True
    assert gap_check.ok is ok
    assert gap_check.value == pytest.approx(gap)
    assert f"at step 200: {gap:+.2%}" in gap_check.text
    rows = {name: values for name, *values in build_side_by_side(nsa, dense)}
    assert rows["tokens per second, median"][-1] == 1.0
    assert rows["validation, bits per byte"][-1] == pytest.approx(1 + gap)


def test_side_by_side_numbers_are_formatted_as_on_the_page(pair: Any) -> None:
    nsa, dense = pair(0.0)
    compared, single = (
        {name: text for name, text, *_ in rows} for rows in (build_side_by_side(nsa, dense), format_facts(nsa))
    )
    names = ("tokens per second, median", "training time", "peak memory", "parameters")
    assert all(compared[name] == single[name] for name in names) and single["training time"].endswith(" s")


def test_different_training_settings_are_named(pair: Any) -> None:
    nsa, dense = pair(0.0, train__lr=2e-3, train__log_every=5)
    assert check_matched_pair(nsa, dense)[0].ok is False
    assert check_matched_pair(nsa, dense)[0].text == "different: train.lr"
    assert find_matched_pair([nsa, nsa]) is None
    assert find_matched_pair([nsa]) is None


def test_dense_baseline_may_have_a_wider_mlp(pair: Any) -> None:
    nsa, dense = pair(0.0, model__mlp_hidden=160)
    nsa = edit_history(nsa, lambda events: events[0].update(params=131_928))
    verdict = check_matched_pair(nsa, dense)[0]
    assert verdict.ok is True
    assert "MLP width 128, dense 160; parameters 131,928, dense 123,456 (+6.9%)" in verdict.text
    assert "MFLOPs per token 1.0, dense 0.9 (+11.1%)" in verdict.text


def test_allowed_differences_are_the_settings_changeable_on_resume() -> None:
    changeable = {f"train.{name}" for name in CHANGEABLE_TRAIN_KEYS} | {f"data.{name}" for name in CHANGEABLE_DATA_KEYS}
    attention_keys = {"attention", "mlp_hidden", "selection_loss", "indexer_block", "indexer_width"}
    assert changeable - {"train.eval_batches"} | {f"model.{name}" for name in attention_keys} == ALLOWED_DIFFERENCES


def test_different_data_is_named(pair: Any) -> None:
    nsa, dense = pair(0.0)
    nsa = edit_history(nsa, lambda events: events[0].update(data_identity="another text"))
    assert check_matched_pair(nsa, dense)[0].text == "different: the data"


def test_gap_is_unknown_without_evaluation_of_the_baseline(pair: Any) -> None:
    nsa, dense = pair(0.0)
    verdict = check_matched_pair(nsa, replace(dense, evaluations=dense.evaluations[:1]))[1]
    assert verdict.ok is None


def test_resume_that_skips_steps_is_named(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [e for e in kill_and_resume(events) if not (e["attempt"] == 1 and e["step"] > 80 and e["kind"] == "step")]

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "every step once")
    assert verdict.ok is False
    assert "steps missing: 90, 100;" in verdict.text


def test_missing_steps_have_thousands_separators(tmp_path: Path) -> None:
    settings = make_config(train__steps=2000)
    run = write_run(tmp_path, settings, lambda events: [e for e in events if (e["kind"], e["step"]) != ("step", 1010)])
    assert "steps missing: 1,010;" in get_verdict(list_verdicts(run), "every step once").text


def falsify_hash(folder: Path) -> None:
    """Edit the manifest: its entry of the weights stays valid, its own digest does not."""
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    (folder / "MANIFEST.json").write_text(json.dumps({**manifest, "step": manifest["step"] + 1}))


@looped
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "has 4 bytes, its manifest records 10"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"10 letters"), "does not match its sha256"),
        (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
        (lambda folder: (folder / "MANIFEST.json").write_text("{"), "MANIFEST.json cannot be read"),
        (falsify_hash, "MANIFEST.json does not match its own digest"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
    ],
)
def test_damaged_checkpoint_is_named(damage: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    write_checkpoint(run_dir, 100)
    damage(write_checkpoint(run_dir, 200))
    verdict = get_verdict(list_verdicts(run_dir), "checkpoints")
    assert verdict.ok is False
    assert text in verdict.text


@looped
@pytest.mark.parametrize("changes", [{}, {"model__attention": "dense"}])
@pytest.mark.parametrize("resumed", [False, True])
def test_copy_without_checkpoints_gives_the_same_results(changes: dict, resumed: bool, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "original", make_config(**changes), kill_and_resume if resumed else None)
    for step in (100, 200):
        write_checkpoint(run_dir, step)
    for file in (directory.LOG, directory.LOCK, "stacks.txt"):
        (run_dir / file).write_text("")
    copy = tmp_path / "copy" / run_dir.name
    copy.mkdir(parents=True)
    for file in (directory.CONFIG, directory.ENVIRONMENT, directory.EVENTS, directory.STATUS):
        shutil.copy(run_dir / file, copy)
    original, copied = examine(run_dir), examine(copy)
    results = [[(v.name, v.ok, v.value, v.limit) for v in health.verdicts] for health in (original, copied)]
    assert results[0] == results[1]
    assert (original.ok, original.headline) == (copied.ok, copied.headline)
    assert "this copy does not contain their files" in get_verdict(copied.verdicts, "checkpoints").text


def test_copy_of_a_run_with_a_missing_save_fails(tmp_path: Path) -> None:
    spoil, _ = FAILURES["checkpoints"]
    assert get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "checkpoints").ok is False


def test_quarantined_checkpoint_fails_checkpoints_not_guards(tmp_path: Path) -> None:
    quarantined = {
        "kind": "guard",
        "attempt": 1,
        "step": 100,
        "rule": "checkpoint",
        "value": "truncated",
        "limit": None,
        "action": "quarantined",
        "text": "the checkpoint of step 100 is damaged and was moved aside: truncated",
    }
    assert [v.name for v in examine(write_run(tmp_path, spoil=append(quarantined))).failed] == ["checkpoints"]


def test_dense_run_has_no_gate_or_selection_checks(tmp_path: Path) -> None:
    health = examine(write_run(tmp_path, make_config(model__attention="dense")))
    assert health.ok
    assert not any("gate" in v.name or "selection" in v.name or "sink" in v.name for v in health.verdicts)


def test_selection_is_unknown_if_all_blocks_are_selected(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(train__seq_len=1024))), "selection chooses")
    assert verdict.ok is None
    assert "1,024 tokens have 16 blocks" in verdict.text


def vary_loss(bpb: float) -> Callable[[list[Event]], None]:
    """Return an edit that sets all losses to almost this value."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] in ("step", "eval"):
                event["bpb"] = bpb + event["step"] * 1e-9
                event["loss"] = event["bpb"] * math.log(2)

    return spoil


def test_loss_of_noise_must_stay_at_its_entropy(tmp_path: Path) -> None:
    config = make_config(data__source="synthetic")
    flat = write_run(tmp_path / "flat", config, vary_loss(7.99))
    assert examine(flat).ok
    assert get_verdict(list_verdicts(flat), "no leak").ok is True
    leaking = write_run(tmp_path / "leaking", config, vary_loss(7.9))
    assert [v.name for v in examine(leaking).failed] == ["no leak"]


LIBRARY = {**ERROR, "type": "RuntimeError", "message": "connection closed by peer", "where": "step"}
KILLED = {**ERROR, "type": "SIGKILL", "message": "rank 1 was killed (signal 9)", "where": "rank 1", "cause": True}


def make_error(where: str, step: int = 60) -> Event:
    return {**ERROR, "where": where, "type": "OSError", "message": "the disk is full", "fatal": False, "step": step}


def test_cause_is_reported_among_several_errors(tmp_path: Path) -> None:
    """Errors of the surviving ranks come first but do not explain the failure, and noncritical errors even less."""
    spoil = append(make_error("tensorboard"), LIBRARY, KILLED)
    verdict = get_verdict(list_verdicts(write_run(tmp_path / "killed", spoil=spoil)), "errors")
    assert (verdict.ok, verdict.value) == (False, 2)
    assert verdict.text == "SIGKILL at step 60: rank 1 was killed (signal 9) (and 1 more)"
    verdict = get_verdict(
        list_verdicts(write_run(tmp_path / "broke", spoil=append(make_error("events"), LIBRARY))), "errors"
    )
    assert verdict.text == "RuntimeError at step 60: connection closed by peer (and 1 more)"


@pytest.mark.parametrize("where", ["tensorboard", "status", "diagnosis"])
def test_noncritical_error_is_reported_and_passes(where: str, tmp_path: Path) -> None:
    health = examine(write_run(tmp_path, spoil=append(make_error(where), make_error(where, 70))))
    assert health.ok, health.headline
    text = f"none that ended the run; OSError ({where}) at step 60: the disk is full (and 1 more)"
    assert get_verdict(health.verdicts, "errors").text == text


def test_gap_in_the_record_fails(tmp_path: Path) -> None:
    lost = {**make_error("events"), "message": "3 events before this one could not be written: no space"}
    del lost["type"]
    health = examine(write_run(tmp_path, spoil=append(lost)))
    assert health.headline == f"NOT healthy: errors: error (events) at step 60: {lost['message']}"


def test_bug_while_saving_is_an_error(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=append({**ERROR, "where": "save"}))), "errors")
    assert verdict.ok is False and verdict.text == "ValueError at step 60: boom more"


def test_run_without_events_is_unknown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, status={"status": directory.PREEMPTED, "reason": "created, not started"})
    (run_dir / directory.EVENTS).write_text("")
    health = examine(run_dir)
    assert health.ok
    assert health.headline.startswith("healthy so far: step 0 of 200: created, not started")
    assert [v.name for v in health.verdicts if v.ok is not None] == []


def test_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    with open(run_dir / directory.EVENTS, "a", encoding="utf-8") as file:
        file.write('{"v": 1, "kind": "st')
    assert examine(run_dir).ok


@looped
@pytest.mark.parametrize(("sinks", "local"), [(1, 2), (1, 1), (2, 1), (2, 4), (3, 2)])
def test_selection_range_matches_counting(sinks: int, local: int) -> None:
    """For any number of first and latest blocks that are always selected."""
    n_sel, length = sinks + local + 1, 64
    nsa = NSAConfig(l_sel=4, n_sel=n_sel, l=4, d=2, sink_blocks=sinks, local_blocks=local)
    selected = near = far = 0
    for t in range(length):
        own = t // 4
        forced = {j for j in range(own + 1) if j < sinks or j > own - local}
        others = sorted(set(range(own + 1)) - forced)
        free = min(own + 1, nsa.n_sel) - len(forced)
        nearest, oldest = forced | set(others[::-1][:free]), forced | set(others[:free])
        selected += len(nearest)
        near += sum(own - j for j in nearest)
        far += sum(own - j for j in oldest)
    bounds = compute_selection_range(length, nsa)
    assert bounds.has_selection
    assert bounds.nearest == pytest.approx(near / selected)
    assert bounds.farthest == pytest.approx(far / selected)
    assert not compute_selection_range(4 * n_sel, nsa).has_selection
    assert compute_selection_range(4 * n_sel, nsa).chance_reuse == 1.0


def test_status_done_before_the_last_step_fails(tmp_path: Path) -> None:
    half = keep_events(lambda event: event["step"] <= 100)
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=half)), "finished")
    assert verdict.ok is False and verdict.text == "status DONE at step 100 of 200"


def test_risen_loss_fails(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=set_at(200, "eval", bpb=12.0))), "loss fell")
    assert verdict.ok is False and "above the start" in verdict.text


def test_leak_only_in_validation_is_detected(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=set_at(100, "eval", bpb=0.05))), "no leak")
    assert verdict.ok is False and "lowest 0.050 bits per byte, at step 100" in verdict.text


RECORDED = sorted(path.parent for path in (resolve.get_root() / "outputs").glob(f"*/{directory.RECORDED}"))


def test_recorded_verdicts_follow_from_the_records_in_outputs() -> None:
    assert len(RECORDED) == 6
    for run in RECORDED:
        assert_verdict_follows(run)


def assert_verdict_follows(run: Path) -> None:
    """Assert equal values. The texts of recorded files have the wording of the version that wrote them."""

    def drop_texts(record: dict[str, Any]) -> dict[str, Any]:
        verdicts = [{key: value for key, value in verdict.items() if key != "text"} for verdict in record["verdicts"]]
        return {**record, "headline": None, "summary": None, "surroundings": None, "verdicts": verdicts}

    recorded = json.loads((run / directory.VERDICT).read_text(encoding="utf-8"))
    history = History.read(run)
    expected = drop_texts({**to_record(history, examine(history)), "digest": directory.compute_record_digest(run)})
    assert expected == drop_texts(recorded), run.name


RECALL = {"data__source": "recall", "data__path": "texts"}


@looped
@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"random": 0.2}, "random blocks are as good: selection saves 0.00 nats"),
        (  # Measured on a model that finds: its selection replaced by random blocks of another seed than `random`.
            {"chosen": 1.295, "random": 1.880, "nearest": 2.131, "no_sel": 4.924},
            "random blocks are as good: selection saves 0.58 nats, required 0.94",
        ),
        ({"nearest": 0.44}, "the nearest blocks are as good: selection saves 0.24 nats"),
        ({"no_sel": 0.2}, "no selected branch is as good"),
        ({"chosen": 2.31, "random": 2.30, "nearest": 2.31, "no_sel": 2.31}, "0% correct, 2.31 nats per byte"),
        (
            {"chosen": 2.31, "random": 5.0, "nearest": 5.1, "no_sel": 5.2},
            "selection saves at least 2.69 nats, but no answer is correct yet",
        ),
    ],
    ids=[
        "a random selection",
        "a luckier random selection",
        "the nearest blocks",
        "a branch of zeros",
        "copying never formed",
        "nothing correct",
    ],
)
def test_selection_without_benefit_fails(losses: dict[str, float], words: str, tmp_path: Path) -> None:
    health = examine(write_run(tmp_path, make_config(**RECALL), spoil=set_reach_losses(**losses)))
    assert [v.name for v in health.failed] == ["selection finds"] and words in health.headline


def test_selection_benefit_is_unknown_if_it_cannot_be_judged(tmp_path: Path) -> None:
    def check_finds(folder: str, spoil: Callable, **settings: object) -> Verdict:
        return get_verdict(
            list_verdicts(write_run(tmp_path / folder, make_config(**settings), spoil=spoil)), "selection finds"
        )

    random = {"random": 0.2}
    text = check_finds("text", set_reach_losses(**random))
    assert text.ok is None and "not trained on facts" in text.text
    wrong = check_finds("wrong", set_reach_losses(chosen=2.31, random=5.0, nearest=5.1, no_sel=5.2))
    assert wrong.ok is None and "no answer is correct yet. The run was not trained on facts" in wrong.text
    early = check_finds(
        "early", lambda events: set_reach_losses(**random)(events) or [e for e in events if e["step"] <= 50], **RECALL
    )
    assert early.ok is True, "an early success counts"
    early = check_finds(
        "started",
        lambda events: [e | make_reach_event(50, **random) if e["kind"] == "reach" else e for e in events],
        **RECALL,
    )
    assert early.ok is None and "Not judged before 50% of the steps" in early.text
    nothing = check_finds("nothing", keep_events(lambda e: e["kind"] != "reach"), **RECALL)
    assert nothing.ok is None and "no ablation" in nothing.text
    small = [{"kind": "reach", "attempt": 1, "step": 200, "length": 64, "why_not": "all blocks are read"}]
    skipped = check_finds("small", lambda events: [e for e in events if e["kind"] != "reach"] + small, **RECALL)
    assert skipped.ok is None and skipped.text == "not judged: all blocks are read"
    lost = check_finds("lost", set_reach_losses(random=None), **RECALL)
    assert lost.ok is False


@looped
@pytest.mark.parametrize(("recorded", "words"), [(4, " in 4 sequences"), (16, " in 16 sequences"), (None, ""), ("?", "")])
def test_number_of_sequences_is_reported(recorded: object, words: str, tmp_path: Path) -> None:
    """The number in the run's record; older runs used 4."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "reach":
                event["sequences"] = recorded

    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(**RECALL), spoil=spoil)), "selection finds")
    assert verdict.ok and f"at 2,048 tokens{words}: 100% correct" in verdict.text


def test_short_runs_are_not_judged_by_their_answers(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_config(**RECALL, train__steps=50), spoil=set_reach_losses(random=0.3))
    verdict = get_verdict(list_verdicts(run_dir), "selection finds")
    assert verdict.ok is None and "Not judged: a trial run, 50 steps" in verdict.text


@looped
@pytest.mark.parametrize(("order_0", "level"), [(2.15, "warning"), (2.13, "failed")])
def test_a_model_of_single_bytes_of_a_text_with_structure_is_a_warning(order_0: float, level: str, tmp_path: Path) -> None:
    """The validation loss is 2.14 bits per byte."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "reference" and event["name"].startswith("order"):
                event["bpb"] = order_0 if event["name"] == "order-0 entropy" else 1.5

    assert get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "learned structure").level == level


def test_without_a_free_block_no_reading_has_a_choice(tmp_path: Path) -> None:
    for n_sel, expected in ((3, False), (4, True)):
        history = History.read(write_run(tmp_path / str(n_sel), make_config(nsa__n_sel=n_sel)))
        assert find_readings_with_selection(history, np.array([20, 40])).tolist() == [expected] * 2


def test_unknown_check_leaves_its_question_open(tmp_path: Path) -> None:
    answers = answer_questions(
        list_verdicts(write_run(tmp_path, spoil=keep_events(lambda event: event["kind"] != "reach")))
    )
    assert [answer.ok for answer in answers] == [True, True, True, None]


def set_at_each(*steps: int, **values: Any) -> Callable[[list[Event]], None]:
    """Return an edit that sets these values at these steps."""

    def spoil(events: list[Event]) -> None:
        for step in steps:
            set_at(step, **values)(events)

    return spoil


@pytest.mark.parametrize(
    ("steps", "text"),
    [((200,), "layer 1, entropy 0.100 nats"), ((100, 120), "entropy 0.100 nats, in 20% of the readings"), ((100,), None)],
)
def test_collapsed_gate_fails_at_the_end_or_if_frequent(steps: tuple[int, ...], text: str | None, tmp_path: Path) -> None:
    collapsed = set_at_each(*steps, gate_entropy=per_layer(0.9, 0.1, 0.9))
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=collapsed)), "gates alive")
    assert verdict.ok is (text is None) and (text or "") in verdict.text


def test_gate_that_starts_even_is_not_a_zero_gate(tmp_path: Path) -> None:
    start_even = set_at(20, gate_entropy=[math.log(3)] * LAYERS)
    assert get_verdict(list_verdicts(write_run(tmp_path, spoil=start_even)), "gates moved").ok is True


@pytest.mark.parametrize(("steps", "ok"), [((60, 80, 100), False), ((60, 80, 120, 140), True)])
def test_unchanged_gate_weights_in_three_readings_fail(steps: tuple[int, ...], ok: bool, tmp_path: Path) -> None:
    verdict = get_verdict(
        list_verdicts(write_run(tmp_path, spoil=set_at_each(*steps, gate_update=per_layer(0.1, 0.0, 0.1)))), "gates moved"
    )
    assert verdict.ok is ok and (ok or "weights unchanged in 3 readings in a row in layer 1" in verdict.text)


def test_two_gate_readings_are_too_few(tmp_path: Path) -> None:
    early = keep_events(lambda event: event["step"] <= 40)
    verdict = get_verdict(
        list_verdicts(write_run(tmp_path, spoil=early, status={"status": directory.PREEMPTED})), "gates moved"
    )
    assert verdict.ok is None and verdict.text == "2 readings are too few to detect changes"


def test_layer_without_gradient_is_named(tmp_path: Path) -> None:
    verdict = get_verdict(
        list_verdicts(write_run(tmp_path, spoil=set_at(120, grad_norm_layers=per_layer(0.2, 0.0, 0.2)))), "gradients"
    )
    assert verdict.ok is False and verdict.text == "no gradient reaches layer 1 at step 120 (1 such readings)"


@pytest.mark.parametrize(("clip", "norm", "ok"), [(10.0, 9e3, True), (10.0, 1.1e4, False), (0.1, 900.0, True)])
def test_gradient_limit_is_relative_to_grad_clip(clip: float, norm: float, ok: bool, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_config(train__grad_clip=clip), set_at(120, grad_norm=norm))
    assert get_verdict(list_verdicts(run_dir), "gradients").ok is ok


def test_final_evaluation_is_due_at_any_step(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(train__eval_every=60))), "evaluations")
    assert verdict.ok is False and verdict.text == "1 of 5 evaluations are missing, the first at step 200"


def test_evaluation_of_the_current_step_is_not_due_yet(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [e for e in events if e["step"] < 100 or (e["step"] == 100 and e["kind"] == "step")]

    verdicts = list_verdicts(write_run(tmp_path, spoil=spoil, status={"status": directory.RUNNING}))
    assert get_verdict(verdicts, "evaluations").ok is True


@looped
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("step", name, value) for name in ("gate_share_sel", "gate_saturation", "sel_reuse") for value in (-0.1, 1.1)),
        *(("step", name, value) for name in ("sel_sink_share", "sel_window_overlap") for value in (-0.1, 1.1)),
        *(("step", name, -1.0) for name in ("loss", "data_s", "mem_peak_bytes", "gate_entropy", "gate_update")),
        *(("step", name, -1.0) for name in ("grad_norm_layers", "sel_distance", "norm_cmp", "norm_sel", "norm_win")),
        *(("eval", name, -1.0) for name in ("loss", "bpb")),
    ],
)
def test_impossible_number_is_named(kind: str, name: str, value: float, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> None:
        event = next(event for event in events if event["kind"] == kind and event["step"] == 100)
        event[name] = per_layer(0.3, value, 0.3) if isinstance(event[name], list) else value

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "finite numbers")
    assert verdict.ok is False and verdict.text.startswith(f"{name} is {value:g} at step 100, which is impossible")


def test_infinity_is_not_finite(tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=set_at(100, grad_norm=math.inf))), "finite numbers")
    assert verdict.ok is False and "grad_norm is not finite at step 100" in verdict.text


@looped
@pytest.mark.parametrize("name", ["loss", "bpb", "lr", "grad_norm", "dt_s", "tokens_per_s"])
def test_missing_number_counts_as_nonfinite(name: str, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> None:
        del next(event for event in events if event["kind"] == "step" and event["step"] == 100)[name]

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "finite numbers")
    assert verdict.ok is False and verdict.text == f"{name} is not finite at step 100 (1 such numbers)"


def test_error_without_fatal_field_is_fatal(tmp_path: Path) -> None:
    event = {key: value for key, value in make_error("tensorboard").items() if key != "fatal"}
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=append(event))), "errors")
    assert verdict.ok is False and verdict.text == "OSError at step 60: the disk is full"


def test_halt_and_longest_stall_are_reported_first(tmp_path: Path) -> None:
    halt = {**GUARD, "action": "halt", "rule": "spike", "text": "step 90: the loss is 9"}
    longer = {**STALL, "step": 70, "phase": "save", "phase_age_s": 500.0}
    verdicts = list_verdicts(write_run(tmp_path, spoil=append(GUARD, halt, STALL, longer, STALL)))
    assert get_verdict(verdicts, "guards").text == "spike (halt): step 90: the loss is 9 (and 1 more)"
    assert get_verdict(verdicts, "stalls").text == "3; the longest in phase save at step 70, detected after 500 s"


def test_selection_is_judged_after_half_of_the_steps(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        set_reach_losses(random=0.2)(
            remaining := [e for e in events if (e["kind"], e["step"]) not in (("reach", 150), ("reach", 200))]
        )
        return remaining

    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(**RECALL), spoil)), "selection finds")
    assert verdict.ok is False and "random blocks are as good" in verdict.text


def test_superseded_reach_event_is_ignored(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        resumed_events = kill_and_resume(events)
        resumed = next(index for index, event in enumerate(resumed_events) if event["kind"] == "resume")
        return [*resumed_events[:resumed], make_reach_event(130, random=0.2), *resumed_events[resumed:]]

    assert get_verdict(list_verdicts(write_run(tmp_path, make_config(**RECALL), spoil)), "selection finds").ok is True


FAR, CHANCE = (getattr(compute_selection_range(2048, make_config().nsa), name) for name in ("farthest", "chance_reuse"))


@looped
@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ({"sel_reuse": per_layer(0.93, 1.0, 0.93)}, "selection chooses", "always select the same blocks in layer 1"),
        ({"sel_reuse": per_layer(0.93, CHANCE - 0.06, 0.93)}, "selection chooses", "in layer 1, less than chance"),
        ({"sel_distance": per_layer(8.5, FAR, 8.5)}, "selection reaches", "only the oldest blocks are selected in layer 1"),
        ({"sel_sink_share": per_layer(0.1, 0.81, 0.1)}, "attention sink", "81% of the selected attention in layer 1"),
    ],
)
def test_selection_is_judged_by_the_last_reading(values: dict[str, Any], name: str, text: str, tmp_path: Path) -> None:
    last, before = (list_verdicts(write_run(tmp_path / str(step), spoil=set_at(step, **values))) for step in (200, 180))
    assert get_verdict(last, name).level == "warning" and text in get_verdict(last, name).text
    assert get_verdict(before, name).ok is True, "only the last reading counts"


def test_reuse_slightly_below_chance_passes(tmp_path: Path) -> None:
    spoil = set_all(sel_reuse=[CHANCE - 0.04] * LAYERS)
    assert get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "selection chooses").ok is True


def test_untrained_selection_distance_is_unknown(tmp_path: Path) -> None:
    short = write_run(tmp_path, make_config(train__steps=80), set_all(sel_distance=per_layer(8.5, 8.5, 6.98)))
    verdict = get_verdict(list_verdicts(short), "selection reaches")
    assert verdict.ok is None and verdict.text == "not judged before step 100"


def test_missing_last_checkpoint_fails(tmp_path: Path) -> None:
    spoil = keep_events(lambda event: (event["kind"], event["step"]) != ("checkpoint", 200))
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "checkpoints")
    assert verdict.ok is False and verdict.text == "none saved at step 200 (1 missing)"


@looped
@pytest.mark.parametrize(
    ("spoil", "config", "text"),
    [
        (set_at(100, tokens=100 * 2 * 2048 + 1), {}, "steps with wrong token counts: 100;"),
        (keep_events(lambda event: (event["kind"], event["step"]) != ("step", 1)), {}, "steps missing: 1;"),
        (None, {"train__log_every": 30, "train__stats_every": 30}, "steps missing: 200;"),
        (None, {"train__log_every": 40, "train__stats_every": 50}, "steps missing: 50, 100, 150;"),
    ],
)
def test_logged_steps_and_token_counts(spoil: Any, config: dict[str, Any], text: str, tmp_path: Path) -> None:
    verdict = get_verdict(list_verdicts(write_run(tmp_path, make_config(**config), spoil)), "every step once")
    assert verdict.ok is False and verdict.text.startswith(text)


def test_readings_without_a_choice_of_blocks_are_not_judged(tmp_path: Path) -> None:
    """In 512 tokens all blocks are selected: the selection loss is 0, and the first block has most of the attention."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            if "sel_sink_share" in event:
                event["sel_sink_share"] = [0.95] * LAYERS
            if event["kind"] == "step":
                event["selection_loss"] = 0.0

    for length, expected in ((512, True), (2048, False)):
        config = make_config(train__seq_len=length, model__indexer_block=4, model__selection_loss=0.05)
        verdicts = list_verdicts(write_run(tmp_path / str(length), config, spoil))
        for name in ("statistics", "attention sink"):
            assert (get_verdict(verdicts, name).ok is True) is expected, get_verdict(verdicts, name)
        assert get_verdict(verdicts, "loss course").ok is True or not expected


def test_memory_compares_the_maxima_of_both_halves(tmp_path: Path) -> None:
    def set_memory(*gigabytes: tuple[int, int], phase: str = "step") -> Callable[[list[Event]], None]:
        """Return an edit that sets (index of heartbeat, gigabytes) in a phase, and 1 GB at all other heartbeats."""

        def spoil(events: list[Event]) -> None:
            beats = [event for event in events if event["kind"] == "heartbeat"]
            for index, event in enumerate(beats):
                event["rss_bytes"] = dict(gigabytes).get(index, 1) * 10**9
                event["phase"] = phase if index in dict(gigabytes) else event["phase"]

        return spoil

    assert get_verdict(list_verdicts(write_run(tmp_path / "early", spoil=set_memory((3, 2), (15, 2)))), "memory").ok is True
    assert get_verdict(list_verdicts(write_run(tmp_path / "late", spoil=set_memory((15, 2)))), "memory").ok is False
    saving = write_run(tmp_path / "saving", spoil=set_memory((15, 2), phase="save"))
    assert get_verdict(list_verdicts(saving), "memory").ok is True


def test_data_wait_is_weighted_by_steps(tmp_path: Path) -> None:
    """Only the first step waits long, for the first text. All other readings cover ten steps."""

    def wait_once(events: list[Event]) -> None:
        set_constant_times(events)
        set_at(1, dt_s=5.0, data_s=4.5)(events)

    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=wait_once)), "data wait")
    assert verdict.ok is True and verdict.value == pytest.approx((4.5 + 199 * 0.005) / (5.0 + 199 * 0.5))


def test_nan_loss_fails_the_gap_check(pair: Any) -> None:
    nsa, dense = pair(0.0)
    last = {**nsa.evaluations[-1], "bpb": None}
    verdict = check_matched_pair(replace(nsa, evaluations=[*nsa.evaluations[:-1], last]), dense)[1]
    assert verdict.ok is False


def test_resumed_run_without_steps_is_at_its_checkpoint(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        return [event for event in kill_and_resume(events) if event["attempt"] == 1 or event["kind"] == "resume"]

    history = History.read(write_run(tmp_path, spoil=spoil, status={"status": directory.PREEMPTED}))
    assert history.last_step == 100 and collect_facts(history).tokens == 100 * 2 * 2048


def test_last_validation_is_not_the_best(tmp_path: Path) -> None:
    facts = collect_facts(write_run(tmp_path, spoil=set_at(200, "eval", bpb=3.0)))
    assert facts.last_validation_bpb == 3.0 and facts.best_validation_bpb == pytest.approx(2.1 + 5.9 * math.exp(-150 / 40))


def test_attempt_with_fatal_error_has_failed(tmp_path: Path) -> None:
    assert [a.outcome for a in History.read(write_run(tmp_path, spoil=append(ERROR))).attempts()] == ["failed"]


def test_lost_status_is_inferred_from_events(tmp_path: Path) -> None:
    halt = {"kind": "halt", "attempt": 1, "step": 90, "status": "HALTED", "exit_code": 3, "reason": "the loss is nan"}
    run_dir = write_run(tmp_path, spoil=lambda events: [*(e for e in events if e["step"] <= 90), halt])
    (run_dir / directory.STATUS).unlink()
    assert get_verdict(list_verdicts(run_dir), "finished").text == "HALTED at step 90 of 200: the loss is nan"


def test_different_eval_texts_are_those_of_the_last_evaluation(pair: Any) -> None:
    nsa, dense = pair(0.0)
    edited = []
    for run, last in ((nsa, "one text"), (dense, "another text")):
        edited.append(edit_history(run, lambda events, last=last: set_eval_texts(events, last)))
    assert have_different_eval_texts(edited)


def set_eval_texts(events: list[Event], last: str) -> None:
    evaluations = [event for event in events if event["kind"] == "eval"]
    evaluations[0]["text"], evaluations[-1]["text"] = "one text", last


@pytest.mark.parametrize(("dt_s", "ok"), [(0.95, True), (1.2, False)])
def test_short_slowdown_passes(dt_s: float, ok: bool, tmp_path: Path) -> None:
    """The last 30 steps take 28.5 s or 36 s."""
    verdict = get_verdict(list_verdicts(write_run(tmp_path, spoil=set_at_each(180, 190, 200, dt_s=dt_s))), "throughput")
    assert (verdict.level == "passed") is ok and verdict.value == 0.15


def test_first_reading_of_an_attempt_is_excluded_from_throughput(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        resumed_events = kill_and_resume(events)
        next(event for event in resumed_events if event["attempt"] == 2 and event["kind"] == "step")["dt_s"] = 40.0
        return resumed_events

    assert "(slowest 8,192)" in get_verdict(list_verdicts(write_run(tmp_path, spoil=spoil)), "throughput").text


def test_selection_is_judged_at_the_current_stage_length(tmp_path: Path) -> None:
    stages = [
        {"steps": 100, "seq_len": length, "batch_size": 2048 // length, "lr": 1e-3, "warmup_steps": 20}
        for length in (1024, 2048)
    ]
    train = {"stages": stages, "log_every": 10, "stats_every": 20, "eval_every": 50, "save_every": 100}
    config = RunConfig.from_dict({**make_config().to_dict(), "train": train})
    run_dir = write_run(tmp_path, config, keep_events(lambda event: event["step"] <= 80), {"status": directory.PREEMPTED})
    verdict = get_verdict(list_verdicts(run_dir), "selection chooses")
    assert verdict.ok is None and verdict.text.startswith("not applicable: 1,024 tokens have 16 blocks")


def test_nan_reading_passes_no_check(tmp_path: Path) -> None:
    """Regression: the check passed with an entropy of NaN."""
    names = ("gate_entropy", "sel_reuse", "sel_distance", "sel_sink_share")
    spoil = set_at(200, **{name: [0.5, None, 0.5] for name in names})
    verdicts = list_verdicts(write_run(tmp_path, spoil=spoil))
    for name in ("gates moved", "gates alive", "selection chooses", "selection reaches", "attention sink"):
        assert get_verdict(verdicts, name).level != "passed", name
    assert get_verdict(verdicts, "attention sink").text == "unknown: a reading is NaN"
