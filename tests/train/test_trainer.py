"""The training loop: checks, timing and records of every step."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stage_config import make_staged_config
from torch import nn

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.train import trainer
from nsa_lab.train.build import Builders, build_model
from nsa_lab.train.guard import Finding
from nsa_lab.train.launcher import write_crash_record
from nsa_lab.train.step import make_optimizer
from nsa_lab.train.telemetry import awake_clock, phases, recorder
from nsa_lab.train.telemetry.tensorboard_writer import TensorBoardWriter
from nsa_lab.train.validation import GateMovement, compute_entropies, get_layer_name, measure_references

Make, Train = Callable[..., Path], Callable[..., int]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[tuple[Any, ...]]]]:
    """Observations passed to each instance of a rule, by the name of the rule."""
    seen: dict[str, list[list[tuple[Any, ...]]]] = {"SpikeRule": [], "ThroughputRule": []}
    for name, instances in seen.items():
        rule = getattr(trainer, name)

        def make(*args: Any, rule: type = rule, instances: list = instances) -> Any:
            instance, shown = rule(*args), []
            instances.append(shown)
            observe = instance.observe
            instance.observe = lambda *numbers: shown.append(numbers) or observe(*numbers)
            return instance

        monkeypatch.setattr(trainer, name, make)
    return seen


def test_rules_restart_with_every_stage_and_skip_compiling_steps(
    make_tiny_config: Callable[..., RunConfig], train: Train, tmp_path: Path, observed: dict[str, Any]
) -> None:
    stages = [{"steps": 3, "seq_len": n, "batch_size": 2, "lr": 1e-3} for n in (16, 32)]
    run_dir = lifecycle.create_run(
        make_staged_config(make_tiny_config(), stages, log_every=1, stats_every=100, eval_every=0), tmp_path
    )
    assert train(run_dir) == 0
    steps = {name: [[numbers[0] for numbers in shown] for shown in of_rule] for name, of_rule in observed.items()}
    assert steps == {"SpikeRule": [[1, 2, 3], [4, 5, 6]], "ThroughputRule": [[2, 3], [5, 6]]}


@pytest.mark.slow
def test_the_first_step_after_a_resume_compiles_too(new_run: Make, train: Train, observed: dict[str, Any]) -> None:
    run_dir = new_run(steps=6, save_every=3, log_every=1, eval_every=0)
    assert train(run_dir) == 0
    shutil.rmtree(run_dir / "checkpoints/step-00000006")
    assert train(run_dir) == 0
    assert [[numbers[0] for numbers in shown] for shown in observed["ThroughputRule"]] == [[2, 3, 4, 5, 6], [5, 6]]


@pytest.mark.slow
def test_a_slowdown_counts_the_seconds_between_log_points(new_run: Make, train: Train, observed: dict[str, Any]) -> None:
    run_dir = new_run(steps=9, log_every=4, stats_every=100, eval_every=0, save_every=0)
    assert train(run_dir) == 0
    _, four, eight, nine = events.get_step_events(events.read_events(run_dir))
    recorded = {step: seconds for step, _, seconds in observed["ThroughputRule"][0]}
    assert recorded == pytest.approx({4: 3 * four["dt_s"], 8: 4 * eight["dt_s"], 9: nine["dt_s"]})


@pytest.mark.slow
def test_step_time_covers_training_only(
    new_run: Make, train: Train, builders: Builders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock that advances with every forward pass. Evaluations, saves and statistics are not step time."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(awake_clock, "time", clock)

    def build(config: RunConfig, device: torch.device) -> nn.Module:
        model = build_model(config, device)
        model.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + 1.0))
        statistics = model.statistics
        model.statistics = lambda *args: now.__setitem__(0, now[0] + 7.0) or statistics(*args)
        return model

    run_dir = new_run(steps=12, log_every=4, stats_every=3, eval_every=1, save_every=2)
    assert train(run_dir, builders=Builders(build, builders.data)) == 0
    assert {e["step"]: e["dt_s"] for e in events.get_step_events(events.read_events(run_dir))} == dict.fromkeys(
        (1, 3, 4, 6, 8, 9, 12), 2.0
    ), "two micro-batches"


@pytest.mark.slow
def test_layer_norms_without_clipping_are_unscaled(new_run: Make, train: Train) -> None:
    run_dir = new_run(grad_clip=1e3, stats_every=1, steps=2, warmup_steps=0)
    assert train(run_dir) == 0
    for step in events.get_step_events(events.read_events(run_dir)):
        assert 0.05 * step["grad_norm"] < math.hypot(*step["grad_norm_layers"]) <= 1.001 * step["grad_norm"]


@pytest.mark.slow
def test_only_the_last_evaluation_records_window_losses(trained_run: Path) -> None:
    recorded = events.get_eval_events(events.read_events(trained_run))
    assert [(e["step"], "window_losses" in e) for e in recorded] == [(0, False), (6, False), (12, True)]


def test_the_adamw_part_of_muon_has_the_configured_eps(make_tiny_config: Callable[..., RunConfig]) -> None:
    config = make_tiny_config(optimizer="muon", eps=1e-3)
    optimizer = make_optimizer(build_model(config, torch.device("cpu")), config.train)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-3}


def test_a_halted_run_has_the_status_of_its_last_good_step(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third(step: int, *_: float) -> Finding | None:
        return Finding("non_finite", step, math.nan, 0.0, "halt", "bad") if step == 3 else None

    monkeypatch.setattr(trainer, "check_non_finite", third)
    run_dir = new_run()
    assert train(run_dir) == directory.EXIT_HALTED
    status = directory.read_status(run_dir)
    assert (status["step"], status["tokens"]) == (2, 2 * 128)
    (halt,) = [event for event in events.read_events(run_dir) if event["kind"] == "halt"]
    assert halt["step"] == 2


def test_references_are_in_bits_per_byte() -> None:
    text = np.frombuffer(random.Random(0).randbytes(1 << 18), dtype=np.uint8)

    class HeldOut:
        def __len__(self) -> int:
            return len(text)

        def read(self, start: int, count: int) -> np.ndarray:
            return text[start : start + count]

    context = SimpleNamespace(config=RunConfig(), dataset=SimpleNamespace(validation=HeldOut()))
    values = {reference["name"]: reference["bpb"] for reference in measure_references(context)}
    assert 8.0 <= values["xz"] < 8.3, "what is random takes all its bits"
    assert values["order-0 entropy"] == pytest.approx(8.0, abs=0.01)
    assert values["order-1 entropy"] == pytest.approx(8.0, abs=0.15), "as a byte alone, although few pairs occur"


def test_entropies_equal_those_of_the_distributions() -> None:
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.25, 0.125, 0.125])
    independent = rng.choice(4, size=1 << 17, p=shares).astype(np.uint8)
    assert compute_entropies(independent) == pytest.approx((1.75, 1.75), abs=0.01)
    # Each byte follows from the previous one.
    cycle = np.tile(np.arange(8, dtype=np.uint8), 1 << 12)
    assert compute_entropies(cycle) == pytest.approx((3.0, 0.0), abs=0.01)
    assert compute_entropies(np.zeros(1, dtype=np.uint8)) == (0.0, 0.0)


def test_layer_names_come_from_parameter_names() -> None:
    names = ("blocks.3.mlp.up.weight", "blocks.12.attention.convolutions.0.weight", "embedding.weight", "norm.weight")
    assert [get_layer_name(name) for name in names] == ["blocks.3", "blocks.12", "embedding", "norm"]


def test_gate_movement_is_measured_since_the_last_call() -> None:
    block = nn.Module()
    block.attention = nn.Module()
    block.attention.gate = nn.Linear(2, 2, bias=False)
    model = nn.Module()
    model.blocks = nn.ModuleList([block])
    movement = GateMovement(model)
    with torch.no_grad():
        block.attention.gate.weight += 1.0
    assert [float(distance) for distance in movement.measure()] == pytest.approx([2.0])
    assert [float(distance) for distance in movement.measure()] == [0.0]


def test_tensorboard_hides_only_repeated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.tensorboard

    calls: list[int | None] = []
    monkeypatch.setattr(
        torch.utils.tensorboard, "SummaryWriter", lambda folder, purge_step, flush_secs: calls.append(purge_step)
    )
    for step in (0, 5):
        TensorBoardWriter(tmp_path, step, lambda error: None)
    assert calls == [None, 6]


def test_tensorboard_gets_every_number_and_one_scalar_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.tensorboard

    written: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def add_scalar(self, *scalar: Any) -> None:
            if len(written) == 3:
                raise OSError("the disk is full")
            written.append(scalar)

    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", Writer)
    trouble: list[Exception] = []
    mirror = TensorBoardWriter(tmp_path, 0, trouble.append)
    mirror.write("train", 3, {"why": None, "ok": True, "loss": 2.0, "gates": [0.1, None, 0.3]})
    layers = [(f"train/gates/layer_0{layer}", value, 3) for layer, value in ((0, 0.1), (2, 0.3))]
    assert written == [("train/loss", 2.0, 3), *layers] and mirror.disabled_reason is None
    for step in (4, 5):
        mirror.write("train", step, {"loss": 2.0})
    assert len(trouble) == 1 and mirror.disabled_reason == "the disk is full", "said once, and nothing is written any more"


def test_a_crash_record_belongs_to_the_latest_attempt(tmp_path: Path) -> None:
    step = {"kind": "step", "t": 1.0}
    lines = [{**step, "attempt": n, "step": at, "tokens": 10 * at} for n, at in ((1, 9), (2, 5), (2, 6))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_crash_record(tmp_path, where="rank 1", kind="SIGKILL", reason="killed", exit_code=1)
    status = directory.read_status(tmp_path)
    assert (status["attempt"], status["step"], status["tokens"]) == (2, 6, 60)


def test_a_phase_has_a_median_duration_after_three_occurrences() -> None:
    recorded = phases.Phases()
    for _ in range(2):
        with recorded("eval"):
            pass
        assert recorded.get_median_duration("eval") is None
    with recorded("eval"):
        pass
    assert recorded.get_median_duration("eval") is not None


@pytest.mark.slow
def test_the_status_has_the_current_step_during_training(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "STATUS_EVERY_S", 0.0)
    written: list[int] = []
    write = directory.write_status
    monkeypatch.setattr(
        directory, "write_status", lambda *a, **fields: written.append(fields["step"]) or write(*a, **fields)
    )
    assert train(new_run(steps=4, eval_every=0, save_every=0)) == 0
    assert set(written) == {0, 1, 2, 3, 4}


def test_a_run_with_eval_every_0_is_evaluated_before_its_first_step(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=3, eval_every=0, save_every=0)
    assert train(run_dir) == 0
    assert [e["step"] for e in events.get_eval_events(events.read_events(run_dir))] == [0]
