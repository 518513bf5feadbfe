"""Trial runs, reference values from records, diagnosis of divergence, and verdict.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import Event, make_config, write_run

from nsa_lab.config import RunConfig
from nsa_lab.health import LIMITS, examine
from nsa_lab.health.divergence import diagnose_divergence
from nsa_lab.health.references import find_references
from nsa_lab.health.verdict_file import read_verdict, write_verdict
from nsa_lab.report.header import describe_loss, get_status_class, list_advice
from nsa_lab.runs import directory
from nsa_lab.runs.history import History, collect_facts


def write_history(folder: Path, name: str, **changes: Any) -> History:
    """Write a run with this directory name in the folder."""
    spoil, status = changes.pop("spoil", None), changes.pop("status", None)
    temporary = write_run(folder / "temporary", make_config(**changes), spoil, status)
    run_dir = temporary.rename(folder / name)
    (folder / "temporary").rmdir()
    return History.read(run_dir)


def set_params(params: int):
    def spoil(events: list[Event]) -> None:
        events[0] |= {"params": params, "flops_per_token": {"nsa": 6.1 * params, "dense": 6.2 * params}}

    return spoil


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train__steps": 50}, "50 steps, fewer than 100"),
        ({"spoil": set_params(900_000)}, "200 steps with 819,200 tokens for 900,000 parameters"),
        ({"spoil": set_params(800_000)}, None),
    ],
)
def test_trial_run_has_its_own_headline(changes: dict, reason: str | None, tmp_path: Path) -> None:
    history = write_history(tmp_path, "a-1", **changes)
    health = examine(history)
    assert health.ok and health.trial_reason == reason
    assert get_status_class(health, history) == ("open" if reason else "ok")
    assert health.headline.startswith("trial run, no failures: " if reason else "healthy: ")
    assert health.counts in health.headline and " passed" in health.counts


def test_counts_cover_all_checks(tmp_path: Path) -> None:
    health = examine(write_history(tmp_path, "a-1", spoil=lambda events: [e for e in events if e["kind"] != "reach"]))
    n_passed = sum(v.ok is True for v in health.verdicts)
    assert (
        health.counts == f"{n_passed} of {len(health.verdicts)} checks passed, 1 unknown"
        and n_passed == len(health.verdicts) - 1
    )


def test_references_are_matched_baseline_and_compressor(tmp_path: Path) -> None:
    xz = {"kind": "reference", "attempt": 1, "step": 0, "name": "xz", "bytes": 2_000_000, "bpb": 2.3}
    nsa = write_history(tmp_path, "nsa-1", spoil=lambda events: [*events[:1], xz, *events[1:]])
    assert [str(reference) for reference in find_references(nsa)] == ["compressor xz on the same text 2.300"]
    assert (
        describe_loss(collect_facts(nsa), find_references(nsa))
        == "2.140 bits per byte; compressor xz on the same text 2.300"
    )
    write_history(tmp_path, "other-1", model__attention="dense", train__lr=2e-3)
    write_history(tmp_path, "shorter-1", model__attention="dense", train__steps=150)
    assert len(find_references(nsa)) == 1, "another learning rate or length: no matched pair"
    write_history(tmp_path, "dense-1", model__attention="dense")
    baseline, _ = find_references(nsa)
    assert baseline.name == "dense baseline" and baseline.note == "dense-1: 123,456 parameters, one run of each"
    assert baseline.bpb == collect_facts(tmp_path / "dense-1").last_validation_bpb


def test_unfinished_run_is_not_a_reference(tmp_path: Path) -> None:
    nsa = write_history(tmp_path, "nsa-1")
    write_history(tmp_path, "dense-1", model__attention="dense", status={"status": directory.HALTED})
    assert find_references(nsa) == []


def test_previous_run_is_the_reference_without_a_baseline(tmp_path: Path) -> None:
    def later(events: list[Event]) -> None:
        events[0]["t"] = 2000.0

    before = write_history(tmp_path, "fake-1")
    after = write_history(tmp_path, "fake-2", spoil=later)
    assert [reference.note for reference in find_references(after)] == ["fake-1"] and find_references(before) == []
    assert find_references(after)[0].bpb == collect_facts(before).last_validation_bpb


def diverge(events: list[Event]) -> list[Event]:
    """Make the loss rise from step 50 on and become NaN at step 71."""
    for event in events:
        if event["kind"] == "step" and event["step"] > 50:
            event |= {"bpb": 10.0 * 3 ** (event["step"] // 10 - 5), "grad_norm": 0.8 * 9 ** (event["step"] // 10 - 5)}
    halt = {"kind": "guard", "attempt": 1, "step": 71, "rule": "non_finite", "action": "halt", "text": "the loss is nan"}
    return [event for event in events if event["step"] <= 70 and event["kind"] != "end"] + [halt]


HALTED = {"status": directory.HALTED, "reason": "step 71: the loss is nan"}


def test_advice_for_a_diverged_run_ends_with_resuming(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", train__lr=0.5, spoil=diverge, status=HALTED)
    divergence = diagnose_divergence(history, LIMITS)
    assert divergence is not None
    assert "30.000 at step 60, 90.000 at step 70" in divergence.observations[0]
    assert divergence.observations[1].endswith("its peak, train.lr, is 0.5.")
    assert divergence.observations[2].startswith("The gradient norm grew from 0.799 at step 20 to 64.8 at step 70")
    assert divergence.action.startswith("Likely cause: the learning rate.") and divergence.action.endswith(
        f"nsa-lab run {tmp_path.name}/fake-1/config.yaml -p train.lr=0.001"
    ), "there is no preset of this name, so the run's own file is used"
    advice = list_advice(history)
    assert [("resume" in line.lower()) for line in advice] == [False] * (len(advice) - 1) + [True]
    assert "The weights are those of step 70, the last good step." in advice[-1]


def test_sudden_nan_is_not_attributed_to_the_learning_rate(tmp_path: Path) -> None:
    def break_without_warning(events: list[Event]) -> list[Event]:
        return [event for event in events if event["step"] <= 70 and event["kind"] != "end"] + diverge([])

    divergence = diagnose_divergence(write_history(tmp_path, "fake-1", spoil=break_without_warning, status=HALTED), LIMITS)
    assert divergence is not None and "an unlikely cause" in divergence.action and len(divergence.observations) == 2
    risky = diagnose_divergence(
        write_history(tmp_path, "fake-2", train__lr=100.0, spoil=break_without_warning, status=HALTED), LIMITS
    )
    assert risky is not None and risky.action.startswith("Likely cause: the learning rate.")
    assert diagnose_divergence(write_history(tmp_path, "fake-3"), LIMITS) is None


def edit_bytes(path: Path, old: bytes, new: bytes) -> None:
    """Replace text in a file, and keep its times as a copy of it would."""
    times = path.stat()
    assert old in path.read_bytes() and len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_verdict_of_another_record_is_none(tmp_path: Path) -> None:
    """A file of the same size and time counts as another record."""
    for name, old, new in (
        (directory.EVENTS, b'"device": "cpu"', b'"device": "gpu"'),
        (directory.STATUS, b'"DONE"', b'"DONA"'),
        (directory.CONFIG, b"steps: 200", b"steps: 300"),
    ):
        history = write_history(tmp_path, f"fake-{name}")
        assert read_verdict(history) is None
        record = json.loads(write_verdict(history).read_text(encoding="utf-8"))
        assert read_verdict(history) == record and read_verdict(history.run_dir) == record
        edit_bytes(history.run_dir / name, old, new)
        assert read_verdict(history) is None
        edit_bytes(history.run_dir / name, new, old)
        assert read_verdict(history) == record


def test_verdict_has_level_purpose_summary_and_numbers(tmp_path: Path) -> None:
    config = make_config().model_copy(update={"description": "A run of the tests."})
    run_dir = write_run(tmp_path, config)
    record = json.loads(write_verdict(run_dir).read_text(encoding="utf-8"))
    assert (record["level"], record["ok"], record["description"]) == ("passed", True, "A run of the tests.")
    assert record["summary"].startswith("This NSA model") and "finished its 200 steps" in record["summary"]
    assert record["facts"]["step"] == 200 and record["facts"]["validation_bpb"] == pytest.approx(2.14, abs=0.01)
    assert {"name", "ok", "value", "limit", "text", "level"} == set(record["verdicts"][0])
    undescribed = json.loads(write_verdict(write_run(tmp_path / "other", make_config())).read_text(encoding="utf-8"))
    assert undescribed["description"] == "Run of the configuration fake, which has no description."


NUMBERS = {"step": 1, "steps": 1, "validation_bpb": None, "tokens_per_s": []}


def test_damaged_verdict_is_ignored(tmp_path: Path) -> None:
    names = ("ok", "headline", "verdicts", "facts", "level", "summary")
    changes: list[dict[str, Any]] = [{name: value} for name in names for value in (None, 7, [1])]
    wrong_numbers = ({"step": 10**400}, {"step": True}, {"validation_bpb": "low"}, {"tokens_per_s": ["fast"]})
    changes += [{"facts": NUMBERS | change} for change in wrong_numbers] + [{"verdicts": [{"name": 1}]}]
    run_dir = write_run(tmp_path)
    path = write_verdict(run_dir)
    record = json.loads(path.read_text(encoding="utf-8"))
    for change in changes:
        path.write_text(json.dumps({**record, **change}))
        assert read_verdict(run_dir) is None, change
    path.write_text(json.dumps({**record, "facts": NUMBERS}))
    assert read_verdict(run_dir) is not None


def test_nonfinite_values_are_null_in_verdict_json(tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> None:
        next(event for event in events if event["kind"] == "step" and event["step"] == 100)["lr"] = None

    text = write_verdict(write_history(tmp_path, "fake-1", spoil=spoil)).read_text(encoding="utf-8")
    rate = next(verdict for verdict in json.loads(text)["verdicts"] if verdict["name"] == "learning rate")
    assert rate["ok"] is False and rate["value"] is None and "Infinity" not in text


def test_stopped_run_is_a_trial_by_its_completed_steps(tmp_path: Path) -> None:
    stopped = write_history(tmp_path, "a-1", spoil=lambda events: [e for e in events if e["step"] <= 50])
    assert examine(stopped).trial_reason == "50 steps, fewer than 100"


def end_with_losses(*losses: float, grad_norm: float = 0.8, rule: str = "spike") -> Callable[[list[Event]], list[Event]]:
    """Return an edit that sets the last losses and the last gradient norm of a run halted by a guard."""

    def spoil(events: list[Event]) -> list[Event]:
        remaining = [event for event in events if event["step"] <= 70 and event["kind"] != "end"]
        steps = [event for event in remaining if event["kind"] == "step"]
        for event, loss in zip(steps[-len(losses) :], losses, strict=True):
            event["bpb"] = loss
        steps[-1]["grad_norm"] = grad_norm
        return [*remaining, {"kind": "guard", "attempt": 1, "step": 70, "rule": rule, "action": "halt", "text": "halted"}]

    return spoil


def test_divergence_is_relative_to_the_lowest_loss(tmp_path: Path) -> None:
    divergence = diagnose_divergence(
        write_history(tmp_path, "fake-1", spoil=end_with_losses(2.0, 3.1), status=HALTED), LIMITS
    )
    assert divergence is not None and divergence.action.startswith("Likely cause: the learning rate.")
    assert (
        diagnose_divergence(write_history(tmp_path, "fake-2", spoil=end_with_losses(2.5, 3.6), status=HALTED), LIMITS)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "grad_norm"), [({}, 9.0), ({"train__warmup_steps": 100}, 0.8)], ids=["growing gradient", "warm-up"]
)
def test_learning_rate_is_suspected_after_gradient_growth_and_in_warm_up(
    settings: dict, grad_norm: float, tmp_path: Path
) -> None:
    spoil = end_with_losses(2.0, grad_norm=grad_norm, rule="non_finite")
    divergence = diagnose_divergence(write_history(tmp_path, "fake-1", spoil=spoil, status=HALTED, **settings), LIMITS)
    assert divergence is not None and divergence.action.startswith("Likely cause: the learning rate.")


@pytest.mark.parametrize("state", [directory.PREEMPTED, directory.RUNNING, directory.DONE])
def test_run_that_was_not_halted_has_no_diagnosis(state: str, tmp_path: Path) -> None:
    assert (
        diagnose_divergence(
            write_history(tmp_path, "fake-1", train__lr=0.5, spoil=diverge, status={"status": state}), LIMITS
        )
        is None
    )


def test_suggested_rate_lowers_min_lr_too(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", train__lr=0.5, train__min_lr=0.1, spoil=diverge, status=HALTED)
    divergence = diagnose_divergence(history, LIMITS)
    assert divergence is not None and "train.lr=0.001" in divergence.action and "train.min_lr=0.001" in divergence.action


def test_peak_rate_is_the_highest_of_all_stages(tmp_path: Path) -> None:
    history = write_history(tmp_path, "fake-1", spoil=end_with_losses(2.0, rule="non_finite"), status=HALTED)
    stages = [{"steps": 100, "seq_len": 2048, "batch_size": 2, "lr": lr} for lr in (0.5, 1e-3)]
    config = RunConfig.from_dict({**history.config.to_dict(), "train": {"stages": stages}})
    divergence = diagnose_divergence(replace(history, config=config), LIMITS)
    assert divergence is not None and divergence.observations[1].endswith("its peak, train.lr, is 0.5.")
    assert divergence.action.startswith("Likely cause: the learning rate.")


def test_reference_is_the_newest_on_the_same_text(tmp_path: Path) -> None:
    def of_another_text(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    nsa = write_history(tmp_path, "nsa-20260101T000000Z-aaaa")
    for day in (2, 3):
        write_history(tmp_path, f"dense-2026010{day}T000000Z-aaaa", model__attention="dense")
    write_history(tmp_path, "dense-20260104T000000Z-aaaa", model__attention="dense", spoil=of_another_text)
    assert [reference.note.split(":")[0] for reference in find_references(nsa)] == ["dense-20260103T000000Z-aaaa"]


def test_previous_run_on_another_text_is_not_a_reference(tmp_path: Path) -> None:
    def later_of_another_text(events: list[Event]) -> None:
        events[0]["t"] = 2000.0
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    write_history(tmp_path, "fake-1")
    assert find_references(write_history(tmp_path, "fake-2", spoil=later_of_another_text)) == []
