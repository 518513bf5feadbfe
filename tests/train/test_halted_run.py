"""Runs that halt or report a finding: faults in the numbers, failed saves, bugs and wrong usage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_checks import Make, Train, final_weights, kinds, rewind, same
from torch import nn

from nsa_lab.config import RunConfig
from nsa_lab.data import Batches, DataError
from nsa_lab.runs import directory, lifecycle
from nsa_lab.runs.lock import take_lock
from nsa_lab.train.build import Builders
from nsa_lab.train.checkpoint import Filesystem
from nsa_lab.train.telemetry.awake_clock import AwakeClock


def plant(run_dir: Path, builders: Builders, step: int, factor: float, where: str) -> Callable[[nn.Module], None]:
    """Multiply the output of a module when the model gets the first micro-batch of `step`."""
    config = RunConfig.from_yaml(run_dir / "config.yaml")
    dataset = builders.data(config.data, 256, config.train.seq_len, None)
    batches = Batches(dataset.train, config.train.seq_len, config.train.sequences_per_step, config.train.seed)
    target = batches.batch(step - 1)[0][: config.train.batch_size]

    def change(model: nn.Module) -> None:
        seen = {}
        model.register_forward_pre_hook(lambda module, inputs: seen.update(now=inputs[0]))
        model.get_submodule(where).register_forward_hook(
            lambda module, inputs, output: output * factor if torch.equal(seen["now"], target) else None
        )

    return change


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, failures: int) -> Iterator[None]:
    left = [failures]
    make_dir = Filesystem.make_dir

    def failing(self: Filesystem, path: Path) -> None:
        if path.parent.name == "checkpoints" and left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        make_dir(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Filesystem, "make_dir", failing)
        yield


@pytest.mark.slow
def test_a_planted_nan_halts_with_the_weights_of_the_step_before_and_a_diagnosis(
    new_run: Make, train: Train, make_hooked_builders: Callable, builders: Builders
) -> None:
    whole, run_dir = new_run(save_every=1, keep_last=12), new_run()
    train(whole)
    planted = make_hooked_builders(plant(run_dir, builders, 7, float("nan"), "blocks.1.mlp"))
    assert train(run_dir, builders=planted) == directory.EXIT_HALTED
    status = directory.read_status(run_dir)
    assert status["status"] == "HALTED" and "step 7" in status["reason"] and status["run"] == run_dir.name
    guard = kinds(run_dir, "guard")[0]
    assert (guard["rule"], guard["step"], guard["action"]) == ("non_finite", 7, "halt")
    bundle = json.loads((run_dir / "halt-00000007/diagnosis.json").read_text())
    assert bundle["first_non_finite_module"] == "blocks.1.mlp" and bundle["weights_of_step"] == 6
    assert bundle["micro_batch_losses"][0] == "nan" and float(bundle["micro_batch_losses"][1]) > 0
    assert {"blocks.0", "blocks.1", "embedding", "head"} <= bundle["gradient_norms"].keys() and bundle["batch_hash"]
    assert same(final_weights(run_dir, 6), final_weights(whole, 6))
    # Without the fault the run resumes and ends as if the fault had not occurred.
    assert lifecycle.get_state(run_dir) == "HALTED" and train(run_dir) == 0
    assert same(final_weights(run_dir), final_weights(whole))


@pytest.mark.slow
def test_a_planted_spike_halts(new_run: Make, train: Train, make_hooked_builders: Callable, builders: Builders) -> None:
    run_dir = new_run(steps=60, spike_sigma=8.0, lr=1e-4, save_every=0, eval_every=0, log_every=50)
    assert (
        train(run_dir, builders=make_hooked_builders(plant(run_dir, builders, 45, 3000.0, "head"))) == directory.EXIT_HALTED
    )
    guard = kinds(run_dir, "guard")[0]
    assert (guard["rule"], guard["step"]) == ("spike", 45) and guard["value"] > guard["limit"]
    assert (run_dir / "halt-00000045/diagnosis.json").exists()


@pytest.mark.slow
def test_the_window_of_the_spike_rule_outlives_a_resume(
    new_run: Make, train: Train, make_hooked_builders: Callable, builders: Builders
) -> None:
    """Spike in the fifth step after a resume; a new window would be inactive for 32 steps."""
    run_dir = new_run(steps=60, spike_sigma=8.0, lr=1e-4, save_every=40, eval_every=0, log_every=50)
    assert train(run_dir) == 0
    rewind(run_dir, 40)
    assert (
        train(run_dir, builders=make_hooked_builders(plant(run_dir, builders, 45, 3000.0, "head"))) == directory.EXIT_HALTED
    )
    (guard,) = kinds(run_dir, "guard")
    assert (guard["rule"], guard["step"], guard["attempt"]) == ("spike", 45, 2)


@pytest.mark.slow
def test_a_healthy_run_with_all_rules_enabled_has_no_findings(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=60, spike_sigma=8.0, min_tokens_per_s=1.0, stats_every=15, log_every=15, save_every=0)
    assert train(run_dir) == 0
    assert not kinds(run_dir, "guard") and not kinds(run_dir, "stall")


@pytest.mark.slow
def test_a_frozen_gate_is_reported(new_run: Make, train: Train, make_hooked_builders: Callable) -> None:
    def freeze(model: nn.Module) -> None:
        # The gradient is zero, as with a bug, and weight decay is off.
        model.blocks[1].attention.gate.weight.register_hook(torch.zeros_like)

    run_dir = new_run(stats_every=2, weight_decay=0.0)
    config = make_hooked_builders(freeze)
    assert train(run_dir, builders=config) == directory.EXIT_HALTED, "preflight finds it before the first step"
    assert "blocks.1.attention.gate.weight" in directory.read_status(run_dir)["reason"]

    def freeze_later(model: nn.Module) -> None:
        calls = []
        weight = model.blocks[1].attention.gate.weight
        weight.register_hook(lambda gradient: calls.append(1) or (gradient * 0 if len(calls) > 8 else None))

    run_dir = new_run(stats_every=2, weight_decay=0.0, beta1=0.0)
    assert train(run_dir, builders=make_hooked_builders(freeze_later)) == 0
    found = {(g["rule"], g["action"]) for g in kinds(run_dir, "guard")}
    assert found == {("frozen", "warn")} and "layer 1" in kinds(run_dir, "guard")[0]["text"]


@pytest.mark.slow
def test_a_throughput_drop_is_reported(
    new_run: Make, train: Train, make_hooked_builders: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock that advances with every forward pass, so that the load of this machine has no effect."""
    now = [0.0]
    monkeypatch.setattr(AwakeClock, "now", lambda clock: now[0])

    def slow_down(model: nn.Module) -> None:
        calls = []

        def pass_time(*_: Any) -> None:
            calls.append(1)
            now[0] += 8.0 if len(calls) > 50 else 1.0

        model.register_forward_pre_hook(pass_time)

    run_dir = new_run(steps=30, log_every=2, stats_every=100, eval_every=0, save_every=0)
    assert train(run_dir, builders=make_hooked_builders(slow_down)) == 0
    assert {(g["rule"], g["action"]) for g in kinds(run_dir, "guard")} == {("slowdown", "warn")}


