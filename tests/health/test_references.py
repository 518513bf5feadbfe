"""What verdicts and results are worth: trials are called so, references come from records, divergence is explained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import Event, make_config, write_run

from nsa_lab.config import RunConfig
from nsa_lab.health import LIMITS, examine, read_verdict, write_verdict
from nsa_lab.health.divergence import diagnose_divergence
from nsa_lab.health.references import find_references
from nsa_lab.report.header import describe_loss, get_status_class, list_advice
from nsa_lab.runs import directory
from nsa_lab.runs.history import History, collect_facts


def write_history(folder: Path, name: str, **changes: Any) -> History:
    """A run of that name in the folder."""
    spoil, status = changes.pop("spoil", None), changes.pop("status", None)
    made = write_run(folder / "being made", make_config(**changes), spoil, status)
    run_dir = made.rename(folder / name)
    (folder / "being made").rmdir()
    return History.read(run_dir)


def set_params(params: int):
    def spoil(events: list[Event]) -> None:
        events[0]["params"] = params

    return spoil


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train__steps": 50}, "50 steps, and under 100 say little"),
        ({"spoil": set_params(900_000)}, "200 steps, and 819,200 tokens for 900,000 parameters"),
        ({"spoil": set_params(800_000)}, None),
    ],
)
def test_a_run_too_short_to_judge_has_another_banner(changes: dict, why: str | None, tmp_path: Path) -> None:
    history = write_history(tmp_path, "a-1", **changes)
    health = examine(history)
    assert health.ok and health.trial_reason == why
    assert get_status_class(health, history) == ("open" if why else "ok")
    assert health.headline.startswith("a trial, and no fault in it: " if why else "healthy: ")
    assert health.counts in health.headline and " hold" in health.counts


def test_the_counts_are_of_all_verdicts(tmp_path: Path) -> None:
    health = examine(write_history(tmp_path, "a-1", spoil=lambda events: [e for e in events if e["kind"] != "reach"]))
    held = sum(v.ok is True for v in health.verdicts)
    assert health.counts == f"{held} of {len(health.verdicts)} hold, 1 not judged" and held == len(health.verdicts) - 1


def test_references_are_the_twin_and_the_compressor_that_the_record_tells(tmp_path: Path) -> None:
    xz = {"kind": "reference", "attempt": 1, "step": 0, "name": "xz", "bytes": 2_000_000, "bpb": 2.3}
    nsa = write_history(tmp_path, "nsa-1", spoil=lambda events: [*events[:1], xz, *events[1:]])
    assert [str(found) for found in find_references(nsa)] == ["the compressor xz on the same text 2.300"]
    assert (
        describe_loss(collect_facts(nsa), find_references(nsa))
        == "2.140 bits per byte; the compressor xz on the same text 2.300"
    )
    write_history(tmp_path, "other-1", model__attention="dense", train__lr=2e-3)
    write_history(tmp_path, "shorter-1", model__attention="dense", train__steps=150)
    assert len(find_references(nsa)) == 1, "another rate, another length: no twins"
    write_history(tmp_path, "dense-1", model__attention="dense")
    twin, _ = find_references(nsa)
    assert twin.name == "dense twin" and twin.note == "dense-1: 123,456 parameters, one run of each"
    assert twin.bpb == collect_facts(tmp_path / "dense-1").last_validation_bpb


def test_what_is_not_finished_is_no_reference(tmp_path: Path) -> None:
    nsa = write_history(tmp_path, "nsa-1")
    write_history(tmp_path, "dense-1", model__attention="dense", status={"status": directory.HALTED})
    assert find_references(nsa) == []


def test_without_a_twin_the_run_before_is_the_reference(tmp_path: Path) -> None:
    def later(events: list[Event]) -> None:
        events[0]["t"] = 2000.0

    before = write_history(tmp_path, "fake-1")
    after = write_history(tmp_path, "fake-2", spoil=later)
    assert [found.note for found in find_references(after)] == ["fake-1"] and find_references(before) == []
    assert find_references(after)[0].bpb == collect_facts(before).last_validation_bpb


def diverge(events: list[Event]) -> list[Event]:
    """Rises from step 50 on, and is no number at step 71."""
    for event in events:
        if event["kind"] == "step" and event["step"] > 50:
            event |= {"bpb": 10.0 * 3 ** (event["step"] // 10 - 5), "grad_norm": 0.8 * 9 ** (event["step"] // 10 - 5)}
    halt = {"kind": "guard", "attempt": 1, "step": 71, "rule": "non_finite", "action": "halt", "text": "the loss is nan"}
    return [event for event in events if event["step"] <= 70 and event["kind"] != "end"] + [halt]


HALTED = {"status": directory.HALTED, "reason": "step 71: the loss is nan"}


def test_of_a_diverged_run_the_suspect_comes_first_and_resuming_last(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", train__lr=0.5, spoil=diverge, status=HALTED)
    found = diagnose_divergence(history, LIMITS)
    assert found is not None
    assert "30.000 at step 60, 90.000 at step 70" in found.observations[0]
    assert found.observations[1].endswith("its peak, train.lr, is 0.5.")
    assert found.observations[2].startswith("The gradient's norm grew from 0.8 at step 1 to 64.8 at step 70")
    assert found.action.startswith("Suspect: the learning rate.") and found.action.endswith(
        f"nsa-lab run {tmp_path.name}/fake-1/config.yaml -p train.lr=0.001"
    ), "of no preset, so the run's own file repeats its settings"
    told = list_advice(history)
    assert [("resume" in line) for line in told] == [False] * (len(told) - 1) + [True]
    assert "The weights are those of step 70, the last good one." in told[-1]


def test_a_run_that_broke_without_a_warning_is_not_laid_on_the_rate(tmp_path: Path) -> None:
    def broke(events: list[Event]) -> list[Event]:
        return [event for event in events if event["step"] <= 70 and event["kind"] != "end"] + diverge([])

    found = diagnose_divergence(write_history(tmp_path, "fake-1", spoil=broke, status=HALTED), LIMITS)
    assert found is not None and "not the first suspect" in found.action and len(found.observations) == 2
    rash = diagnose_divergence(write_history(tmp_path, "fake-2", train__lr=100.0, spoil=broke, status=HALTED), LIMITS)
    assert rash is not None and rash.action.startswith("Suspect: the learning rate.")
    assert diagnose_divergence(write_history(tmp_path, "fake-3"), LIMITS) is None


def test_a_verdict_that_the_run_has_left_behind_is_none(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1")
    assert read_verdict(history) is None
    told = json.loads(write_verdict(history).read_text(encoding="utf-8"))
    assert read_verdict(history) == told
    assert read_verdict(history.truncate_at(100)) is None
    assert read_verdict(replace(history, status={**history.status, "status": directory.PREEMPTED})) is None


def test_a_value_without_a_number_is_null_in_a_verdict(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> None:
        next(event for event in events if event["kind"] == "step" and event["step"] == 100)["lr"] = None

    told = write_verdict(write_history(tmp_path, "fake-1", spoil=spoil)).read_text(encoding="utf-8")
    rate = next(verdict for verdict in json.loads(told)["verdicts"] if verdict["name"] == "learning rate")
    assert rate["ok"] is False and rate["value"] is None and "Infinity" not in told


def test_a_run_that_ended_early_is_a_trial_by_the_steps_it_did(tmp_path: Path) -> None:
    stopped = write_history(tmp_path, "a-1", spoil=lambda events: [e for e in events if e["step"] <= 50])
    assert examine(stopped).trial_reason == "50 steps, and under 100 say little"


def end_with_losses(*losses: float, grad_norm: float = 0.8, rule: str = "spike") -> Callable[[list[Event]], list[Event]]:
    """The last losses of a run that a guard halted, and the last norm of its gradient."""

    def spoil(events: list[Event]) -> list[Event]:
        kept = [event for event in events if event["step"] <= 70 and event["kind"] != "end"]
        steps = [event for event in kept if event["kind"] == "step"]
        for event, loss in zip(steps[-len(losses) :], losses, strict=True):
            event["bpb"] = loss
        steps[-1]["grad_norm"] = grad_norm
        return [*kept, {"kind": "guard", "attempt": 1, "step": 70, "rule": rule, "action": "halt", "text": "halted"}]

    return spoil


def test_losses_rise_above_their_lowest_not_above_their_first(tmp_path: Path) -> None:
    found = diagnose_divergence(write_history(tmp_path, "fake-1", spoil=end_with_losses(2.0, 3.1), status=HALTED), LIMITS)
    assert found is not None and found.action.startswith("Suspect: the learning rate.")
    assert (
        diagnose_divergence(write_history(tmp_path, "fake-2", spoil=end_with_losses(2.5, 3.6), status=HALTED), LIMITS)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "grad_norm"), [({}, 9.0), ({"train__warmup_steps": 100}, 0.8)], ids=["a gradient that grew", "warm-up"]
)
def test_a_rate_is_suspect_where_the_gradient_grew_and_in_warm_up(settings: dict, grad_norm: float, tmp_path: Path) -> None:
    spoil = end_with_losses(2.0, grad_norm=grad_norm, rule="non_finite")
    found = diagnose_divergence(write_history(tmp_path, "fake-1", spoil=spoil, status=HALTED, **settings), LIMITS)
    assert found is not None and found.action.startswith("Suspect: the learning rate.")


@pytest.mark.parametrize("state", [directory.PREEMPTED, directory.RUNNING, directory.DONE])
def test_a_run_that_was_not_halted_has_no_suspect(state: str, tmp_path: Path) -> None:
    assert (
        diagnose_divergence(
            write_history(tmp_path, "fake-1", train__lr=0.5, spoil=diverge, status={"status": state}), LIMITS
        )
        is None
    )


def test_the_rate_that_is_tried_next_is_not_below_its_own_least(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", train__lr=0.5, train__min_lr=0.1, spoil=diverge, status=HALTED)
    found = diagnose_divergence(history, LIMITS)
    assert found is not None and "train.lr=0.001" in found.action and "train.min_lr=0.001" in found.action


def test_of_several_stages_the_highest_rate_is_the_peak(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", spoil=end_with_losses(2.0, rule="non_finite"), status=HALTED)
    stages = [{"steps": 100, "seq_len": 2048, "batch_size": 2, "lr": lr} for lr in (0.5, 1e-3)]
    config = RunConfig.from_dict({**history.config.to_dict(), "train": {"stages": stages}})
    found = diagnose_divergence(replace(history, config=config), LIMITS)
    assert found is not None and found.observations[1].endswith("its peak, train.lr, is 0.5.")
    assert found.action.startswith("Suspect: the learning rate.")


def test_a_reference_read_the_same_text_and_is_the_newest(tmp_path: Path) -> None:
    def of_another_text(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    nsa = write_history(tmp_path, "nsa-20260101T000000Z-aaaa")
    for day in (2, 3):
        write_history(tmp_path, f"dense-2026010{day}T000000Z-aaaa", model__attention="dense")
    write_history(tmp_path, "dense-20260104T000000Z-aaaa", model__attention="dense", spoil=of_another_text)
    assert [found.note.split(":")[0] for found in find_references(nsa)] == ["dense-20260103T000000Z-aaaa"]


def test_a_run_before_that_read_another_text_is_no_reference(tmp_path: Path) -> None:
    def later_of_another_text(events: list[Event]) -> None:
        events[0]["t"] = 2000.0
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    write_history(tmp_path, "fake-1")
    assert find_references(write_history(tmp_path, "fake-2", spoil=later_of_another_text)) == []
