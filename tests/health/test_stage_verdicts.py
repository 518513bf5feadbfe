"""Checks of runs with several stages compare only readings of equal length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looping import looped

from nsa_lab.config import RunConfig, StageConfig
from nsa_lab.health.conversion_checks import check_indexer_learns
from nsa_lab.health.loss_checks import check_generalization, check_loss_kept, check_training_loss, compute_expected_lr
from nsa_lab.health.throughput_checks import check_throughput
from nsa_lab.health.verdict import LIMITS
from nsa_lab.runs.history import History
from nsa_lab.train.lr_schedule import compute_learning_rate

STAGES: list[dict[str, Any]] = [
    {"steps": 24, "seq_len": 64, "batch_size": 8, "lr": 1e-3, "warmup_steps": 5},
    {"steps": 16, "seq_len": 512, "batch_size": 1, "lr": 5e-4, "warmup_steps": 3, "min_lr": 1e-5},
]


def make_history(
    speeds: list[float],
    train_bpb: list[float],
    eval_bpb: dict[int, float],
    selection_loss: list[float] | None = None,
    **train: Any,
) -> History:
    """Return a run of 40 steps with these speeds (tokens per second) and losses, and some evaluations."""
    config = RunConfig.from_dict({"train": train or {"stages": STAGES}})
    steps = [
        {"kind": "step", "attempt": 1, "step": n, "dt_s": 512 / speed, "tokens_per_s": speed, "bpb": bpb}
        for n, (speed, bpb) in enumerate(zip(speeds, train_bpb, strict=True), 1)
    ]
    for step, loss in zip(steps, selection_loss or (), strict=False):
        step["selection_loss"] = loss
    evaluations = [{"kind": "eval", "attempt": 1, "step": n, "bpb": bpb} for n, bpb in eval_bpb.items()]
    return History(Path(), config, {}, {}, [*steps, *evaluations], steps, evaluations)


ONE_STAGE = {"steps": 40, "seq_len": 64, "batch_size": 8}
FLAT = [2.0] * 40


def test_speed_is_compared_within_a_stage() -> None:
    slower = [200.0] * 24 + [60.0] * 16
    verdict = check_throughput(make_history(slower, FLAT, {}), LIMITS)
    assert verdict.level == "passed" and "200, then 60 tokens/s" in verdict.text
    assert check_throughput(make_history(slower, FLAT, {}, **ONE_STAGE), LIMITS).level == "warning"
    with_slow_part = [*slower[:28], *[20.0] * 6, *slower[34:]]
    assert check_throughput(make_history(with_slow_part, FLAT, {}), LIMITS).level == "warning"


def test_selection_losses_are_compared_within_a_stage() -> None:
    """Those of longer texts are twice as high. The changes of the stages are multiplied."""
    for change, expected in ((-0.1, True), (0.1, False)):
        losses = [1 + change * step / 24 for step in range(24)] + [2 + 2 * change * step / 16 for step in range(16)]
        verdict = check_indexer_learns(make_history(FLAT, FLAT, {}, losses), replace(LIMITS, selection_loss_rise=0.1))
        assert verdict.ok is expected and "by stage" in verdict.text, verdict


def test_losses_are_compared_at_equal_length() -> None:
    # Longer texts are harder for this model, so the best loss is taken among evaluations of the same length.
    eval_bpb = {0: 8.0, 10: 2.0, 20: 1.5, 30: 2.2, 35: 2.1, 40: 2.0}
    train = [1.5] * 24 + [2.0] * 16
    assert check_loss_kept(make_history(FLAT, train, eval_bpb), LIMITS).ok
    assert check_loss_kept(make_history(FLAT, train, eval_bpb, **ONE_STAGE), LIMITS).ok is False
    assert check_loss_kept(make_history(FLAT, train, {**eval_bpb, 40: 3.0}), LIMITS).ok is False
    assert check_loss_kept(make_history(FLAT, train, {0: 8.0, 20: 1.5, 40: 2.0}), LIMITS).ok is None
    assert check_generalization(make_history(FLAT, train, eval_bpb), LIMITS).ok
    assert check_generalization(make_history(FLAT, train, {**eval_bpb, 40: 2.8}), LIMITS).level == "warning"
    assert check_generalization(make_history(FLAT, train, {**eval_bpb, 40: 3.1}), LIMITS).ok is False


def test_stage_without_readings_is_unknown() -> None:
    history = make_history(FLAT[:24], [8.0 - n / 10 for n in range(24)], {26: 2.0})
    history = replace(history, steps=[{**step, "loss": step["bpb"]} for step in history.steps])
    assert history.last_step == 26
    verdict = check_training_loss(history, LIMITS)
    assert verdict is not None and verdict.ok is None and "no readings in the current stage yet" in verdict.text


# The last stage of a run with two texts of 32,768 bytes per step: the losses of the texts differ by a third.
RANDOM_READINGS = [0.83, 0.83, 0.92, 0.87, 0.74, 0.78, 0.76, 0.59, 0.83, 0.79, 0.76, 0.84, 0.79, 0.71, 0.79, 1.0]
# Larger variation: the mean of the latest readings is 1.6 times the lowest mean, but within their scatter.
WIDE_READINGS = [0.64, 0.54, 0.54, 0.86, 0.88, 1.24, 0.78, 1.12, 1.27, 1.16, 0.34, 1.2, 0.88, 0.9, 0.89, 0.89]


def test_random_variation_of_few_texts_is_not_a_rise() -> None:
    def check(last_stage: list[float]) -> bool | None:
        losses = [5.5 - 0.18 * n for n in range(24)] + last_stage
        run = make_history(FLAT, losses, {0: 8.0})
        verdict = check_training_loss(replace(run, steps=[{**step, "loss": step["bpb"]} for step in run.steps]), LIMITS)
        assert verdict is not None
        return verdict.ok

    assert check(RANDOM_READINGS) and check(WIDE_READINGS)
    assert check([*RANDOM_READINGS[:-2], 2.4, 2.5]) is False
    assert check([0.8 + 0.001 * (n % 2) for n in range(14)] + [1.1, 1.1]) is False


def test_expected_rate_equals_the_schedule() -> None:
    train = RunConfig.from_dict({"train": {"stages": [*STAGES, {**STAGES[0], "lr_schedule": "constant"}]}}).train
    assert compute_expected_lr(np.arange(1, 61), train) == pytest.approx(
        [compute_learning_rate(step, train) for step in range(1, 61)], rel=1e-12
    )
    assert isinstance(train.plan[2], StageConfig)


@looped
@pytest.mark.parametrize(("warmup", "share"), [(0, 0.2), (4, 0.35), (0, 1.0), (10, 0.5), (1, 0.01), (2, 0.33)])
def test_expected_rate_of_wsd_equals_the_schedule(warmup: int, share: float) -> None:
    train = {"steps": 20, "warmup_steps": warmup, "decay_share": share, "lr_schedule": "wsd", "min_lr": 1e-5}
    config = RunConfig.from_dict({"train": train}).train
    assert compute_expected_lr(np.arange(1, 21), config) == pytest.approx(
        [compute_learning_rate(step, config) for step in range(1, 21)], rel=1e-12
    )


def test_generalization_uses_training_losses_before_the_evaluation() -> None:
    train = [2.0] * 20 + [1.0] * 20
    assert check_generalization(make_history(FLAT, train, {0: 8.0, 10: 3.0, 20: 2.0}, **ONE_STAGE), LIMITS).ok is True
