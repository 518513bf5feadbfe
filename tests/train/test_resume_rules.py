"""Rules for resuming: settings that may change, and the state that is restored."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looping import looped
from safetensors.torch import save_file

from nsa_lab.config import RunConfig
from nsa_lab.runs import events
from nsa_lab.runs.trajectory import get_trajectory_settings
from nsa_lab.train import attempt, checkpoint_state
from nsa_lab.train.checkpoint import Filesystem

Make, Train = Callable[..., Path], Callable[..., int]


def goes_on(before: RunConfig, after: RunConfig, identity: str = "text") -> bool:
    state = {"trajectory": get_trajectory_settings(before), "data_identity": "text"}
    try:
        checkpoint_state.check_same_trajectory(state, after, identity)
    except checkpoint_state.ResumeRefused:
        return False
    return True


@looped
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(f"train.{key}", 7) for key in ("log_every", "stats_every", "eval_every", "eval_batches", "save_every")],
        *[(f"train.{key}", 7) for key in ("keep_last", "keep_every")],
        ("train.micro_batch_size", 1),
        ("train.spike_sigma", 9.0),
        ("train.min_tokens_per_s", 9.0),
        ("train.stall_action", "halt"),
        ("data.timeout_s", 9.0),
        ("runtime.heartbeat_s", 9.0),
        ("runtime.compile", True),
    ],
)
def test_monitoring_settings_may_change(make_tiny_config: Callable[..., RunConfig], key: str, value: Any) -> None:
    section, name = key.split(".")
    sections = make_tiny_config().to_dict()
    sections[section] = {**sections[section], name: value}
    assert goes_on(make_tiny_config(), RunConfig.from_dict(sections))


@looped
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("train.grad_clip", 0.5), ("train.weight_decay", 0.3), ("train.beta1", 0.8), ("train.beta2", 0.8)],
        *[("train.eps", 1e-3), ("train.min_lr", 1e-4), ("train.warmup_steps", 3), ("train.lr_schedule", "constant")],
        *[("train.optimizer", "muon"), ("data.packing", "best_fit"), ("data.documents", "mask")],
        *[("runtime.precision", "bf16"), ("model.norm_eps", 1e-3), ("nsa.w", 12), ("data.val_fraction", 0.2)],
        *[("train.lr", 1e-3), ("train.seed", 1), ("train.batch_size", 4), ("train.steps", 13)],
    ],
)
def test_trajectory_settings_may_not_change(make_tiny_config: Callable[..., RunConfig], key: str, value: Any) -> None:
    section, name = key.split(".")
    sections = make_tiny_config().to_dict()
    sections[section] = {**sections[section], name: value}
    assert not goes_on(make_tiny_config(), RunConfig.from_dict(sections))


def test_other_data_is_another_run(make_tiny_config: Callable[..., RunConfig]) -> None:
    assert goes_on(make_tiny_config(), make_tiny_config()) and not goes_on(
        make_tiny_config(), make_tiny_config(), identity="another"
    )


def test_the_probe_difference_is_relative_and_nan_is_refused(tmp_path: Path) -> None:
    logits = torch.tensor([[[100.0, -1.0]]])
    save_file({"logits": logits}, tmp_path / checkpoint_state.PROBE)
    ask: dict[str, Any] = {"require_equal": False, "precision": "bf16"}
    assert checkpoint_state.check_probe(tmp_path, logits + torch.tensor([1.0, 0.0]), **ask) == pytest.approx(0.01)
    for bad in (logits + 6.0, logits * float("nan")):
        with pytest.raises(checkpoint_state.ResumeRefused, match="other logits"):
            checkpoint_state.check_probe(tmp_path, bad, **ask)
    ask["require_equal"] = True
    assert checkpoint_state.check_probe(tmp_path, logits, **ask) == 0.0
    with pytest.raises(checkpoint_state.ResumeRefused, match="allowed 0"):
        checkpoint_state.check_probe(tmp_path, logits + 1e-4, **ask)


def test_random_states_are_restored() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = checkpoint_state.get_rng_states()
    values = draw()
    checkpoint_state.restore_rng(states)
    assert draw() == values


@pytest.mark.slow
def test_a_run_resumes_with_the_random_states_of_its_checkpoint(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(steps=2, warmup_steps=1, save_every=1, eval_every=0)
    assert train(run_dir) == 0
    shutil.rmtree(run_dir / "checkpoints/step-00000002")
    restored: list[dict[str, Any]] = []
    monkeypatch.setattr(checkpoint_state, "restore_rng", restored.append)
    assert train(run_dir) == 0
    saved = torch.load(run_dir / "checkpoints/step-00000001" / checkpoint_state.OPTIMIZER, weights_only=True)["rng"]
    assert [states["python"] for states in restored] == [saved["python"]]


@looped
@pytest.mark.parametrize("other", [None, "versions", "device", "backend", "threads", "ranks", "code"])
def test_equal_bits_are_required_if_nothing_else_changed(
    make_tiny_config: Callable[..., RunConfig], other: str | None
) -> None:
    alike = {"versions": {}, "device": "cpu", "backend": {}, "threads": 1, "ranks": 1, "code": {"source": "a"}}
    state = alike | ({} if other is None else {other: {"source": "b"}})
    here = object.__new__(attempt._Attempt)
    here.config = make_tiny_config()
    assert here._requires_equal_bits(state, alike) == (other is None)


def test_the_stall_limit_of_data_is_the_configured_timeout(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, heartbeat = [], attempt.Heartbeat
    monkeypatch.setattr(attempt, "Heartbeat", lambda *a, rule, **k: rules.append(rule) or heartbeat(*a, rule=rule, **k))
    run_dir = new_run(steps=1, warmup_steps=0, data={"timeout_s": 333.0})
    assert train(run_dir) == 0
    assert rules[0].get_limit_s("data", None) == 333.0 and rules[0].get_limit_s("step", None) == 120.0


@pytest.mark.slow
def test_a_successful_save_resets_the_count_of_failures(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dir, calls = Filesystem.make_dir, []

    def failing(self: Filesystem, path: Path) -> None:
        if path.parent.name == "checkpoints":  # and not the save of preflight
            calls.append(path.name)
            if len(calls) in (1, 3):
                raise OSError(28, "No space left on device")
        make_dir(self, path)

    monkeypatch.setattr(Filesystem, "make_dir", failing)
    run_dir = new_run(save_every=3)
    assert train(run_dir) == 0, "steps 3 and 9 are lost, and neither follows another that is"
    assert [e["step"] for e in events.read_events(run_dir) if e["kind"] == "checkpoint"] == [6, 12]


def test_files_of_a_killed_preflight_are_removed(new_run: Make, train: Train) -> None:
    run_dir = new_run(steps=1, warmup_steps=0)
    left = run_dir / ".preflight-killed"
    left.mkdir()
    (left / "model.safetensors").touch()
    assert train(run_dir) == 0 and not left.exists()
