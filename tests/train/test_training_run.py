"""Complete runs: records, exit codes, and equality of resumed runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from nsa_lab.attention import geometry
from nsa_lab.config import RunConfig
from nsa_lab.data import Batches, BuildProgress, DataError, ProgressMeter
from nsa_lab.health import examine
from nsa_lab.health.loss_checks import compute_expected_lr
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.checkpoint_files import MANIFEST, format_manifest, read_manifest_entry
from nsa_lab.runs.history import History, get_monitor_settings
from nsa_lab.runs.live_view import RunView
from nsa_lab.runs.lock import take_lock
from nsa_lab.train import attempt, trainer
from nsa_lab.train.build import Builders, build_model
from nsa_lab.train.checkpoint import Filesystem
from nsa_lab.train.muon import Muon
from nsa_lab.train.signals import StopRequested
from nsa_lab.train.step import Readback
from nsa_lab.train.telemetry.awake_clock import AwakeClock
from nsa_lab.train.telemetry.phases import Phases

Make, Train = Callable[..., Path], Callable[..., int]


def kinds(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read_events(run_dir) if event["kind"] == kind]


def final_weights(run_dir: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"checkpoints/step-{step:08d}/model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def make_hooked_builders(builders: Builders) -> Callable[[Callable[[nn.Module], None]], Builders]:
    """`hooked(change)`: builders that apply `change(model)` to the model."""

    def make(change: Callable[[nn.Module], None]) -> Builders:
        def model(config: RunConfig, device: torch.device) -> nn.Module:
            built = build_model(config, device)
            change(built)
            return built

        return replace(builders, model=model)

    return make


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


def rewind(run_dir: Path, step: int) -> None:
    """Delete later checkpoints, as if the trainer had been killed before them."""
    for path in run_dir.glob("checkpoints/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    expected, losses = final_weights(run_dir), [e["loss"] for e in events.get_step_events(events.read_events(run_dir))]
    rewind(run_dir, 5)
    assert train(run_dir) == 0
    (resume,) = kinds(run_dir, "resume")
    assert resume["from_step"] == 5 and resume["attempt"] == 2 and resume["probe_difference"] == 0.0
    assert same(final_weights(run_dir), expected)
    assert [e["loss"] for e in events.get_step_events(events.read_events(run_dir))] == losses


@pytest.mark.slow
def test_a_run_with_muon_resumes_only_with_muon(new_run: Make, train: Train) -> None:
    run_dir = new_run(optimizer="muon")
    assert train(run_dir) == 0
    last = run_dir / "checkpoints/step-00000012/optimizer.pt"
    expected, moments = final_weights(run_dir), torch.load(last, weights_only=True)["moments"]
    rewind(run_dir, 5)
    edit(run_dir, "train", optimizer="adamw")
    assert train(run_dir) == directory.EXIT_USAGE
    assert "train.optimizer: 'muon' in the checkpoint, 'adamw' now" in directory.read_status(run_dir)["reason"]
    edit(run_dir, "train", optimizer="muon")
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)
    again = torch.load(last, weights_only=True)["moments"]
    assert again.keys() == moments.keys() and all(same(again[name], moments[name]) for name in moments)
    assert moments["blocks.0.mlp.up.weight"].keys() == {"momentum_buffer"}
    assert moments["head.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_a_run_without_an_optimizer_setting_resumes_only_with_adamw(finished_run: Path, train: Train) -> None:
    rewind(finished_run, 5)
    edit(finished_run, "train", optimizer="muon")
    assert train(finished_run) == directory.EXIT_USAGE
    assert "train.optimizer: 'adamw' in the checkpoint, 'muon' now" in directory.read_status(finished_run)["reason"]
    edit(finished_run, "train", optimizer="adamw")
    assert train(finished_run) == 0


def edit(run_dir: Path, section: str, **changes: Any) -> None:
    sections = yaml.safe_load((run_dir / "config.yaml").read_text())
    sections[section] |= changes
    (run_dir / "config.yaml").write_text(yaml.safe_dump(sections))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"lr": 1e-3}),
        ("train", {"steps": 20}),
        ("train", {"seed": 1}),
        ("nsa", {"w": 8}),
        ("model", {"mlp": "gated"}),
        ("data", {"val_fraction": 0.4}),
        ("runtime", {"precision": "bf16"}),
    ],
)
def test_resuming_on_another_trajectory_is_refused_with_the_setting(
    finished_run: Path, train: Train, section: str, change: dict
) -> None:
    run_dir = finished_run
    rewind(run_dir, 5)
    edit(run_dir, section, **change)
    assert train(run_dir) == directory.EXIT_USAGE
    (key,) = change
    assert key in directory.read_status(run_dir)["reason"] or section == "model"
    assert kinds(run_dir, "error")[0]["type"] in ("ResumeRefused", "DataError")


def test_weights_of_other_code_are_refused_with_a_message(finished_run: Path, train: Train) -> None:
    """For example, weights saved before the model had convolutions."""
    rewind(finished_run, 5)
    checkpoint = finished_run / "checkpoints/step-00000005"
    save_file({k: v for k, v in load_file(checkpoint / "model.safetensors").items() if "gate" not in k}, checkpoint / "new")
    (checkpoint / "new").rename(checkpoint / "model.safetensors")
    files = {path.name: read_manifest_entry(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(format_manifest(5, files))
    assert train(finished_run) == directory.EXIT_USAGE
    reason = directory.read_status(finished_run)["reason"]
    assert "blocks.0.attention.gate.weight, blocks.1.attention.gate.weight" in reason


@pytest.mark.slow
def test_a_run_resumed_with_other_intervals_is_checked_per_attempt(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    began = RunConfig.from_yaml(run_dir / "config.yaml")
    rewind(run_dir, 5)
    edit(run_dir, "train", log_every=5, stats_every=6, eval_every=5, save_every=7)
    assert train(run_dir) == 0
    history = History.read(run_dir)
    assert history.config_of_attempt(1) == began and history.config_of_attempt(2) == history.config != began
    assert [(stretch.first, stretch.last) for stretch in history.step_ranges()] == [(1, 5), (6, 12)]
    found = {verdict.name: verdict for verdict in examine(history).verdicts}
    assert all(
        found[name].ok for name in ("evaluations", "statistics", "every step once", "checkpoints", "record unchanged")
    ), found


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
    assert recorded == pytest.approx([compute_expected_lr(step, settings) for step in range(1, 13)], rel=1e-12)


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
@pytest.mark.parametrize("cut_off", ["evaluate_held_out", "measure_run_selection_benefit"])
def test_an_interrupted_evaluation_is_done_after_the_resume(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    run_dir, reference_run = new_run(), new_run()
    assert train(reference_run) == 0
    real, asked = getattr(trainer, cut_off), []

    def stopped(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise StopRequested("SIGTERM")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, cut_off, stopped)
        assert train(run_dir) == directory.EXIT_STOPPED
    assert [event["step"] for event in kinds(run_dir, "eval")] == [0]
    assert train(run_dir) == 0
    assert [event["step"] for event in kinds(run_dir, "reach")] == [0, 6, 12]
    recorded, expected = ([(e["step"], e["loss"]) for e in kinds(run, "eval")] for run in (run_dir, reference_run))
    assert recorded == expected and [step for step, _ in recorded] == [0, 6, 12]
    assert train(run_dir) == 0 and len(kinds(run_dir, "eval")) == 3, "what is there is not done again"


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


@pytest.mark.slow
def test_monitoring_settings_may_change_on_resume(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    expected = final_weights(run_dir)
    rewind(run_dir, 5)
    edit(run_dir, "train", log_every=3, save_every=4, spike_sigma=50.0, eval_every=0)
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)


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
        # As with a bug: the gradient is zero, and weight decay is off.
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


@pytest.mark.slow
def test_code_that_computes_other_logits_is_refused_and_the_checkpoint_stays(
    finished_run: Path, train: Train, make_hooked_builders: Callable
) -> None:
    run_dir = finished_run
    rewind(run_dir, 5)
    other = make_hooked_builders(
        lambda model: model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.001)
    )
    assert train(run_dir, builders=other) == directory.EXIT_USAGE
    assert "probe" in directory.read_status(run_dir)["reason"]
    assert (run_dir / "checkpoints/step-00000005").is_dir() and train(run_dir) == 0


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


def test_two_trainers_in_one_directory_are_refused(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=1, warmup_steps=0, eval_every=0, save_every=0)
    lock = take_lock(run_dir)
    with pytest.raises(directory.RunDirectoryError, match="another trainer"):
        train(run_dir)
    os.close(lock)
    assert train(run_dir) == 0


@pytest.mark.slow
def test_a_run_resumes_without_its_source_if_the_cache_is_complete(new_run: Make, train: Train, tmp_path: Path) -> None:
    text_file = tmp_path / "texts"
    text_file.mkdir()
    for number in range(40):
        (text_file / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall. " * 20)
    source = {"source": "local", "path": str(text_file), "max_tokens": None}
    run_dir = new_run(data=source)
    assert train(run_dir) == 0
    expected = final_weights(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    for leftover in (".status.json.4711-1", ".status.json.12-140"):
        (run_dir / leftover).write_text("{")
    text_file.rename(tmp_path / "away")
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)
    assert "nothing at" in kinds(run_dir, "resume")[0]["source_missing"]
    assert not list(run_dir.glob(".status*")), "what a kill left of a status is swept"
    fresh = RunConfig.from_yaml(run_dir / "config.yaml")
    with pytest.raises(DataError):
        lifecycle.create_run(fresh, tmp_path)


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
