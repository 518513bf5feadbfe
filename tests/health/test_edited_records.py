"""The record of a healthy production run with one simulated fault fails the right check.

Each edit must fail the named check, and may fail only the other checks listed with it. The record is that of a run in
outputs/ with fewer readings, so that a case takes milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import edit_history
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.health import Health, examine
from nsa_lab.runs import resolve
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_facts

Event = dict[str, Any]
Edit = Callable[[list[Event]], list[Event] | None]

EVERY = 500  # steps between the readings of the thinned record
STEPS = 50_000
HEARTBEAT_S = 10.0


def load_thinned() -> History:
    """Return an NSA run of 50,000 steps in two attempts, reduced to the readings with statistics."""
    for run in resolve.list_run_dirs(resolve.get_root() / "outputs"):
        config = RunConfig.from_yaml(run / "config.yaml")
        if (config.model.attention, config.train.steps, config.train.stats_every) == ("nsa", STEPS, EVERY):
            history = History.read(run)
            config = config.model_copy(update={"train": config.train.model_copy(update={"log_every": EVERY})})
            events = [e for e in history.events if e["kind"] != "step" or e["step"] == 1 or e["step"] % EVERY == 0]
            # Pretend that both attempts used this configuration.
            edited = [e | ({"config_hash": config.hash()} if "config_hash" in e else {}) for e in events]
            environment = history.environment | {"config_hash": config.hash()}
            return edit_history(replace(history, config=config, environment=environment), lambda _, edited=edited: edited)
    raise AssertionError(f"outputs/ holds no NSA run of {STEPS} steps with statistics every {EVERY}")


@pytest.fixture(scope="module")
def healthy() -> History:
    return load_thinned()


def examine_edited(history: History, edit: Edit) -> Health:
    """Judge an edited record, whose status was written at its end."""
    edited = edit_history(history, edit)
    delay_s = float(np.nanmax(edited.events.numbers("t")) - np.nanmax(history.events.numbers("t")))
    return examine(replace(edited, status=history.status | {"updated": history.status["updated"] + delay_s}))


def select_events(events: list[Event], kind: str, first: float = 0.0, last: float = 1.0) -> Iterator[Event]:
    """Return the events of a kind between two fractions of the run."""
    return (e for e in events if e["kind"] == kind and first * STEPS < e["step"] <= last * STEPS)


def select_readings(events: list[Event], first: float = 0.0, last: float = 1.0) -> Iterator[Event]:
    return (event for event in select_events(events, "step", first, last) if "gate_entropy" in event)


def slow_down(factor: float | Callable[[float], float], first: float = 0.5, what: str = "both") -> Edit:
    """Return an edit of one measure of the speed, or of both; then all later events are later, with more heartbeats."""

    def edit(events: list[Event]) -> list[Event]:
        edited, beat, delay_s, last_step = list[Event](), {}, 0.0, 0
        for event in events:
            if event["kind"] == "step":
                if event["step"] > first * STEPS:
                    by = factor(event["step"] / STEPS) if callable(factor) else factor
                    if what != "clock":
                        event["tokens_per_s"] *= by
                    if what == "both":
                        delay_s += (event["step"] - last_step) * event["dt_s"] * (1 / by - 1)
                    if what != "speed":
                        event["dt_s"] /= by
                last_step = event["step"]
            event["t"] += delay_s
            beat = event if event["kind"] == "heartbeat" else beat
            while beat and delay_s and edited[-1]["t"] + HEARTBEAT_S < event["t"]:
                edited.append(beat | {"t": edited[-1]["t"] + HEARTBEAT_S})
            edited.append(event)
        return edited

    return edit


def set_values(first: float = 0.0, last: float = 1.0, **values: Any) -> Edit:
    """Return an edit that sets almost these values in every `step` event that has the field."""

    def edit(events: list[Event]) -> None:
        for event in select_events(events, "step", first, last):
            for name, value in values.items():
                if name in event:
                    varied = value * (1 + 1e-12 * event["step"])  # no two readings are bitwise equal
                    event[name] = [varied] * len(event[name]) if isinstance(event[name], list) else varied

    return edit


def freeze_gates(first: float, jitter: float = 0.0, names: tuple[str, ...] = ("gate_share_", "gate_entropy")) -> Edit:
    def edit(events: list[Event]) -> None:
        rng = random.Random(0)
        first_reading, *later = select_readings(events, first)
        for event in later:
            for name in [name for name in event if name.startswith(names)]:
                event[name] = [value + rng.uniform(-jitter, jitter) for value in first_reading[name]]

    return edit


def shrink_gradients(factor: float) -> Edit:
    """Return an edit by which the gradients fall evenly to 1 / factor over the run."""

    def edit(events: list[Event]) -> None:
        for event in select_events(events, "step"):
            scale = factor ** (-event["step"] / STEPS)
            event["grad_norm"] *= scale
            if "grad_norm_layers" in event:
                event["grad_norm_layers"] = [value * scale for value in event["grad_norm_layers"]]

    return edit


def collapse_gates(first: float, last: float, layer: int | None = None) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in select_readings(events, first, last):
            event["gate_entropy"] = [
                0.05 + 1e-3 * index + 1e-9 * event["step"] if layer in (None, index) else value
                for index, value in enumerate(event["gate_entropy"])
            ]

    return edit


def disable_branch(branch: str, layers: Callable[[int], bool], share: float = 0.0) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in select_readings(events):
            shares = event[f"gate_share_{branch}"]
            event[f"gate_share_{branch}"] = [share if layers(index) else value for index, value in enumerate(shares)]

    return edit


def drop(kind: str, first: float = -1.0, last: float = 1.0) -> Edit:
    return lambda events: [e for e in events if e["kind"] != kind or not first * STEPS < e["step"] <= last * STEPS]


def drop_fields(*prefixes: str, first: float = 0.0) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in select_events(events, "step", first):
            for name in [name for name in event if name.startswith(prefixes)]:
                del event[name]

    return edit


def set_null(kind: str, *names: str, where: Callable[[Event], bool] = lambda event: True, value: Any = None) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in filter(where, select_events(events, kind, -1.0)):
            event.update(dict.fromkeys(names, value))

    return edit


def flatten(*names: str, first: float = -1.0) -> Edit:
    def edit(events: list[Event]) -> None:
        first_event, *later = select_events(events, "step", first)
        for event in later:
            event.update({name: first_event[name] for name in names})

    return edit


def flatten_with_noise(events: list[Event]) -> None:
    rng = random.Random(0)
    for event in select_events(events, "step"):
        event["bpb"] = 1.0 + rng.gauss(0, 0.01)
        event["loss"] = event["bpb"] * math.log(2)


def triple_loss(events: list[Event]) -> None:
    for event in select_events(events, "step", 0.9):
        event["loss"] *= 3
        event["bpb"] *= 3


def shift_clock(seconds: float) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in events[len(events) // 2 :]:
            event["t"] += seconds

    return edit


def is_at_half(event: Event) -> bool:
    return event["step"] == STEPS // 2


# Name, edit, possible. The speed affects no model, so these are warnings. Times that contradict each other are impossible.
SLOWDOWNS: list[tuple[str, Edit, bool]] = [
    ("half the speed from half on", slow_down(0.5), True),
    ("a third of the speed from half on", slow_down(0.3), True),
    ("a tenth of the speed from half on", slow_down(0.1), True),
    ("a tenth of the speed from 15 % on", slow_down(0.1, 0.15), True),
    ("half the speed in tokens_per_s only", slow_down(0.5, what="speed"), False),
    ("half the speed in dt_s only", slow_down(0.5, what="clock"), False),
    ("gradual slowdown to 5 %", slow_down(lambda at: 1 - 0.95 * at, 0.0), True),
]
IMPOSSIBLE = {"consistent numbers"}
# Name, edit, check that must fail, part of its text, other checks that may fail.
EDITS: list[tuple[str, Edit, str, str, set[str]]] = [
    ("no gradient from half on", set_values(0.5, grad_norm=0.0), "gradients", "the first 25,500", IMPOSSIBLE),
    ("no gradient in any layer", set_values(grad_norm_layers=0.0), "gradients", "layer 0 at step 500", set()),
    ("a gradient norm of a million", set_values(grad_norm=1e6), "gradients", "1e+06", {"repeated values"}),
    ("a gradient norm of a million, once", set_values(0.49, 0.5, grad_norm=1e6), "gradients", "step 25,000", set()),
    (
        "all branches zero",
        set_values(norm_cmp=0.0, norm_sel=0.0, norm_win=0.0),
        "branch outputs",
        "the compressed branch is 0 in every layer",
        set(),
    ),
    ("one branch zero from 70 % on", set_values(0.7, norm_sel=0.0), "branch outputs", "first at step 35,500", set()),
    ("gates frozen from 10 % on", freeze_gates(0.1), "gates moved", "branch shares bitwise equal", set()),
    ("gates frozen from 10 % on but for rounding", freeze_gates(0.1, 1e-4), "gates moved", "no longer changed", set()),
    ("a gate entropy frozen from half on", freeze_gates(0.5, names=("gate_entropy",)), "gates moved", "entropy", set()),
    (
        "a gate entropy frozen from 40 % on but for rounding",
        freeze_gates(0.4, 1e-4, names=("gate_entropy",)),
        "gates moved",
        "gate entropy no longer changed",
        set(),
    ),
    (
        "gate shares frozen from half on",
        freeze_gates(0.5, names=("gate_share_",)),
        "gates moved",
        "branch shares bitwise equal",
        set(),
    ),
    ("a gradient that falls by a factor of 100", shrink_gradients(100), "gradients", "varies by a factor", set()),
    (
        "gate weights constant from 10 % on",
        set_values(0.1, gate_update=0.0),
        "gates moved",
        "weights unchanged",
        {"layers differ"},
    ),
    (
        "gates collapsed from 10 % to 90 %",
        collapse_gates(0.1, 0.9),
        "gates alive",
        "80% of the readings",
        set(),
    ),
    ("one layer collapsed from 10 % to 90 %", collapse_gates(0.1, 0.9, layer=3), "gates alive", "in layer 3", set()),
    (
        "no selection in all layers but one",
        disable_branch("sel", lambda n: n != 4),
        "gates alive",
        "the selected branch",
        IMPOSSIBLE,
    ),
    ("no selection in one layer", disable_branch("sel", lambda n: n == 4, 0.01), "gates alive", "in layer 4", IMPOSSIBLE),
    (
        "gates at 0 or 1 from 10 % to 90 %",
        set_values(0.1, 0.9, gate_saturation=0.9),
        "gates alive",
        "90% of the gate",
        set(),
    ),
    ("no evaluations", drop("eval"), "evaluations", "51 of 51", set()),
    ("no evaluations in the second half", drop("eval", 0.5), "evaluations", "25 of 51", set()),
    ("one evaluation missing", drop("eval", 0.49, 0.5), "evaluations", "the first at step 25,000", set()),
    (
        "selection statistics frozen from 10 % on",
        freeze_gates(0.1, names=("sel_",)),
        "statistics",
        "in a row",
        {"repeated values"},
    ),
    (
        "branch norms frozen from 90 % on",
        freeze_gates(0.9, names=("norm_",)),
        "statistics",
        "branch norms",
        {"repeated values"},
    ),
    ("no statistics after 30 %", drop_fields("gate_", "sel_", "norm_", first=0.3), "statistics", "70 of 100", set()),
    ("no gate statistics after 30 %", drop_fields("gate_", first=0.3), "statistics", "70 of 100", set()),
    ("no statistics at all", drop_fields("gate_", "sel_", "norm_", "grad_norm_"), "statistics", "100 of 100", set()),
    (
        "a flat training loss",
        flatten("loss", "bpb"),
        "training loss",
        "bitwise equal",
        {"no leak", "repeated values"},
    ),
    (
        "a flat training loss from 90 % on",
        flatten("loss", "bpb", first=0.9),
        "training loss",
        "bitwise equal",
        {"repeated values"},
    ),
    (
        "a flat training loss, with noise",
        flatten_with_noise,
        "training loss",
        "at least 25.0% below",
        set(),
    ),
    ("a training loss that triples at the end", triple_loss, "training loss", "up from", {"loss course", "no leak"}),
    ("no tokens per second", set_values(tokens_per_s=0.0), "finite numbers", "tokens_per_s is 0 at step 1,", IMPOSSIBLE),
    ("steps that take no time", set_values(dt_s=0.0), "finite numbers", "dt_s is 0 at step 1,", IMPOSSIBLE),
    (
        "a gradient norm below 0",
        set_values(grad_norm=-1.0),
        "finite numbers",
        "grad_norm is -1 at step 1,",
        {"consistent numbers", "gradients", "repeated values"},
    ),
    (
        "a share above 1",
        set_values(0.5, gate_share_win=1.5),
        "finite numbers",
        "gate_share_win is 1.5 at step 25,500",
        IMPOSSIBLE,
    ),
    ("a clock that goes back a day", shift_clock(-86400.0), "clock", "goes back by 86,", set()),
    ("no heartbeats", drop("heartbeat"), "heartbeats", "0 in the", set()),
    ("no heartbeats in the second half", drop("heartbeat", 0.5), "heartbeats", "of attempt 2", IMPOSSIBLE),
    ("no preflight", drop("preflight"), "preflight", "no check was recorded before the first step", set()),
    ("null losses, none of them listed", set_null("step", "loss", "bpb"), "finite numbers", "loss is not finite", set()),
    ("one null loss", set_null("step", "loss", where=is_at_half), "finite numbers", "at step 25,000 (1 such", set()),
    ("a NaN loss", set_null("step", "loss", where=is_at_half, value=math.nan), "finite numbers", "at step 25,000", set()),
    ("no loss at all", drop_fields("loss", "bpb"), "finite numbers", "loss is not finite at step 1 ", set()),
    ("all evaluations null", set_null("eval", "loss", "bpb"), "finite numbers", "loss is not finite at step 0", set()),
    (
        "a null learning rate",
        set_null("step", "lr", where=is_at_half),
        "finite numbers",
        "lr is not finite at step 25,000",
        {"learning rate"},
    ),
    (
        "events of two runs",
        lambda events: [*events, {**events[-1], "run": "another"}],
        "one run",
        "several runs",
        {"status agrees"},
    ),
]


def test_unedited_record_is_healthy(healthy: History) -> None:
    health = examine_edited(healthy, lambda events: None)
    # This run is older than these fields of the record.
    assert [(verdict.name, verdict.level) for verdict in health.verdicts if verdict.level != "passed"] == [
        ("evaluated text", "unknown"),
        ("learned structure", "unknown"),
        ("selection finds", "unknown"),
    ]
    assert len(healthy.steps) == STEPS // EVERY + 1


@pytest.mark.slow
@looped
@pytest.mark.parametrize(("edit", "name", "text", "others"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_edited_record_fails_the_right_check(healthy: History, edit: Edit, name: str, text: str, others: set[str]) -> None:
    health = examine_edited(healthy, edit)
    failed = {verdict.name: verdict for verdict in health.failed}
    assert name in failed, health.headline
    assert text in failed[name].text
    assert failed.keys() <= {name} | others
    assert health.headline.startswith("NOT healthy: ")


@pytest.mark.slow
def test_slowdown_is_a_warning(healthy: History) -> None:
    for name, edit, is_possible in SLOWDOWNS:
        health = examine_edited(healthy, edit)
        assert [verdict.name for verdict in health.warnings] == ["throughput"], name
        assert (health.ok, {verdict.name for verdict in health.failed} <= IMPOSSIBLE) == (is_possible, True), name


def test_status_of_another_run_fails(healthy: History) -> None:
    health = examine(replace(healthy, status={**healthy.status, "run": "another-20260101T000000Z-0000"}))
    assert [verdict.name for verdict in health.failed] == ["one run"]
    assert "the status belongs to another-20260101T000000Z-0000" in health.headline


def test_record_without_start_is_unknown_and_one_without_the_end_of_its_status_fails(healthy: History) -> None:
    cases = (("start", "one run", None, "attempt 1 is missing"), ("end", "finished", False, "the end is not recorded"))
    for kind, name, ok, text in cases:
        verdicts = {verdict.name: verdict for verdict in examine_edited(healthy, drop(kind)).verdicts}
        assert verdicts[name].ok is ok and text in verdicts[name].text


def test_null_learning_rate_fails(healthy: History) -> None:
    health = examine_edited(healthy, set_null("step", "lr", where=is_at_half))
    verdict = next(verdict for verdict in health.verdicts if verdict.name == "learning rate")
    assert verdict.ok is False and verdict.text.startswith("nan at step 25,000, configured: 0.000")


def test_missing_events_never_pass(healthy: History) -> None:
    """If all events of a kind are missing, no check that needs them passes."""
    needs = {
        "eval": {"evaluations", "loss fell", "loss kept", "generalises"},
        "heartbeat": {"heartbeats", "memory"},
        "preflight": {"preflight"},
        "checkpoint": {"checkpoints"},
        "step": {
            *("training loss", "learning rate", "gradients", "statistics", "throughput", "data wait", "every step once"),
            *("gates moved", "gates alive", "branch outputs"),
        },
    }
    for kind, checks in needs.items():
        health = examine_edited(healthy, drop(kind))
        assert not {verdict.name for verdict in health.verdicts if verdict.ok} & checks, kind


def test_nan_in_files_is_detected(healthy: History, tmp_path: Path) -> None:
    """Python writes and reads NaN in JSON, although JSON does not allow it."""
    from fake_run import write_run

    def edit(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["bpb"] = event["loss"] = math.nan

    run_dir = write_run(tmp_path, spoil=edit)
    health = examine(run_dir)
    assert [verdict.name for verdict in health.failed] == ["finite numbers"]
    assert "validation, bits per byte" not in dict(format_facts(History.read(run_dir)))
