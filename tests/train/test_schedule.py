from collections.abc import Callable

import pytest

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.train.schedule import learning_rate

Tiny = Callable[..., RunConfig]


def test_a_table_of_rates() -> None:
    train = TrainConfig(steps=110, warmup_steps=10, lr=1e-3, min_lr=1e-4)
    found = {step: learning_rate(step, train) for step in (1, 5, 10, 60, 110)}
    assert found == pytest.approx({1: 1e-4, 5: 5e-4, 10: 1e-3, 60: 5.5e-4, 110: 1e-4}, rel=1e-12)


def test_the_end_of_warm_up_is_the_peak_and_the_last_step_the_minimum_exactly() -> None:
    for warmup in (0, 1, 7):
        train = TrainConfig(steps=50, warmup_steps=warmup, lr=3e-4, min_lr=0.0)
        assert learning_rate(max(warmup, 1), train) == 3e-4
        assert learning_rate(50, train) == 0.0
        rates = [learning_rate(step, train) for step in range(max(warmup, 1), 51)]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_a_step_is_an_optimiser_step_whatever_the_accumulation(accumulate: int) -> None:
    one = TrainConfig(steps=40, warmup_steps=4)
    many = TrainConfig(steps=40, warmup_steps=4, accumulate_grad_batches=accumulate)
    assert [learning_rate(s, one) for s in range(1, 41)] == [learning_rate(s, many) for s in range(1, 41)]


def test_constant_stays_at_the_peak() -> None:
    train = TrainConfig(steps=9, warmup_steps=3, lr=1e-3, lr_schedule="constant")
    assert [learning_rate(s, train) for s in (3, 6, 9)] == [1e-3] * 3


@pytest.mark.parametrize("step", [0, 51])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.50"):
        learning_rate(step, TrainConfig(steps=50))
