from collections.abc import Callable
from typing import Any

import pytest
from looping import looped

from nsa_lab.config import ConfigError, RunConfig, TrainConfig
from nsa_lab.train.lr_schedule import compute_learning_rate

Tiny = Callable[..., RunConfig]


def test_a_table_of_rates() -> None:
    train = TrainConfig(steps=110, warmup_steps=10, lr=1e-3, min_lr=1e-4)
    result = {step: compute_learning_rate(step, train) for step in (1, 5, 10, 60, 110)}
    assert result == pytest.approx({1: 1e-4, 5: 5e-4, 10: 1e-3, 60: 5.5e-4, 110: 1e-4}, rel=1e-12)


def test_the_end_of_warm_up_is_the_peak_and_the_last_step_the_minimum_exactly() -> None:
    for warmup in (0, 1, 7):
        train = TrainConfig(steps=50, warmup_steps=warmup, lr=3e-4, min_lr=0.0)
        assert compute_learning_rate(max(warmup, 1), train) == 3e-4
        assert compute_learning_rate(50, train) == 0.0
        rates = [compute_learning_rate(step, train) for step in range(max(warmup, 1), 51)]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_a_step_is_an_optimizer_step_with_any_accumulation(accumulate: int) -> None:
    one = TrainConfig(steps=40, warmup_steps=4)
    many = TrainConfig(steps=40, warmup_steps=4, accumulate_grad_batches=accumulate)
    assert [compute_learning_rate(s, one) for s in range(1, 41)] == [compute_learning_rate(s, many) for s in range(1, 41)]


def test_constant_stays_at_the_peak() -> None:
    train = TrainConfig(steps=9, warmup_steps=3, lr=1e-3, lr_schedule="constant")
    assert [compute_learning_rate(s, train) for s in (3, 6, 9)] == [1e-3] * 3


def test_wsd_at_its_corners() -> None:
    """Warm-up to step 4, stable to step 32 of 40, then linear to `min_lr` over the last fifth."""
    train = TrainConfig(steps=40, warmup_steps=4, lr=1e-3, min_lr=2e-4, lr_schedule="wsd")
    rates = {step: compute_learning_rate(step, train) for step in range(1, 41)}
    assert rates[1] == 2.5e-4 and rates[3] == 7.5e-4
    assert {rates[step] for step in range(4, 33)} == {1e-3}
    assert [rates[step] for step in (33, 36, 39)] == pytest.approx([9e-4, 6e-4, 3e-4], rel=1e-12)
    assert rates[40] == 2e-4


def test_wsd_decays_over_decay_share() -> None:
    half = TrainConfig(steps=10, lr=1.0, lr_schedule="wsd", decay_share=0.5)
    assert [compute_learning_rate(step, half) for step in range(4, 11)] == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0])
    # Without warm-up the first step is at the peak for every share, and a decay takes at least one step.
    whole = TrainConfig(steps=5, lr=1.0, lr_schedule="wsd", decay_share=1.0)
    assert [compute_learning_rate(step, whole) for step in range(1, 6)] == [1, 0.75, 0.5, 0.25, 0]
    short = TrainConfig(steps=3, lr=1.0, lr_schedule="wsd", decay_share=0.01)
    assert [compute_learning_rate(step, short) for step in (1, 2, 3)] == [1, 1, 0]
    assert compute_learning_rate(1, TrainConfig(steps=1, lr=1.0, lr_schedule="wsd")) == 1


def test_every_stage_has_its_own_decay() -> None:
    stage = {"steps": 10, "seq_len": 32, "batch_size": 1, "lr": 1.0, "lr_schedule": "wsd"}
    train = RunConfig.from_dict({"train": {"stages": [stage, {**stage, "lr": 0.5, "decay_share": 0.5}]}}).train
    assert [compute_learning_rate(s, train) for s in (8, 9, 10, 11, 15, 16, 20)] == pytest.approx(
        [1, 0.5, 0, 0.5, 0.5, 0.4, 0]
    )


@looped
@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"decay_share": 0.0}, ["train.decay_share = 0.0", "greater than 0"]),
        ({"decay_share": 1.5}, ["train.decay_share = 1.5", "less than or equal to 1"]),
        ({"lr_schedule": "wsd", "steps": 10, "warmup_steps": 6, "decay_share": 0.5}, ["5 of 10 steps", "warmup_steps = 6"]),
        ({"decay_share": 0.3}, ["only by train.lr_schedule: wsd", "cosine"]),
        ({"lr_schedule": "linear"}, ["train.lr_schedule = 'linear'", "'wsd'"]),
    ],
)
def test_an_invalid_decay_is_refused(train: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"train": train})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_configuration_from_before_wsd_keeps_its_hash() -> None:
    """With and without stages. A configuration that sets the new key keeps it."""
    stage = {"steps": 10, "seq_len": 32, "batch_size": 1, "lr": 1.0}
    for train in ({"steps": 10}, {"stages": [stage, stage]}):
        config = RunConfig.from_dict({"train": train})
        assert "decay_share" not in str(config.to_dict())
        assert RunConfig.from_dict(config.to_dict()) == config
    shared = {"lr_schedule": "wsd", "decay_share": 0.4}
    for train in (shared, {"stages": [stage, {**stage, **shared}]}):
        config = RunConfig.from_dict({"train": train})
        assert RunConfig.from_dict(config.to_dict()).train.plan[-1].decay_share == 0.4


@pytest.mark.parametrize("step", [0, 51])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.50"):
        compute_learning_rate(step, TrainConfig(steps=50))