def test_a_bug_leaves_its_traceback_and_exit_code_1(new_run: Make, train: Train, make_hooked_builders: Callable) -> None:
    def break_at_seventh(model: nn.Module) -> None:
        calls = []
        model.register_forward_pre_hook(lambda *_: calls.append(1) or (1 / 0 if len(calls) > 12 else None))

    run_dir = new_run()
    assert train(run_dir, builders=make_hooked_builders(break_at_seventh)) == directory.EXIT_BUG
    (error,) = kinds(run_dir, "error")
    assert error["type"] == "ZeroDivisionError" and Path(__file__).name in error["traceback"]
    assert directory.read_status(run_dir)["status"] == "HALTED"


def test_data_that_cannot_be_read_is_wrong_usage(new_run: Make, train: Train, builders: Builders) -> None:
    def data(*arguments: Any) -> Any:
        raise DataError("no text in it")

    run_dir = new_run()
    assert train(run_dir, builders=replace(builders, data=data)) == directory.EXIT_USAGE
    assert directory.read_status(run_dir)["reason"] == "no text in it"


@pytest.mark.slow
def test_a_run_whose_last_save_failed_is_not_done(new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    again, never = new_run(save_every=0), new_run(save_every=0)
    with full_disk(monkeypatch, failures=1):
        assert train(again) == 0, "a failure of the last save is tried again at once"
    assert [e["step"] for e in kinds(again, "checkpoint")] == [12]
    with full_disk(monkeypatch, failures=10):
        assert train(never) == directory.EXIT_HALTED
    message = directory.read_status(never)
    assert message["status"] == "HALTED" and message["step"] == 12
    assert "saving failed 2 consecutive times: the disk is full: " in message["reason"]


@pytest.mark.slow
def test_one_failed_save_is_recorded_and_the_next_one_is_tried(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run()
    with full_disk(monkeypatch, failures=1):
        assert train(run_dir) == 0
    (error,) = kinds(run_dir, "error")
    assert error["message"].startswith("the disk is full: ") and not error["fatal"]
    assert [e["step"] for e in kinds(run_dir, "checkpoint")] == [10, 12]


@pytest.mark.slow
def test_two_failed_saves_in_a_row_halt(new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = new_run()
    with full_disk(monkeypatch, failures=9):
        assert train(run_dir) == directory.EXIT_HALTED
    assert "saving failed" in directory.read_status(run_dir)["reason"]


def test_two_trainers_in_one_directory_are_refused(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=1, warmup_steps=0, eval_every=0, save_every=0)
    lock = take_lock(run_dir)
    with pytest.raises(directory.RunDirectoryError, match="another trainer"):
        train(run_dir)
    os.close(lock)
    assert train(run_dir) == 0
