"""Complete runs: records, exit codes, and equality of resumed runs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_checks import Make, Train, final_weights, kinds, same

from nsa_lab.attention import geometry
from nsa_lab.config import RunConfig
from nsa_lab.data import BuildProgress, ProgressMeter
from nsa_lab.health.loss_checks import compute_expected_lr
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.history import get_monitor_settings
from nsa_lab.runs.live_view import RunView
from nsa_lab.train import attempt, trainer
from nsa_lab.train.build import Builders
from nsa_lab.train.muon import Muon
from nsa_lab.train.step import Readback
from nsa_lab.train.telemetry.phases import Phases


def test_a_run_records_what_the_contract_says(trained_run: Path) -> None:
    run_dir = trained_run
    assert directory.read_status(run_dir)["status"] == "DONE" and lifecycle.get_state(run_dir) == "DONE"
    (start,) = kinds(run_dir, "start")
    assert {"config_hash", "versions", "device", "backend", "params", "flops_per_token"} <= start.keys()
    assert start["settings"] == get_monitor_settings(RunConfig.from_yaml(run_dir / "config.yaml"))
    assert start["backend"]["selected"] == {"backend": "torch", "reason": start["backend"]["selected"]["reason"]}
    steps = kinds(run_dir, "step")
    assert [(e["step"], e["tokens"]) for e in steps] == [(n, 128 * n) for n in range(1, 13)]
    fields = {"loss", "bpb", "lr", "grad_norm", "dt_s", "data_s", "tokens_per_s", "mem_peak_bytes"}
    assert all(fields <= e.keys() for e in steps)
    read = [e for e in steps if "gate_share_cmp" in e]
    assert [e["step"] for e in read] == [4, 8, 12]
    assert all(
        len(e[name]) == 2
        for e in read
        for name in (
            "gate_share_cmp",
            "gate_share_sel",
            "gate_share_win",
            "gate_entropy",
            "gate_saturation",
            "sel_reuse",
            "sel_distance",
            "sel_sink_share",
            "sel_window_overlap",
            "norm_cmp",
            "norm_sel",
            "norm_win",
            "grad_norm_layers",
            "gate_update",
        )
    )
    assert [(e["step"], e["split"]) for e in kinds(run_dir, "eval")] == [(s, "validation") for s in (0, 6, 12)]
    assert [e["step"] for e in kinds(run_dir, "checkpoint")] == [5, 10, 12]
    assert kinds(run_dir, "end")[0]["exit_code"] == 0 and not kinds(run_dir, "guard")
    assert list((run_dir / "tensorboard").iterdir())


@pytest.mark.slow
def test_late_results_are_logged_at_their_own_step(new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a step is recorded while the next one is computed."""
    here, late = new_run(log_every=2), new_run(log_every=2)
    assert train(here) == 0

    def take(self: Readback, *, include_newest: bool = False) -> list[tuple[int, list[float]]]:
        cut = len(self._pending) if include_newest else max(len(self._pending) - 1, 0)
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        return [(step, result.tolist()) for step, result, _ in ready]

    monkeypatch.setattr(Readback, "take", take)
    assert train(late) == 0
    fields = ("step", "tokens", "loss", "lr", "grad_norm", "sel_reuse")
    recorded = [[tuple(e.get(name) for name in fields) for e in kinds(run_dir, "step")] for run_dir in (here, late)]
    assert [row[0] for row in recorded[1]] == [1, 2, 4, 6, 8, 10, 12] and recorded[0] == recorded[1]
    assert same(final_weights(here), final_weights(late))


def test_bits_per_byte_are_nats_over_ln_2(trained_run: Path) -> None:
    for step in kinds(trained_run, "step"):
        assert step["bpb"] == pytest.approx(step["loss"] / 0.6931471805599453, rel=1e-3)


@pytest.mark.slow
def test_the_logging_interval_does_not_change_the_weights(trained_run: Path, new_run: Make, train: Train) -> None:
    seldom = new_run(log_every=100, stats_every=100, eval_every=0, save_every=0)
    assert train(seldom) == 0
    assert [e["step"] for e in kinds(seldom, "step")] == [1, 12]
    assert same(final_weights(trained_run), final_weights(seldom))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Muon])
def test_the_recorded_rate_is_that_of_the_optimizer_at_its_step(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer]
) -> None:
    """The recorded rates are those that torch used at each update, and those of the configuration."""
    seen: list[float] = []
    update = kind.step

    def spy(self: torch.optim.Optimizer, *rest: Any) -> Any:
        (rate,) = {group["lr"] for group in self.param_groups}
        seen.append(rate)
        return update(self, *rest)

    run_dir = new_run(save_every=0, eval_every=0, optimizer=kind.__name__.lower())
    with monkeypatch.context() as patch:
        patch.setattr(kind, "step", spy)
        assert train(run_dir) == 0
    recorded = [event["lr"] for event in kinds(run_dir, "step")]
    settings = RunConfig.from_yaml(run_dir / "config.yaml").train
    assert recorded == seen[-12:]
    assert recorded == pytest.approx(compute_expected_lr(np.arange(1, 13), settings), rel=1e-12)


@pytest.mark.slow
def test_events_have_data_waits_selected_keys_and_memory(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = iter([0.4] + [0.1] * 4 + [0.2] * 7)
    last = Phases.get_last_duration
    monkeypatch.setattr(
        Phases, "get_last_duration", lambda self, name: next(waited) if name == "data" else last(self, name)
    )
    run_dir = new_run(log_every=6, stats_every=6, save_every=0, eval_every=0)
    assert train(run_dir) == 0
    first, half, end = kinds(run_dir, "step")
    assert [(e["data_s_p50"], e["data_s_p95"]) for e in (first, half, end)] == [(0.4, 0.4), (0.1, 0.2), (0.2, 0.2)]
    assert [e["data_s"] for e in (first, half, end)] == pytest.approx([0.4, 0.12, 0.2])
    config = RunConfig.from_yaml(run_dir / "config.yaml")
    parameters = kinds(run_dir, "start")[0]["params"]
    for event in (first, half, end):
        assert event["weight_bytes"] == {"float32": 4 * parameters}
        # Two moments per parameter and a counter per tensor.
        assert 8 * parameters < event["optimizer_bytes"]["float32"] < 8 * parameters + 4 * 100
    keys = geometry.mean_selected_keys(config.train.seq_len, config.nsa)
    assert half["sel_keys"] == pytest.approx([keys] * 2) and half["sel_keys_most"] == [24.0] * 2


@pytest.mark.slow
def test_a_stop_while_statistics_are_computed_loses_no_event(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(log_every=1, stats_every=5, save_every=0, eval_every=0)
    real = trainer.compute_branch_statistics

    def asked_to_stop(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "compute_branch_statistics", asked_to_stop)
        assert train(run_dir) == directory.EXIT_STOPPED
    assert train(run_dir) == 0
    recorded = kinds(run_dir, "step")
    assert [event["step"] for event in recorded] == list(range(1, 13))
    assert [event["step"] for event in recorded if "gate_update" in event] == [5, 10]


@pytest.mark.slow
def test_every_evaluation_records_the_selection_benefit(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=4, seq_len=256, eval_every=2, save_every=0, nsa={"n_sel": 4})
    assert train(run_dir) == 0
    references = kinds(run_dir, "reference")
    assert [event["name"] for event in references] == ["xz", "order-0 entropy", "order-1 entropy"], "once"
    assert all(event["bytes"] > 0 and event["step"] == 0 for event in references)
    xz, order_0, order_1 = (event["bpb"] for event in references)
    assert 0 < xz < 16 and order_1 < order_0 < 8
    assert events.read_events(run_dir).violations.count == 0, "the trainer writes what the schema says"
    recorded = kinds(run_dir, "reach")
    assert [event["step"] for event in recorded] == [0, 2, 4]
    for event in recorded:
        assert event["length"] == 256 and event["sequences"] == 16
        assert all(4.0 < loss < 8.0 for loss in event["answer_loss"].values()), "untrained, near ln 256"
        assert len(set(event["answer_loss"].values())) == 4
    short = new_run(steps=2, warmup_steps=0, eval_every=2, save_every=0)
    assert train(short) == 0
    assert all(
        "all selected blocks are forced" in event["why_not"] and event["length"] == 32 for event in kinds(short, "reach")
    )
    dense = new_run(steps=2, warmup_steps=0, eval_every=2, save_every=0, model={"attention": "dense"})
    assert train(dense) == 0 and not kinds(dense, "reach")
    assert all(event["seconds"] > 1e-3 for event in kinds(dense, "eval")), "of the whole evaluation"


def test_a_dense_model_trains_and_has_no_gate_statistics(new_run: Make, train: Train) -> None:
    model = {"attention": "dense"}
    run_dir = new_run(model=model)
    assert train(run_dir) == 0
    assert not any("gate_share_cmp" in e for e in kinds(run_dir, "step"))


@pytest.mark.slow
def test_gradient_checkpointing_changes_memory_and_not_the_weights(trained_run: Path, new_run: Make, train: Train) -> None:
    saving = new_run(runtime={"gradient_checkpointing": True})
    assert train(saving) == 0
    assert same(final_weights(trained_run), final_weights(saving))


@pytest.mark.slow
def test_data_preparation_reports_progress_and_is_not_a_stall(
    new_run: Make, train: Train, builders: Builders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress for longer than the limit of the phase is not a stall; the same time without progress is."""
    monkeypatch.setattr(ProgressMeter.__init__, "__defaults__", (0.05,))
    monkeypatch.setitem(attempt.PHASE_STALL_FLOORS_S, "prepare", 0.4)
    silent = []

    def data(*arguments: Any) -> Any:
        for number in range(1, 80):
            arguments[3](BuildProgress("filling", 1000 * number, number, 100_000, 900 * number, 800 * number))
            time.sleep(0.01)
        if silent:
            for _ in range(60):
                arguments[3](BuildProgress("waiting for the source", 0, 0, None))
                time.sleep(0.01)
        return builders.data(*arguments)

    slow, fast = new_run(runtime={"heartbeat_s": 0.05}), new_run(runtime={"heartbeat_s": 0.05})
    assert train(fast, builders=replace(builders, data=data)) == 0
    # The reports of `data` above; the build that follows may add its own on a slow machine.
    recorded = [event for event in kinds(fast, "fill") if event["tokens_wanted"] == 100_000]
    assert len(recorded) > 5 and not kinds(fast, "stall")
    assert (
        recorded[-1]["documents"] > recorded[0]["documents"]
        and recorded[-1]["bytes_per_s"] > 0
        and recorded[-1]["left_s"] > 0
    )
    view = RunView(fast)
    view.update([e for e in events.read_events(fast) if e["kind"] in ("heartbeat", "fill")][:8])
    assert view.format_numbers()["phase"].startswith("filling: ") and "documents" in view.format_line()
    silent.append(True)
    assert train(slow, builders=replace(builders, data=data)) == 0
    assert [e["phase"] for e in kinds(slow, "stall")] == ["prepare"]


@pytest.mark.slow
def test_waiting_for_the_device_is_part_of_the_step(new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for a GPU when it reads results; the heartbeat then shows the phase of the step, not `start`."""
    taken, seen = Readback.take, []

    def take(self: Readback, *, include_newest: bool = False) -> Any:
        seen.append(phases[-1].get_current()[0])
        return taken(self, include_newest=include_newest)

    phases: list[Phases] = []
    created = Phases.__init__
    monkeypatch.setattr(Phases, "__init__", lambda self, *rest: (phases.append(self), created(self, *rest))[1])
    monkeypatch.setattr(Readback, "take", take)
    assert train(new_run()) == 0
    assert [phase for phase in seen if phase != "preflight"] == ["compile"] + ["step"] * 11
    assert len(phases[-1]._durations["step"]) == 11, "the wait is no step of its own in the median"
    assert phases[-1].get_last_duration("restore") > 0
